"""Runs are saved and resumed: bit for bit on the same number of ranks, to 1e-6 on others, after
kills at every kind of moment.

These are runs of train.py in real processes, which send themselves SIGKILL at a given point.
Damaged folders are in test_resume.py. Read next: tests/distributed/test_failure.py.
"""

import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.runner import Runner
from nanogrpo.logs import console as log
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from nanogrpo.run import optim, state
from tests import ranks
from tests.conftest import steps
from tests.ranks import run, start, until

OPTIONS = (
    "--max-steps 8 --save-steps 2 --learning-rate 3e-3 --warmup-steps 2 --adam-epsilon 1e-5"
    " --token-budget 60 --num-iterations 2 --beta 0.05"
)


def argv(base: Path, output: Path, *more: str) -> list[str]:
    return ranks.argv(base, output, *OPTIONS.split(), *more)


def final(output: Path) -> tuple[dict, dict]:
    """Return the exported weights and the full state of the last checkpoint."""
    folder = checkpoints(str(output))[-1]
    model = checkpoint.load_model(folder)
    optimizer = optim.make_optimizer(model, Config())
    mine = state.tensors(model, optimizer)
    state.dcp.load(mine, checkpoint_id=folder / "state", no_dist=True)
    return load_file(folder / "model.safetensors"), {n: t.clone() for n, t in mine.items()}


# --- kills ---

POINTS = {
    # name: (owner, function, whether the process dies before or after the counted call)
    "sampling": (Runner, "decode", "before"),
    "between forward and backward": (fsdp, "backward", "before"),
    "between backward and optimizer step": (train, "clip_and_step", "before"),
    "after the optimizer's step": (train, "clip_and_step", "after"),
    "weight sync": (LocalEngine, "load", "before"),
    "logging": (log.Log, "step", "before"),
    "a save begins": (state.Saver, "save", "before"),
    "weights half written": (checkpoint, "write_model", "before"),
    "shards being written": (state.dcp.FileSystemWriter, "write_data", "before"),
    "shards written, not finished": (state.dcp.FileSystemWriter, "write_data", "after"),
    "before the rename": (checkpoint, "flush", "before"),
    "after the rename": (state.Saver, "failure", "before"),
}


def train_until_killed(
    options: list[str], kill: tuple[str, int, int | None] | None = None, here: Path | None = None
) -> int:
    """Run train.py; at the n-th call of a point, kill rank `who` by SIGKILL.

    None: every rank stops there, says so in the folder `here`, and is killed from outside. If each
    killed itself, on a busy machine the others could notice the first one's end before they are
    there.
    """
    if kill is not None:
        where, count, who = kill
        owner, name, when = POINTS[where]
        original, calls = getattr(owner, name), [0]

        def die() -> None:
            calls[0] += 1
            if calls[0] != count or who not in (None, int(os.environ["RANK"])):
                return
            if who is None:
                (here / os.environ["RANK"]).touch()
                threading.Event().wait()
            os.kill(os.getpid(), signal.SIGKILL)

        def counted(*args, **kwargs):
            if when == "before":
                die()
            result = original(*args, **kwargs)
            if when == "after":
                die()
            return result

        setattr(owner, name, counted)
    return train.main(options)


def start_and_kill(
    size: int, options: list[str], kill: tuple[str, int, int | None], saved: Path | None = None
) -> tuple[list[int], list[str]]:
    """Return how the ranks of a run ended, and what they wrote. If all of them are killed, and
    `saved` is given, they are killed once it exists.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(size, train_until_killed, options, kill, Path(folder))
        if kill[2] is None:
            until(lambda: len(os.listdir(folder)) == size)
            until(lambda: saved is None or saved.exists())
            for process in ranks.processes:
                process.kill()
        return ranks.ends(), ranks.errors()


# (point, call, rank) on two ranks; each run resumes what the one before it left
KILLS = [
    ("sampling", 9, 1),
    ("between forward and backward", 3, 0),
    ("between backward and optimizer step", 4, None),
    ("a save begins", 1, 1),
    ("weights half written", 1, 0),
    ("after the rename", 6, None),
    ("after the optimizer's step", 1, None),
    ("shards being written", 1, 1),
    ("shards written, not finished", 1, None),
    ("before the rename", 3, 0),
    ("weight sync", 2, 0),
    ("logging", 2, None),
]


@pytest.fixture(scope="module")
def uninterrupted(tied_base, tmp_path_factory) -> dict[int, Path]:
    """Uninterrupted runs on 1 and 2 ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    for size in (1, 2):
        assert run(size, train_until_killed, argv(tied_base, folder / str(size))) == [0] * size
    assert len({row["loss"] for row in steps(folder / "2")}) == 8  # something happens in the run
    return {size: folder / str(size) for size in (1, 2)}


@pytest.mark.timeout(1800)  # 30 processes
def test_a_run_killed_anywhere_and_resumed_is_the_uninterrupted_one_bit_for_bit(
    tied_base, uninterrupted, tmp_path
):
    """Twelve kills, of one rank and of both: losses, rewards, norms and the last checkpoint equal
    those of the uninterrupted run.
    """
    output, story = tmp_path / "run", []
    options = argv(tied_base, output, "--resume")
    for kill in KILLS:
        ends, errors = start_and_kill(2, options, kill)
        left = sorted(p.name for p in output.iterdir()) if output.exists() else []
        story.append((kill, ends, left))
        dead = [0, 1] if kill[2] is None else [kill[2]]
        assert all(ends[rank] == -signal.SIGKILL for rank in dead), (story, errors)
        # the survivor neither hangs nor reports success
        assert 0 not in ends, (story, errors)
    assert run(2, train_until_killed, options) == [0, 0], story
    print(*story, sep="\n")
    # some kill left half a checkpoint behind, and some left a finished one
    assert any(".tmp" in name for *_, left in story for name in left), story
    assert any(name.startswith("checkpoint-") for *_, left in story for name in left), story
    assert steps(output) == steps(uninterrupted[2]), story
    for mine, theirs in zip(final(output), final(uninterrupted[2])):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [p.name for p in output.glob(".*")] == [".lock"]


def test_two_ranks_refuse_a_checkpoint_with_a_flipped_bit(tied_base, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[2], tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-8"
    data = bytearray((folder / "state" / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 8
    (folder / "state" / "__1_0.distcp").write_bytes(data)
    ranks = start(2, train.main, argv(tied_base, tmp_path / "run", "--resume"))
    assert 0 not in ranks.ends()
    assert ranks.reports()[0] == (
        f"error: --resume: {folder} is damaged, or belongs to another model (state/__1_0.distcp "
        "is missing, or its hash is not the one in state.json): remove the checkpoint to continue "
        "from the one before it, or to start again."
    )


def test_a_run_continues_on_any_number_of_ranks(tied_base, uninterrupted, tmp_path):
    """Two steps without a process group, two on two ranks, two on four, and the rest on one. The
    ranks are killed while they sample for the next step.
    """
    assert train.main(argv(tied_base, tmp_path, "--max-steps", "2")) == 0
    files = sorted(p.name for p in (tmp_path / "checkpoint-2" / "state").iterdir())
    assert files == [".metadata", "__0_0.distcp"]
    for size, step in ((2, 4), (4, 6)):
        kill, saved = ("sampling", 14, None), tmp_path / f"checkpoint-{step}"
        ends, errors = start_and_kill(size, argv(tied_base, tmp_path, "--resume"), kill, saved)
        assert ends == [-signal.SIGKILL] * size, errors
    assert run(1, train_until_killed, argv(tied_base, tmp_path, "--resume")) == [0]
    for mine, theirs in zip(steps(tmp_path), steps(uninterrupted[1]), strict=True):
        # other numbers of ranks add in another order, and the largest gap is itself rounding
        gaps = [row.pop("sampling/sampling_logp_difference/max") for row in (mine, theirs)]
        assert max(gaps) <= 1e-5
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
