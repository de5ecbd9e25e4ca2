"""Read a run for `nanogrpo view`: its curves, its options, its completions and their tokens.

In: metrics.jsonl and the folder completions. Out: an index (the curves, and which prompts each
step has), and a block for each step, with one completion per line. The page unpacks a block when it
shows the step. A damaged line is left out and counted. Read before: tokens.py. Read next: view.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanogrpo.errors import UserError

# The kinds of blocks, named as in the page: c is a step, e an evaluation, t the tokens of a step.
FILES = {"c": "completions_{}.jsonl", "e": "eval_{}.jsonl", "t": "tokens_{}.jsonl.gz"}
OWN = ("step", "prompt", "completion", "reward", "advantage", "stopped")  # columns; more follow
PICTURE = re.compile(r"pictures/([0-9a-f]{16})\.webp")  # logs/completions.py
PREVIEW = 160  # characters of a prompt in the index


def _float(text: str) -> float | None:
    """Return a number of JSON. The page's parser knows neither NaN nor infinity."""
    x = float(text)
    return x if math.isfinite(x) else None


def records(path: Path) -> tuple[list[dict], int]:
    """Return the objects in a file of JSON lines, and the number of other lines.

    A half-written last line does not count, because the run may be going on.
    """
    found, bad, lines = [], 0, path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        record = None
        with contextlib.suppress(ValueError, RecursionError):  # no JSON, or endless brackets
            record = json.loads(line, parse_float=_float, parse_constant=lambda _: None)
        if isinstance(record, dict):
            found.append(record)
        elif number < len(lines):
            bad += 1
    return found, bad


def curves(rows: Iterable[dict]) -> dict[str, dict[str, list]]:
    """Return the finished steps x and the values y of each metric. The last record of a step
    counts.
    """
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        step = row.get("step")
        done = row.get("eval/after", step + 1 if type(step) is int else None)
        if type(done) is not int or not 0 <= done < 10**9:
            continue
        for name, y in row.items():
            if type(y) in (int, float) and abs(y) < 1e300 and name not in ("step", "eval/after"):
                values.setdefault(name, {})[done] = y
    return {name: {"x": sorted(y), "y": [y[x] for x in sorted(y)]} for name, y in values.items()}


def completions(path: Path) -> tuple[list[dict], int]:
    """Return the completions in a file, with only the types that the page expects, and the number
    of damaged lines.
    """
    lines, bad = records(path)
    found = []
    for record in lines:
        try:
            found.append(_completion(record))
        except RecursionError:  # brackets within brackets
            bad += 1
    return found, bad


def _completion(record: dict) -> dict:
    def number(x: Any) -> Any:
        return x if type(x) in (int, float) and abs(x) < 1e300 else None

    def simple(x: Any) -> Any:
        return x if isinstance(x, str | bool) or number(x) == x else str(x)[:1000]

    prompt, stopped, images = (record.get(name) for name in ("prompt", "stopped", "images"))
    if isinstance(prompt, list):  # messages
        prompt = [
            [str(m.get("role")), str(m.get("content"))] if isinstance(m, dict) else ["", str(m)]
            for m in prompt
        ]
    return {
        "prompt": prompt if isinstance(prompt, list) else str(prompt),
        "images": PICTURE.findall(" ".join(map(str, images))) if isinstance(images, list) else [],
        "completion": str(record.get("completion", "")),
        "reward": number(record.get("reward")),
        "advantage": number(record.get("advantage")),
        "stopped": stopped if isinstance(stopped, bool) else None,
        "more": {
            name: simple(x)
            for name, x in record.items()
            if name not in OWN and not (name == "images" and isinstance(x, list))
        },
    }


class Run:
    """The files of a run. `index` and `block` may be called again while the run goes on."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "metrics.jsonl").is_file() and not (folder / "completions").is_dir():
            raise UserError(f"{folder} has no metrics.jsonl: give the output folder of a run.")
        self.cache: dict[tuple[str, int], Any] = {}  # file → its stamp, and the result of `groups`
        self.prompts: dict[str, int] = {}  # prompt and pictures as JSON → their number
        self.shown: dict[tuple[str, int], set[str]] = {}  # file → its pictures, once it was read

    def path(self, kind: str, step: int) -> Path:
        return self.folder / "completions" / FILES[kind].format(f"{step:05d}")

    def steps(self, kind: str) -> list[int]:
        pattern = FILES[kind].format(r"(\d{5,9})").replace(".", r"\.")
        names = (p.name for p in (self.folder / "completions").glob("*") if p.is_file())
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(pattern, name)))

    def read(self, kind: str, step: int) -> tuple[list[dict], int]:
        """Return the completions of a file, each with the number of its prompt (`group`), and the
        number of damaged lines.
        """
        rows, bad = completions(self.path(kind, step))
        for row in rows:
            prompt = json.dumps([row["prompt"], row["images"]])
            row["group"] = self.prompts.setdefault(prompt, len(self.prompts))
        self.shown[kind, step] = {name for row in rows for name in row["images"]}
        return rows, bad

    def picture(self, name: str) -> bytes:
        """Return the small copy of a picture. Raises OSError if there is none.

        Another file, to which a link may lead, is not read: the page may be passed on.
        """
        path = self.folder / "completions/pictures" / f"{name}.webp"
        if path.is_file():  # reading a pipe may never end
            with path.open("rb") as file:
                data = file.read(2**20)
            if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
                return data
        raise FileNotFoundError(path)

    def groups(self, kind: str, step: int) -> tuple[list, int]:
        """Return [prompt, completions, mean reward] for each prompt in a file, and the number of
        damaged lines. A file that has not changed is not read again.
        """
        stat = self.path(kind, step).stat()
        stamp = stat.st_mtime_ns, stat.st_size
        if self.cache.get((kind, step), [None])[0] != stamp:
            rows, bad = self.read(kind, step)
            rewards: dict[int, list] = {}
            for row in rows:
                rewards.setdefault(row["group"], []).append(row["reward"])
            found: list = []
            for group, each in rewards.items():
                given = [r for r in each if r is not None]
                mean = round(sum(given) / len(given), 4) if given else None
                found.append([group, len(each), mean])
            self.cache[kind, step] = stamp, found, bad
        return self.cache[kind, step][1:]

    def block(self, kind: str, step: int) -> bytes:
        """Return a block, compressed. The page checks the tokens, which may be damaged."""
        if kind == "t":
            return self.path(kind, step).read_bytes()
        rows, _ = self.read(kind, step)
        return gzip.compress("\n".join(map(json.dumps, rows)).encode(), 6, mtime=0)

    def index(self) -> dict:
        """Return the curves, the options, the prompts of each step, and sentences about what is
        missing.
        """
        notes: list[str] = []
        rows: list[dict] = []
        path = self.folder / "metrics.jsonl"
        if path.is_file():
            rows, bad = records(path)
            if bad:
                notes.append(f"metrics.jsonl: {bad} damaged lines are left out.")
        else:
            notes.append("metrics.jsonl is missing, so there are no curves.")
        blocks: dict[str, list] = {"c": [], "e": []}
        for kind, found in blocks.items():
            for step in self.steps(kind):
                try:
                    groups, bad = self.groups(kind, step)
                except OSError:  # a run that starts over has renamed the folder
                    continue
                found.append([step, groups])
                if bad:
                    name = self.path(kind, step).name
                    notes.append(f"{name}: {bad} damaged lines are left out.")
        tokens = self.steps("t")
        if not blocks["c"]:
            notes.append("There are no completions: the run had no --log-completions.")
        elif not tokens:
            notes.append("There are no numbers of tokens: the run had no --log-tokens.")
        heads = [row for row in rows if isinstance(row.get("run"), dict)]
        head = heads[-1] if heads else {"run": {}}
        about = {name: json.dumps(x) for name, x in head.items() if name != "run"}
        about |= {f"--{name.replace('_', '-')}": json.dumps(x) for name, x in head["run"].items()}
        previews = [_preview(json.loads(key)[0]) for key in self.prompts]
        return {
            "name": str(self.folder),
            "about": {name: x.strip('"')[:2000] for name, x in about.items()},
            "curves": curves(row for row in rows if "run" not in row),
            "blocks": blocks,
            "tokens": tokens,
            "prompts": previews,
            "notes": notes[:5] + ([f"… and {len(notes) - 5} more."] if notes[5:] else []),
        }


def _preview(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1][1] if prompt else ""
    return text[:PREVIEW]
