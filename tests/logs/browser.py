"""A headless Chromium for tests, driven by chromedriver through WebDriver, which is JSON over HTTP.

    with open_browser() as browser:           # None if there is no chromedriver on the path
        browser.open(page.as_uri())
        browser.run("return document.title")

Debian's packages are chromium and chromium-driver. Read next: test_view_page.py.
"""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]


class Browser:
    def __init__(self, port: int):
        self.base = f"http://127.0.0.1:{port}/session"
        options = {"args": ARGUMENTS}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/{made['sessionId']}"

    def _post(self, path: str, body: dict) -> Any:
        request = urllib.request.Request(self.base + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        """Open a page, and wait until it has drawn its first view."""
        self._post("/url", {"url": "about:blank"})  # another fragment alone would not load it again
        self._post("/url", {"url": address})
        self.run("while (!document.body.dataset.ready) await new Promise(requestAnimationFrame)")

    def run(self, script: str, *args: Any) -> Any:
        """Return the result of the body of an async function."""
        source = (
            "const done = arguments[arguments.length - 1], given = [...arguments].slice(0, -1);"
            f"(async () => {{ {script} }})().then(done, error => done('error: ' + error))"
        )
        return self._post("/execute/async", {"script": source, "args": list(args)})

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the page, without scroll bars, and whether it has dark colours."""
        self._command("Emulation.setScrollbarsHidden", hidden=True)
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            mobile=False,
            deviceScaleFactor=1,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return the visible part of the page as a PNG."""
        return base64.b64decode(self._command("Page.captureScreenshot", format="png")["data"])

    def _command(self, name: str, **params: Any) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": name, "params": params})

    def press(self, *keys: str) -> None:
        """Press keys one after the other, and wait each time until the page has drawn what they
        change. Several characters are keys that are held together.
        """
        for together in keys:
            down = [{"type": "keyDown", "value": key} for key in together]
            up = [{"type": "keyUp", "value": key} for key in reversed(together)]
            self._post("/actions", {"actions": [{"type": "key", "id": "k", "actions": down + up}]})
            self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn its state."""
        drawn = "+document.body.dataset.shown === turn && told === asked"
        self.run(f"while (!({drawn})) await new Promise(setTimeout)")

    def point_at(self, selector: str) -> None:
        """Move the mouse to the first element that matches."""
        x, y = self.run(
            "const r = document.querySelector(given[0]).getClientRects()[0];"
            "return [Math.round(r.x + r.width / 2), Math.round(r.y + r.height / 2)]",
            selector,
        )
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
        pointer = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._post("/actions", {"actions": [pointer]})

    def messages(self) -> list[str]:
        """Return what the page wrote to the console since the last call, such as errors."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]


@contextlib.contextmanager
def open_browser() -> Iterator[Browser | None]:
    driver = shutil.which("chromedriver")
    if driver is None:
        yield None
        return
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        port = next(int(m[1]) for x in process.stdout if (m := re.search(r"on port (\d+)\.", x)))
        browser = Browser(port)
        yield browser
        request = urllib.request.Request(browser.base, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
    finally:
        process.terminate()
        process.wait()
