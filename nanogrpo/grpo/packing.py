"""Samples → strips of tokens: which rank trains what, in how many micro-batches, and the tensors of
each.

In: the samples of a generation; of other ranks' samples only their sizes. Out: for each optimizer
step, this rank's micro-batches (`PackedBatch`; batch.py shows one in full). Nothing is padded, and
the completions of a prompt share one copy of its tokens where they lie in one strip:

    a group of three, prompt p q r:     p q r | a b | c | d e f        T = 9 instead of 15
    sees                                p q r | p q r a b | p q r c | p q r d e f

`schedule` is a pure function of the sizes, so that all ranks agree on it without a word. The
gradient does not depend on it. Read next: model.py (what runs over a strip), attention.py (how a
completion sees its prompt).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanogrpo.config import Config
from nanogrpo.grpo.loss import is_trained, token_weight
from nanogrpo.types import PackedBatch, Sample

Piece = list[int]  # samples of one prompt that lie in one strip, by their index in the generation
Strip = list[Piece]
KEY_ROWS = 4  # rows of keys and values that a strip may gather, in token budgets: see `_room`


class Size(NamedTuple):
    """What every rank must know of a sample. Example: Size(prompt=7, prompt_tokens=11,
    completion_tokens=22)
    """

    prompt: int  # its id: completions of one prompt can share its tokens
    prompt_tokens: int
    # up to the last that is trained; 0 where the completion is masked, and then it is not computed
    completion_tokens: int
    told_tokens: int = 0  # of these, a tool's answers: computed, and not trained


def sizes(samples: Sequence[Sample], cfg: Config) -> list[Size]:
    return [
        _size(s) if is_trained(s, cfg) else Size(s.prompt.id, len(s.prompt.token_ids), 0)
        for s in samples
    ]


def _size(s: Sample) -> Size:
    written = s.model_token_indices
    last = written[-1] + 1 if written else 0
    return Size(s.prompt.id, len(s.prompt.token_ids), last, last - len(written))


def _trained(sizes: Sequence[Size], chosen: Sequence[int]) -> int:
    return sum(sizes[i].completion_tokens - sizes[i].told_tokens for i in chosen)


# --- who computes what ----------------------------------------------------------------------------


@dataclass
class Update:
    """One optimizer step: its samples over all ranks, and who computes them in how many
    micro-batches.
    """

    samples: list[int]  # by their index in the generation
    n_tokens: int  # trained, over all ranks and micro-batches: the normaliser
    strips: list[list[Strip]]  # [world][micro-batch]


def schedule(
    sizes: Sequence[Size], cfg: Config, step: int, world: int = 1, pair_cost: float = 0.0
) -> list[Update]:
    """The optimizer steps of one pass over a generation: `steps_per_generation` parts of whole
    groups.

    A pure function of (sizes, seed, step): all ranks agree on it without a word. pair_cost:
    model.ModelConfig.pair_cost.
    """
    groups = [
        list(range(i, i + cfg.num_generations)) for i in range(0, len(sizes), cfg.num_generations)
    ]
    if cfg.steps_per_generation > 1:
        random.Random(f"{cfg.seed},{step}").shuffle(groups)
    part = len(groups) // cfg.steps_per_generation
    parts = [
        [sample for group in groups[i : i + part] for sample in group]
        for i in range(0, len(groups), part)
    ]
    return [Update(p, _trained(sizes, p), plan(p, sizes, cfg, world, pair_cost)) for p in parts]


def one_update(samples: Sequence[Sample], cfg: Config) -> Update:
    """All samples in one optimizer step of one process."""
    known, everything = sizes(samples, cfg), list(range(len(samples)))
    return Update(everything, _trained(known, everything), plan(everything, known, cfg))


def wanted(updates: Sequence[Update], world: int) -> list[set[int]]:
    """The samples that each rank computes."""
    return [
        {i for u in updates for strip in u.strips[rank] for piece in strip for i in piece}
        for rank in range(world)
    ]


def plan(
    chosen: Sequence[int],
    sizes: Sequence[Size],
    cfg: Config,
    world: int = 1,
    pair_cost: float = 0.0,
) -> list[list[Strip]]:
    """Strips for each rank, [world][micro-batches]: within the token budget, as even as can be, the
    same number for every rank.

    Groups are split where that makes the step cheaper: a split group computes its prompt twice, but
    evens out the load. A rank with nothing to do gets an empty strip; if no sample is trained, no
    rank has a strip. Which rank takes which strip of a micro-batch is free, so each keeps as much
    as it can of what it drew: a run of the generation, whose sizes these are.
    """
    groups: dict[int, Piece] = {}
    for i in chosen:
        if sizes[i].completion_tokens:
            groups.setdefault(sizes[i].prompt, []).append(i)
    best, best_cost = [], float("inf")
    largest = max(map(len, groups.values()), default=0)
    # completions in a piece
    for most in _halvings(largest) if cfg.share_prompts else [1] * (largest > 0):
        pieces = [
            group[j : j + most] for group in groups.values() for j in range(0, len(group), most)
        ]
        if any(len(p) > 1 and _room(p, sizes) > cfg.token_budget for p in pieces):
            # the budget is the memory: only a single completion may exceed it, which nothing can
            # split
            continue
        bins, costs = _spread(pieces, sizes, cfg.token_budget, world, pair_cost)
        # Ranks wait for each other at every micro-batch: a step takes as long as the longest of
        # each.
        cost = sum(max(costs[slot : slot + world]) for slot in range(0, len(costs), world))
        if cost < best_cost:
            best, best_cost = bins, cost
    slots = [
        _at_home(best[slot : slot + world], sizes, world) for slot in range(0, len(best), world)
    ]
    return [[sorted(slot[rank]) for slot in slots] for rank in range(world)]


def home(sample: int, n_samples: int, world: int) -> int:
    """The rank that drew a sample of a generation."""
    return sample * world // n_samples


def _at_home(slot: list[Strip], sizes: Sequence[Size], world: int) -> list[Strip]:
    """The strips of one micro-batch, rank by rank, so that few tokens change rank: the fewest up to
    six ranks, then greedily.
    """
    kept = [[0] * world for _ in slot]  # [strip][rank]: tokens that need not be sent
    for strip, row in zip(slot, kept):
        for i in itertools.chain(*strip):
            row[home(i, len(sizes), world)] += sizes[i].completion_tokens
    if world <= 6:
        orders = itertools.permutations(range(world))
        order = max(
            orders, key=lambda order: sum(kept[strip][rank] for rank, strip in enumerate(order))
        )
        return [slot[strip] for strip in order]
    strip_of: dict[int, Strip] = {}
    free = set(range(world))  # strips
    for strip, rank in sorted(
        itertools.product(range(world), repeat=2), key=lambda pair: -kept[pair[0]][pair[1]]
    ):
        if strip in free and rank not in strip_of:
            strip_of[rank] = slot[strip]
            free.remove(strip)
    return [strip_of[rank] for rank in range(world)]


def _halvings(n: int) -> list[int]:
    """8 → [8, 4, 2, 1], 5 → [5, 3, 2, 1], 0 → []."""
    return [n, *_halvings(math.ceil(n / 2))] if n > 1 else [1] * n


def _spread(
    pieces: list[Piece], sizes: Sequence[Size], budget: int, world: int, pair_cost: float
) -> tuple[list[Strip], list[float]]:
    """Few strips, a multiple of `world`, that hold all pieces, costliest strips first; a piece over
    the budget has its own.

    Longest processing time first: each piece goes to the cheapest strip with room. At most 4/3 of
    the optimum where the budget does not bind (Graham 1969). Where costs are equal the ranks'
    pieces take turns, so that each strip is made of one rank's.
    """
    turn = {p[0]: p[0] - home(p[0], len(sizes), world) * len(sizes) // world for p in pieces}
    weighed = [(_cost(p, sizes, pair_cost), _room(p, sizes), p) for p in pieces]
    weighed.sort(key=lambda x: (-x[0], turn[x[2][0]], x[2]))
    by_room, by_pieces = sum(room for _, room, _ in weighed) / (budget * world), len(pieces) / world
    count = world * math.ceil(min(by_room, by_pieces))
    while True:
        bins: list[Strip] = [[] for _ in range(count)]
        costs, left = [0.0] * count, [budget] * count
        for cost, room, piece in weighed:
            fits = [b for b in range(count) if room <= left[b] or not bins[b]]
            if not fits:
                break
            b = min(fits, key=lambda b: costs[b])
            bins[b].append(piece)
            costs[b] += cost
            left[b] -= room
        else:
            order = sorted(range(count), key=lambda b: -costs[b])
            return [bins[b] for b in order], [costs[b] for b in order]
        count += world


def _tokens(piece: Piece, sizes: Sequence[Size]) -> int:
    """Tokens a piece computes: its prompt once, and of each completion all but the last, which
    predicts nothing.
    """
    return sizes[piece[0]].prompt_tokens + sum(sizes[i].completion_tokens - 1 for i in piece)


def key_rows(piece: Piece, sizes: Sequence[Size]) -> int:
    """Rows of keys and values that attention reads for a piece, Tk of batch.py: each completion
    gathers its prompt's again.
    """
    if len(piece) == 1:
        return _tokens(piece, sizes)
    p = sizes[piece[0]].prompt_tokens
    return p + sum(
        p + sizes[i].completion_tokens - 1 for i in piece if sizes[i].completion_tokens > 1
    )


def _room(piece: Piece, sizes: Sequence[Size]) -> int:
    """What a piece takes of the token budget: its tokens, or a quarter of its key rows where that
    is more.

    So a strip has at most `token_budget` tokens and KEY_ROWS times as many key rows. A row costs a
    few percent of a token (memory.py), but a long prompt has one for each of its tokens and
    completions: 64 completions of 100 tokens on a prompt of 1,000 are 7,400 tokens and 71,400 rows.
    """
    return max(_tokens(piece, sizes), -(-key_rows(piece, sizes) // KEY_ROWS))


def _cost(piece: Piece, sizes: Sequence[Size], pair_cost: float) -> float:
    """Tokens, and the query-key pairs between them in units of tokens."""
    p = sizes[piece[0]].prompt_tokens
    ends = [sizes[i].completion_tokens - 1 for i in piece]
    pairs = p * (p + 1) / 2 + sum(n * p + n * (n + 1) / 2 for n in ends)
    return p + sum(ends) + pair_cost * pairs


# --- the tensors ----------------------------------------------------------------------------------


def pack(
    update: Update, samples: Mapping[int, Sample] | Sequence[Sample], cfg: Config, rank: int = 0
) -> list[PackedBatch]:
    """A rank's micro-batches of an optimizer step. `samples`: at least those that the rank
    computes, by index.
    """
    return [
        _pack(strip, samples, len(update.samples), update.n_tokens, cfg)
        for strip in update.strips[rank]
    ]


def _pack(
    strip: Strip,
    samples: Mapping[int, Sample] | Sequence[Sample],
    n_samples: int,
    n_tokens: int,
    cfg: Config,
) -> PackedBatch:
    tokens, positions, rows, kv_rows = [], [], [], []  # [T], [T], [M], [Tk]
    starts, kv_starts = [0], [0]  # [N+1]

    def sequence(ids: list[int], position: int, sees: Sequence[int]) -> list[int]:
        """Lays down a sequence that sees the rows `sees` and then itself; returns its rows."""
        own = list(range(len(tokens), len(tokens) + len(ids)))
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))
        kv_rows.extend([*sees, *own])
        starts.append(len(tokens))
        kv_starts.append(len(kv_rows))
        return own

    members = [i for piece in strip for i in piece]
    # the completion tokens that are trained on
    written = {i: samples[i].model_token_indices for i in members}
    for piece in strip:
        prompt = samples[piece[0]].prompt.token_ids
        if any(samples[i].prompt.token_ids != prompt for i in piece):
            raise ValueError(
                f"different prompts share the id {samples[piece[0]].prompt.id}: ids must tell prompts apart"
            )
        shared = sequence(prompt, 0, []) if len(piece) > 1 else None
        for i in piece:
            # the last token's hidden state would predict what nobody sampled
            ids = samples[i].token_ids[: written[i][-1]]
            if shared is None:
                predicts = sequence(prompt + ids, 0, [])[len(prompt) - 1 :]
            else:  # the last prompt token predicts the first token of every completion
                predicts = [shared[-1], *(sequence(ids, len(prompt), shared) if ids else [])]
            rows += [predicts[j] for j in written[i]]
    # nothing to do, but the other ranks wait in the same collectives: one token, no row, no
    # gradient
    if not tokens:
        sequence([0], 0, [])

    counts = torch.tensor([len(written[i]) for i in members], dtype=torch.int64)  # [samples]

    def per_token(values: list, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One value a sample → one a completion token, [M]."""
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    def longest(bounds: list[int]) -> int:
        return max(b - a for a, b in zip(bounds, bounds[1:]))  # noqa: RUF007

    sharing = len(kv_rows) > len(tokens)
    return PackedBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_len=longest(starts),
        kv_rows=torch.tensor(kv_rows) if sharing else None,
        kv_cu_seqlens=torch.tensor(kv_starts, dtype=torch.int32) if sharing else None,
        kv_max_len=longest(kv_starts) if sharing else 0,
        rows=torch.tensor(rows, dtype=torch.int64),
        targets=torch.tensor(
            [samples[i].token_ids[j] for i in members for j in written[i]], dtype=torch.int64
        ),
        sample=per_token(members, torch.int64),
        advantage=per_token([samples[i].advantage for i in members]),
        weight=per_token(
            [token_weight(len(written[i]), n_samples, n_tokens, cfg) for i in members]
        ),
        sampling_logp=torch.tensor(
            [samples[i].logp[j] for i in members for j in written[i]], dtype=torch.float32
        ),
    )
