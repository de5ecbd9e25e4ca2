"""How many full GRPO steps per second does nanogrpo complete with its local engine, and how many
does TRL complete with its default generation?

In: nothing. This file creates a random model, whose completions end at the lengths of the case.
Out: results/end_to_end.json with steps and tokens per second, seconds by phase and peak memory. A
step includes sampling, rewards, advantages, training, the weight update and logging. nanogrpo runs
the loop of train.py, and TRL runs `GRPOTrainer.train()`, each in a separate process (runs.py). The
two trainers run alternately, `--rounds` times each. The tables show medians over the steps of all
rounds. The first step of each run is a warm-up and does not count.

* even: no completion ends before the length limit.
* uneven: the model stops with the same probability at every token, so that the mean length is a
  third of the limit.

The trainers do not enforce the lengths of a case. The weights of the model determine the
probability that a completion stops (`ending_model`). With a learning rate of 1e-6, this probability
hardly changes in so few steps. So both trainers get random lengths with the same distribution, and
the table shows their mean length. With --vllm, nanogrpo samples from a vLLM server. TRL cannot use
a vLLM server on a CPU, and the table gives the reason. TRL's settings are in trl_run.py. Read next:
runs.py.
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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import Progress

from bench import common, runs, tables
from nanogrpo import Config
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer

# The value of channel 0 in every hidden state.
# It is so large that, after a norm, channel 0 hardly depends on the other channels.
STEADY = 30.0
NO_VLLM = (
    "its client syncs weights to a server only over NCCL, which needs a CUDA device"
    " (trl/generation/vllm_client.py)"
)


def stop_probability(mean: float, longest: int) -> float:
    """Return the stop probability per token for completions of this mean length. A completion also
    ends when it has `longest` tokens.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** longest) / p > mean else (low, p)
    return p


@torch.no_grad()
def ending_model(cfg: ModelConfig, stop: int, probability: float) -> Decoder:
    """Return a random decoder that samples token `stop` with this probability at every position.

    Channel 0 of the residual stream has the value STEADY for every token, and no layer writes to
    it. The output head reads channel 0 only for the logit of `stop`, so this logit is constant. The
    other logits are small, so their exponentials sum to about V - 1.
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
    """Write the tokenizer of `nanogrpo warmup`, with tokens added until it has `vocab` ids."""
    size = warmup.write_tokenizer(folder).vocab_size
    padded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    padded.add_tokens([f"<{i}>" for i in range(size, vocab)])
    padded.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def write_case(folder: Path, shape: ModelConfig, args: argparse.Namespace, even: bool) -> Config:
    """Write the model, tokenizer and prompts to `folder`. Return the options of a run with these
    files.
    """
    longest = args.length if even else args.longest
    tokenizer = write_tokenizer(folder, shape.vocab_size)
    (stop,) = tokenizer.stop_token_ids
    torch.manual_seed(0)
    model = ending_model(shape, stop, 0.0 if even else stop_probability(longest / 3, longest))
    checkpoint.export(model, folder, tokenizer)
    rng = random.Random(0)
    lines = []
    for _ in range(args.prompts * args.steps):
        text = "".join(rng.choices(string.ascii_letters, k=args.prompt_length))
        lines.append(json.dumps({"prompt": text}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))
    return Config(
        model=str(folder),
        data=(str(folder / "prompts.jsonl"),),
        reward_funcs=("bench.rewards:share_of_even",),
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
) -> dict[str, list[dict]]:
    """Run the sides alternately, `--rounds` times each. Return the runs of each side."""
    found: dict[str, list[dict]] = {side: [] for side in sides}
    task = progress.add_task(title, total=args.rounds * len(sides))
    for turn in range(args.rounds):
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            progress.update(task, description=f"{title}: {side}")
            found[side].append(runs.run(side, dataclasses.replace(cfg, seed=turn), args.threads))
            progress.advance(task)
    return found


def figures_of(rounds: list[dict], cfg: Config) -> tuple[common.Timing, dict]:
    """Summarize the runs of one side, without the first step of each run."""

    def steady(series: str) -> list[float]:
        return [x for run in rounds for x in run[series][1:]]

    timing, lengths = common.Timing(steady("seconds")), steady("length")
    tokens = sum(lengths) * cfg.generation_batch_size
    phases = {
        name: statistics.median([s for run in rounds for s in run["phases"][name][1:]])
        for name in rounds[0]["phases"]
    }
    return timing, {
        "steps_per_second": 1 / timing.median,
        "tokens_per_second": tokens / sum(timing.seconds),
        "mean_length": statistics.fmean(lengths),
        "phases": phases,
        "peak_bytes": max(run["peak_bytes"] for run in rounds),
        "peak_bytes_above_libraries": max(run["peak_bytes_above_libraries"] for run in rounds),
    }


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "end_to_end",
        __doc__,
        rounds=(3, "runs of each side and case"),
        steps=(7, "steps per run, the first of which is not counted"),
        prompts=(8, "prompts per step"),
        group=(8, "completions per prompt"),
        prompt_length=(32, "tokens per prompt"),
        length=(96, "tokens per completion in the even case"),
        longest=(192, "length limit in the uneven case"),
        hidden=(256, "hidden size of the small model"),
        layers=(4, "layers of the small model"),
        vocab=(2048, "vocabulary of the small model"),
    )
    common.add_cases(parser, ("even", "uneven"))
    parser.add_argument(
        "--shape",
        default="small",
        choices=["small", *common.LARGE],
        help="the model: small (for CPUs, the default) or one for a GPU",
    )
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="sample from a vLLM server, which train.py starts; one round is enough",
    )
    common.add_vllm(parser)
    common.add_alone(parser)
    args = parser.parse_args(argv)
    if args.vllm and not args.vllm_python:
        parser.error("--vllm needs an environment with vLLM: set --vllm-python (docs/vllm.md).")
    # vLLM must leave some cores for the trainer
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    context = args.prompt_length + max(args.length, args.longest)
    if args.shape == "small":
        shape = common.small_qwen3(args.hidden, args.layers, args.vocab, context)
    else:
        shape = common.large_qwen3(args.shape, context)
    # The head is not tied to the embeddings, so that its weights can set the stop probability.
    shape = dataclasses.replace(shape, tie_word_embeddings=False)
    if args.vllm:
        os.environ["NANOGRPO_VLLM_PYTHON"] = args.vllm_python
    server = {
        "engine": "vllm",
        "vllm_options": f"--dtype float32 --enforce-eager --max-model-len {context}",
    }
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in args.cases:
            label = case if args.shape == "small" else f"{args.shape}, GPU, bfloat16, {case}"
            sides = common.SIDES[:1] if args.alone or args.vllm else common.SIDES
            with tempfile.TemporaryDirectory() as where:
                cfg = write_case(Path(where), shape, args, even=case == "even")
                if args.vllm:
                    label = f"{label}, a vLLM server"
                    cfg = dataclasses.replace(cfg, **server)
                found = measure(cfg, sides, args, progress, label)
            figures = {side: figures_of(rounds, cfg) for side, rounds in found.items()}
            records = [
                common.record(
                    "end_to_end",
                    label,
                    side,
                    argv,
                    timing,
                    **own,
                    speedup_over_trl=figures["TRL"][0].median / timing.median
                    if "TRL" in figures
                    else None,
                )
                for side, (timing, own) in figures.items()
            ]
            if args.vllm:
                records.append(common.record("end_to_end", label, "TRL", argv, why_not=NO_VLLM))
            # Results are written after each case, so an interrupted run keeps them.
            common.merge("end_to_end", records, args.out)
    return tables.report("end_to_end", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
