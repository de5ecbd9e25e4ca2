"""Whole GRPO runs, each in a process of its own: ours is train.py's loop, TRL's is its GRPOTrainer,
or both after each other.

In: a side (common.SIDES, common.REPLAYED) and a `Config`. Out: a dict: seconds, tokens and rewards
of each step, held-out accuracy after the steps that evaluate, peak memory. The clock of both sides
runs from the first draw to the last update, logging included, and stands still while the held-out
problems are answered, which both sides do with the same engine and rewards. Building the parts is
not counted.

    found = run("TRL", Config(model="runs/base", data=("arithmetic",), …), threads=2)

A process a run: so that threads, allocator and peak memory are a side's own. Read next: learning.py
and end_to_end.py, which compare such runs; trl_run.py, TRL's settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from bench import common
from nanogrpo.config import Config, dashed
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.runner import Runner
from nanogrpo.run.setup import load_prompts
from nanogrpo.types import Sample


def run(side: str, cfg: Config, threads: int) -> dict:
    """One run in a new process; its output is shown only when it fails."""
    cfg.validate()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        (folder / "options.json").write_text(json.dumps(dataclasses.asdict(cfg)))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        argv = [sys.executable, "-m", "bench.runs", side, where]
        done = subprocess.run(
            argv, env=env, cwd=common.ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"the run of {side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return json.loads((folder / "found.json").read_text())


class Laps:
    """A stopwatch with a lap a step, which can be held."""

    def __init__(self):
        self.began, self.seconds = time.perf_counter(), []

    def start(self) -> None:
        self.began = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.began += time.perf_counter() - before


def memory() -> dict[str, int]:
    """Bytes of this process: {"now": resident, "peak": most so far}; on a GPU those of its
    allocator.
    """
    if torch.cuda.is_available():
        return {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(status[field].split()[0]) * 1024
        for name, field in (("now", "VmRSS"), ("peak", "VmHWM"))
    }


def forget_peak() -> None:
    """Peaks count from here: what importing the libraries needed is nobody's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def share_of_even(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """A reward for models that have nothing to learn: differs within a group and costs nothing."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


# ---- our side ------------------------------------------------------------------------------------


def arguments(cfg: Config) -> list[str]:
    """The command line of these options."""
    out = []
    for field in dataclasses.fields(cfg):
        name, value = f"--{dashed(field.name)}", getattr(cfg, field.name)
        if isinstance(value, tuple):
            out += [name, *map(str, value)] if value else []
        elif isinstance(value, bool):
            out.append(name if value else f"--no-{dashed(field.name)}")
        elif value is not None:
            out.append(f"{name}={value}")
    return out


def ours(cfg: Config, drawn: list[list[Sample]] | None = None) -> dict:
    """train.py's own loop with a stopwatch at its seams. drawn: the samples of each step are put
    there.
    """
    import train
    from nanogrpo import step as step_module

    laps, setup, evaluate = Laps(), train.setup, train.evaluate

    def started(*args):
        built = setup(*args)
        step, completions = built.log.step, built.log.completions.log

        def logged(*args):
            step(*args)
            laps.lap()

        def written(step: int, samples: list[Sample]) -> None:
            completions(step, samples)
            if drawn is not None:
                drawn.append(samples)

        built.log.step, built.log.completions.log = logged, written
        laps.start()
        return built

    def evaluated(*args, **kwargs):
        with laps.held():
            evaluate(*args, **kwargs)

    with (
        patch.object(train, "setup", started),
        patch.object(train, "evaluate", evaluated),
        patch.object(step_module, "evaluate", evaluated),  # before the first step
    ):
        if train.main(arguments(cfg)):
            raise SystemExit(2)  # it has said why
    rows = [
        json.loads(line)
        for line in (Path(cfg.output_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [r for r in rows if "reward" in r]
    phases = [name for name in steps[0] if name.startswith("time/")]
    return {
        "seconds": laps.seconds,
        "held_out": {
            r["eval/after"]: r.get("eval/rewards/accuracy_reward")
            for r in rows
            if "eval/after" in r
        },
        "phases": {name.removeprefix("time/"): [r[name] for r in steps] for name in phases},
        **{
            name: [r[metric] for r in steps]
            for name, metric in METRICS.items()
            if metric in steps[0]
        },
    }


# of both sides
METRICS = {
    "reward": "reward",
    "accuracy": "rewards/accuracy_reward/mean",
    "length": "completions/mean_length",
}


# ---- TRL's side ----------------------------------------------------------------------------------


def replayed(cfg: Config) -> dict:
    """Our run, then TRL's on the completions which that drew (one update a generation). Adds
    "ours": our held-out accuracies; and "weights_apart": how far the two models are from each other
    in the end, over how far ours is from the base (Euclidean norms of all weights).
    """
    drawn, where = [], f"{cfg.output_dir}/drawn"
    our = ours(dataclasses.replace(cfg, output_dir=where), drawn)["held_out"]
    found = theirs(cfg, drawn) | {"ours": our}
    folders = (Path(cfg.model), Path(where) / f"checkpoint-{cfg.max_steps}", Path(cfg.output_dir))
    base, mine, trls = (
        torch.cat([p.flatten() for p in checkpoint.load_model(f).parameters()]) for f in folders
    )
    return found | {
        "weights_apart": ((trls - mine).norm() / (mine - base).norm().clamp(min=1e-9)).item()
    }


def theirs(cfg: Config, drawn: list[list[Sample]] | None = None) -> dict:
    """TRL's trainer, with a callback that keeps the time and evaluates. drawn: the samples of each
    step, taken instead of drawing any; the model is then saved in cfg.output_dir.
    """
    import transformers

    from bench import trl_run

    tokenizer = Tokenizer(cfg.model)
    shape = checkpoint.empty_model(Path(cfg.model)).cfg
    (prompts,), problems = load_prompts(cfg, tokenizer, shape.max_position_embeddings)
    rewards = Runner(cfg.reward_funcs, max_completion_length=cfg.max_completion_length)
    functions = rewards.here.functions
    trainer = trl_run.trainer(cfg, prompts, functions, Path(cfg.output_dir))
    laps, held_out, sampling = Laps(), {}, []
    if drawn:
        trainer.rollout_func = lambda texts, trainer: taken(drawn[trainer.state.global_step], texts)
    if cfg.eval_steps:
        longest = max(len(p.token_ids) for p in problems)
        engine = LocalEngine(
            shape, max_len=longest + cfg.max_completion_length, slots=cfg.max_concurrent
        )
        greedy = SamplingParams(
            0.0, max_tokens=cfg.max_completion_length, stop_token_ids=tokenizer.stop_token_ids
        )

    def evaluate(after: int) -> None:
        with laps.held():
            engine.load(trainer.model, version=after)
            samples = engine.sample(problems, 1, greedy, step=0)
            for s in samples:
                s.text = tokenizer.decode(s.token_ids)
            rewards.score(samples)
            held_out[after] = statistics.fmean(s.rewards["accuracy_reward"] for s in samples)

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            laps.start()
            if cfg.eval_steps:
                evaluate(0)

        def on_step_end(self, args, state, control, **kwargs):
            laps.lap()
            if cfg.eval_steps and (
                state.global_step % cfg.eval_steps == 0 or state.global_step == cfg.max_steps
            ):
                evaluate(state.global_step)

    generate = trainer._generate

    def timed(*args, **kwargs):
        began = time.perf_counter()
        out = generate(*args, **kwargs)
        sampling.append(time.perf_counter() - began)
        return out

    trainer._generate = timed
    trainer.add_callback(Watch())
    trainer.train()
    if drawn:
        trainer.save_model(cfg.output_dir)
    steps = [row for row in trainer.state.log_history if "reward" in row]
    rest = [whole - part for whole, part in zip(laps.seconds, sampling)]
    return {
        "seconds": laps.seconds,
        "held_out": held_out,
        "phases": {"sample": sampling, "everything else": rest},
        **{
            name: [row[metric] for row in steps]
            for name, metric in METRICS.items()
            if metric in steps[0]
        },
    }


def taken(samples: list[Sample], texts: list[str]) -> dict:
    """What TRL asks of a `rollout_func`: the completions of these prompts, which are drawn already."""
    if [s.prompt.text for s in samples] != texts:
        raise RuntimeError("the two sides draw different prompts")
    ids = {
        "prompt_ids": [s.prompt.token_ids for s in samples],
        "completion_ids": [s.token_ids for s in samples],
    }
    return {**ids, "logprobs": None}


def main(argv: list[str]) -> int:
    """The process of one run: `python -m bench.runs SIDE FOLDER`, as `run` starts it."""
    side, folder = argv[0], Path(argv[1])
    options = json.loads((folder / "options.json").read_text())
    cfg = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    cfg = dataclasses.replace(cfg, output_dir=str(folder / "output"))
    if side == "nanogrpo":
        import train  # noqa: F401
    else:
        import bench.trl_run  # noqa: F401
    torch.manual_seed(cfg.seed)
    random.seed(cfg.seed)
    forget_peak()
    before = memory()["now"]
    try:
        found = {"nanogrpo": ours, "TRL": theirs, common.REPLAYED: replayed}[side](cfg)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    peak = memory()["peak"]
    found |= {
        "threads": torch.get_num_threads(),
        "peak_bytes": peak,
        "peak_bytes_above_libraries": peak - before,
    }
    (folder / "found.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
