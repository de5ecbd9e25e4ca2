"""How many whole GRPO steps a second: ours with the embedded engine, TRL's with its default
generation?

In: nothing: a random model that ends its completions as the case asks is made here. Out:
results/end_to_end.json: steps and tokens a second, seconds by phase, peak memory. A step is
sampling, rewards, advantages, training, the update and the log of it: train.py's loop and TRL's
`GRPOTrainer.train()`, each in a process of its own (runs.py). Runs take turns, `--rounds` each;
medians are over the steps of all rounds but the first of each run, which warms up.

* even: no completion ends before the length limit.
* uneven: at every token the model stops with the same probability, such that the mean length is a
  third of the limit.

Lengths are not forced from outside, on either side: the model itself has that stop probability
(`ending_model`), and a learning rate of 1e-6 does not move it in so few steps. So the two sides
meet the same distribution, not the same draws; the table has the mean length of both. With --vllm
our side samples from a vLLM server instead; TRL's side cannot on a CPU, and the table says why. TRL
with the settings of trl_run.py. Read next: runs.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import Progress

from bench import common, runs, tables
from nanogrpo.config import Config
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import warmup

STEADY = 30.0  # channel 0 of every hidden state: so large that the norm leaves it all but constant
NO_VLLM = "its client syncs weights to a server over NCCL alone, which needs a CUDA device (trl/generation/vllm_client.py)"


def stop_probability(mean: float, longest: int) -> float:
    """The p at which completions have this mean length, when each stops with probability p a token,
    and at `longest` anyway.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** longest) / p > mean else (low, p)
    return p


@torch.no_grad()
def ending_model(cfg: ModelConfig, stop: int, probability: float) -> Decoder:
    """A random decoder that draws token `stop` with this probability at every position, whatever
    came before.

    Channel 0 of the residual stream is STEADY for every token and no layer writes to it; the head
    reads it for `stop` alone, whose logit is therefore constant. The other logits are small, so
    that their exponentials sum to about V - 1.
    """
    model = Decoder(cfg)
    model.model.embed_tokens.weight[:, 0] = STEADY
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    odds = probability / (1 - probability) * (cfg.vocab_size - 1)
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[stop] = 0
    model.lm_head.weight[stop, 0] = math.log(max(odds, 1e-12)) / math.sqrt(cfg.hidden_size)
    return model


def write_tokenizer(folder: Path, vocab: int) -> Tokenizer:
    """The warm-up's tokenizer of characters, with a word for every further id of the vocabulary."""
    size = warmup.write_tokenizer(folder).vocab_size
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.add_tokens([f"<{i}>" for i in range(size, vocab)])
    whole.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def write_case(folder: Path, shape: ModelConfig, args: argparse.Namespace, even: bool) -> Config:
    """Model, tokenizer and prompts in `folder`; the options of a run on them."""
    longest = args.length if even else args.longest
    tokenizer = write_tokenizer(folder, shape.vocab_size)
    (stop,) = tokenizer.stop_token_ids
    torch.manual_seed(0)
    model = ending_model(shape, stop, 0.0 if even else stop_probability(longest / 3, longest))
    checkpoint.export(model, folder, tokenizer)
    rng = random.Random(0)
    texts = [
        "".join(rng.choices(string.ascii_letters, k=args.prompt_length))
        for _ in range(args.prompts * args.steps)
    ]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    )
    return Config(
        model=str(folder),
        data=(str(folder / "prompts.jsonl"),),
        reward_funcs=("bench.runs:share_of_even",),
        num_generations=args.group,
        generation_batch_size=args.prompts * args.group,
        max_concurrent=args.prompts * args.group,
        max_completion_length=longest,
        max_steps=args.steps,
        learning_rate=1e-6,
        device="cpu" if args.shape == "small" else "cuda",
    )


def measure(
    cfg: Config, sides: Sequence[str], args: argparse.Namespace, progress: Progress, title: str
) -> dict[str, list]:
    """The runs of each side, in turns."""
    found: dict[str, list[dict]] = {side: [] for side in sides}
    task = progress.add_task(title, total=args.rounds * len(sides))
    for turn in range(args.rounds):
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            progress.update(task, description=f"{title}: {side}")
            found[side].append(runs.run(side, dataclasses.replace(cfg, seed=turn), args.threads))
            progress.advance(task)
    return found


def figures_of(rounds: list[dict], cfg: Config) -> tuple[common.Timing, dict]:
    """The runs of one side as one row: the first step of each is left out."""
    later = lambda name: [x for run in rounds for x in run[name][1:]]  # noqa: E731
    timing, lengths = common.Timing(later("seconds")), later("length")
    tokens = sum(lengths) * cfg.generation_batch_size
    phases = {
        n: statistics.median([s for run in rounds for s in run["phases"][n][1:]])
        for n in rounds[0]["phases"]
    }
    memory = {
        name: max(run[name] for run in rounds)
        for name in ("peak_bytes", "peak_bytes_above_libraries")
    }
    return timing, {
        "steps_per_second": 1 / timing.median,
        "tokens_per_second": tokens / sum(timing.seconds),
        "mean_length": statistics.fmean(lengths),
        "longest": cfg.max_completion_length,
        "completions": cfg.generation_batch_size,
        "phases": phases,
        "rounds": len(rounds),
        **memory,
    }


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.end_to_end", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each side and case, in turns (default 3)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=7,
        help="steps a run, the first of which is not counted (default 7)",
    )
    parser.add_argument(
        "--cases",
        nargs="*",
        default=["even", "uneven"],
        choices=["even", "uneven"],
        help="one of the cases",
    )
    parser.add_argument(
        "--shape",
        default="small",
        choices=["small", *common.LARGE],
        help="the model: small (CPU), or one for a GPU",
    )
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="sample from a vLLM server, which train.py starts; a round will do",
    )
    parser.add_argument(
        "--vllm-python",
        default=common.vllm_python(),
        help="has vLLM (default $NANOGRPO_VLLM_PYTHON)",
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step (default 8)")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt (default 8)")
    parser.add_argument(
        "--prompt-length", type=int, default=32, help="tokens a prompt (default 32)"
    )
    parser.add_argument(
        "--length", type=int, default=96, help="even case: tokens a completion (default 96)"
    )
    parser.add_argument(
        "--longest", type=int, default=192, help="uneven case: the length limit (default 192)"
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size of the small model (default 256)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="layers of the small model (default 4)"
    )
    parser.add_argument(
        "--vocab", type=int, default=2048, help="vocabulary of the small model (default 2048)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    args = parser.parse_args(argv)
    if args.vllm and not args.vllm_python:
        parser.error(
            "--vllm needs an interpreter that has vLLM: name it by --vllm-python (docs/vllm.md)."
        )
    # the trainer needs the cores too
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    context = args.prompt_length + max(args.length, args.longest)
    shape = common.small_qwen3(args.hidden, args.layers, args.vocab, context)
    if args.shape != "small":
        shape = common.large_qwen3(args.shape, context)
    # the head alone must know when to stop
    shape = dataclasses.replace(shape, tie_word_embeddings=False)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in args.cases:
            label = case if args.shape == "small" else f"{args.shape}, GPU, bfloat16, {case}"
            with tempfile.TemporaryDirectory() as where:
                cfg = write_case(Path(where), shape, args, even=case == "even")
                if args.vllm:
                    label, options = (
                        f"{label}, a vLLM server",
                        f"--dtype float32 --enforce-eager --max-model-len {context}",
                    )
                    cfg = dataclasses.replace(
                        cfg, engine="vllm", vllm_python=args.vllm_python, vllm_options=options
                    )
                found = measure(
                    cfg, common.SIDES[:1] if args.vllm else common.SIDES, args, progress, label
                )
            sides = {side: figures_of(rounds, cfg) for side, rounds in found.items()}
            rows, shown = [], [] if argv is None else argv
            for side, (timing, figures) in sides.items():
                figures["speedup_over_trl"] = (
                    sides["TRL"][0].median / timing.median if "TRL" in sides else None
                )
                figures["model"] = dataclasses.asdict(shape)
                rows.append(common.row("end_to_end", label, side, timing, shown, **figures))
            if args.vllm:
                rows.append(common.facts("end_to_end", label, "TRL", shown, why_not=NO_VLLM))
            # case by case: what is cut short keeps what it has
            path = common.merge("end_to_end", rows, args.out)
    rows = common.read("end_to_end", args.out)
    tables.show("end_to_end", rows)
    print(f"rows: {path}")
    return rows


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
