"""Saved beside training and continued: bit for bit on as many ranks, to 1e-6 on others, after kills
at every kind of moment.

Whole runs of train.py on real processes, which kill themselves with SIGKILL at a given point
(`Kill`). Damaged folders are in test_resume.py. Read next: test_saver.py, test_signals.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from nanogrpo.config import Config
from nanogrpo.distributed.failure import Watch
from nanogrpo.engine import local as local_engine
from nanogrpo.grpo import packing
from nanogrpo.logs import console as log
from nanogrpo.logs import metrics
from nanogrpo.model import checkpoint
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import optim, state
from tests.conftest import timeless, write_base
from tests.ranks import REWARD, run, start

OPTIONS = [
    "--device",
    "cpu",
    "--max-steps",
    "8",
    "--save-steps",
    "2",
    "--num-generations",
    "4",
    "--generation-batch-size",
    "16",
]
OPTIONS += [
    "--max-completion-length",
    "6",
    "--learning-rate",
    "3e-3",
    "--lr-scheduler-type",
    "cosine",
    "--warmup-steps",
    "2",
]
OPTIONS += [
    "--token-budget",
    "60",
    "--num-iterations",
    "2",
    "--beta",
    "0.05",
    "--reward-funcs",
    f"{REWARD}:even",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


def argv(base: Path, output: Path, *more: str) -> list[str]:
    return [
        "--model",
        str(base),
        "--data",
        "arithmetic",
        "--output-dir",
        str(output),
        *OPTIONS,
        *more,
    ]


def rows(output: Path) -> list[dict]:
    """The steps' lines, without what depends on the clock."""
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [timeless(row) for row in found if "step" in row]


def final(output: Path) -> tuple[dict, dict]:
    """The last checkpoint: the exported weights and the state, whole."""
    folder = checkpoint.checkpoints(str(output))[-1]
    model = checkpoint.load_model(folder)
    optimizer = optim.make_optimizer(model, Config())
    mine = state.tensors(model, optimizer)
    state._load(folder, mine)
    return load_file(folder / "model.safetensors"), {n: t.clone() for n, t in mine.items()}


LARGEST_GAP = "sampling/sampling_logp_difference/max"


def close(a: list[dict], b: list[dict]) -> bool:
    """Other numbers of ranks add in another order: equal to rounding, which training carries on.

    The largest gap between trainer and engine is itself the rounding of one token in one strip:
    small on both sides, no more.
    """
    if [x.keys() for x in a] != [y.keys() for y in b]:
        return False
    gaps = [row[k] for row in (*a, *b) for k in row if k == LARGEST_GAP]
    rest = [(x[k], y[k]) for x, y in zip(a, b) for k in x if k != LARGEST_GAP]
    return max(gaps) <= 1e-5 and all(abs(x - y) <= 1e-6 * max(1, abs(x)) for x, y in rest)


# ---- killed --------------------------------------------------------------------------------------

POINTS = {
    # where → the function whose call is counted; the process dies as it is entered, or, with
    # "after", as it returns
    "sampling": (local_engine.LocalEngine, "_decode", "before"),
    "scoring": (Runner, "score", "before"),
    "packing": (packing, "schedule", "after"),
    "between forward and backward": (metrics.Meter, "add", "before"),
    "between backward and step": (optim, "clip_and_step", "before"),
    "after the optimizer's step": (optim, "clip_and_step", "after"),
    "weight sync": (local_engine.LocalEngine, "load", "before"),
    "logging": (log.Log, "step", "before"),
    "a save begins": (state.Saver, "save", "before"),
    "weights half written": (checkpoint, "write_model", "before"),
    "shards being written": (state.dcp.FileSystemWriter, "write_data", "before"),
    "shards written, not finished": (state.dcp.FileSystemWriter, "write_data", "after"),
    "before the rename": (checkpoint, "_flush", "before"),
    "after the rename": (state.Saver, "failure", "before"),
}


def train_until_killed(options: list[str], kill: tuple[str, int, int | None] | None) -> int:
    """train.py, which at the n-th passage of a point kills rank `who` (None: every rank) as SIGKILL
    does: without a word.
    """
    Watch.grace = 0.3  # the killed will not come to read who speaks
    if kill is not None:
        where, count, who = kill
        owner, name, when = POINTS[where]
        original, passed = getattr(owner, name), [0]

        def die() -> None:
            passed[0] += 1
            if passed[0] == count and who in (None, int(os.environ["RANK"])):
                os.kill(os.getpid(), signal.SIGKILL)

        def passing(*args, **kwargs):
            if when == "before":
                die()
            result = original(*args, **kwargs)
            if when == "after":
                die()
            return result

        setattr(owner, name, passing)
    return train.main(options)


# (where, the how manieth passage, which rank) of two; each run continues what the one before it
# left
KILLS = [
    ("sampling", 9, 1),
    ("between forward and backward", 3, 0),
    ("between backward and step", 4, None),
    ("a save begins", 1, 1),
    ("weights half written", 1, 0),
    ("shards being written", 1, 1),
    ("shards written, not finished", 1, None),
    ("before the rename", 3, 0),
    ("after the optimizer's step", 5, 1),
    ("scoring", 4, None),
    ("weight sync", 3, 0),
    ("logging", 2, None),
    ("packing", 3, 1),
    ("after the rename", 3, None),
]


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory) -> dict[int, Path]:
    """Uninterrupted runs on 1 and 2 ranks."""
    folder = tmp_path_factory.mktemp("whole")
    for size in (1, 2):
        assert run(size, train_until_killed, argv(base, folder / str(size)), None) == [0] * size
    # not runs in which nothing happens
    assert len({row["loss"] for row in rows(folder / "2")}) == 8
    assert close(rows(folder / "1"), rows(folder / "2"))
    return {size: folder / str(size) for size in (1, 2)}


def test_killed_anywhere_and_resumed_it_is_the_same_run_bit_for_bit(base, whole, tmp_path):
    """Fourteen kills, of one rank and of both: losses, rewards, norms and the last checkpoint are
    those of the whole run.
    """
    output, story = tmp_path / "run", []
    options = argv(base, output, "--resume")
    for kill in KILLS:
        before = time.monotonic()
        ranks = start(2, train_until_killed, options, kill)
        ends = ranks.ends()
        left = sorted(p.name for p in output.iterdir()) if output.exists() else []
        story.append((kill, ends, left, round(time.monotonic() - before, 1)))
        dead = [0, 1] if kill[2] is None else [kill[2]]
        assert -signal.SIGKILL in ends, (story, ranks.errors())
        assert all(ends[rank] in (-signal.SIGKILL, 1) for rank in dead), (story, ranks.errors())
        # the survivor does not hang and does not pretend
        assert 0 not in ends, (story, ranks.errors())
    assert run(2, train_until_killed, options, None) == [0, 0], story
    print(*story, sep="\n")
    # some kill left half a checkpoint behind
    assert any(".tmp" in name for _, _, left, _ in story for name in left), story
    assert rows(output) == rows(whole[2]), story
    for mine, theirs in zip(final(output), final(whole[2])):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [p.name for p in output.glob(".*")] == [".lock"]


def test_resumed_on_other_numbers_of_ranks(base, whole, tmp_path):
    for size, kill in [(2, ("sampling", 14, None)), (4, ("sampling", 14, None)), (1, None)]:
        ranks = start(size, train_until_killed, argv(base, tmp_path, "--resume"), kill)
        assert set(ranks.ends()) == {-signal.SIGKILL if kill else 0}, ranks.errors()
    assert [row["step"] for row in rows(tmp_path)] == list(range(8))
    assert close(rows(tmp_path), rows(whole[1]))


def test_a_run_on_one_process_without_torchrun_is_continued_by_two(base, whole, tmp_path):
    """The same code saves without a process group, and its checkpoint is of the same kind."""
    assert (
        train.main(argv(base, tmp_path, "--max-steps", "4", "--lr-scheduler-type", "constant")) == 0
    )
    assert sorted(p.name for p in (tmp_path / "checkpoint-4" / "state").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
    ]
    assert run(
        2,
        train_until_killed,
        argv(base, tmp_path, "--resume", "--lr-scheduler-type", "constant"),
        None,
    ) == [0, 0]
    assert [row["step"] for row in rows(tmp_path)] == list(range(8))
