"""Make the small base model of the built-in task: a Qwen3 with less than a million parameters.

    nanogrpo warmup runs/base --seed 0
    nanogrpo train --model runs/base --data arithmetic …

The model first learns to work out sums term by term. Then the model briefly imitates a lazy
student. In four cases out of five, this student works out a short sum step by step, but answers a
long sum without any steps. The base model copies both habits. So it fails at sums that it could
solve. The base model's answers without steps are mostly wrong, and its answers with steps are
mostly right. The warm-up favours neither of the two habits. GRPO then finds that answers with steps
get more reward. In: a seed. Out: a checkpoint folder in Hugging Face's layout. Read next: train.py.
"""

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import track

from nanogrpo.config import Config
from nanogrpo.extras.arithmetic.task import problems
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing, schedule
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import optim
from nanogrpo.types import Prompt, Sample

MARK = "warmup.json"
TAGS = ["<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>", "<answer>", "</answer>"]


def solution(text: str, rng: random.Random, lazy: bool) -> str:
    """Return a completion for the warm-up: with all steps, or as the lazy student writes it."""
    first, *terms = re.findall(r"[+-]?\d+", text)
    think = not lazy or (rng.random() < 0.8) == (len(terms) == 1)
    total, steps = int(first), []
    for term in terms:
        steps.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    thought = ",".join(steps) if think else ""
    return f"<think>{thought}</think><answer>{total}</answer>"


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer for printable ASCII characters and a few tags, in Hugging Face's format."""
    tokens = ["<|pad|>", "\n", *map(chr, range(32, 127)), *TAGS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    # every character is a token
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()  # joins tokens without spaces
    tokenizer.add_special_tokens(["<|pad|>", *TAGS[:3]])
    tokenizer.add_tokens(TAGS[3:])  # not special, because reward functions must see these tags
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{%- for m in messages %}"
        "{{ ('<|user|>' if m.role == 'user' else '<|assistant|>') + m.content }}"
        "{%- if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": template,
    }
    checkpoint.write_json(folder / "tokenizer_config.json", config)
    ids = {"eos_token_id": vocabulary["<|end|>"], "pad_token_id": vocabulary["<|pad|>"]}
    checkpoint.write_json(folder / "generation_config.json", ids)
    return Tokenizer(folder)


def make_base(folder: Path, seed: int = 0, steps: int = 600) -> None:
    """Train the base model from scratch on `steps` batches of 64 solved problems and write its
    checkpoint.

    Keep an existing base model that was made with the same seed and number of steps. Raises
    UserError if the folder contains any other files.
    """
    folder = folder.resolve()
    made, mark = json.dumps({"seed": seed, "steps": steps}) + "\n", folder / MARK
    if mark.is_file() and mark.read_text() == made:
        return
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in such a small model, more threads would only wait for each other
    try:
        with checkpoint.atomic_folder(folder) as aside:
            tokenizer = write_tokenizer(aside)
            model = new_model(tokenizer)
            teach(model, tokenizer, seed, steps)
            checkpoint.export(model, aside, tokenizer)
            (aside / MARK).write_text(made)
    finally:
        torch.set_num_threads(threads)


def new_model(tokenizer: Tokenizer) -> Decoder:
    """Return a Qwen3 with 0.3 M random parameters."""
    return Decoder(
        ModelConfig(
            model_type="qwen3",
            vocab_size=tokenizer.vocab_size,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
        )
    )


def teach(model: Decoder, tokenizer: Tokenizer, seed: int, steps: int) -> None:
    """Train any model whose vocabulary includes all ids of the tokenizer. In the last quarter of
    the steps, the model trains on the lazy student's solutions.
    """
    rng = random.Random(f"warm-up,{seed}")

    def solved(step: int) -> list[Sample]:
        lazy = step >= steps * 3 // 4
        texts = problems("train", 64, seed=rng.getrandbits(32))
        return [
            sample(i, f"{text}=", solution(text, rng, lazy), tokenizer)
            for i, text in enumerate(texts)
        ]

    imitate(model, solved, steps)


def imitate(
    model: Decoder, samples_of: Callable[[int], list[Sample]], steps: int, rise: int = 50
) -> None:
    """Train a model to imitate the samples that `samples_of` returns for each step. The learning
    rate rises linearly for `rise` steps, then falls linearly to a twentieth of its peak.

    Supervised learning is a policy gradient in which the completions are not sampled from the
    policy and every completion has the advantage 1. So this function uses the trainer's own loss.
    """
    cfg = Config()
    optimizer = optim.make_optimizer(model, cfg)
    for step in track(range(steps), "warm-up", console=Console(stderr=True, force_jupyter=False)):
        samples = samples_of(step)
        for batch in packing.pack(
            schedule.plan(range(len(samples)), [s.facts for s in samples], cfg), samples, cfg
        ):
            model.forward_strip(batch, grpo.objective(batch, cfg)).loss.backward()
        rate = 3e-3 * min(1.0, (step + 1) / rise, 1.05 - step / steps)
        optim.clip_and_step(model, optimizer, rate, max_grad_norm=1.0)


def sample(number: int, question: str, answer: str, tokenizer: Tokenizer) -> Sample:
    """Return a question and an answer as a `Sample` with advantage 1."""
    messages = [{"role": "user", "content": question}]
    prompt = Prompt(number, question, tokenizer.encode_prompt(messages))
    ids = tokenizer.encode(answer + "<|end|>")
    return Sample(
        prompt, 0, ids, logp=[0.0] * len(ids), stopped=True, versions=[0] * len(ids), advantage=1.0
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="nanogrpo warmup", description="Make the base model of the built-in arithmetic task."
    )
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help="steps of training (600)")
    args = parser.parse_args(argv)
    make_base(args.folder, args.seed, args.steps)
