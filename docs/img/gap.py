"""Measure where the gap between sampling and training comes from: python docs/img/gap.py

In: the model and the held-out prompts of nanogrpo/data/sums. Out: the table of docs/gap.md, on the
standard output. It takes less than a minute on one core of a CPU.

With `--bitwise`, and logits in float32, the engine and the trainer compute the same bits. Each
experiment then changes a single thing in the engine or in its weights, lets the engine sample, and
compares its log-probs with those of the trainer. Read next: nanogrpo/extras/bitwise.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanogrpo.cli import SUMS
from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras import bitwise, head_dtype
from nanogrpo.grpo.advantages import group_relative
from nanogrpo.kernels import exact, reference
from nanogrpo.model import checkpoint, dispatch
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Decoder, Linear
from nanogrpo.types import Prompt, Sample

CPU = torch.device("cpu")
RUN: Any = SimpleNamespace(world=SimpleNamespace(device=CPU))  # what the two features read of a run
GROUP = 8
Change = Callable[[Any, Any], None]
TOKENIZER = checkpoint.Tokenizer(SUMS / "base")


def main(count: int = 16) -> list[tuple[str, float, float, float]]:
    """Print the table, and return its rows: the name, k3, mean |d| and largest |d|."""
    prompts = read_prompts(count)
    attend = exact.attend

    def in_float32(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        """Compute in float32 and round only the result, as a kernel on a GPU does."""
        return attend(q.float(), k.float(), v.float(), *more).to(q.dtype)

    with ExitStack() as stack:
        stack.enter_context(bitwise.swapped(CPU, dispatch.reference, (exact, "attend", in_float32)))
        stack.enter_context(bitwise.Bitwise().running(RUN))
        stack.enter_context(head_dtype.HeadDtype().running(RUN))
        rows = [(name, *gap(*both)) for name, both in experiments(prompts)]
    print("| what differs | k3 | mean \\|d\\| | largest \\|d\\| |\n|---|---|---|---|")
    for name, k3, mean, largest in rows:
        print(f"| {name} | {k3:.1e} | {mean:.1e} | {largest:.1e} |")
    return rows


def differing(count: int) -> list[str]:
    """Return the experiments whose mean is not within a factor of ten of that on the page."""
    page = (Path(__file__).parents[1] / "gap.md").read_text()
    row = re.compile(r"^\| (\w.*?) \| .* \| (\S+e\S+) \| .* \|$", re.MULTILINE)
    stated = {name: float(mean) for name, mean in row.findall(page)}
    found = {name: mean for name, _, mean, _ in main(count)}
    if [*found] != [*stated]:
        return ["the names of the experiments"]
    # a small mean comes from a few tokens, and other processors round other tokens
    least = {name: mean / 10 if mean > 1e-4 else 0.0 for name, mean in stated.items()}
    return [name for name, x in found.items() if not least[name] <= x <= 10 * stated[name]]


def experiments(prompts: list[Prompt]) -> Iterator[tuple[str, tuple[list[Sample], Tensor]]]:
    """Yield each experiment: its name, and its samples with the log-probs of the trainer."""
    model, wide = load(torch.bfloat16), load(torch.float32)

    def alone(
        *changes: Change, model: Decoder = model, top_p: float = 1.0, rounded: bool = False
    ) -> tuple[list[Sample], Tensor]:
        samples = sample(model, prompts, changes, top_p)
        return samples, trainer_logp(model, samples, rounded)

    yield "nothing", alone()
    yield "1. a product adds up K in four parts, in float32", alone(split_products, model=wide)
    yield "1. the same in bfloat16", alone(split_products)
    yield "2. attention has blocks of 16 keys instead of 64", alone(smaller_blocks)
    yield "2. the cache stores keys and values in 8 bits", alone(cache_in_8_bits)
    yield "3. a norm reads a sum before it is rounded", alone(fused_norm)
    yield "3. a rotation has cosines and sines in bfloat16", alone(rounded_rotation)
    yield "4. logits are rounded to bfloat16 in the engine", alone(round_logits)
    yield "4. logits are rounded to bfloat16 on both sides", alone(round_logits, rounded=True)
    yield "5. tokens from top-p 0.9 are scored over all tokens", alone(top_p=0.9)
    before = sample(wide, prompts)
    for lr in (1e-6, 5e-5):
        logp = trainer_logp(update(before, lr), before)
        yield f"6. weights are one update old, learning rate {lr:g}", (before, logp)
    several = split_products, smaller_blocks, fused_norm, rounded_rotation
    yield "1. to 3. without 8 bits, logits in float32", alone(*several)
    yield "the same, logits rounded on both sides", alone(*several, round_logits, rounded=True)


# --- the two sides ---


def load(dtype: torch.dtype) -> Decoder:
    """Return the model with exact products."""
    model = checkpoint.load_model(SUMS / "base", dtype)
    bitwise.use_exact_products(model, dispatch.reference)
    return model


def sample(
    model: Decoder, prompts: list[Prompt], changes: Sequence[Change] = (), top_p: float = 1.0
) -> list[Sample]:
    """Sample with an engine that computes the trainer's bits, except for the changes."""
    dtype = model.lm_head.weight.dtype
    engine = bitwise.ExactEngine(
        model.cfg, max_len=64, slots=128, device=CPU, dtype=dtype, paged=True
    )
    engine.load(model, 0)
    functions = SimpleNamespace(**vars(dispatch.reference))
    for change in changes:
        change(engine, functions)
    params = SamplingParams(max_tokens=32, stop_token_ids=TOKENIZER.stop_token_ids, top_p=top_p)
    with bitwise.swapped(CPU, functions):
        return engine.sample(prompts, GROUP, params, 0)


def hidden_states(model: Decoder, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Return the hidden states [M, D] that predict the tokens of the completions, and these tokens
    [M]. All samples are in one strip, as in training.
    """
    ids = [torch.tensor(s.prompt.token_ids + s.token_ids) for s in samples]
    ends = torch.tensor([0, *map(len, ids)]).cumsum(0)
    positions = torch.cat([torch.arange(len(x)) for x in ids])
    predicted = [torch.arange(end - len(s.token_ids), end) for s, end in zip(samples, ends[1:])]
    rows, tokens = torch.cat(predicted), torch.cat(ids)
    attend = StripAttention(ends.int(), max(map(len, ids)))
    return model(tokens, positions, attend, rows - 1, lambda hidden, weight: hidden), tokens[rows]


@torch.no_grad()
def trainer_logp(model: Decoder, samples: list[Sample], rounded: bool = False) -> Tensor:
    """Return the log-probs [M] of all completions over the full vocabulary."""
    hidden, targets = hidden_states(model, samples)
    logits = dispatch.reference.product(hidden, model.lm_head.weight)  # [M, V] float32
    logits = logits.bfloat16() if rounded else logits
    return dispatch.reference.log_softmax_forward(logits, targets, 1.0)[0]


def gap(samples: list[Sample], logp: Tensor) -> tuple[float, float, float]:
    """Return k3, and the mean and the largest difference of log-probs."""
    d = logp.double() - torch.tensor([x for s in samples for x in s.logp]).double()
    return tuple(float(x) for x in ((d.expm1() - d).mean(), d.abs().mean(), d.abs().max()))


# --- what differs: each function changes an engine, or the functions that it uses ---


def split_products(engine: Any, functions: Any) -> None:
    """Add up K in four parts, as a library on a GPU may do if there are few rows."""

    def product(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        parts = zip(x.float().chunk(4, 1), weight.float().chunk(4, 1))
        return torch.stack([exact.product(a, b) for a, b in parts]).sum(0)

    for module in engine.model.modules():
        if isinstance(module, Linear):
            module.product = lambda x, *more: product(x, *more).to(x.dtype)
    engine.runner.head = product


def smaller_blocks(engine: Any, functions: Any) -> None:
    def attend(*args: Any) -> Tensor:
        usual, exact.KEYS = exact.KEYS, 16
        try:
            return exact.attend(*args)
        finally:
            exact.KEYS = usual

    functions.paged_attention = functools.partial(bitwise.paged_attention, attend)


def cache_in_8_bits(engine: Any, functions: Any) -> None:
    """Round keys and values to the type that vLLM calls fp8."""

    def attend(q: Tensor, *more: Any) -> Tensor:
        keys, values = (x.to(torch.float8_e4m3fn).to(q.dtype) for x in more[:2])
        return exact.attend(q, keys, values, *more[2:])

    functions.paged_attention = functools.partial(bitwise.paged_attention, attend)


def fused_norm(engine: Any, functions: Any) -> None:
    """Normalize the sum of x and the residual before it is rounded, as vLLM does."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple:
        total = residual.float() + x.float()
        return reference.rms_norm(total, weight.float(), eps).to(x.dtype), total.to(x.dtype)

    functions.add_rms_norm = add_rms_norm


def rounded_rotation(engine: Any, functions: Any) -> None:
    """Round cosines and sines, as vLLM does."""

    def norm_rope(q: Tensor, k: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        *weights, cos, sin, eps = more
        return reference.norm_rope(q, k, *weights, *(x.bfloat16().float() for x in (cos, sin)), eps)

    functions.norm_rope = norm_rope


def round_logits(engine: Any, functions: Any) -> None:
    product = engine.runner.head
    engine.runner.head = lambda hidden, weight: product(hidden, weight).bfloat16()


def update(samples: list[Sample], lr: float) -> Decoder:
    """Return the model after the first update of GRPO with AdamW."""
    model = load(torch.float32)
    hidden, targets = hidden_states(model, samples)
    logp = (hidden @ model.lm_head.weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    right = [f">{s.prompt.columns['answer']}<" in TOKENIZER.decode(s.token_ids) for s in samples]
    A = group_relative(torch.tensor(right).float().view(-1, GROUP))[0].flatten()
    each = A.repeat_interleave(torch.tensor([len(s.token_ids) for s in samples]))  # [M]
    (-(each * logp).mean()).backward()
    torch.optim.AdamW(model.parameters(), lr, weight_decay=0).step()
    return model


def read_prompts(count: int) -> list[Prompt]:
    lines = (SUMS / "held_out.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    encode = TOKENIZER.encode_prompt
    return [Prompt(i, r["prompt"], encode(r["prompt"]), r) for i, r in enumerate(rows)]


if __name__ == "__main__":
    main()
