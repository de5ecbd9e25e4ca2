"""A save is complete or absent whatever happens while it is written, and a resumed run repeats the
uninterrupted one bit for bit.

Runs of train.py that are killed at many points are in test_state.py; here tests damage the files.
Read next: test_output.py.
"""

import dataclasses
import json
import logging
import os
import resource
import shutil
import stat
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError, read_json
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import checkpoint
from nanogrpo.run import optim, state
from tests.conftest import random_batch, write_base

ALONE = World(0, 1, torch.device("cpu"))


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    assert all(torch.equal(a[n], b[n]) for n in a)


def saver(cfg: Config, model, optimizer, tokenizer, base: Path) -> state.Saver:
    return state.Saver(cfg, ALONE, model, optimizer, tokenizer, read_json(base / "config.json"), {})


# the configuration, the tokenizer, the weights, or the state do not fit
@pytest.mark.parametrize("limit", [100, 5_000, 100_000, 400_000])
def test_a_disk_that_fills_up_while_saving_leaves_the_earlier_checkpoint(
    tmp_path, tiny_base, tiny_tokenizer, limit
):
    """A limit on the size of files makes a write fail midway, as on a full disk (Python ignores the
    signal).
    """
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "config.json").write_text("one")
    model, cfg = checkpoint.load_model(tiny_base), Config(output_dir=str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        writer = saver(cfg, model, optim.make_optimizer(model, cfg), tiny_tokenizer, tiny_base)
        writer.save(2)
        message = rf"{tmp_path}/checkpoint-2 could not be written \(.*\): make room"
        with pytest.raises(UserError, match=message) as error:
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "config.json").read_text() == "one"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_get_the_permissions_of_the_umask(tmp_path, tiny_base, tiny_tokenizer, umask, mode):
    model, cfg = checkpoint.load_model(tiny_base), Config(output_dir=str(tmp_path))
    before = os.umask(umask)
    try:
        with saver(
            cfg, model, optim.make_optimizer(model, cfg), tiny_tokenizer, tiny_base
        ) as writer:
            writer.save(1)
    finally:
        os.umask(before)
    files = [p for p in (tmp_path / "checkpoint-1").rglob("*") if p.is_file()]
    assert {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in files} == {
        p.name: oct(mode) for p in files
    }
    assert {"config.json", "model.safetensors", ".metadata", "__0_0.distcp", "state.json"} <= {
        p.name for p in files
    }


# --- saving and resuming a run ---


@dataclasses.dataclass
class Run:
    """The part of a run that a checkpoint holds: `advance` makes optimizer steps on fixed batches,
    `save` writes checkpoint-N.
    """

    cfg: Config
    base: Path
    step: int = 0

    def __post_init__(self):
        self.model = checkpoint.load_model(self.base)
        self.optimizer = optim.make_optimizer(self.model, self.cfg)
        self.step, _ = state.resume(self.cfg, ALONE, self.model, self.optimizer, {})

    def advance(self, steps: int) -> "Run":
        for _ in range(steps):
            batch = random_batch([(3, 5), (2, 7)], vocab_size=104, seed=self.step, off_policy=False)
            self.model.forward_packed(batch, grpo.objective(batch, self.cfg)).loss.backward()
            optim.clip_and_step(
                self.model, self.optimizer, optim.learning_rate(self.step, self.cfg), 1.0
            )
            self.step += 1
        return self

    def save(self) -> Path:
        tokenizer = checkpoint.Tokenizer(self.base)
        with saver(self.cfg, self.model, self.optimizer, tokenizer, self.base) as writer:
            writer.save(self.step)
        return writer.final

    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in state.tensors(self.model, self.optimizer).items()}


def start(tmp_path: Path, base: Path, **options) -> Run:
    return Run(
        Config(
            **{
                "model": str(base),
                "output_dir": str(tmp_path / "run"),
                "learning_rate": 1e-2,
                **options,
            }
        ),
        base,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, tied):
    base = write_base(tmp_path / "base", tie_word_embeddings=tied)
    options = {
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_steps": 6,
    }
    full = start(tmp_path, base, **options).advance(3)
    before = full.state()
    full.save()
    resumed = start(tmp_path, base, **options, resume=True)
    assert resumed.step == 3
    assert_same(resumed.state(), before)
    assert_same(resumed.advance(3).state(), full.advance(3).state())
    assert not torch.equal(
        full.state()["master.model.norm.weight"], before["master.model.norm.weight"]
    )
    assert before["updates"] == 3


def test_a_checkpoint_before_the_first_update_resumes(tmp_path, tiny_base):
    run = start(tmp_path, tiny_base)
    run.save()
    resumed = start(tmp_path, tiny_base, resume=True)
    assert_same(resumed.advance(2).state(), run.advance(2).state())


def test_only_the_last_checkpoints_are_kept(tmp_path, tiny_base):
    def names(limit: int) -> list[str]:
        run = start(tmp_path / str(limit), tiny_base, save_total_limit=limit)
        for run.step in (8, 9, 10, 11):  # as strings, 10 is before 9
            run.save()
        return [p.name for p in checkpoint.checkpoints(run.cfg.output_dir)]

    assert names(2) == ["checkpoint-10", "checkpoint-11"]
    assert names(1) == ["checkpoint-11"]
    assert names(0) == ["checkpoint-8", "checkpoint-9", "checkpoint-10", "checkpoint-11"]


def test_resume_takes_the_newest_checkpoint_and_removes_unfinished_ones(
    tmp_path, tiny_base, caplog
):
    run = start(tmp_path, tiny_base)
    for run.step in (9, 10):
        run.save()
    folder = tmp_path / "run"
    shutil.copytree(folder / "checkpoint-10", folder / ".checkpoint-11.tmp")
    (folder / ".checkpoint-11.tmp" / "state.json").unlink()
    (folder / "checkpoint-best").mkdir()  # not ours
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path, tiny_base, resume=True).step == 10
    assert [r.message for r in caplog.records if r.name == "nanogrpo"] == [
        f"removed {folder}/.checkpoint-11.tmp: the run ended while it was writing this checkpoint"
    ]
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-best",
    ]


def test_with_nothing_to_resume_a_run_starts(tmp_path, tiny_base):
    assert start(tmp_path, tiny_base, resume=True).step == 0
    start(tmp_path, tiny_base).save()
    assert start(tmp_path, tiny_base).step == 0  # without --resume, nothing is read


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(folder: Path, *removed: str, **values: object) -> None:
    """Write another state.json, as an older version did: without hashes."""
    saved = {**json.loads((folder / "state.json").read_text()), **values}
    saved = {k: v for k, v in saved.items() if k not in ("files", "sha256", *removed)}
    (folder / "state.json").write_text(json.dumps(saved))


DAMAGE = {
    "a shard truncated": lambda f: truncate(f / "state" / "__0_0.distcp"),
    "a shard empty": lambda f: (f / "state" / "__0_0.distcp").write_bytes(b""),
    "a shard missing": lambda f: (f / "state" / "__0_0.distcp").unlink(),
    "all shards missing": lambda f: shutil.rmtree(f / "state"),
    "metadata missing": lambda f: (f / "state" / ".metadata").unlink(),
    "metadata truncated": lambda f: truncate(f / "state" / ".metadata"),
    "metadata nonsense": lambda f: (f / "state" / ".metadata").write_text("not a pickle"),
    "state truncated": lambda f: truncate(f / "state.json"),
    "state missing": lambda f: (f / "state.json").unlink(),
    "state empty": lambda f: (f / "state.json").write_text("{}"),
    "state of a negative step": lambda f: change(f, step=-1),
    "state of a boolean step": lambda f: change(f, step=True),
    "state of a step far away": lambda f: change(f, step=10**30),
    "state of a step in quotes": lambda f: change(f, step="2"),
    "state with a list of options": lambda f: change(f, config=[]),
    "state with a list of inputs": lambda f: change(f, origin=[]),
    "state with a list of carried values": lambda f: change(f, carried=[1]),
    "state a list": lambda f: (f / "state.json").write_text("[]"),
}


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory, tiny_base) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with checkpoints of two steps, and the state after the first."""
    folder = tmp_path_factory.mktemp("saved")
    run = start(folder, tiny_base).advance(1)
    run.save()
    first = run.state()
    run.advance(1).save()
    return folder / "run", first


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_a_run_can_continue_from_the_one_before(
    tmp_path, tiny_base, two_saves, damage, hashes
):
    """Checkpoints of older versions have no hashes."""
    folder, first = two_saves
    shutil.copytree(folder, tmp_path / "run")
    earlier, newest = (tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2))
    if not hashes:
        change(earlier)
        change(newest)
    DAMAGE[damage](newest)
    message = (
        rf"^--resume: {newest} is damaged \(.*\): add --resume-from checkpoint-1, the last sound "
        r"checkpoint\.$"
    )
    with pytest.raises(UserError, match=message) as error:
        start(tmp_path, tiny_base, resume=True)
    assert "\n" not in str(error.value)
    resumed = start(tmp_path, tiny_base, resume=True, resume_from="checkpoint-1")
    assert resumed.step == 1
    assert_same(resumed.state(), first)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["checkpoint-1", "checkpoint-2-1"]  # the next --resume does not take it


def test_resuming_with_other_options_is_refused(tmp_path, tiny_base):
    start(tmp_path, tiny_base).advance(1).save()
    other = {"seed": 7, "learning_rate": 0.5, "reward_funcs": ("format",), "epsilon_high": 0.3}
    for name, value in other.items():
        with pytest.raises(
            UserError,
            match=rf"--resume: .*checkpoint-1 was written with {name} = .*: give the same options",
        ):
            start(tmp_path, tiny_base, resume=True, **{name: value})


def test_options_that_change_nothing_may_differ_and_max_steps_where_the_schedule_allows(
    tmp_path, tiny_base
):
    start(tmp_path, tiny_base).advance(1).save()
    free = {"max_steps": 900, "save_steps": 3, "save_total_limit": 9, "num_completions_to_print": 2}
    free["reward_timeout"] = 600.0  # the advice to a run with slow functions
    assert start(tmp_path, tiny_base, resume=True, **free).step == 1
    start(tmp_path / "linear", tiny_base, lr_scheduler_type="linear").save()
    with pytest.raises(UserError, match="max_steps = 100, now it is 900"):
        start(
            tmp_path / "linear", tiny_base, lr_scheduler_type="linear", resume=True, max_steps=900
        )


def test_an_option_newer_than_the_checkpoint_counts_as_its_default(tmp_path, tiny_base):
    folder = start(tmp_path, tiny_base).save()
    config = read_json(folder / "state.json")["config"]
    del config["top_entropy_quantile"]
    change(folder, "origin", config=config)  # without origin, there is nothing to compare with
    assert start(tmp_path, tiny_base, resume=True).step == 0
    with pytest.raises(
        UserError, match=r"was written with top_entropy_quantile = 1\.0, now it is 0\.5"
    ):
        start(tmp_path, tiny_base, resume=True, top_entropy_quantile=0.5)


def test_max_steps_below_the_finished_steps_is_refused_and_equal_is_not(tmp_path, tiny_base):
    start(tmp_path, tiny_base).advance(2).save()
    with pytest.raises(
        UserError,
        match=r"--max-steps is 1 but \S+checkpoint-2 has 2 finished steps: set it to 2 or more\.",
    ):
        start(tmp_path, tiny_base, resume=True, max_steps=1)
    assert start(tmp_path, tiny_base, resume=True, max_steps=2).step == 2


def test_another_models_checkpoint_is_refused(tmp_path, tiny_base):
    start(tmp_path, tiny_base).advance(1).save()
    other = write_base(tmp_path / "other", hidden_size=32)
    with pytest.raises(
        UserError, match=r"was written with model = .*now it is .*other: give the same options"
    ):
        start(tmp_path, other, resume=True)
    folder = tmp_path / "run" / "checkpoint-1"
    config = read_json(folder / "state.json")["config"]
    # as if the base model's folder now held another model
    change(folder, config={**config, "model": str(other)})
    with pytest.raises(
        UserError,
        match=r"belongs to another model \(\S+ has shape \(\S+ 48\) there and \(\S+ 32\) here",
    ):
        start(tmp_path, other, resume=True)
    tied = write_base(tmp_path / "tied", tie_word_embeddings=True)
    change(folder, config={**config, "model": str(tied)})
    with pytest.raises(
        UserError,
        match=r"another model \(exp_avg\.lm_head\.weight has shape \(104, 48\) there and none here",
    ):
        start(tmp_path, tied, resume=True)


def test_a_kill_between_two_renames_loses_no_checkpoint(tmp_path, tiny_base):
    """While checkpoint-1 is replaced, the old one has another name, and the new one not yet its
    own.
    """
    run = start(tmp_path, tiny_base).advance(1)
    folder = run.save()
    folder.rename(folder.with_name(f".{folder.name}.old"))
    resumed = start(tmp_path, tiny_base, resume=True)
    assert resumed.step == 1
    assert_same(resumed.state(), run.state())
    shutil.copytree(folder, folder.with_name(f".{folder.name}.old"))
    assert start(tmp_path, tiny_base, resume=True).step == 1
    assert not list(folder.parent.glob(".*"))


# --- saving in the background ---


def test_training_continues_while_the_state_is_written(tmp_path, tiny_base, monkeypatch):
    """The files hold the state when `save` returned, although each parameter changed before its
    file was opened.
    """
    run, go = start(tmp_path, tiny_base).advance(1), threading.Event()
    expected = run.state()
    write, export = state.dcp.FileSystemWriter.write_data, checkpoint.write_model
    monkeypatch.setattr(
        state.dcp.FileSystemWriter, "write_data", lambda *a: (go.wait(60), write(*a))[1]
    )
    monkeypatch.setattr(checkpoint, "write_model", lambda *a: (go.wait(60), export(*a))[1])
    tokenizer = checkpoint.Tokenizer(tiny_base)
    with saver(run.cfg, run.model, run.optimizer, tokenizer, tiny_base) as writer:
        writer.save(1)
        assert writer.failure() is None
        run.advance(2)
        assert not checkpoint.checkpoints(run.cfg.output_dir)
        go.set()
    resumed = start(tmp_path, tiny_base, resume=True)
    assert_same(resumed.state(), expected)
    exported = dict(checkpoint.load_model(writer.final).named_parameters())
    assert all(torch.equal(p, expected[f"master.{n}"]) for n, p in exported.items())


def test_a_failed_save_is_reported_once(tmp_path, tiny_base, monkeypatch):
    run = start(tmp_path, tiny_base)
    run.save()
    run.advance(1)
    monkeypatch.setattr(
        checkpoint,
        "write_model",
        lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    writer = saver(
        run.cfg,
        run.model,
        run.optimizer,
        checkpoint.Tokenizer(tiny_base),
        tiny_base,
    )
    writer.save(1)
    writer.wait()
    assert str(writer.failure()).startswith(
        f"{tmp_path}/run/checkpoint-1 could not be written (No space left on device): make room"
    )
    assert writer.failure() is None  # once
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoint-0"]


def test_a_bfloat16_base_is_exported_in_bfloat16_and_resumed_in_float32(tmp_path):
    base = write_base(tmp_path / "base")
    model = checkpoint.load_model(base).to(torch.bfloat16)
    checkpoint.export(model, base, checkpoint.Tokenizer(base))
    run = start(tmp_path, base).advance(1)
    exported = load_file(run.save() / "model.safetensors")
    assert {t.dtype for t in exported.values()} == {torch.bfloat16}
    masters = run.state()
    assert all(
        torch.equal(t, masters[f"master.{n}"].to(torch.bfloat16)) for n, t in exported.items()
    )
    assert any(not torch.equal(t.float(), masters[f"master.{n}"]) for n, t in exported.items())
    assert_same(start(tmp_path, base, resume=True).state(), masters)
