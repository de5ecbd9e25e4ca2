"""Samples → strips of tokens under a budget.

In: the samples of a generation. Out: for each optimizer step a list of `PackedBatch` micro-batches (batch.py shows one in full).
No padding anywhere: a strip is as long as its sequences. Read next: model.py (what runs over a strip).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from nanogrpo.batch import PackedBatch, Sample
from nanogrpo.config import Config
from nanogrpo.grpo import is_trained, token_weight


def minibatches(samples: Sequence[Sample], cfg: Config, step: int) -> Iterator[list[Sample]]:
    """The samples of each optimizer step: `num_iterations` passes over the generation, each in `steps_per_generation` parts.

    Parts hold whole groups, so that the G completions of a prompt can share its tokens; which groups go together is a pure
    function of (seed, step, pass).
    """
    G = cfg.num_generations
    groups = [list(samples[i : i + G]) for i in range(0, len(samples), G)]
    part = len(groups) // cfg.steps_per_generation
    for iteration in range(cfg.num_iterations):
        order = list(range(len(groups)))
        if cfg.steps_per_generation > 1:
            random.Random(f"{cfg.seed},{step},{iteration}").shuffle(order)
        for i in range(0, len(order), part):
            yield [sample for g in order[i : i + part] for sample in groups[g]]


def trained_tokens(samples: Sequence[Sample], cfg: Config) -> int:
    """How many completion tokens of these samples carry loss: with all ranks' counts added up, the step's normaliser."""
    return sum(len(s.token_ids) for s in samples if is_trained(s, cfg))


def strips(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of sequences, put together so that no strip exceeds `budget` tokens (a sequence longer than it gets its own).

    First fit, longest first: within 22 % of the fewest strips possible (Johnson 1973), and in practice within a few.
    Indices keep their order inside a strip.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return [sorted(b) for b in bins]


def pack(samples: Sequence[Sample], cfg: Config, n_samples: int = 1, n_tokens: int = 1) -> list[PackedBatch]:
    """Micro-batches of the samples that are trained. `n_samples`, `n_tokens`: of the whole optimizer step (token_weight).

    `batch.sample` indexes the list that was given. Without trained samples the list is empty.
    """
    chosen = [i for i, s in enumerate(samples) if is_trained(s, cfg) and s.token_ids]
    lengths = [len(samples[i].prompt.token_ids) + len(samples[i].token_ids) for i in chosen]
    return [_strip([chosen[j] for j in strip], samples, cfg, n_samples, n_tokens) for strip in strips(lengths, cfg.token_budget)]


def _strip(chosen: list[int], samples: Sequence[Sample], cfg: Config, n_samples: int, n_tokens: int) -> PackedBatch:
    tokens: list[int] = []
    positions: list[int] = []
    starts, rows, targets = [0], [], []
    for i in chosen:
        prompt, completion = samples[i].prompt.token_ids, samples[i].token_ids
        tokens += prompt + completion
        positions += range(len(prompt) + len(completion))
        first = starts[-1] + len(prompt) - 1  # the last prompt token predicts the first completion token
        rows += range(first, first + len(completion))
        targets += completion
        starts.append(len(tokens))

    counts = torch.tensor([len(samples[i].token_ids) for i in chosen])  # [N]

    def per_token(values: list, dtype=torch.float32) -> torch.Tensor:
        """One value a sample → one a completion token, [M]."""
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    def joined(name: str) -> torch.Tensor | None:
        """A per-token vector of the samples, [M], or None where they have none."""
        parts = [getattr(samples[i], name) for i in chosen]
        return None if parts[0] is None else torch.cat([torch.as_tensor(p, dtype=torch.float32) for p in parts])

    return PackedBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_len=max(b - a for a, b in itertools.pairwise(starts)),
        rows=torch.tensor(rows),
        targets=torch.tensor(targets),
        sample=per_token(chosen, torch.int64),
        advantage=per_token([samples[i].advantage for i in chosen]),
        weight=per_token([token_weight(len(samples[i].token_ids), n_samples, n_tokens, cfg) for i in chosen]),
        sampling_logp=joined("logp"),
        old_logp=joined("old_logp"),
        ref_logp=joined("ref_logp"),
    )
