"""A save is whole or absent whatever happens while it is written, and a resumed run repeats the
uninterrupted one bit for bit.

Whole runs, killed at many points, are in test_state.py; here each damage is done by hand. Read
next: test_bad_input.py.
"""

import dataclasses
import json
import logging
import os
import resource
import shutil
import stat
from pathlib import Path

import pytest
import torch

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError, read_json
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import checkpoint
from nanogrpo.run import optim, state
from tests.conftest import random_batch, write_base
from tests.model.test_checkpoint import assert_same, content, write

ALONE = World(0, 1, torch.device("cpu"))


def saver(cfg: Config, model, optimizer, tokenizer, base: Path) -> state.Saver:
    return state.Saver(cfg, ALONE, model, optimizer, tokenizer, read_json(base / "config.json"), {})


@pytest.mark.parametrize(
    "limit", [100, 5_000, 100_000, 400_000]
)  # config.json, tokenizer.json, the weights, the state do not fit
def test_a_disk_that_fills_up_while_saving_leaves_the_earlier_checkpoint(
    tmp_path, tiny_base, tiny_tokenizer, limit
):
    """By the limit on a file's size: a write beyond it fails as on a full disk, midway (Python
    ignores the signal).
    """
    write(tmp_path / "checkpoint-1", "one")
    model, cfg = checkpoint.load_model(tiny_base), Config(output_dir=str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        writer = saver(cfg, model, optim.make_optimizer(model, cfg), tiny_tokenizer, tiny_base)
        writer.save(2)
        with pytest.raises(
            UserError, match=rf"{tmp_path}/checkpoint-2 could not be written \(.*\): make room"
        ) as told:
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(told.value)
    assert content(tmp_path) == {"checkpoint-1/config.json": b"one"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_are_as_readable_as_the_umask_says(tmp_path, tiny_base, tiny_tokenizer, umask, mode):
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


# ---- saving and resuming a run -------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """As much of a run as a checkpoint holds: `advance` does optimizer steps on fixed batches,
    `save` writes checkpoint-N.
    """

    cfg: Config
    base: Path
    step: int = 0

    def __post_init__(self):
        self.model = checkpoint.load_model(self.base)
        self.optimizer = optim.make_optimizer(self.model, self.cfg)
        self.step = state.resume(self.cfg, ALONE, self.model, self.optimizer)

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
    whole = start(tmp_path, base, **options).advance(3)
    before = whole.state()
    whole.save()
    resumed = start(tmp_path, base, **options, resume=True)
    assert resumed.step == 3
    assert_same(resumed.state(), before)
    assert_same(resumed.advance(3).state(), whole.advance(3).state())
    assert not torch.equal(
        whole.state()["master.model.norm.weight"], before["master.model.norm.weight"]
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
        for run.step in (8, 9, 10, 11):  # 10 is after 9, though not to a string
            run.save()
        return [p.name for p in checkpoint.checkpoints(run.cfg.output_dir)]

    assert names(2) == ["checkpoint-10", "checkpoint-11"]
    assert names(1) == ["checkpoint-11"]
    assert names(0) == ["checkpoint-8", "checkpoint-9", "checkpoint-10", "checkpoint-11"]


def test_resume_takes_the_newest_and_removes_what_was_cut_short(tmp_path, tiny_base, caplog):
    run = start(tmp_path, tiny_base)
    for run.step in (9, 10):
        run.save()
    folder = tmp_path / "run"
    shutil.copytree(folder / "checkpoint-10", folder / ".checkpoint-11.tmp")
    (folder / ".checkpoint-11.tmp" / "state.json").unlink()
    (folder / "checkpoint-best").mkdir()  # somebody's own
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path, tiny_base, resume=True).step == 10
    assert [r.message for r in caplog.records if r.name == "nanogrpo"] == [
        f"removed {folder}/.checkpoint-11.tmp: the run ended while this checkpoint was being written"
    ]
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-best",
    ]


def test_nothing_to_resume_is_a_start(tmp_path, tiny_base):
    assert start(tmp_path, tiny_base, resume=True).step == 0
    start(tmp_path, tiny_base).save()
    assert start(tmp_path, tiny_base).step == 0  # without --resume nothing is read


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def set_step(folder: Path, step: int) -> None:
    saved = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**saved, "step": step}))


DAMAGE = {
    "a shard cut": lambda f: cut(f / "state" / "__0_0.distcp"),
    "a shard empty": lambda f: (f / "state" / "__0_0.distcp").write_bytes(b""),
    "a shard gone": lambda f: (f / "state" / "__0_0.distcp").unlink(),
    "all shards gone": lambda f: shutil.rmtree(f / "state"),
    "metadata gone": lambda f: (f / "state" / ".metadata").unlink(),
    "metadata cut": lambda f: cut(f / "state" / ".metadata"),
    "metadata nonsense": lambda f: (f / "state" / ".metadata").write_text("not a pickle"),
    "state cut": lambda f: cut(f / "state.json"),
    "state gone": lambda f: (f / "state.json").unlink(),
    "state empty": lambda f: (f / "state.json").write_text("{}"),
    "state of a step that has not been": lambda f: set_step(f, -1),
    "state of a step to come": lambda f: set_step(f, 10**30),
    "state of no step": lambda f: set_step(f, True),
    "state a list": lambda f: (f / "state.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_removing_it_goes_back_one(tmp_path, tiny_base, damage):
    run = start(tmp_path, tiny_base).advance(1)
    run.save()
    expected = run.state()
    newest = run.advance(1).save()
    DAMAGE[damage](newest)
    with pytest.raises(
        UserError, match=rf"--resume: {newest} is damaged \(.*\): remove it to continue"
    ) as told:
        start(tmp_path, tiny_base, resume=True)
    assert "\n" not in str(told.value)
    shutil.rmtree(newest)
    resumed = start(tmp_path, tiny_base, resume=True)
    assert resumed.step == 1
    assert_same(resumed.state(), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 7), ("learning_rate", 0.5), ("reward_funcs", ("format",)), ("epsilon_high", 0.3)],
)
def test_resuming_with_other_options_is_refused(tmp_path, tiny_base, name, value):
    start(tmp_path, tiny_base).advance(1).save()
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
    free["reward_timeout"] = 600.0  # the advice to a run whose functions were too slow
    assert start(tmp_path, tiny_base, resume=True, **free).step == 1
    start(tmp_path / "linear", tiny_base, lr_scheduler_type="linear").save()
    with pytest.raises(UserError, match="max_steps = 100, now it is 900"):
        start(
            tmp_path / "linear", tiny_base, lr_scheduler_type="linear", resume=True, max_steps=900
        )


def test_an_option_that_is_newer_than_the_checkpoint_counts_as_its_default(tmp_path, tiny_base):
    path = start(tmp_path, tiny_base).save() / "state.json"
    saved = json.loads(path.read_text())
    del saved["config"]["top_entropy_quantile"]
    path.write_text(json.dumps(saved))
    assert start(tmp_path, tiny_base, resume=True).step == 0
    with pytest.raises(
        UserError, match=r"was written with top_entropy_quantile = 1\.0, now it is 0\.5"
    ):
        start(tmp_path, tiny_base, resume=True, top_entropy_quantile=0.5)


def test_fewer_steps_than_are_done_are_refused_and_as_many_are_not(tmp_path, tiny_base):
    start(tmp_path, tiny_base).advance(2).save()
    with pytest.raises(
        UserError,
        match=r"--max-steps is 1 but \S+checkpoint-2 has 2 finished steps: give as many or more\.",
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
    path = tmp_path / "run" / "checkpoint-1" / "state.json"
    saved = json.loads(path.read_text())
    # the folder of the base model was made anew, with other sizes
    saved["config"]["model"] = str(other)
    path.write_text(json.dumps(saved))
    with pytest.raises(
        UserError,
        match=r"checkpoint-1 is of another model \(\S+ has shape \(\S+ 48\) there and \(\S+ 32\) here",
    ):
        start(tmp_path, other, resume=True)
    tied = write_base(tmp_path / "tied", tie_word_embeddings=True)
    saved["config"]["model"] = str(tied)
    path.write_text(json.dumps(saved))
    with pytest.raises(
        UserError,
        match=r"another model \(exp_avg\.lm_head\.weight has shape \(104, 48\) there and none here",
    ):
        start(tmp_path, tied, resume=True)


def test_a_kill_between_two_renames_loses_no_checkpoint(tmp_path, tiny_base):
    """Replacing checkpoint-3: the old one is aside under another name, the new one has not its own
    yet.
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
