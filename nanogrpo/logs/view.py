"""Look at a run in the browser: `nanogrpo view RUN [RUN2] [--serve]`.

In: the output folders of one run, or of two to compare. Out: RUN/view.html, a page that needs no
network and no other file. With --serve, a small server on this machine sends the page, and reads
the files again while the run goes on. The page itself is view.html. Read before: view_data.py.

The data are in the page as gzip in base64, so nothing that a model wrote can end up in the HTML.
The page unpacks a step when it shows it, so the page of a long run opens at once, too.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import hashlib
import hmac
import itertools
import json
import math
import re
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from nanogrpo.errors import UserError
from nanogrpo.logs.files import writing
from nanogrpo.logs.view_data import FILES, Run

TEMPLATE = Path(__file__).with_name("view.html")
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TEXT, DATA = "text/plain; charset=utf-8", "application/octet-stream"


# --- the page ---


def page(index: Sequence[dict], blocks: Iterable[tuple[str, bytes]], live: bool) -> Iterator[str]:
    """Yield the parts of the page. blocks: (name, compressed data).

    A policy in the page forbids scripts and styles other than its own, and all requests but those
    of a live page to its server.
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
    for name, data in itertools.chain([first], blocks):
        yield f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode()}</script>\n'
    yield script


def write(runs: Sequence[Run], out: Path, mib: float) -> str:
    """Write the page. If it would have more than about `mib` MiB, it has only the completions of
    every second step, every third, and so on, and the latest of their pictures. Return sentences
    about that, or "".
    """
    names = [
        (r, kind, step) for r, run in enumerate(runs) for kind in FILES for step in run.steps(kind)
    ]
    # base64 has 4/3 of the bytes. Text shrinks to a third before that, tokens are compressed.
    sizes = {
        (r, k, s): runs[r].path(k, s).stat().st_size * (4 / 3 if k == "t" else 4 / 9)
        for r, k, s in names
    }
    every = max(1, math.ceil(sum(sizes.values()) / (mib * 2**20)))
    steps = sorted({step for _, _, step in names}, reverse=True)
    kept = set(steps[::every])  # the last one, and others at equal distances
    names = [name for name in names if name[2] in kept]
    index = [run.index() for run in runs]
    pictures, without = _pictures(runs, names, mib * 2**20 - sum(sizes[name] for name in names))
    notes = []
    if every > 1:
        notes.append(
            f"To stay near {mib:g} MiB, the page has the completions of {len(kept)} of its "
            f"{len(steps)} steps: --serve has all, and --mib allows more."
        )
    if without:
        notes.append(
            f"To stay near {mib:g} MiB, the page leaves out {without:,} pictures: --serve has all, "
            "and --mib allows more."
        )
    for found in index:
        found["notes"] += notes
        found["tokens"] = [step for step in found["tokens"] if step in kept]
        for kind, blocks in found["blocks"].items():
            found["blocks"][kind] = [block for block in blocks if block[0] in kept]
    parts = itertools.chain(_blocks(runs, names), pictures.items())
    with writing(out), out.open("w", encoding="utf-8") as file:
        file.writelines(page(index, parts, live=False))
    return " ".join(notes)


def _blocks(
    runs: Sequence[Run], names: Iterable[tuple[int, str, int]]
) -> Iterator[tuple[str, bytes]]:
    for r, kind, step in names:
        with contextlib.suppress(OSError):  # the run has just removed it
            yield f"{r}/{kind}{step}", runs[r].block(kind, step)


def _pictures(
    runs: Sequence[Run], names: Iterable[tuple[int, str, int]], room: float
) -> tuple[dict[str, bytes], int]:
    """Return the pictures that these blocks show and that fit into so many bytes, those of the
    latest steps first, and the number of the others.
    """
    shown = {  # a dict, to keep the order
        (r, picture): None
        for r, kind, step in sorted(names, key=lambda name: -name[2])
        for picture in sorted(runs[r].shown.get((kind, step), ()))
    }
    found: dict[str, bytes] = {}
    without = 0
    for r, picture in shown:
        with contextlib.suppress(OSError):
            data = runs[r].picture(picture)
            room -= len(data) * 4 / 3
            if room >= 0:
                found[f"{r}/p{picture}"] = data
            else:
                without += 1
    return found, without


# --- the server ---


class Handler(BaseHTTPRequestHandler):
    """Answer a GET request.

    Every user of the machine can reach the port, and so can every page in a browser. The secret
    path keeps out both. The check of Host also keeps out a page whose name points to this machine.
    """

    timeout = 10  # seconds to wait for a request, or for the reader of an answer
    server: Server

    def do_GET(self) -> None:
        status, kind, body = self._answer()
        with contextlib.suppress(OSError):  # the browser has closed the connection
            self.send_response(status)
            for name, value in {"Content-Type": kind, **HEADERS}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _answer(self) -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of the answer."""
        server, port = self.server, self.server.server_port
        if self.headers.get_all("Host") not in ([f"127.0.0.1:{port}"], [f"localhost:{port}"]):
            return 403, TEXT, b"The host is not the address of this server.\n"
        block = r"block/([01])/(?:([cet])([0-9]{1,9})|p([0-9a-f]{16}))"
        path = re.fullmatch(rf"/([\w-]+)/(|index|{block})", self.path)
        if not path or not hmac.compare_digest(path[1].encode(), server.secret.encode()):
            return 404, TEXT, b"Open the address that nanogrpo view has printed.\n"
        with server.lock:
            if not path[2]:
                html = "".join(page([], (), live=True))
                return 200, "text/html; charset=utf-8", html.encode()
            if path[2] == "index":
                index = json.dumps([run.index() for run in server.runs])
                return 200, DATA, gzip.compress(index.encode(), 1)
            for run in server.runs[int(path[3]) :][:1]:
                with contextlib.suppress(OSError):  # there is no such file, or not any more
                    found = run.picture(path[6]) if path[6] else run.block(path[4], int(path[5]))
                    return 200, DATA, found
        return 404, TEXT, b"There is no such block.\n"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the path of a request has the secret."""


class Server(ThreadingHTTPServer):
    """Listen on this machine only."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Run], port: int):
        self.runs, self.secret, self.lock = runs, secrets.token_urlsafe(16), threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as e:
            raise UserError(
                f"--port {port} cannot be used ({e.strerror}): choose another one, or leave it out."
            ) from e

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"


def serve(runs: Sequence[Run], port: int) -> int:
    """Serve until Ctrl-C. Return the exit status."""
    with Server(runs, port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"open {server.address} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nanogrpo view",
        description="Look at a run in the browser, or compare two: curves, completions and tokens.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of one run or two")
    parser.add_argument(
        "--out", type=Path, help="the page (default: view.html in the first folder)"
    )
    parser.add_argument(
        "--mib",
        type=float,
        default=64.0,
        help="about the largest size of the page; a longer run is shown with fewer steps"
        " (default: 64)",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on this machine, and keep it up to date",
    )
    parser.add_argument("--port", type=int, default=0, help="port of --serve (default: a free one)")
    args = parser.parse_args(argv)
    try:
        if len(args.runs) > 2:
            raise UserError(f"{len(args.runs)} runs are given: name one, or two to compare.")
        if not args.mib > 0:
            raise UserError(f"--mib is {args.mib:g}: give a number above 0.")
        if not 0 <= args.port < 2**16:
            raise UserError(f"--port is {args.port}: give a number from 0 to 65535.")
        if args.port and not args.serve:
            raise UserError(f"--port {args.port} has no effect without --serve: add it.")
        if args.out and args.serve:
            raise UserError("--out has no effect with --serve, which writes no file: leave it out.")
        runs = [Run(folder) for folder in args.runs]
        if args.serve:
            return serve(runs, args.port)
        out = args.out or args.runs[0] / "view.html"
        if note := write(runs, out, args.mib):
            print(note, file=sys.stderr)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{out} ({out.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
