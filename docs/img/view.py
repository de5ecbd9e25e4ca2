"""Take the pictures of `nanogrpo view` in the documentation: python -m docs.img.view RUN

In: the output folder of a run with --eval-steps 12, --log-completions and --log-tokens, such as
that of `make real`. Out: view.gif, which moves the slider through the run, and view.png,
view_dark.png and view_phone.png, in this folder. This program needs chromium and chromedriver. Read
next: tests/logs/browser.py.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from nanogrpo.extras.view.data import Run
from nanogrpo.extras.view.server import write
from tests.logs.browser import Browser, open_browser

HERE = Path(__file__).parent
# Show a problem whose answer the steps 13 to 24 have corrected.
CORRECTED = """
const was = (problem, i) => quality(problem.visits[0][i].mean);
pick(story.problems.find(problem => was(problem, 1) === 0 && was(problem, 2) === 1));
"""
# name, size, whether it is dark, the state of the page, and what happens there
PICTURES = [
    ("view", (1280, 860), False, "step=24", CORRECTED),
    ("view_dark", (1280, 700), True, "tab=completions&step=24", ""),
    ("view_phone", (390, 720), False, "step=24", CORRECTED),
]


def main(run: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        assert browser, "chromedriver is not on the path"
        page = Path(folder) / "view.html"
        write([Run(run)], page)
        for name, size, dark, view, script in PICTURES:
            browser.resize(*size, dark)
            browser.open(f"{page.as_uri()}#{view}")
            browser.run(script)
            browser.settle()
            if dark:
                browser.point_at(".t[style*='70%']")
            (HERE / f"{name}.png").write_bytes(browser.picture())
        record(browser, page)


def record(browser: Browser, page: Path) -> None:
    """Write view.gif: the overview after each evaluation, for a second each."""
    frames = []
    browser.resize(1280, 860, False)
    browser.open(page.as_uri())
    for step in browser.run("return story.problems[0].visits[0].map(visit => visit.step)"):
        browser.open(f"{page.as_uri()}#step={step}")
        browser.run(CORRECTED)
        browser.settle()
        image = Image.open(io.BytesIO(browser.picture())).convert("RGB")
        frames.append(image.resize((960, 645), Image.Resampling.LANCZOS).quantize(64))
    times = [1000] * (len(frames) - 1) + [3000]  # ms
    frames[0].save(
        HERE / "view.gif", save_all=True, append_images=frames[1:], duration=times, loop=0
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
