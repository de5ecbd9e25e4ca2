"""The small base model of the built-in task: a Qwen3 of under a million parameters, taught two
habits from a seed.

    python -m nanogrpo.run.warmup runs/base --seed 0      # then: python train.py --model runs/base --data arithmetic …

First it learns to work sums out term by term. Then, for a while, it is shown a lazy student: short
sums worked out four times of five, long ones blurted out four times of five. The base copies both,
and so fails at what it could do: its blurted answers are mostly wrong, its worked ones mostly
right. Nothing tells it which habit is better: GRPO finds out. In: a seed. Out: a checkpoint folder
in Hugging Face's layout. Read next: train.py.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import track

from nanogrpo.config import Config
from nanogrpo.data.tasks import problems
from nanogrpo.errors import UserError
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import optim
from nanogrpo.types import Prompt, Sample

MARK = "warmup.json"  # in a folder that this file wrote: nothing else is overwritten
TAGS = ["<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>", "<answer>", "</answer>"]


def solution(text: str, rng: random.Random, lazy: bool) -> str:
    """A completion as the warm-up shows it: worked out always, or by a lazy student."""
    first, *terms = re.findall(r"[+-]?\d+", text)
    think = not lazy or (rng.random() < 0.8) == (len(terms) == 1)
    total, steps = int(first), []
    for term in terms:
        steps.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    thought = ",".join(steps) if think else ""
    return f"<think>{thought}</think><answer>{total}</answer>"


def write_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer of printable ASCII characters and a few tags, in Hugging Face's files."""
    vocabulary = {
        token: i for i, token in enumerate(["<|pad|>", "\n", *map(chr, range(32, 127)), *TAGS])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    # every character by itself
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()  # and no spaces put between them
    tokenizer.add_special_tokens(["<|pad|>", *TAGS[:3]])
    tokenizer.add_tokens(TAGS[3:])  # ordinary tokens: the rewards must see them
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{%- for m in messages %}{{ ('<|user|>' if m.role == 'user' else '<|assistant|>') + m.content }}"
        "{%- if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    ids = {"eos_token_id": vocabulary["<|end|>"], "pad_token_id": vocabulary["<|pad|>"]}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return Tokenizer(folder)


def base_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )


def make_base(folder: Path, seed: int = 0, steps: int = 600, quiet: bool = False) -> None:
    """Trains the base model from scratch on `steps` batches of 64 solved training problems and
    writes its checkpoint.

    The last quarter of the steps shows the lazy student. Supervised learning is the policy gradient
    of someone else's completions with advantage 1: so this is the trainer's own loss, on samples
    that were not sampled.
    """
    folder = may_write(folder)
    torch.manual_seed(seed)
    with checkpoint.atomic_folder(folder) as aside:
        tokenizer = write_tokenizer(aside)
        model = Decoder(base_config(tokenizer.vocab_size))
        teach(model, tokenizer, seed, steps, quiet)
        checkpoint.export(model, aside, tokenizer)
        row = {
            "seed": seed,
            "steps": steps,
            "files": sorted([MARK, *(path.name for path in aside.iterdir())]),
        }
        (aside / MARK).write_text(json.dumps(row) + "\n")


def teach(model: Decoder, tokenizer: Tokenizer, seed: int, steps: int, quiet: bool = True) -> None:
    """The training itself, of any model whose vocabulary the tokenizer's ids fit into."""
    cfg = Config(loss_type="dapo")
    rng = random.Random(f"warm-up,{seed}")
    optimizer = optim.make_optimizer(model, cfg)
    for step in track(range(steps), "warm-up", console=Console(stderr=True, quiet=quiet)):
        lazy = step >= steps * 3 // 4
        samples = [solved(i, text, tokenizer, rng, lazy) for i, text in enumerate(draw(rng))]
        for batch in packing.pack(packing.one_update(samples, cfg), samples, cfg):
            model.forward_packed(batch, grpo.objective(batch, cfg)).loss.backward()
        # up in 50 steps, then down to a twentieth
        rate = 3e-3 * min(1.0, (step + 1) / 50, 1.05 - step / steps)
        optim.clip_and_step(model, optimizer, rate, max_grad_norm=1.0)


def ensure_base(folder: Path, seed: int, steps: int) -> None:
    """`make_base`, unless the folder holds this very base already."""
    try:
        row = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        row = None
    if not isinstance(row, dict) or (row.get("seed"), row.get("steps")) != (seed, steps):
        make_base(folder, seed, steps)


def may_write(folder: Path) -> Path:
    """The folder itself, links followed. UserError when it holds anything but what an earlier
    warm-up wrote there.

    A base is replaced as a whole: so a run inside its folder would be lost with it, or another
    model's only copy.
    """
    folder = folder.resolve()
    try:
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        written = json.loads((folder / MARK).read_text())["files"] if MARK in found else []
    except OSError as e:
        raise UserError(f"{folder} cannot be used ({e.strerror}): choose another folder.") from e
    except (ValueError, TypeError, KeyError) as e:
        raise UserError(
            f"{folder / MARK} was not written by a warm-up: choose another folder."
        ) from e
    if found != written:
        raise UserError(
            f"{folder} holds files that no warm-up wrote, which would be lost: choose another folder."
        )
    return folder


def draw(rng: random.Random) -> list[str]:
    return problems("train", 64, seed=rng.getrandbits(32))


def solved(number: int, text: str, tokenizer: Tokenizer, rng: random.Random, lazy: bool) -> Sample:
    """A problem and its solution as if it had been sampled, with advantage 1."""
    prompt = Prompt(
        number, text, tokenizer.encode_prompt([{"role": "user", "content": f"{text}="}])
    )
    ids = tokenizer.encode(solution(text, rng, lazy) + "<|end|>")
    return Sample(
        prompt, 0, ids, logp=[0.0] * len(ids), stopped=True, versions=[0] * len(ids), advantage=1.0
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make the base model of the built-in arithmetic task."
    )
    parser.add_argument("folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        make_base(args.folder, args.seed)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
