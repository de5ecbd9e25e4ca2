"""Run a full GRPO training run in a separate process, with nanogrpo's train.py or TRL's
GRPOTrainer.

In: a side (common.SIDES or common.REPLAYED) and a `Config`. Out: a dict with the seconds, lengths
and rewards of each step, the held-out accuracy at each evaluation, and the peak memory. For both
trainers, the clock runs from the start of the first step to the end of the last update, including
logging. The clock is paused during evaluations, for which both trainers use the same engine and
rewards. The time to create the model, the optimizer and the data is not measured.

    found = run("TRL", Config(model="runs/base", data=("arithmetic",), …), threads=2)

Read next: learning.py and end_to_end.py, which compare such runs, and trl_run.py with TRL's
settings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress

from bench import common
from nanogrpo import Config
from nanogrpo.data.prompts import load_prompts
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError
from nanogrpo.extras.data.sources import Sources
from nanogrpo.extras.rewards import Rewards
from nanogrpo.logs.files import read_records
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.scorer import Scorer
from nanogrpo.types import Sample


def run(side: str, cfg: Config, threads: int, micro: int = 1) -> dict:
    """Run one side in a new process and return its measurements.

    micro: TRL's micro-batches per optimizer step. For nanogrpo, the token budget determines the
    micro-batches.
    """
    cfg.validate()
    with tempfile.TemporaryDirectory() as where:
        (Path(where) / "options.json").write_text(json.dumps(dataclasses.asdict(cfg)))
        return common.in_process(
            Path(where), ["bench.runs", side, where, "--micro", micro], threads
        )


# --- a benchmark of several runs, which can be interrupted and continued ---


def parser(bench: str, doc: str, base: Path, **numbers) -> argparse.ArgumentParser:
    """Return `common.parser` with more options. `base` is the default of the option --base."""
    out = common.parser(bench, doc, **numbers)
    text = f"the model, made if it is missing (default {base.relative_to(common.ROOT)})"
    out.add_argument("--base", type=Path, default=base, help=text)
    for option, text in (
        ("--afresh", "repeat runs that already have a record"),
        ("--redraw", "only create plot and table from the existing records"),
    ):
        out.add_argument(option, action="store_true", help=text)
    return out


def complete(
    bench: str,
    wanted: Sequence[tuple[int, str]],
    start: Callable[[int, str], dict],
    args: argparse.Namespace,
    argv: Sequence[str],
    keep: Callable[[dict], bool] = lambda record: True,
) -> None:
    """Run each (seed, side) that has no record yet, and write its record when the run ends.
    `start(seed, side)` performs one run and returns its measurements. `keep` says whether an
    earlier record is used.
    """
    records = [
        r for r in common.read(bench, args.out) if keep(r) and not (args.afresh and "seed" in r)
    ]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(bench, total=len(wanted))
        for seed, side in wanted:
            progress.update(task, description=f"seed {seed}: {side}")
            if not any((r.get("seed"), r["side"]) == (seed, side) for r in records):
                found = {**start(seed, side), "seed": seed}
                records.append(common.record(bench, f"seed {seed}", side, argv, **found))
                common.write(bench, records, args.out)
            progress.advance(task)


# --- measuring a run ---


class StepClock:
    """Measure the seconds of each step. The clock can be paused."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: list[float] = []

    def start(self) -> None:
        self.began = time.perf_counter()

    def end_step(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.began += time.perf_counter() - before


def memory() -> dict[str, int]:
    """Return {"now": bytes in use, "peak": most bytes in use so far} for the GPU's allocator or,
    without a GPU, for this process.
    """
    if torch.cuda.is_available():
        return {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(status[field].split()[0]) * 1024
        for name, field in (("now", "VmRSS"), ("peak", "VmHWM"))
    }


def reset_peak() -> None:
    """Reset the peak memory, so that the peak does not include memory used only during imports."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def logged(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return the records of the steps and of the evaluations in the log of nanogrpo."""
    lines = [*read_records(folder / "metrics.jsonl")]
    return [x for x in lines if "reward" in x], [x for x in lines if "eval/after" in x]


def series(steps: list[dict]) -> dict[str, list]:
    """Return the mean reward and the mean length of each step, from the log of either trainer."""
    metrics = {"reward": "reward", "length": "completions/mean_length"}
    return {name: [step[metric] for step in steps] for name, metric in metrics.items()}


def first_reward(row: dict, prefix: str = "") -> float:
    """Return the value of the first reward function in a row of the log. Over the held-out
    problems, the mean of this value is the accuracy.
    """
    return next(value for name, value in row.items() if name.startswith(prefix))


# --- our side ---


def ours(cfg: Config, sampled: list[list[Sample]] | None = None) -> dict:
    """Run train.py's own loop and measure its steps.

    The samples of each step are appended to the list `sampled`.
    """
    import train

    clock, setup, evaluate = StepClock(), train.setup, train.evaluate
    assign_advantages = train.assign_advantages

    def timed_setup(*args):
        run = setup(*args)
        log_step = run.log.step

        def step(*args) -> None:
            log_step(*args)
            clock.end_step()

        run.log.step = step
        clock.start()
        return run

    def kept(run, samples: list[Sample]):
        if sampled is not None:
            sampled.append(samples)
        return assign_advantages(run, samples)

    def untimed_evaluate(*args, **kwargs):
        with clock.paused():
            evaluate(*args, **kwargs)

    with (
        patch.object(train, "setup", timed_setup),
        patch.object(train, "assign_advantages", kept),
        patch.object(train, "evaluate", untimed_evaluate),
    ):
        train.start(cfg)
    steps, evaluations = logged(Path(cfg.output_dir))
    phases = [name for name in steps[0] if name.startswith("time/")]
    return {
        "seconds": clock.seconds,
        "held_out": {e["eval/after"]: first_reward(e, "eval/rewards/") for e in evaluations},
        "phases": {name.removeprefix("time/"): [s[name] for s in steps] for name in phases},
        **series(steps),
    }


# --- TRL's side ---


def theirs(cfg: Config, sampled: list[list[Sample]] | None = None, micro: int = 1) -> dict:
    """Run TRL's trainer, with a callback that measures time and evaluates.

    `sampled` has one list of samples per step. If `sampled` is given, TRL trains on these samples
    instead of its own. The model is then saved in cfg.output_dir.
    """
    import transformers

    from bench import trl_run

    tokenizer = Tokenizer(cfg.model)
    shape = checkpoint.empty_model(Path(cfg.model)).cfg
    features = [Sources(cfg), Rewards(cfg)]
    prompts, problems = load_prompts(cfg, tokenizer, shape.max_position_embeddings, features)
    # If there is no time limit, all reward functions run in this process.
    rewards = Scorer(dataclasses.replace(cfg, reward_timeout=0.0), torch.device("cpu"), features)
    functions = rewards.local
    trainer = trl_run.trainer(cfg, prompts, functions, Path(cfg.output_dir), micro)
    clock, held_out, sampling = StepClock(), {}, []
    if sampled:
        trainer.rollout_func = lambda texts, trainer: rollout(
            sampled[trainer.state.global_step], texts
        )
    if cfg.eval_steps:
        longest = max(len(p.token_ids) for p in problems)
        engine = LocalEngine(
            shape,
            max_len=longest + cfg.max_completion_length,
            slots=cfg.slots,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        greedy = SamplingParams(
            0.0, max_tokens=cfg.max_completion_length, stop_token_ids=tokenizer.stop_token_ids
        )

    def evaluate(after: int) -> None:
        with clock.paused():
            engine.load(trainer.model, version=after)
            samples = engine.sample(problems, 1, greedy, step=0)
            for s in samples:
                s.text = tokenizer.decode(s.token_ids)
            rewards.score(samples)
            held_out[after] = statistics.fmean(first_reward(s.rewards) for s in samples)

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.start()
            if cfg.eval_steps:
                evaluate(0)

        def on_step_end(self, args, state, control, **kwargs):
            clock.end_step()
            step = state.global_step
            if cfg.eval_steps and (step % cfg.eval_steps == 0 or step == cfg.max_steps):
                evaluate(step)

    generate = trainer._generate

    def timed_generate(*args, **kwargs):
        began = time.perf_counter()
        out = generate(*args, **kwargs)
        sampling.append(time.perf_counter() - began)
        return out

    trainer._generate = timed_generate
    trainer.add_callback(Watch())
    trainer.train()
    if sampled:
        trainer.save_model(cfg.output_dir)
    rest = [step - part for step, part in zip(clock.seconds, sampling)]
    return {
        "seconds": clock.seconds,
        "held_out": held_out,
        "phases": {"sample": sampling, "everything else": rest},
        **series([line for line in trainer.state.log_history if "reward" in line]),
    }


def rollout(samples: list[Sample], texts: list[str]) -> dict:
    """Return completions that nanogrpo has sampled, in the form that TRL expects from
    `rollout_func`.

    `texts` are the prompts of TRL's step, which must be the prompts of the samples.
    """
    if [s.prompt.text for s in samples] != texts:
        raise RuntimeError("the two sides draw different prompts")
    return {
        "prompt_ids": [s.prompt.token_ids for s in samples],
        "completion_ids": [s.token_ids for s in samples],
        "logprobs": None,
    }


def replayed(cfg: Config) -> dict:
    """Run nanogrpo, then TRL on the completions that nanogrpo sampled, with one update per
    generation. Return TRL's measurements with two additions. The first addition is "ours", the
    held-out accuracies of nanogrpo. The second addition is "weights_apart": the distance between
    the two final models, divided by the distance between nanogrpo's final model and the base model
    (Euclidean norms over all weights).
    """
    sampled: list[list[Sample]] = []
    folder = f"{cfg.output_dir}/ours"
    our_accuracies = ours(dataclasses.replace(cfg, output_dir=folder), sampled)["held_out"]
    found = theirs(cfg, sampled)
    last = Path(folder) / f"checkpoint-{cfg.max_steps}"
    base, mine, trls = (
        torch.cat([p.flatten() for p in checkpoint.load_model(folder).parameters()])
        for folder in (Path(cfg.model), last, Path(cfg.output_dir))
    )
    apart = (trls - mine).norm() / (mine - base).norm().clamp(min=1e-9)
    return found | {"ours": our_accuracies, "weights_apart": apart.item()}


SIDES = {"nanogrpo": ours, "TRL": theirs, common.REPLAYED: replayed}


def main(argv: list[str]) -> int:
    """Run one side in this process. The function `run` starts this command."""
    parser = argparse.ArgumentParser(prog="python -m bench.runs", description=main.__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder", type=Path, help="has options.json, gets found.json")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches per step of TRL")
    args = parser.parse_args(argv)
    side, folder = args.side, args.folder
    cfg = Config(**json.loads((folder / "options.json").read_text()))
    cfg = dataclasses.replace(cfg, output_dir=str(folder / "output"))
    if side == "nanogrpo":
        import train  # noqa: F401 (an early import)
    else:
        import bench.trl_run  # noqa: F401
    torch.manual_seed(cfg.seed)
    random.seed(cfg.seed)
    reset_peak()
    before = memory()["now"]
    try:
        found = theirs(cfg, micro=args.micro) if side == "TRL" else SIDES[side](cfg)
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
