"""The page of `nanogrpo view` in a real browser: what it shows, and that a model's text stays text.

Without a browser these tests are skipped, unless NANOGRPO_REQUIRE_BROWSER is set, as in .ci/run.
Read before: browser.py, test_view.py.
"""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from nanogrpo.extras import commands
from tests.logs.browser import Browser, open_browser
from tests.logs.conftest import serving, write_run

LEFT, RIGHT = "\ue012", "\ue014"  # WebDriver's names of keys
STEP = "#tools b"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        if found is None and not os.environ.get("NANOGRPO_REQUIRE_BROWSER"):
            pytest.skip("needs chromium and chromedriver: apt-get install chromium-driver")
        assert found, "NANOGRPO_REQUIRE_BROWSER is set, but chromedriver is not on the path"
        yield found


def opened(browser: Browser, *folders: Path, view: str = "") -> None:
    """Write the page of these runs and open it."""
    assert commands.main(["view", *map(str, folders)]) == 0
    name = "_".join(["view", *(folder.name for folder in folders[1:])])
    browser.messages()
    browser.open(f"file://{folders[0]}/{name}.html#{view}")


def texts(browser: Browser, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(given[0])].map(e => e.textContent)"
    return browser.run(script, selector)


def each_card(browser: Browser, expression: str) -> list:
    return browser.run(f"return allCards().map(card => {expression})")


def test_the_overview_shows_how_the_answer_to_a_held_out_problem_changes(browser, tmp_path):
    options = {"model": "models/tiny"}
    write_run(tmp_path, steps=4, options=options, held_out=(0.0, 0.0, 1.0, 1.0, 0.0))
    opened(browser, tmp_path)
    assert texts(browser, "h2") == ["tiny · 4 steps · held-out 0.00 → 1.00 (best, step 2) → 0.00"]
    assert texts(browser, ".values span") == ["step 4", "training 0.75", "held-out 0"]
    first, last = "evaluation before trainingok ok", "evaluation after {} stepsok ok"
    held_out = ".pane:first-child article"
    assert texts(browser, f"{held_out} .bar")[1] == f"reward 0{last.format(4)}"
    browser.press(LEFT, LEFT)
    assert browser.run("return +$('slider').value") == 2
    shown = [f"reward 0{first}0", f"reward 1{last.format(2)}1"]
    assert texts(browser, held_out) == [text + ".0" for text in shown]
    colours = f"[...document.querySelectorAll('{held_out}')].map(card => card.style.background)"
    wrong, right = browser.run(f"return {colours}")
    assert "25)" in wrong  # the hue of oklch: red
    assert "145)" in right  # green
    assert texts(browser, ".truth") == ["answer 7"] * 2
    browser.press("\ue011")  # Home: the first step
    assert texts(browser, held_out) == [f"reward 0{first}0.0"]
    assert texts(browser, ".pane:last-child") == ["Training has not begun."]
    browser.press(" ")  # play
    browser.run("while (playing) await new Promise(requestAnimationFrame)")
    assert browser.run("return state.step") == 4
    tokens = browser.run(
        "return [...document.querySelectorAll('.pane .t')].map(t => t.style.background)"
    )
    assert "var(--plus)" in tokens[0]
    assert browser.messages() == []


def test_without_evaluations_the_overview_shows_a_prompt_of_several_steps(browser, tmp_path):
    write_run(tmp_path, steps=3, held_out=())
    opened(browser, tmp_path)
    assert "3 steps · reward 0.00 → 0.67" in texts(browser, "h2")[0]
    assert texts(browser, ".pane:first-child article .bar b:first-child") == ["reward 1"] * 2
    assert texts(browser, ".pane:first-child > .bar b") == ["Prompts of several steps"]
    assert len(texts(browser, ".strip i")) == 3


def test_the_page_shows_curves_completions_and_tokens_without_a_request(browser, tmp_path):
    write_run(tmp_path, steps=6)
    opened(browser, tmp_path, view="tab=curves")
    assert texts(browser, "figcaption b") == ["reward", "rewards/a/mean"]
    assert texts(browser, "summary") == ["Constant metrics (1): entropy 1.5"]
    pixels = "c.canvas.getContext('2d').getImageData(0, 0, 400, 150).data"
    assert browser.run(f"return charts.every(c => {pixels}.some(x => x > 0))")
    browser.press("3")
    assert texts(browser, STEP) == ["step 6"]
    assert texts(browser, ".prompt") == ["first?", "user: second?"]  # once for each group
    assert each_card(browser, "card.row.advantage") == [1.0, -1.0, 0.5, -0.5]
    assert texts(browser, "article.card pre:last-child")[0] == " one two⏎\n end"
    colours = each_card(browser, "card.querySelector('.t').style.background")
    assert ["var(--plus)" in colour for colour in colours] == [True, False] * 2
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.messages() == []


def test_the_ticks_are_round_and_differ(browser, tmp_path):
    write_run(tmp_path, steps=2)
    opened(browser, tmp_path)
    for low, high, expected in [
        (0.117, 0.875, ["0", "0.5", "1"]),
        (-0.415, 0.0194, ["-0.6", "-0.4", "-0.2", "0", "0.2"]),
        (1.0000002, 1.0000005, ["1.0000002", "1.0000003", "1.0000004", "1.0000005"]),
        (2e-7, 9e-7, ["0", "5e-7", "0.000001"]),
        (103, 98_000, ["0", "50K", "100K"]),
    ]:
        script = "const [all, by] = ticks(...given, 3); return all.map(y => tickText(y, by))"
        assert browser.run(script, low, high) == expected


def test_a_phone_scrolls_in_one_direction_only(browser, tmp_path):
    write_run(tmp_path, steps=3, words=[" word" * 9, "x" * 300, " end"], more="y" * 300)
    opened(browser, tmp_path)
    try:
        browser.resize(390, 844)
        for key in "12345":
            browser.press(key)
            size = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
            assert browser.run(size) == 0, key
        browser.press("3")
        assert not browser.run("return $('sort').checkVisibility()")
        browser.run("document.querySelector('.more').click()")
        assert browser.run("return $('sort').checkVisibility()")
    finally:
        browser.resize(1280, 900)


def test_pointing_at_a_token_shows_its_numbers(browser, tmp_path):
    write_run(tmp_path, steps=2)
    opened(browser, tmp_path, view="tab=completions&step=1")
    browser.point_at(".t")
    cells = texts(browser, "#tip td")
    assert dict(zip(cells[::2], cells[1::2])) == {
        "token": '" one", id 11, number 1',
        "log-prob": "-0.5 (probability 0.6065)",
        "entropy": "1.25",
        "advantage": "+1",
        "ratio": "1.1",
        "trainer − engine": "1.00e-6",
        "share of the gradient": "12.5 %",
    }


def test_keys_change_the_step_the_colour_and_the_group(browser, tmp_path):
    write_run(tmp_path, steps=3)
    opened(browser, tmp_path, view="tab=completions")
    browser.press(LEFT, LEFT, RIGHT)
    assert texts(browser, STEP) == ["step 2"]
    browser.press("c")
    assert browser.run("return state.colour") == "logp"
    browser.press("j", "j", "j", "g")  # only the group of the third completion
    assert each_card(browser, "card.row.prompt.at(-1).at(-1)") == ["second?"] * 2
    browser.press("e")
    assert texts(browser, STEP) == ["evaluation before training"]


def test_two_runs_are_compared(browser, tmp_path):
    for name in "ab":
        write_run(
            tmp_path / name,
            steps=3,
            name=f"rewards/exact {name}/mean",
            options={"learning_rate": name, "seed": 0, "beta": 1},
        )
    opened(browser, tmp_path / "a", tmp_path / "b", view="tab=about")
    assert not (tmp_path / "a/view.html").exists()
    rows = "return [...document.querySelectorAll('#main > table tr')].map(row => row.innerText)"
    different, *_, set_, last = browser.run(rows)[1:]
    assert different == "Different"
    assert (set_, last) == ("Set", "--beta\t1\t1")
    assert texts(browser, "details td:first-child") == ["--seed"]
    browser.press("1")
    assert "B 3 steps · held-out 0.25" in texts(browser, "h2")
    browser.press("2")
    assert browser.run("return charts[0].lines.map(line => line.run)") == [0, 0, 1, 1]
    browser.press("3", "r", "r", "g")  # both runs, the completions of a group side by side
    groups = "return [...$('main').querySelectorAll('.sides > div')].map(side => side.innerText)"
    first, second = browser.run(groups)
    assert first.count("reward 1") == second.count("reward 1") == 2
    browser.press("1")
    assert [text[:3] for text in texts(browser, ".pane article")] == ["A r", "B r", "A r", "B r"]
    browser.run("[...document.querySelectorAll('.pane button')].at(-1).click()")
    browser.settle()
    assert texts(browser, "#tools option:checked")[:3] == ["B", "training", "2: first?"]
    assert len(texts(browser, "article.card")) == 2
    assert browser.messages() == []


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.hacked = 1'>",
    "]]>\"'`${window.hacked = 1}",
    "&lt;b&gt; &amp;",
    "a\u2028b\u2029c",
    "\ud800 and \udfff",
    "\x00\x07\x1b[31m\r\x7f\x85",
    "\u202eevil\u202c \u2066x\u2069 \u200e\u200b\ufeff\u00ad",
    "\U000e0041\U000e0042",  # invisible letters
    "e" + "\u0301" * 500,
]
# control characters but for tab and newline, directions, separators, lone surrogates
UNSEEN = r"(?![\n\t])[\p{Cc}\p{Bidi_C}\p{Zl}\p{Zp}\p{Cs}\u00ad\u200b\ufeff\u{e0000}-\u{e007f}]"


def webp(colour: str, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "WEBP")
    return file.getvalue()


# Wait until each picture of the page is there or missing; return the natural sizes.
SIZES = """
const shown = () => [...document.querySelectorAll('.pictures img')];
while (shown().some(i => !i.complete || !i.naturalWidth)) await new Promise(setTimeout);
return shown().map(i => [i.naturalWidth, i.naturalHeight]);
"""


def test_pictures_stand_below_their_prompt(browser, tmp_path):
    write_run(tmp_path, steps=2, pictures=[webp("red", (60, 30)), webp("blue", (20, 40))])
    opened(browser, tmp_path, view="tab=completions")
    assert browser.run(SIZES) == [[60, 30], [20, 40]]
    browser.press("g")
    assert browser.run(SIZES) == [[60, 30]]
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.messages() == []
    with serving(tmp_path) as server:
        browser.open(f"{server.address}#tab=completions")
        assert browser.run(SIZES) == [[60, 30], [20, 40]]


def test_text_of_a_model_is_never_html_or_script(browser, tmp_path):
    folder, text = tmp_path / "<img src=x onerror='window.hacked = 1'>", " ".join(HOSTILE)
    write_run(folder, steps=1, words=HOSTILE, prompt=text, name=text, more=text)
    page = tmp_path / "view.html"
    assert commands.main(["view", str(folder), "--out", str(page)]) == 0
    assert "hacked" not in page.read_text()  # of the run, the HTML has only base64
    browser.messages()
    for tab in ("overview", "curves", "prompts", "about", "completions"):
        browser.open(f"file://{page}#tab={tab}")
        if tab == "prompts":
            browser.run("while (!allCards().length) await new Promise(setTimeout)")
        # the scripts: the index, three blocks, and our own
        count = "[window.hacked, document.images.length, document.scripts.length]"
        assert browser.run(f"return {count}") == [None, 0, 5]
        shown = "$('main').textContent + $('top').textContent + document.title"
        assert not browser.run(f"return new RegExp(given[0], 'u').test({shown})", UNSEEN), tab
    browser.point_at(".t")
    assert "</script>" in texts(browser, "#tip")[0]
    for text, shown in zip(HOSTILE, texts(browser, ".t")):
        assert shown == text if text.isprintable() else "U+" in shown
    assert browser.run("return window.hacked") is None
    assert browser.messages() == []  # not even an attempt that the page's policy has stopped


def test_a_damaged_run_says_on_the_page_what_is_missing(browser, tmp_path):
    write_run(tmp_path, steps=3, tokens=False, pictures=[b"RIFF....WEBP no picture", b""])
    (tmp_path / f"completions/pictures/{1:016x}.webp").unlink()
    opened(browser, tmp_path, view="tab=completions")
    assert texts(browser, ".notes li") == [
        "There are no numbers for the tokens: the run had no --log-tokens."
    ]
    missing = "document.querySelectorAll('.pictures .faint').length"
    browser.run(f"while ({missing} < 2) await new Promise(setTimeout)")
    assert texts(browser, ".pictures") == ["A picture is missing."] * 2
    write_run(tmp_path, steps=3)
    tokens = tmp_path / "completions" / "tokens_00003.jsonl.gz"
    tokens.write_bytes(tokens.read_bytes()[:-20])
    opened(browser, tmp_path, view="tab=completions")
    assert "Some tokens of this step cannot be read." in texts(browser, "#main p")
    assert len(texts(browser, "article.card")) == 4
    assert browser.messages() == []


def test_a_served_page_follows_the_run(browser, tmp_path):
    write_run(tmp_path, steps=2)
    with serving(tmp_path) as server:
        browser.messages()
        browser.open(server.address + "#tab=completions")
        assert texts(browser, STEP) == ["step 2"]
        assert len(texts(browser, ".t")) == 12
        write_run(tmp_path, steps=3)
        browser.run("await update()")  # as the page does every five seconds
        browser.settle()
        assert texts(browser, STEP) == ["step 3"]
        assert browser.messages() == []
