"""Read a run for `nanogrpo view`: its curves, its options, its completions and their tokens.

In: metrics.jsonl and the folder completions. Out: an index (the curves, and which prompts each
step has), and a block for each step, with one completion per line. The page unpacks a block when it
shows the step. Read before: tokens.py. Read next: server.py.
"""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanogrpo.config import dashed
from nanogrpo.errors import UserError
from nanogrpo.extras.options import Config
from nanogrpo.logs.files import read_records

# The kinds of blocks, named as in the page: c is a step, e an evaluation, t the tokens of a step.
FILES = {"c": "completions_{}.jsonl", "e": "eval_{}.jsonl", "t": "tokens_{}.jsonl.gz"}
# columns that the page shows separately; the last two may have the reference answer
OWN = "step prompt images completion reward advantage stopped answer solution"
PICTURE = re.compile(r"pictures/([0-9a-f]{16})\.webp")  # extras/vision/processor.py
PREVIEW = 160  # characters of each prompt in the index


def number(x: Any) -> Any:
    """Return x if it is a number that a browser can read and draw, or else None."""
    return x if type(x) in (int, float) and abs(x) < 1e300 else None


def curves(records: Iterable[dict]) -> dict[str, dict[str, list]]:
    """Return the finished steps x and the values y of each metric. If a step has several records,
    the last one counts.
    """
    values: dict[str, dict[int, float]] = {}
    for record in records:
        done = record.get("step", -1) + 1
        for name, y in record.items():
            if number(y) is not None and name not in ("step", "eval/after"):
                values.setdefault(name, {})[done] = y
    return {name: {"x": sorted(y), "y": [y[x] for x in sorted(y)]} for name, y in values.items()}


def completion(record: dict) -> dict:
    """Convert a line of a file of completions to the form that the page reads."""

    def simple(x: Any) -> Any:
        return x if isinstance(x, str | bool) or number(x) == x else str(x)[:1000]

    prompt = record["prompt"]
    if isinstance(prompt, list):  # messages
        prompt = [[m["role"], str(m["content"])] for m in prompt]
    return {
        "prompt": prompt,
        "images": PICTURE.findall(str(record.get("images"))),
        "completion": record["completion"],
        "answer": simple(record.get("solution", record.get("answer", ""))),
        "reward": number(record["reward"]),
        "advantage": number(record["advantage"]),
        "stopped": record["stopped"],
        "more": {name: simple(x) for name, x in record.items() if name not in OWN.split()},
    }


class Run:
    """The files of a run. `index` and `block` may be called again while the run goes on."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "metrics.jsonl"
        next(read_records(self.log), None)  # raises UserError if there is no log
        # (kind, step) → the file's modification time, and its entry in the index
        self.known: dict[tuple[str, int], tuple[int, list]] = {}
        self.prompts: dict[str, int] = {}  # prompt and pictures, as JSON → number of the prompt
        self.pictures: set[str] = set()  # the names of all pictures that `read` has found
        self.kept: set[int] | None = None  # the steps to show; None: all

    def path(self, kind: str, step: int) -> Path:
        return self.file(FILES[kind].format(f"{step:05d}"))

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder completions. The user may send the page to
        others, so it contains no files from outside of the run.
        """
        path = self.folder / "completions" / name
        if not (path.is_file() and path.resolve().is_relative_to(self.folder.resolve())):
            raise UserError(
                f"{path} is not a file of this run, because the file or its folder is a link: "
                "replace the link with a copy of its target."
            )
        return path

    def steps(self, kind: str) -> list[int]:
        paths = (self.folder / "completions").glob(FILES[kind].format("[0-9]*"))
        steps = sorted(int(re.findall(r"\d+", path.name)[0]) for path in paths)
        return [step for step in steps if self.kept is None or step in self.kept]

    def read(self, kind: str, step: int) -> list[dict]:
        """Return the completions of a file, each with the number of its prompt (`group`)."""
        rows = [completion(record) for record in read_records(self.path(kind, step))]
        for row in rows:
            prompt = json.dumps([row["prompt"], row["images"]])
            row["group"] = self.prompts.setdefault(prompt, len(self.prompts))
            self.pictures.update(row["images"])
        return rows

    def groups(self, kind: str, step: int) -> list:
        """Return [prompt, completions, mean reward] for each prompt in a file. A file that has not
        changed is not read again.
        """
        written = self.path(kind, step).stat().st_mtime_ns
        if self.known.get((kind, step), [None])[0] != written:
            rows = self.read(kind, step)
            rewards: dict[int, list] = {}
            for row in rows:
                rewards.setdefault(row["group"], []).append(row["reward"])
            found = []
            for group, each in rewards.items():
                given = [r for r in each if r is not None]
                found.append([group, len(each), sum(given) / len(given) if given else None])
            self.known[kind, step] = written, found
        return self.known[kind, step][1]

    def picture(self, name: str) -> bytes:
        """Return the small copy of a picture. Raises UserError if there is none."""
        return self.file(f"pictures/{name}.webp").read_bytes()

    def block(self, kind: str, step: int) -> bytes:
        """Return a block, compressed."""
        if kind == "t":
            return self.path(kind, step).read_bytes()
        return gzip.compress("\n".join(map(json.dumps, self.read(kind, step))).encode(), 6, mtime=0)

    def index(self) -> dict:
        """Return the curves, the options, the names of the options that differ from their defaults,
        the prompts of each step, and sentences about missing data.
        """
        records = [*read_records(self.log)]
        blocks = {kind: [[s, self.groups(kind, s)] for s in self.steps(kind)] for kind in "ce"}
        tokens = self.steps("t")
        notes = []
        if not blocks["c"]:
            notes.append("There are no completions: the run had no --log-completions.")
        elif not tokens:
            notes.append("There are no numbers for the tokens: the run had no --log-tokens.")
        head: dict = next((r for r in reversed(records) if "run" in r), {"run": {}})
        options = {f"--{dashed(name)}": json.dumps(x) for name, x in head["run"].items()}
        usual = {f"--{dashed(f.name)}": json.dumps(f.default, default=str) for f in fields(Config)}
        about = {name: json.dumps(x) for name, x in head.items() if name != "run"}
        prompts = (json.loads(key)[0] for key in self.prompts)
        return {
            "name": str(self.folder),
            "about": {name: x.strip('"') for name, x in (about | options).items()},
            "set": [name for name, x in options.items() if x != usual.get(name)],
            "curves": curves(r for r in records if "run" not in r),
            "blocks": blocks,
            "tokens": tokens,
            "prompts": [(p if isinstance(p, str) else p[-1][1])[:PREVIEW] for p in prompts],
            "notes": notes,
        }
