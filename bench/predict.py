"""Predict a run's memory and its seconds per phase, and decide which GPUs should sample.

    python -m bench.predict 8B --gpu H100 --gpus 8 --completion-length 1500 --profile full

In: a model (a folder with config.json, a hub id, or the size of a Qwen3), the GPUs, the mean
lengths of prompts and completions, and options of train.py. The GPUs need not exist. Out: every
layout that fits into memory, with the predicted seconds per step. A layout says which GPUs train
and which GPUs sample. For the fastest layout, the memory per GPU and the commands that start the
run are also printed. With `--engine vllm`, only layouts with servers are considered. The times are
estimates (cost.py, docs/scale.md). Read next: cost.py, nanogrpo/extras/memory.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import shlex
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from bench import common, cost
from bench.common import QWEN3
from nanogrpo.config import dashed
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.extras import commandline, memory
from nanogrpo.extras.attach import attach
from nanogrpo.extras.lora import lora
from nanogrpo.extras.options import Config
from nanogrpo.logs import progress
from nanogrpo.model import checkpoint, weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.run.setup import empty_model

logger = logging.getLogger("nanogrpo")


RESERVED = 1 << 30  # bytes that CUDA itself takes on a GPU
# maximum number of completions per step; predictions for more would take minutes
MOST = 100_000
SLOTS = 256  # number of sequences that a vLLM server decodes at once (default on most GPUs)


class Machines(NamedTuple):
    """Machines on which servers run."""

    number: int
    first: int  # index of the first GPU with a server; the GPUs before this one train
    servers: int  # on each machine

    @property
    def addresses(self) -> str:
        """The addresses of the servers, as a bash brace expansion."""
        ports = f"{{8000..{7999 + self.servers}}}" if self.servers > 1 else "8000"
        hosts = f"HOST{{1..{self.number}}}" if self.number > 1 else "HOST1"
        return f"http://{'127.0.0.1' if self.first else hosts}:{ports}"


def placed(gpus: int, trainers: int, each: int, per_node: int) -> list[Machines]:
    """Return the machines on which servers run. One machine may also have GPUs that train."""
    per_node, used = min(per_node, gpus), trainers % min(per_node, gpus)
    rest = (gpus - trainers) // per_node
    found = [Machines(1, used, (per_node - used) // each if used else 0)]
    found.append(Machines(rest, 0, per_node // each))
    return [m for m in found if m.number and m.servers]


class Layout(NamedTuple):
    """A way to use the GPUs, with the predicted memory and seconds."""

    trainers: int  # number of GPUs that train; without servers, they also sample
    machines: list[Machines]  # where vLLM servers run
    each: int  # GPUs per server
    cfg: Config  # with all settings chosen
    rows: list[memory.Row]  # of one trainer's GPU
    seconds: dict[str, float]  # by phase

    @property
    def total(self) -> float:
        """The seconds of a step. With --max-staleness, sampling and training overlap."""
        s = self.seconds
        if self.cfg.max_staleness:
            return s["sync"] + max(s["sample"] + s["score"], s["train"])
        return sum(s.values())


def gpus(size: int) -> World:
    """Return the `World` of rank 0, for `size` ranks with a GPU each. The GPUs need not exist."""
    return World(0, size, torch.device("cuda", 0))


def inputs(model: Decoder, world: World, longest_prompt: int = 256) -> Any:
    """Return an object with only those parts of a run that the memory estimate reads."""
    more = {"rewards": SimpleNamespace(local=[]), "features": []}
    return SimpleNamespace(model=model, world=world, longest_prompt=longest_prompt, **more)


def shape_of(name: str, four_bits: bool = False) -> Decoder:
    """Return the model without weights, on the meta device. `four_bits` says whether the matrices
    are stored in four bits.
    """
    if name not in QWEN3:
        lora = {"lora_r": 1, "load_in_4bit": True} if four_bits else {}
        features = attach(Config(model=name, **lora))
        return empty_model(checkpoint.locate(name), features)
    with torch.device("meta"):
        out = Decoder(QWEN3[name])
    out.saved_dtype = torch.bfloat16
    return out


def on_disk(model: Decoder, cfg: Config) -> int:
    """Return the size of a checkpoint in bytes. A checkpoint has all weights. For each trained
    weight, a checkpoint also contains a float32 copy and two moments of the optimizer.
    """
    trained, n = weights.sizes(model)
    moments = 2.05 if cfg.optim == "adamw_torch_8bit" else 8
    return round(model.saved_dtype.itemsize * n + (4 + moments) * trained)


def layouts(model: Decoder, cfg: Config, args: argparse.Namespace) -> Iterator[Layout]:
    """Yield each layout that fits into GPU memory."""
    device, c, P = args.device, model.cfg, cfg.prompts_per_step
    free = device.memory - RESERVED
    work = cost.Work(
        cost.lengths(P, args.prompt_length, args.longest_prompt),
        cost.lengths(P * cfg.num_generations, args.completion_length, cfg.max_completion_length),
        args.skipped,
    )
    size = device.item * cost.Weights.of(c).total
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    each = 2 ** max(0, math.ceil(math.log2(size / (0.6 * device.memory))))
    for trainers in range(1, min(args.gpus, P) + 1):
        machines = placed(args.gpus, trainers, each, args.per_node)
        servers = sum(m.number * m.servers for m in machines)
        embedded = trainers == args.gpus
        wanted = cfg.engine == "local" if embedded else servers
        if P % trainers or not wanted or each > args.per_node:
            continue
        # torchrun starts the same number of ranks on each machine
        if trainers > args.per_node and trainers % args.per_node:
            continue
        addresses = tuple(m.addresses for m in machines)
        engine = "local" if embedded else "vllm"
        given = dataclasses.replace(cfg, engine=engine, server=addresses)
        place = inputs(model, gpus(trainers), args.longest_prompt)
        chosen = memory.choose(place, given, free)
        rows = memory.table(place, chosen)
        if memory.on_device(rows) > free:
            continue
        if embedded:
            mean = args.prompt_length + args.completion_length
            engines, slots = trainers, min(chosen.slots, int((chosen.cache_tokens or 0) / mean))
        else:
            longest = args.longest_prompt + cfg.max_completion_length
            key = 2 * device.item * c.num_key_value_heads * c.head_dim * c.num_hidden_layers
            cache = 0.9 * each * device.memory - size
            engines, slots = servers, min(SLOTS, int(cache / (key * longest)))
        # the groups of one engine
        groups = range(0, len(work.completions), cfg.num_generations * engines)
        lengths = [n for i in groups for n in work.completions[i : i + cfg.num_generations]]
        share = cost.Work(work.prompts[::engines], lengths)
        near = sum(m.servers for m in machines if m.first)
        seconds = {
            "sync": cost.sync(c, device, trainers, near, servers - near, args.per_node),
            "sample": cost.sample(c, share, device, max(1, slots), 1 if embedded else each),
            "score": args.score_seconds,
            "train": cost.train(
                c,
                work,
                device,
                trainers,
                budget=chosen.strip_tokens,
                checkpointing=chosen.checkpointing,
                per_node=args.per_node,
                adapters=trained if cfg.lora_r else 0,
                updates=cfg.steps_per_generation,
                iterations=cfg.num_iterations,
                scored=_scored(chosen),
                reduces_each=chosen.reduce_gradients == "micro_batch",
            ),
        }
        yield Layout(trainers, machines, each, chosen, rows, seconds)


def _scored(cfg: Config) -> int:
    """Return how many forward passes are needed before training, for old and reference log-probs
    (step.py).
    """
    corrected = cfg.updates_per_step > 1 or cfg.vllm_importance_sampling_mode != "off"
    recomputed = corrected and not cfg.old_from_engine
    return (recomputed or cfg.top_entropy_quantile < 1) + (cfg.beta > 0)


def commands(layout: Layout, model: str, words: list[str], per_node: int) -> list[str]:
    """Return the bash commands that start a run with this layout."""
    name = f"Qwen/Qwen3-{model}" if model in QWEN3 else shlex.quote(model)
    each, out = layout.each, []
    for machines in layout.machines:
        cards = ",".join(f"$(({machines.first + j} + {each} * i))" for j in range(each))
        serve = f"CUDA_VISIBLE_DEVICES={cards} python serve.py --model {name} --port $((8000 + i))"
        serve += f" --tensor-parallel-size {each}" if each > 1 else ""
        if machines.first:
            out.append("# next to the trainers; NANOGRPO_SECRET: see docs/vllm.md")
        else:
            serve += " --host 0.0.0.0"
            out.append(
                f"# on each of {machines.number} machines; NANOGRPO_SECRET: see docs/vllm.md"
            )
        out.append(f"for i in {{0..{machines.servers - 1}}}; do {serve} & done")
    nodes = math.ceil(layout.trainers / per_node)
    start = "python"
    if layout.trainers > 1:
        start = f"torchrun --nproc-per-node {min(layout.trainers, per_node)}"
        if nodes > 1:
            start += f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    data = [] if "--data" in words else ["--data DATA"]
    options = [f"--model {name}", *data, *map(shlex.quote, words), memory.spelled(layout.cfg)]
    if layout.machines:
        options += [] if "--engine" in words else ["--engine vllm"]
        options.append(f"--server {' '.join(m.addresses for m in layout.machines)}")
    out.append(f"# on each of {nodes} machines" if nodes > 1 else "# the trainer")
    return [*out, " ".join([start, "train.py", *options])]


# --- the command ----------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description=__doc__.split("\n\n")[0] + " Most options of train.py are accepted, too.",
        allow_abbrev=False,
    )
    out.add_argument("model", help=f"a checkpoint folder, a hub id, or one of {', '.join(QWEN3)}")
    kinds = f"kind of GPU: {', '.join(cost.GPUS)}, or its memory, such as 24GB"
    out.add_argument("--gpu", default="H100", help=kinds)
    whole: list[tuple[str, int, str]] = [
        ("gpus", 1, "number of GPUs"),
        ("per-node", 8, "GPUs per machine"),
        ("prompt-length", 256, "mean tokens of a prompt"),
        ("longest-prompt", 0, "tokens of the longest prompt; 0: twice the mean"),
        ("completion-length", 0, "mean tokens of a completion; 0: a third of the maximum"),
    ]
    for name, default, text in whole:
        out.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    out.add_argument(
        "--score-seconds", type=float, default=0.0, metavar="X", help="seconds of a step's rewards"
    )
    out.add_argument(
        "--skipped", type=float, default=0.0, metavar="X", help="share of groups without a signal"
    )
    return out


def checked(args: argparse.Namespace, cfg: Config) -> argparse.Namespace:
    """Return the arguments with their defaults filled in. Raises UserError."""
    found = cost.gpu(args.gpu)
    if not found:
        raise UserError(
            f"--gpu {args.gpu} is not known: choose one of {', '.join(cost.GPUS)}, or give the "
            "memory, such as 24GB."
        )
    args.like, args.device = found
    args.longest_prompt = args.longest_prompt or 2 * args.prompt_length
    args.completion_length = args.completion_length or -(-cfg.max_completion_length // 3)
    for name in ("gpus", "per_node", "prompt_length", "longest_prompt", "completion_length"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1.")
    if args.gpus > args.per_node and args.gpus % args.per_node:
        raise UserError(
            f"--gpus {args.gpus} is not a multiple of the {args.per_node} GPUs per machine: set "
            "--per-node."
        )
    if args.completion_length > cfg.max_completion_length:
        raise UserError(
            f"--completion-length {args.completion_length} is above --max-completion-length "
            f"{cfg.max_completion_length}: raise the maximum, too."
        )
    if args.prompt_length > args.longest_prompt:
        raise UserError("--prompt-length is above --longest-prompt: raise --longest-prompt, too.")
    if not 0 <= args.score_seconds < math.inf or not 0 <= args.skipped < 1:
        raise UserError("--score-seconds must be at least 0, and --skipped must be in [0, 1).")
    if cfg.generation_batch_size > MOST:
        raise UserError(
            f"--generation-batch-size {cfg.generation_batch_size} is too large for a plan: give at "
            f"most {MOST}."
        )
    names = "server vllm_gpus vllm_options vllm_enable_sleep_mode cpu_offload ref_model"
    for name in names.split():
        if getattr(cfg, name):
            raise UserError(f"--{dashed(name)} is not part of a plan: leave it out.")
    if cfg.engine == "vllm" and args.gpus == 1:
        raise UserError(
            "--engine vllm needs separate GPUs for its servers here: set --gpus to at least 2, or "
            "leave --engine out."
        )
    return args


def assumptions(best: Layout, args: argparse.Namespace) -> str:
    """Return the assumptions of the prediction, and the duration of the fastest run."""
    cfg, P = best.cfg, best.cfg.prompts_per_step
    whole = f"{cfg.max_steps:,} steps take {progress.duration(best.total * cfg.max_steps)}"
    likeness = "" if args.like == args.gpu else f"; a GPU as fast as {args.like}"
    return (
        f"assumed: {P:,} prompts of {args.prompt_length:,} tokens per step (the longest has "
        f"{args.longest_prompt:,}), with {cfg.num_generations} completions of "
        f"{args.completion_length:,} tokens each (at most {cfg.max_completion_length:,}); rewards "
        f"take {args.score_seconds:g} s; {args.skipped:.0%} of the groups are skipped{likeness}\n"
        f"{'a step takes' if cfg.num_train_epochs else whole + ', a step'} {best.total:.1f} s, "
        "without evaluations and saving"
    )


def report(found: list[Layout], args: argparse.Namespace, words: list[str], disk: int) -> None:
    """Print the layouts, fastest first, then the assumptions, the memory and the commands of the
    fastest layout. `disk` is the size of a checkpoint in bytes.
    """
    best = found[0]
    lines = []
    for x in found[:8]:
        servers = sum(m.number * m.servers for m in x.machines)
        sampling = f"{servers} × {x.each}" if servers else "embedded"
        numbers = [*x.seconds.values(), x.total, memory.on_device(x.rows) / 2**30]
        lines.append((x.trainers, sampling, *(f"{number:.1f}" for number in numbers)))
    columns = ("trainers", "servers", *best.seconds, "step", "GiB")
    common.table(f"{args.gpus} × {args.gpu}: estimated seconds per step", columns, lines)
    print(assumptions(best, args))
    sizes = {
        row.name + (" (host)" if row.on_host else ""): row.bytes
        for row in sorted(best.rows, key=lambda row: -row.bytes)
        if row.bytes
    }
    sizes |= {
        "on the GPU together": memory.on_device(best.rows),
        "a checkpoint on the disk": disk,
    }
    memory_lines = [(name, f"{size / 2**30:.1f}") for name, size in sizes.items()]
    common.table("memory of one training GPU", ("what", "GiB"), memory_lines)
    print(*commands(best, args.model, words, args.per_node), sep="\n")


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        args, words = arguments().parse_known_args(sys.argv[1:] if argv is None else argv)
        cfg = commandline.parse(["--data", "DATA", "--model", args.model, *words])
        cfg.validate()
        if cfg.model != args.model:
            raise UserError(
                f"the model is given twice, {args.model} and --model: leave out --model."
            )
        args = checked(args, cfg)
        model = shape_of(args.model, cfg.load_in_4bit)
        lora.attach(model, cfg, "cuda")
        if hasattr(model.cfg, "vision"):
            logger.warning("the seconds and the sync leave out the vision encoder")
        found = sorted(layouts(model, cfg, args), key=lambda x: x.total)
        if not found:
            raise UserError(
                f"{args.model} does not fit on {args.gpus} × {args.gpu} with these options, or the "
                f"{cfg.prompts_per_step} prompts of a step cannot be split evenly among the GPUs: "
                "use more or larger GPUs, --lora-r 16 (with --load-in-4bit), or --optim "
                "adamw_torch_8bit."
            )
        report(found, args, words, on_disk(model, cfg))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
