"""Follow one prompt through a step of train.py, and print every intermediate value.

    python -m examples.walkthrough              # the model in nanogrpo/data/sums/base
    python -m examples.walkthrough runs/base    # the model of `nanogrpo warmup runs/base`

Change the options in CFG, the seed, the step or the reward function, and compare the output. The
program calls the same functions as train.py, in the same order, and prints the intermediate values.
In: a checkpoint with the tokenizer of the built-in task. Out: sections of text, separated by empty
lines. Read next: docs/walkthrough.md, which explains each section.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from nanogrpo.kernels.reference.log_softmax import log_softmax_forward
from nanogrpo.kernels.reference.policy import policy_terms
from nanogrpo.kernels.reference.sample import uniform
from torch import Tensor

from nanogrpo import Config
from nanogrpo.data import prompts as data
from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError
from nanogrpo.extras.data.sources import Sources
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing, schedule
from nanogrpo.grpo.advantages import centered, step_advantages
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.scorer import Scorer
from nanogrpo.run import optim
from nanogrpo.types import PackedBatch, Prompt, Sample

# One prompt with four completions. All options that are not listed here have their defaults.
CFG = Config(
    data=("arithmetic",),
    num_generations=4,
    generation_batch_size=4,
    max_completion_length=48,
    learning_rate=1e-4,
)
STEP = 3  # determines the prompt and the random numbers
BASE = Path(__file__).parents[1] / "nanogrpo/data/sums/base"


def show(title: str, *lines: object) -> None:
    print(title, *lines, sep="\n", end="\n\n")


def numbers(values: Iterable[float], digits: int = 3) -> str:
    return "  ".join(f"{value:.{digits}f}" for value in values)


def main(argv: list[str]) -> None:
    folder = Path(argv[0]) if argv else BASE
    tokenizer, model = Tokenizer(folder), checkpoint.load_model(folder)

    prompt = draw(tokenizer)
    engine, samples = sample(prompt, model, tokenizer)
    explain_token(prompt, samples, model, tokenizer)
    score(samples, tokenizer)
    if not any(s.advantage for s in samples):
        show("every advantage is 0, so nothing can be learned from this group: change STEP")
        return
    batch = pack(samples, tokenizer)
    logp = loss(batch, model, tokenizer)
    update(batch, model, tokenizer)
    look_again(batch, logp, model, tokenizer)
    sync(engine, prompt, model, tokenizer)


# --- 1. draw ---


def draw(tokenizer: Tokenizer) -> Prompt:
    prompts = data.load(CFG, tokenizer, CFG.data, [Sources(CFG)])
    (prompt,) = data.draw(prompts, CFG.prompts_per_step, CFG.seed, STEP)
    named = [f"{tokenizer.decode([id], False)} {id}" for id in prompt.token_ids]
    show(
        "the prompt",
        f"record   {prompt.id} of {len(prompts)}",
        f"text     {prompt.text}",
        f"columns  {prompt.columns}",
        f"template {tokenizer.decode(prompt.token_ids, False)}",
        f"tokens   {' | '.join(named)}",
    )
    return prompt


# --- 2. sample ---


def sample(
    prompt: Prompt, model: Decoder, tokenizer: Tokenizer
) -> tuple[LocalEngine, list[Sample]]:
    length = len(prompt.token_ids) + CFG.max_completion_length
    engine = LocalEngine(model.cfg, max_len=length, slots=CFG.num_generations, device="cpu")
    engine.load(model, version=STEP)
    samples = engine.sample([prompt], CFG.num_generations, params(tokenizer), STEP)
    show("the completions", *(describe(s, tokenizer) for s in samples))
    show(
        "the log-probs of their first four tokens",
        *(f"{s.index}  {numbers(s.logp[:4])}" for s in samples),
    )
    return engine, samples


def params(tokenizer: Tokenizer) -> SamplingParams:
    stops, length = tokenizer.stop_token_ids, CFG.max_completion_length
    return SamplingParams(max_tokens=length, stop_token_ids=stops, seed=CFG.seed)


def describe(s: Sample, tokenizer: Tokenizer) -> str:
    end = "stopped" if s.stopped else "cut off"
    return f"{s.index}  {len(s.token_ids):2} tokens, {end}  {tokenizer.decode(s.token_ids)}"


def explain_token(
    prompt: Prompt, samples: list[Sample], model: Decoder, tokenizer: Tokenizer
) -> None:
    """Sample the second token again, step by step, for completions with the same first token."""
    begin = samples[0].token_ids[:1]
    samples = [s for s in samples if s.token_ids[:1] == begin]
    context = prompt.token_ids + begin
    p = next_token_probs(model, context)  # [V]
    end = p.cumsum(0)  # [V]
    likely = p.topk(3).indices.sort().values.tolist()
    show(
        f"the next token after {tokenizer.decode(context, False)}",
        *(
            f"{tokenizer.decode([i], False):8}  probability {p[i]:.3f}"
            f"  from {end[i] - p[i]:.3f} to {end[i]:.3f}"
            for i in likely
        ),
    )
    # The random number of a token depends on its completion and on the preceding position.
    keys = torch.tensor([stream(CFG.seed, STEP, prompt.id, s.index) for s in samples])
    draws = uniform(keys, torch.full_like(keys, len(context) - 1))  # [G]
    tokens = torch.searchsorted(end.double(), draws, right=True).tolist()
    show(
        "the second token of each completion",
        *(
            f"{s.index}  random number {u:.3f}  by hand {tokenizer.decode([token], False)}"
            f"  by the engine {tokenizer.decode(s.token_ids[1:2], False)}"
            for s, u, token in zip(samples, draws, tokens)
        ),
    )


@torch.no_grad()
def next_token_probs(model: Decoder, ids: list[int]) -> Tensor:
    """Return the probabilities [V] of the token that follows `ids`."""
    last = Sample(Prompt(0, "", ids), 0, [0], [0.0], True, [0])
    (batch,) = packing.pack(schedule.plan([0, 1], [last.facts] * 2, CFG), [last, last], CFG)
    return model.forward_strip(batch, lambda hidden, head: hidden @ head.T)[0].softmax(-1)


# --- 3. score, and compare with the group ---


def score(samples: list[Sample], tokenizer: Tokenizer) -> None:
    for s in samples:
        s.text = tokenizer.decode(s.token_ids)
    Scorer(CFG, torch.device("cpu")).score(samples)
    names = samples[0].rewards
    show(
        "the rewards",
        *(f"{name:16} {numbers([s.rewards[name] or 0.0 for s in samples], 1)}" for name in names),
        f"{'sum':16} {numbers([s.reward or 0.0 for s in samples], 1)}",
    )
    rewards = [s.reward for s in samples]
    group = torch.tensor([rewards], dtype=torch.float64)  # [1, G]
    values, std = step_advantages(rewards, CFG)
    for s, value in zip(samples, values):
        s.advantage = value
    show(
        "the advantages",
        f"mean               {group.mean():.4f}",
        f"reward - mean      {numbers(centered(group)[0], 4)}",
        f"standard deviation {std.item():.4f}",
        f"advantages         {numbers(values, 4)}",
        f"their sum          {abs(sum(values)):.4f}",
    )


# --- 4. pack ---


def pack(samples: list[Sample], tokenizer: Tokenizer) -> PackedBatch:
    update = schedule.plan(range(len(samples)), [s.facts for s in samples], CFG)
    (batch,) = packing.pack(update, samples, CFG)
    assert batch.kv_rows is not None
    assert batch.kv_cu_seqlens is not None
    starts, keys = batch.cu_seqlens.tolist(), batch.kv_cu_seqlens.tolist()
    copies = sum(len(s.prompt.token_ids) + len(s.token_ids) - 1 for s in samples)
    show(
        "the strip",
        f"T {len(batch.tokens)} tokens, {copies} with a copy of the prompt for each completion",
        f"N {len(starts) - 1} sequences",
        f"M {len(batch.targets)} targets",
        f"Tk {len(batch.kv_rows)} key rows",
    )
    lines = []
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        seen = runs(batch.kv_rows[keys[n] : keys[n + 1]].tolist())
        text = tokenizer.decode(batch.tokens[start:end].tolist(), False)
        lines.append(f"{n}  rows {start}-{end - 1}  attends to {seen}  {text}")
    show("the sequences", *lines)
    lines = []
    for i in batch.sample.unique().tolist():
        on = batch.sample == i
        rows, targets = batch.rows[on].tolist(), batch.targets[on].tolist()
        text = tokenizer.decode(targets, False)
        values = f"advantage {batch.advantage[on][0]:.4f}  weight {batch.weight[on][0]:.5f}"
        lines.append(f"{i}  {len(targets):2} targets in rows {runs(rows)}  {values}  {text}")
    show("the targets", *lines)
    return batch


def runs(rows: list[int]) -> str:
    """Return sorted rows as ranges: [8, 30, 31, 32] → "8, 30-32"."""
    starts = [r for r in rows if r - 1 not in rows]
    ends = [r for r in rows if r + 1 not in rows]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends))


# --- 5. loss ---


def loss(batch: PackedBatch, model: Decoder, tokenizer: Tokenizer) -> Tensor:
    """Compute the loss and its gradient step by step, then as the trainer does."""
    with torch.no_grad():
        hidden, head = model.forward_strip(batch, lambda hidden, head: (hidden, head))
        logits = hidden @ head.T  # [M, V]; the trainer never stores all logits
        logp, entropy, _ = log_softmax_forward(logits, batch.targets, CFG.temperature)
    gap = (logp - batch.sampling_logp).abs().max()
    show(
        "the log-probs of the trainer",
        f"hidden states {list(hidden.shape)}, output matrix {list(head.shape)}, logits"
        f" {list(logits.shape)}",
        f"largest difference from the engine's: below 1e-5 is {bool(gap < 1e-5)}",
        f"mean entropy {entropy.mean():.3f}",
    )

    inputs = grpo.loss_inputs(batch)
    l, dl, _, _ = policy_terms(logp, inputs, grpo.clip_of(CFG))
    dlogp = batch.weight * dl
    second = second_tokens(batch)
    show(
        "the loss of the second token of each completion",
        "token      logp  advantage      l  dl/dlogp   weight  dloss/dlogp",
        *(
            f"{tokenizer.decode([int(batch.targets[j])], False):8} {logp[j]:6.3f}"
            f" {batch.advantage[j]:10.4f} {l[j]:6.3f} {dl[j]:9.4f} {batch.weight[j]:8.5f}"
            f" {dlogp[j]:12.5f}"
            for j in second
        ),
    )

    p = logits[second].softmax(-1)  # [completions, V]
    dz = -dlogp[second, None] * p  # dlogp/dz = 1[the target] - p
    dz[torch.arange(len(second)), batch.targets[second]] += dlogp[second]
    p = p[0]  # the same for all completions, because each starts with the prompt and <think>
    shown = p.topk(4).indices.tolist()
    named = "  ".join(f"{tokenizer.decode([i], False):>8}" for i in shown)
    show(
        "the gradient of the loss at the logits after <think>",
        f"token         {named}",
        f"probability   {'  '.join(f'{p[i]:8.3f}' for i in shown)}",
        *(
            f"completion {n} {'  '.join(f'{row[i]:8.5f}' for i in shown)}"
            for n, row in enumerate(dz)
        ),
        f"sum           {'  '.join(f'{dz.sum(0)[i]:8.5f}' for i in shown)}",
    )

    out = model.forward_strip(batch, grpo.objective(batch, CFG))  # the line of train.py
    out.loss.backward()
    each = [batch.advantage[batch.sample == i] for i in batch.sample.unique()]
    parts = [f"{values[0]:.4f}·{len(values)}" for values in each]
    show(
        "the loss",
        f"sum of weight·l        {(batch.weight * l).sum():.4f}",
        f"by the fused head      {out.loss.item():.4f}",
        f"-({' + '.join(parts)}) / {len(batch.targets)}",
    )
    return logp


def second_tokens(batch: PackedBatch) -> Tensor:
    """Return the index in [M] of the second token of each completion."""
    return torch.stack([(batch.sample == i).nonzero()[:2][-1, 0] for i in batch.sample.unique()])


# --- 6. optimizer step ---


def update(batch: PackedBatch, model: Decoder, tokenizer: Tokenizer) -> None:
    optimizer = optim.make_optimizer(model, CFG)
    weight = model.lm_head.weight  # [V, D]
    assert weight.grad is not None
    row = int(batch.targets[1])  # the token that completion 0 wrote after <think>
    before, gradient = weight[row, :3].tolist(), weight.grad[row, :3].clone()
    norm = optim.clip_and_step(model, optimizer, CFG.learning_rate, CFG.max_grad_norm)
    after = weight[row, :3].tolist()
    scale = min(1.0, CFG.max_grad_norm / norm)
    show(
        "the optimizer step",
        f"norm of the gradient  {norm:.3f}, so it is multiplied by {scale:.3f}",
        f"three weights of the output matrix, row {tokenizer.decode([row], False)}",
        f"gradient              {numbers(gradient, 4)}",
        f"before                {numbers(before, 5)}",
        f"after                 {numbers(after, 5)}",
        f"difference            {numbers((a - b for a, b in zip(after, before)), 5)}",
    )


# --- 7. another look at the same samples ---


def look_again(batch: PackedBatch, before: Tensor, model: Decoder, tokenizer: Tokenizer) -> None:
    """Compute the loss of a second update, as --num-iterations 2 does."""
    batch = copy.copy(batch)
    batch.old_logp = before
    with torch.no_grad():
        out = model.forward_strip(batch, grpo.objective(batch, CFG))
    ratio = (out.logp - before).exp()
    clip = out.metrics.get("clip", torch.zeros_like(ratio))  # not every loss type clips
    second = second_tokens(batch)
    show(
        "the second token again, with the new weights",
        "token     probability before  after  ratio  clipped",
        *(
            f"{tokenizer.decode([int(batch.targets[j])], False):8} {before[j].exp():19.3f}"
            f" {out.logp[j].exp():6.3f} {ratio[j]:6.3f}  {'yes' if clip[j] else 'no'}"
            for j in second
        ),
    )
    show(
        "the ratios of a second update",
        f"smallest {ratio.min():.3f}, largest {ratio.max():.3f}",
        f"above {1 + CFG.epsilon} with a positive advantage: {(clip > 0).sum()} of {len(clip)}",
        f"below {1 - CFG.epsilon} with a negative advantage: {(clip < 0).sum()} of {len(clip)}",
        f"loss {out.loss:.4f}",
    )


# --- 8. sync ---


def sync(engine: LocalEngine, prompt: Prompt, model: Decoder, tokenizer: Tokenizer) -> None:
    engine.load(model, version=STEP + 1)
    samples = engine.sample([prompt], CFG.num_generations, params(tokenizer), STEP)
    show(
        f"the same random numbers with the weights of version {engine.version}",
        *(describe(s, tokenizer) for s in samples),
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f"error: {e}")
