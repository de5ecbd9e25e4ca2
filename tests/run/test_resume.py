"""A save is complete or absent whatever happens while it is written, and a resumed run repeats the
uninterrupted one bit for bit.

Runs of train.py that are killed at many points are in test_state.py; here tests damage the files.
Read next: test_output.py.
"""

import dataclasses
import functools
import itertools
import json
import logging
import os
import random
import resource
import shutil
import stat
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import train
from nanogrpo import Config
from nanogrpo.errors import read_json
from nanogrpo.grpo import loss as grpo
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from nanogrpo.run import optim, state
from tests import configurations
from tests.conftest import (
    SOLO,
    arguments,
    assert_same,
    edit_json,
    random_batch,
    refused,
    steps,
    write_base,
)


@pytest.mark.parametrize("name", configurations.names("resumes"))
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    """Bit for bit: the log, and every tensor of the last checkpoint. tests/configurations.py has
    the table.
    """
    whole, output = configurations.uninterrupted(name), tmp_path / "run"
    shutil.copytree(whole, output)
    shutil.rmtree(output / f"checkpoint-{configurations.STEPS}")
    command = configurations.command(name, output, "--resume", "--save-steps", "2")
    assert configurations.run(name, command) == 0
    assert steps(output) == steps(whole)
    assert_same(configurations.saved(output), configurations.saved(whole))


# --- a part of a run, to damage ---


@dataclasses.dataclass
class Run:
    """The part of a run that a checkpoint holds: `advance` makes optimizer steps on fixed batches,
    `save` writes checkpoint-N.
    """

    cfg: Config
    base: Path

    def __post_init__(self):
        self.model = checkpoint.load_model(self.base)
        self.optimizer = optim.make_optimizer(self.model, self.cfg)
        parts = {"cfg": self.cfg, "world": SOLO, "model": self.model, "features": []}
        tokenizer = checkpoint.Tokenizer(self.base)
        inputs = SimpleNamespace(**parts, tokenizer=tokenizer, source=self.base)
        self.saver = state.Saver(inputs, self.optimizer, {"the list of prompts": "hash"})
        self.step = self.saver.resume()

    def advance(self, steps: int) -> "Run":
        for _ in range(steps):
            batch = random_batch([(3, 5), (2, 7)], vocab_size=104, seed=self.step, off_policy=False)
            self.model.forward_strip(batch, grpo.objective(batch, self.cfg)).loss.backward()
            rate = optim.learning_rate(self.step, self.cfg)
            optim.clip_and_step(self.model, self.optimizer, rate, 1.0)
            self.step += 1
        return self

    def save(self) -> Path:
        with self.saver:
            self.saver.save(self.step)
        return self.saver.final

    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in state.tensors(self.model, self.optimizer).items()}


def start(tmp_path: Path, base: Path, **options) -> Run:
    output = {"model": str(base), "output_dir": str(tmp_path / "run"), "learning_rate": 1e-2}
    return Run(Config(**{**output, **options}), base)


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").iterdir())


# --- saving ---


# the configuration, the tokenizer, the weights, or the state do not fit
@pytest.mark.parametrize("limit", [100, 5_000, 100_000, 400_000])
def test_a_disk_that_fills_up_while_saving_leaves_the_earlier_checkpoint(
    tmp_path, tiny_base, limit
):
    """A limit on the size of files makes a write fail midway, as on a full disk (Python ignores the
    signal). The error is reported once.
    """
    run = start(tmp_path, tiny_base)
    (earlier := tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    (earlier / "config.json").write_text("one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        run.saver.save(2)
        run.saver.job.exception()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with refused(rf"^{tmp_path}/run/checkpoint-2 could not be written \([^\n]*\): choose"):
        run.saver.finish()
    assert run.saver.failure() is None
    assert names(tmp_path) == ["checkpoint-1"]
    assert (earlier / "config.json").read_text() == "one"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_get_the_permissions_of_the_umask(tmp_path, tiny_base, umask, mode):
    before = os.umask(umask)
    try:
        folder = start(tmp_path, tiny_base).save()
    finally:
        os.umask(before)
    files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    assert set(files.values()) == {mode}
    assert {"config.json", "model.safetensors", ".metadata", "__0_0.distcp", "state.json"} <= {
        *files
    }


def test_only_the_last_checkpoints_and_those_to_keep_remain(tmp_path, tiny_base):
    def left(limit: int, *keep: str) -> list[str]:
        folder = tmp_path / f"{limit} {keep}"
        run = start(folder, tiny_base, save_total_limit=limit)
        (folder / "run/checkpoint-99").mkdir(parents=True)  # of another program
        run.saver.keep.update(keep)
        for run.step in (8, 9, 10, 11):  # as strings, 10 is before 9
            run.save()
        return sorted(int(name.split("-")[1]) for name in names(folder))

    assert left(2) == [10, 11, 99]
    assert left(1, "checkpoint-9") == [9, 11, 99]
    assert left(0) == [8, 9, 10, 11, 99]


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
    with run.saver:
        run.saver.save(1)
        assert run.saver.failure() is None
        run.advance(2)
        assert not checkpoints(run.cfg.output_dir)
        go.set()
    assert_same(start(tmp_path, tiny_base, resume=True).state(), expected)
    exported = dict(checkpoint.load_model(run.saver.final).named_parameters())
    assert all(torch.equal(p, expected[f"master.{n}"]) for n, p in exported.items())


def test_the_log_is_on_the_disk_before_a_checkpoint_gets_its_name(
    tiny_base, files, tmp_path, monkeypatch
):
    """After a power cut, what was flushed is there. The last flush of the log before the rename of
    a checkpoint contains all its steps.
    """
    log, durable, seen = tmp_path / "metrics.jsonl", [b""], {}
    fsync, rename = os.fsync, Path.rename

    def flush(descriptor):
        fsync(descriptor)
        if log.exists() and os.fstat(descriptor).st_ino == log.stat().st_ino:
            durable[0] = log.read_bytes()

    def watch(self, target):
        if Path(target).name.startswith("checkpoint-"):
            seen[Path(target).name] = durable[0]
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", watch)
    assert train.main(arguments(tiny_base, files, tmp_path, "--save-steps", "1")) == 0
    assert [*seen] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    for step, text in enumerate(seen.values(), start=1):
        found = [json.loads(line) for line in text.splitlines()]
        assert [row["step"] for row in found if "reward" in row][:step] == list(range(step))


def test_a_failed_run_does_not_wait_forever_for_a_save(tmp_path, tiny_base):
    run = start(tmp_path, tiny_base, ddp_timeout=1)
    run.saver.job = Future()  # another rank hangs in the save
    with pytest.raises(ZeroDivisionError), run.saver:
        raise ZeroDivisionError


# --- resuming ---


def test_a_bfloat16_base_is_exported_in_bfloat16_and_resumed_in_float32(tmp_path):
    base = write_base(tmp_path / "base")
    model = checkpoint.load_model(base).to(torch.bfloat16)
    checkpoint.export(model, base, checkpoint.Tokenizer(base))
    run = start(tmp_path, base).advance(1)
    exported = load_file(run.save() / "model.safetensors")
    masters = run.state()
    assert {t.dtype for t in exported.values()} == {torch.bfloat16}
    assert all(
        torch.equal(t, masters[f"master.{n}"].to(torch.bfloat16)) for n, t in exported.items()
    )
    assert any(not torch.equal(t.float(), masters[f"master.{n}"]) for n, t in exported.items())
    assert_same(start(tmp_path, base, resume=True).state(), masters)


def test_resume_takes_the_newest_checkpoint_and_removes_unfinished_ones(
    tmp_path, tiny_base, caplog
):
    assert start(tmp_path, tiny_base, resume=True).step == 0  # there is nothing yet
    run = start(tmp_path, tiny_base)
    for run.step in (9, 10):
        run.save()
    folder = tmp_path / "run"
    shutil.copytree(folder / "checkpoint-10", folder / ".checkpoint-11.tmp")
    (folder / "checkpoint-best").mkdir()  # not ours
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path, tiny_base, resume=True).step == 10
    assert [r.message for r in caplog.records if r.name == "nanogrpo"] == [
        f"removed {folder}/.checkpoint-11.tmp: a run ended while it was writing or removing it"
    ]
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9", "checkpoint-best"]
    assert start(tmp_path, tiny_base).step == 0  # without --resume, nothing is read


# --- damage ---


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory, tiny_base) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with checkpoints of two steps, and the state after the first."""
    folder = tmp_path_factory.mktemp("saved")
    run = start(folder, tiny_base).advance(1)
    run.save()
    first = run.state()
    run.advance(1).save()
    return folder / "run", first


DAMAGE = {
    "a shard missing": lambda f: (f / "state" / "__0_0.distcp").unlink(),
    "state truncated": lambda f: os.truncate(f / "state.json", 9),
    "state missing": lambda f: (f / "state.json").unlink(),
    "state empty": lambda f: (f / "state.json").write_text("{}"),
    "state with a list of options": lambda f: edit_json(f / "state.json", config=[1]),
    "state with a list of files": lambda f: edit_json(f / "state.json", files=["__0_0.distcp"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_a_run_can_continue_from_the_one_before(
    tmp_path, tiny_base, two_saves, damage
):
    folder, first = two_saves
    shutil.copytree(folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint-2"
    DAMAGE[damage](newest)
    file = "/state.json" if damage.startswith("state ") and "files" not in damage else ""
    message = (
        rf"^--resume: {newest}{file} is damaged, .* model \([^\n]*\): remove the checkpoint to"
    )
    with refused(message):
        start(tmp_path, tiny_base, resume=True)
    shutil.rmtree(newest)  # as it says
    resumed = start(tmp_path, tiny_base, resume=True)
    assert resumed.step == 1
    assert_same(resumed.state(), first)


def test_a_flipped_bit_in_any_file_is_found(tmp_path, tiny_base, two_saves):
    shutil.copytree(two_saves[0], tmp_path / "run")
    folder, rng = tmp_path / "run" / "checkpoint-2", random.Random(0)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "state.json"]
    for path, _ in itertools.product(files, range(3)):
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        name = path.relative_to(folder)
        message = rf"is damaged, .* \({name} .* its hash is not the one in state.json\): remove"
        with refused(message):
            start(tmp_path, tiny_base, resume=True)
        path.write_bytes(data)
    # a user may add files
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text("{}")
    assert start(tmp_path, tiny_base, resume=True).step == 2


# --- options that do not fit ---


def test_resuming_with_other_options_is_refused(tmp_path, tiny_base):
    start(tmp_path, tiny_base, top_p=0.5).advance(2).save()
    other = {"seed": 7, "learning_rate": 0.5, "reward_funcs": ("format",), "epsilon_high": 0.3}
    for name, value in {**other, "top_p": 1.0}.items():
        match = rf"--resume: .*-2/state.json was written with {name} = .*: give the same options"
        with refused(match):
            start(tmp_path, tiny_base, **{"top_p": 0.5, "resume": True, name: value})
    assert start(tmp_path, tiny_base, top_p=0.5, resume=True, max_steps=2).step == 2


def test_options_that_change_nothing_may_differ_and_max_steps_where_the_schedule_allows(
    tmp_path, tiny_base
):
    start(tmp_path, tiny_base).advance(1).save()
    free = {"max_steps": 900, "save_steps": 3, "save_total_limit": 9, "num_completions_to_print": 2}
    free["reward_timeout"] = 600.0  # the advice to a run with slow functions
    assert start(tmp_path, tiny_base, resume=True, **free).step == 1
    start(tmp_path / "linear", tiny_base, lr_scheduler_type="linear").save()
    with refused("max_steps = 100, but max_steps is now 900"):
        start(
            tmp_path / "linear", tiny_base, lr_scheduler_type="linear", resume=True, max_steps=900
        )


def test_an_option_that_one_side_lacks_counts_as_its_default(tmp_path, tiny_base):
    """The core's own Config has fewer options than the full one."""
    options = {"model": str(tiny_base), "output_dir": str(tmp_path / "run"), "resume": True}
    core = train.Config(**options)
    assert "lora_r" not in dataclasses.asdict(core)
    Run(core, tiny_base).save()
    assert Run(Config(**options), tiny_base).step == 0
    shutil.rmtree(tmp_path / "run" / "checkpoint-0")
    Run(Config(**options), tiny_base).save()
    with refused(r"was written with lora_r = 0, but lora_r is now 4: give the same"):
        Run(Config(**options, lora_r=4), tiny_base)
    edit_json(tmp_path / "run/checkpoint-0/state.json", config={"lora_r": 4})
    with refused(r"with lora_r = 4, but lora_r is now the default: give"):
        Run(core, tiny_base)


def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path, tiny_base):
    """It has hashes only of the prompts and of the files of state/, named without the folder."""
    folder = start(tmp_path, tiny_base).advance(1).save()
    hashes = read_json(folder / "state.json")["files"].items()
    files = {name.removeprefix("state/"): h for name, h in hashes if name.startswith("state/")}
    edit_json(folder / "state.json", origin="hash", files=files)
    assert start(tmp_path, tiny_base, resume=True).step == 1


def test_another_models_checkpoint_is_refused(tmp_path, tiny_base):
    folder = start(tmp_path, tiny_base).advance(1).save()
    other = write_base(tmp_path / "other", hidden_size=32)
    tied = write_base(tmp_path / "tied", tie_word_embeddings=True)
    # as if the base model's folder now held another model
    config = read_json(folder / "state.json")["config"]
    for base, what in (
        (other, r"Size mismatch between saved torch\.Size\(\[\d+, 48\]\) and current: .* for "),
        (tied, "it also has the tensor exp_avg.lm_head.weight"),
    ):
        edit_json(folder / "state.json", config={**config, "model": str(base)})
        with refused(rf"belongs to another model \({what}"):
            start(tmp_path, base, resume=True)


def test_the_state_of_another_optimizer_is_resumed_or_refused(tmp_path, tiny_base, monkeypatch):
    """An optimizer that creates its state only in its first step cannot be resumed."""

    def with_state(groups):
        made = sgd(groups)
        parameters = [p for group in groups for p in group["params"]]
        made.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in parameters})
        return made

    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    monkeypatch.setattr(optim, "adamw", with_state)
    whole = start(tmp_path, tiny_base).advance(1)
    whole.save()
    resumed = start(tmp_path, tiny_base, resume=True)
    assert_same(resumed.advance(2).state(), whole.advance(2).state())
    monkeypatch.setattr(optim, "adamw", sgd)
    with refused("it also has the tensor momentum_buffer"):
        start(tmp_path, tiny_base, resume=True)
