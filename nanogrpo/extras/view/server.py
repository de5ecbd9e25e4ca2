"""Look at a run in the browser: `nanogrpo view RUN [RUN2] [--serve]`.

In: the output folders of one or two runs. Out: RUN/view.html or, for two runs, RUN/view_RUN2.html.
This page needs no network and no other file. With --serve, a small server on this machine sends the
page, and reads the files again while the run goes on. The page itself is view.html. Read before:
data.py.

The page contains the data as gzip in base64, so nothing that a model wrote can become HTML. A step
is unpacked only when the page shows it, so even the page of a long run opens at once.
"""

import argparse
import base64
import contextlib
import gzip
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import threading
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from nanogrpo.errors import UserError
from nanogrpo.extras.view.data import FILES, Run
from nanogrpo.logs.files import replace

TEMPLATE = Path(__file__).with_name("view.html")
LIMIT = 64 * 2**20  # bytes; the page may become slightly larger
TEXT, DATA = "text/plain; charset=utf-8", "application/octet-stream"


# --- the page ---


def page(index: Sequence[dict], blocks: Iterable[tuple[str, bytes]], live: bool) -> Iterator[str]:
    """Yield the parts of the page. `blocks` are pairs (name, compressed data).

    A content security policy allows only the page's own scripts and styles. It forbids all
    requests, but a live page may send requests to its server.
    """
    template = TEMPLATE.read_text(encoding="utf-8")
    rules = ["default-src 'none'", "base-uri 'none'", "img-src blob:"]
    rules += ["connect-src 'self'"] if live else []
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    head, body, script = re.split("<!-- (?:policy|data) -->", template)
    yield f'{head}<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">{body}'
    first = "live" if live else "index", gzip.compress(json.dumps(index).encode(), 6, mtime=0)
    for name, data in (first, *blocks):
        yield f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode()}</script>\n'
    yield script


def write(runs: Sequence[Run], out: Path) -> None:
    """Write the page. If the page would be larger than about LIMIT, it contains the completions of
    only every second step, every third step, and so on.
    """
    files = [p for run in runs for p in run.folder.glob("completions/**/*") if p.is_file()]
    # gzip shrinks text to about a third of its size; base64 then enlarges all data by a third.
    size = sum(p.stat().st_size * (4 / 9 if p.suffix == ".jsonl" else 4 / 3) for p in files)
    every = max(1, math.ceil(size / LIMIT))
    steps = sorted({s for run in runs for kind in FILES for s in run.steps(kind)}, reverse=True)
    for run in runs:
        run.kept = set(steps[::every])  # the last step, and other steps at equal intervals
    index = [run.index() for run in runs]
    for found in index if every > 1 else ():
        found["notes"].append(
            f"The page has the completions of {len(steps[::every])} of the {len(steps)} steps, to"
            f" stay near {LIMIT >> 20} MiB: --serve shows all."
        )
    if os.path.lexists(out) and not (out.is_file() and b"nanogrpo view" in out.read_bytes()[:99]):
        raise UserError(f"{out} is not a page of `nanogrpo view`: choose another --out.")
    replace(out, "".join(page(index, _blocks(runs), live=False)).encode())


def _blocks(runs: Sequence[Run]) -> Iterator[tuple[str, bytes]]:
    """Yield the blocks of the kept steps, and the pictures that they show."""
    for r, run in enumerate(runs):
        for kind in FILES:
            for step in run.steps(kind):
                yield f"{r}/{kind}{step}", run.block(kind, step)
        for name in run.pictures:
            with contextlib.suppress(UserError):  # the page reports the missing picture
                yield f"{r}/p{name}", run.picture(name)


# --- the server ---


class Handler(BaseHTTPRequestHandler):
    """Answer a GET request.

    Every user of the machine, and any web page in a browser, can reach the port, so the path
    contains a secret.
    """

    timeout = 10  # seconds to wait until a browser sends a request or reads an answer
    server: "Server"

    def do_GET(self) -> None:
        status, kind, body = self._answer()
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
            "Content-Length": str(len(body)),
        }
        with contextlib.suppress(OSError):  # the browser has closed the connection
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def _answer(self) -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of the answer."""
        server = self.server
        block = r"block/([01])/(?:([cet])([0-9]{1,9})|p([0-9a-f]{16}))"
        path = re.fullmatch(rf"/([\w-]+)/(|index|{block})", self.path)
        if not path or not hmac.compare_digest(path[1].encode(), server.secret.encode()):
            return 404, TEXT, b"Open the address that nanogrpo view has printed.\n"
        if not path[2]:
            return 200, "text/html; charset=utf-8", "".join(page([], (), live=True)).encode()
        # the file may not exist, or no longer exist
        with server.lock, contextlib.suppress(OSError, UserError, IndexError):
            if path[2] == "index":
                index = json.dumps([run.index() for run in server.runs])
                return 200, DATA, gzip.compress(index.encode(), 1)
            run = server.runs[int(path[3])]
            return 200, DATA, run.picture(path[6]) if path[6] else run.block(path[4], int(path[5]))
        return 404, TEXT, b"There is no such block.\n"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing, because the path of a request contains the secret."""


class Server(ThreadingHTTPServer):
    """Listen on this machine only."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Run], port: int):
        self.runs, self.secret, self.lock = runs, secrets.token_urlsafe(16), threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as e:
            raise UserError(f"--port {port} cannot be used ({e}): choose another port.") from e

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="nanogrpo view",
        description="Look at a run in the browser, or compare two: curves, completions and tokens.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="output folders of one run or two")
    text = "the page (default: view.html in the first folder; of two runs, view_RUN2.html)"
    add("--out", type=Path, help=text)
    text = "serve the page on this machine instead, and keep it up to date"
    add("--serve", action="store_true", help=text)
    add("--port", type=int, default=0, help="port of --serve (default: a free one)")
    add("--open", action="store_true", help="also open the page in the browser")
    args = parser.parse_args(argv)
    if len(args.runs) > 2:
        raise UserError(f"{len(args.runs)} runs are given: name one, or two to compare.")
    runs = [Run(folder) for folder in args.runs]
    if args.serve:
        with Server(runs, args.port) as server, contextlib.suppress(KeyboardInterrupt):
            print(f"open {server.address} (Ctrl-C ends it)", flush=True)
            if args.open:
                webbrowser.open(server.address)
            server.serve_forever()
        return
    name = "_".join(["view", *(run.resolve().name for run in args.runs[1:])])
    out = args.out or args.runs[0] / f"{name}.html"
    write(runs, out)
    address = out.resolve().as_uri()
    print(f"{address} ({out.stat().st_size / 2**20:.1f} MiB)")
    if args.open:
        webbrowser.open(address)
