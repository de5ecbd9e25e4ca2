"""Turn samples into strips of tokens: decide which rank trains on which samples in which
micro-batches, and build the tensors.

In: the samples of a generation. Of the samples of other ranks, only the sizes are needed. Out: this
rank's micro-batches (`PackedBatch`) of each optimizer step. The steps are:

    generation ─ schedule ─► updates      one per optimizer step, made of complete groups
    update ─ plan ─► strips               one per rank and micro-batch, within the token budget
    strip ─ pack ─► PackedBatch           nothing is padded

A strip consists of pieces. A piece is a set of completions of one prompt, which share its tokens.
In this example, the prompt pqr has the completions ab, c and def, and the prompt xy has the
completion g. The last token of each completion is predicted, but is not an input:

    tokens      p q r     │ a       │ d e       │ x y       T = 8 instead of 14
    attends to  p q r     │ p q r a │ p q r d e │ x y
    predicts    · · a,c,d │ b       │ e f       │ · g       M = 7

Completions whose advantage is 0 have no gradient, unless the loss has a term without an advantage
(`has_gradient` in loss.py). Most groups of an easy or a hard data set are like that. They count in
the normalizer, but no strip contains them, so they cost nothing.

`schedule` is a pure function of the sizes, so all ranks agree on it without communication. The
gradient does not depend on the schedule. Read next: model/decoder.py (which runs over a strip),
model/attention.py (how a completion attends to its prompt).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.grpo.loss import has_gradient, is_trained, token_weight
from nanogrpo.types import PackedBatch, Sample

NO_ROWS = range(0)
KEY_ROWS = 4  # maximum number of key rows of a strip per token of the budget (see Piece.room)


class Size(NamedTuple):
    """The size of a sample, which every rank knows.

    Example: Size(prompt=7, prompt_tokens=11, completion_tokens=22, trained_tokens=22)
    """

    prompt: int  # the prompt's id: completions of one prompt can share its tokens
    prompt_tokens: int
    completion_tokens: int  # up to the last trained one; 0: nothing is trained or computed
    trained_tokens: int  # excluding tool answers, which are only inputs
    has_gradient: bool = True  # False: it counts in the normalizer, but need not be computed


class Piece(NamedTuple):
    """Completions of one prompt in one strip."""

    samples: list[int]  # as indices into the generation
    # number of input tokens: the prompt once, and each completion without its last token
    tokens: int
    # number of key rows that attention reads (Tk of PackedBatch): the prompt's once per completion
    key_rows: int
    cost: float  # number of tokens, plus the query-key pairs converted to tokens

    @property
    def room(self) -> int:
        """The part of the token budget that the piece uses.

        A key row takes a few percent of the memory of a token (run/memory.py), but there can be
        many: 64 completions of 100 tokens for a prompt of 1,000 tokens need 7,400 tokens and 71,400
        key rows. So the number of tokens is limited to the budget, and the number of key rows to
        KEY_ROWS times the budget.
        """
        return max(self.tokens, math.ceil(self.key_rows / KEY_ROWS))


Strip = list[Piece]


@dataclass
class Update:
    """One optimizer step: its samples over all ranks, and their strips."""

    samples: list[int]  # as indices into the generation
    n_tokens: int  # number of trained tokens over all ranks and micro-batches: the normalizer
    strips: list[list[Strip]]  # [world][micro-batch]
    measured: int = 0  # the first so many micro-batches of each rank are only for the metrics


def sizes(samples: Sequence[Sample], cfg: Config) -> list[Size]:
    """Return the sizes of the samples; a masked completion has size 0."""
    out = []
    for s in samples:
        trained: Sequence[int] = s.model_token_indices if is_trained(s, cfg) else []
        end = trained[-1] + 1 if trained else 0
        lengths = len(s.prompt.token_ids), end, len(trained)
        out.append(Size(s.prompt.id, *lengths, has_gradient(s, cfg)))
    return out


def skipped(sizes: Sequence[Size]) -> float:
    """Return the share of the trained tokens that have no gradient and are left out."""
    total = sum(size.trained_tokens for size in sizes)
    return sum(size.trained_tokens for size in sizes if not size.has_gradient) / max(total, 1)


# --- which rank computes what ---


def schedule(
    sizes: Sequence[Size], cfg: Config, step: int, world: int = 1, pair_cost: float = 0.0
) -> list[Update]:
    """Split a generation into `steps_per_generation` updates of complete groups.

    This is a pure function of (sizes, seed, step). pair_cost: see ModelConfig.pair_cost.
    """
    groups = [range(i, i + cfg.num_generations) for i in range(0, len(sizes), cfg.num_generations)]
    if cfg.steps_per_generation > 1:
        random.Random(f"{cfg.seed},{step}").shuffle(groups)
    each = len(groups) // cfg.steps_per_generation
    return [
        plan(list(itertools.chain(*groups[i : i + each])), sizes, cfg, world, pair_cost)
        for i in range(0, len(groups), each)
    ]


def one_update(samples: Sequence[Sample], cfg: Config) -> Update:
    """Plan a single optimizer step of one process with all samples."""
    return plan(list(range(len(samples))), sizes(samples, cfg), cfg)


def wanted(updates: Sequence[Update], world: int) -> list[set[int]]:
    """Return the indices of the samples that each rank computes."""
    return [
        {i for u in updates for strip in u.strips[rank] for piece in strip for i in piece.samples}
        for rank in range(world)
    ]


def plan(
    samples: list[int], sizes: Sequence[Size], cfg: Config, world: int = 1, pair_cost: float = 0.0
) -> Update:
    """Divide the samples of one update into strips.

    Samples without a gradient are left out, or with --measure-zero-advantages put into strips of
    their own, which come first. If no sample has a gradient, the smallest one is trained on anyway:
    its gradient of 0 lets AdamW take its step, as it would if nothing were left out.
    """
    n_tokens = sum(sizes[i].trained_tokens for i in samples)
    computed = [i for i in samples if sizes[i].completion_tokens]
    trained = [i for i in computed if sizes[i].has_gradient]
    if computed and not trained:
        trained = [min(computed, key=lambda i: sizes[i].prompt_tokens + sizes[i].completion_tokens)]
    rest = set(computed).difference(trained) if cfg.measure_zero_advantages else ()
    measured = _strips(sorted(rest), sizes, cfg, world, pair_cost)
    strips = _strips(trained, sizes, cfg, world, pair_cost)
    both = [first + second for first, second in zip(measured, strips)]
    return Update(samples, n_tokens, both, len(measured[0]))


def _strips(
    samples: list[int], sizes: Sequence[Size], cfg: Config, world: int, pair_cost: float
) -> list[list[Strip]]:
    """Divide samples into strips [world][micro-batch].

    Strips stay within the token budget and cost about the same. All ranks have the same number of
    strips. It is zero if there are no samples, and some strips are empty if there is too little
    work for all ranks. A group is split if that makes the step cheaper: its prompt is then computed
    twice, but the load is more even.
    """
    groups: dict[int, list[int]] = {}
    for i in samples:
        groups.setdefault(sizes[i].prompt, []).append(i)
    best: list[Strip] = []
    least = math.inf
    most = max(map(len, groups.values()), default=0) if cfg.share_prompts else min(len(groups), 1)
    while most:  # the maximum number of completions in a piece
        pieces = [
            _piece(group[j : j + most], sizes, pair_cost)
            for group in groups.values()
            for j in range(0, len(group), most)
        ]
        # Only a single completion may exceed the budget, because nothing can split it.
        if all(p.room <= cfg.strip_tokens or len(p.samples) == 1 for p in pieces):
            strips, cost = _spread(pieces, len(sizes), cfg.strip_tokens, world)
            if cost < least:
                best, least = strips, cost
        most = math.ceil(most / 2) if most > 1 else 0
    batches = [_assign(best[i : i + world], sizes) for i in range(0, len(best), world)]
    return [[sorted(batch[rank]) for batch in batches] for rank in range(world)]


def _piece(samples: list[int], sizes: Sequence[Size], pair_cost: float) -> Piece:
    p = sizes[samples[0]].prompt_tokens
    ends = [sizes[i].completion_tokens - 1 for i in samples]  # the last token predicts nothing
    tokens = p + sum(ends)
    key_rows = tokens if len(samples) == 1 else p + sum(p + n for n in ends if n)
    pairs = p * (p + 1) / 2 + sum(n * p + n * (n + 1) / 2 for n in ends)
    return Piece(samples, tokens, key_rows, tokens + pair_cost * pairs)


def _home(sample: int, n_samples: int, world: int) -> int:
    """Return the rank that drew a sample: each rank samples a contiguous part of the generation."""
    return sample * world // n_samples


def _spread(
    pieces: list[Piece], n_samples: int, budget: int, world: int
) -> tuple[list[Strip], float]:
    """Distribute the pieces over as few strips as the budget allows, but a multiple of `world`.

    Return the strips, most expensive first, and their total cost. Each group of `world` consecutive
    strips is one micro-batch, with one strip per rank. Ranks wait for each other, so a micro-batch
    costs as much as its first strip. A piece that exceeds the budget gets a strip of its own.

    Longest processing time first: each piece goes to the cheapest strip with room for it. If the
    budget does not limit the choice, the cost is at most 4/3 of the optimum (Graham 1969). Among
    equal pieces the ranks take turns, so each strip tends to get the samples of one rank.
    """

    def order(piece: Piece) -> tuple:
        first = piece.samples[0]
        turn = first - _home(first, n_samples, world) * n_samples // world
        return -piece.cost, turn, piece.samples

    pieces = sorted(pieces, key=order)
    needed = min(sum(p.room for p in pieces) / budget, len(pieces))  # strips
    count = world * math.ceil(needed / world)
    while True:
        strips: list[Strip] = [[] for _ in range(count)]
        costs, left = [0.0] * count, [budget] * count
        for piece in pieces:
            fits = [b for b in range(count) if piece.room <= left[b] or not strips[b]]
            if not fits:
                break
            b = min(fits, key=costs.__getitem__)
            strips[b].append(piece)
            costs[b] += piece.cost
            left[b] -= piece.room
        else:
            by_cost = sorted(range(count), key=lambda b: -costs[b])
            return [strips[b] for b in by_cost], sum(costs[b] for b in by_cost[::world])
        count += world


def _assign(strips: list[Strip], sizes: Sequence[Size]) -> list[Strip]:
    """Return the strips of a micro-batch in the order of the ranks that compute them.

    Every order takes the same time to compute, so we choose one that sends few tokens between
    ranks. For up to six ranks it is the best order, for more ranks a greedy approximation.
    """
    world = len(strips)
    kept = [[0] * world for _ in strips]  # [strip][rank]: number of tokens that need not be sent
    for strip, row in zip(strips, kept):
        for i in itertools.chain(*(piece.samples for piece in strip)):
            row[_home(i, len(sizes), world)] += sizes[i].completion_tokens
    if world <= 6:
        orders = itertools.permutations(range(world))
        best = max(orders, key=lambda order: sum(kept[strip][r] for r, strip in enumerate(order)))
        return [strips[b] for b in best]
    pairs = itertools.product(range(world), repeat=2)
    strip_of: dict[int, Strip] = {}
    free = set(range(world))  # strips
    for b, rank in sorted(pairs, key=lambda pair: -kept[pair[0]][pair[1]]):
        if b in free and rank not in strip_of:
            strip_of[rank] = strips[b]
            free.remove(b)
    return [strip_of[rank] for rank in range(world)]


# --- the tensors ---


class Strips(Sequence[PackedBatch]):
    """A rank's micro-batches of an optimizer step. Each one is built when it is first used.

    A GPU computes asynchronously, so the host builds the next strip while the GPU trains on one.
    """

    def __init__(self, count: int, build: Callable[[int], PackedBatch]):
        self.indices, self.build = range(count), functools.cache(build)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.build(self.indices[index])


def pack(
    update: Update,
    samples: Mapping[int, Sample] | Sequence[Sample],
    cfg: Config,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> Strips:
    """Return a rank's micro-batches of an optimizer step.

    samples: at least the samples that the rank computes, by their index in the generation.
    """
    strips = update.strips[rank]

    def build(k: int) -> PackedBatch:
        return _pack(strips[k], samples, update, cfg, k < update.measured).to(device)

    return Strips(len(strips), build)


def _pack(
    strip: Strip,
    samples: Mapping[int, Sample] | Sequence[Sample],
    update: Update,
    cfg: Config,
    measured_only: bool,
) -> PackedBatch:
    tokens: list[int] = []  # [T]
    # ranges that together have the length T and Tk
    positions: list[range] = []
    kv_rows: list[range] = []
    starts, kv_starts = [0], [0]  # [N+1]

    def sequence(ids: list[int], position: int, sees: range) -> range:
        """Append a sequence that attends to the rows `sees` and to itself; return its own rows."""
        own = range(len(tokens), len(tokens) + len(ids))
        tokens.extend(ids)
        positions.append(range(position, position + len(ids)))
        kv_rows.extend((sees, own))
        starts.append(len(tokens))
        kv_starts.append(kv_starts[-1] + len(sees) + len(own))
        return own

    rows, targets, logp = [], [], []  # arrays that together have the length M
    sample, counts, advantage, weight = [], [], [], []  # one entry per completion
    images: list[tuple[int, Any]] = []
    for piece in strip:
        prompt = samples[piece.samples[0]].prompt
        if prompt.images is not None:  # a piece begins with its prompt
            images.append((len(tokens), prompt.images))
        many = len(piece.samples) > 1
        shared = sequence(prompt.token_ids, 0, NO_ROWS) if many else NO_ROWS
        for i in piece.samples:
            s, trained = samples[i], np.asarray(samples[i].model_token_indices)
            ids = s.token_ids[: trained[-1]]  # the inputs: all tokens before the last target
            if many:
                own = sequence(ids, len(shared), shared) if ids else NO_ROWS
                last, first = shared[-1], own.start
            else:
                own = sequence(prompt.token_ids + ids, 0, NO_ROWS)
                last, first = own[len(prompt.token_ids) - 1], own.start + len(prompt.token_ids)
            # The row of the prompt's last token predicts token 0 of every completion.
            rows.append(np.where(trained == 0, last, first + trained - 1))
            targets.append(np.asarray(s.token_ids)[trained])
            logp.append(np.asarray(s.logp)[trained])
            sample.append(i)
            counts.append(len(trained))
            advantage.append(s.advantage)
            weight.append(token_weight(len(trained), len(update.samples), update.n_tokens, cfg))
    if not tokens:  # nothing to compute; with one token, this rank can take part in the collectives
        sequence([0], 0, NO_ROWS)

    def longest(bounds: list[int]) -> int:
        return max(end - start for start, end in itertools.pairwise(bounds))

    def spans(ranges: list[range]) -> Tensor:
        return joined([np.arange(r.start, r.stop) for r in ranges])

    def joined(arrays: list[np.ndarray], dtype: Any = np.int64) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype))

    def each_token(values: list, dtype: Any) -> Tensor:  # [M]
        return torch.from_numpy(np.array(values, dtype).repeat(np.array(counts, np.int64)))

    sharing = kv_starts[-1] > len(tokens)
    return PackedBatch(
        tokens=torch.tensor(tokens),
        positions=spans(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_len=longest(starts),
        kv_rows=spans(kv_rows) if sharing else None,
        kv_cu_seqlens=torch.tensor(kv_starts, dtype=torch.int32) if sharing else None,
        kv_max_len=longest(kv_starts) if sharing else 0,
        rows=joined(rows),
        targets=joined(targets),
        sample=each_token(sample, np.int64),
        advantage=each_token(advantage, np.float32),
        weight=each_token(weight, np.float32),
        sampling_logp=joined(logp, np.float32),
        measured_only=measured_only,
        images=images,
    )
