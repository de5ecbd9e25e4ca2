"""A sample without a model, and the files of a run, for the tests of this folder.

    from tests.logs.conftest import completions_of, sample, serving, write_run

Read next: test_metrics.py.
"""

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanogrpo.extras.completions import write
from nanogrpo.extras.view.data import Run
from nanogrpo.extras.view.server import Server
from nanogrpo.types import Prompt, Sample
from tests.conftest import completion, read_rows, write_rows


def sample(n: int, stopped: bool = True, prompt: int = 3, **rewards: float | None) -> Sample:
    """A completion of `n` tokens to a prompt of `prompt` tokens, with these rewards."""
    given = [r for r in rewards.values() if r is not None]
    fields = {"text": "text", "rewards": rewards, "reward": sum(given) if given else None}
    return completion(Prompt(0, "?", [1] * prompt), [2] * n, stopped=stopped, **fields)


def completions_of(folder: Path, step: int) -> list[dict]:
    """Return the completions that a run has written after so many steps."""
    return read_rows(folder / f"completions/completions_{step:05d}.jsonl")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve the page of a run."""
    with Server([Run(folder)], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def write_run(
    folder: Path,
    steps: int,
    tokens: bool = True,
    words: Sequence[str] = (" one", " two\n", " end"),
    prompt: str = "first?",
    name: str = "entropy",
    more: str = "ok",
    options: dict | None = None,
    pictures: Sequence[bytes] = (),
    held_out: Sequence[float] = (0.25,),
) -> None:
    """Write the output folder of a run with two prompts of two completions per step, as the log
    would. pictures: files, the first for each first prompt and so on. held_out: the rewards of the
    only held-out prompt, before training and after each step.
    """
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(pictures):
        (folder / "completions/pictures").mkdir(exist_ok=True)
        (folder / f"completions/pictures/{i:016x}.webp").write_bytes(data)
    log: list[dict] = [{"run": options or {name: name}}]
    log += [{"step": i - 1, "eval/after": i, "eval/reward": r} for i, r in enumerate(held_out)]
    for i in range(steps):
        log.append({"step": i, "reward": i / steps, name: 1.5, "rewards/a/mean": i / steps})
    write_rows(folder / "metrics.jsonl", log)
    prompts = [prompt, [{"role": "user", "content": "second?"}]]
    advantages = [1.0, -1.0, 0.5, -0.5]
    for i in range(steps):
        rows = []
        lines = []
        for j, advantage in enumerate(advantages):
            row = {"step": i, "prompt": prompts[j // 2], "completion": "".join(words), more: more}
            if pictures:
                row["images"] = [f"pictures/{j // 2:016x}.webp"]
            rows.append(row | {"reward": 1.0, "advantage": advantage, "stopped": j < 3})
            rows[-1]["answer"] = "7"
            numbers = {"logp": -0.5, "entropy": 1.25, "ratio": 1.1, "gap": 1e-6, "share": 0.125}
            line = {key: [value] * len(words) for key, value in numbers.items()}
            lines.append({"row": j, "id": [11] * len(words), "text": list(words), **line})
        write(folder / "completions" / f"completions_{i + 1:05d}.jsonl", rows)
        data = "".join(json.dumps(line) + "\n" for line in lines)
        path = folder / "completions" / f"tokens_{i + 1:05d}.jsonl.gz"
        if tokens:
            path.write_bytes(gzip.compress(data.encode()))
    for i, reward in enumerate(held_out):
        row = rows[0] | {"reward": reward, "completion": f"{reward}"}
        write(folder / "completions" / f"eval_{i:05d}.jsonl", [row])
