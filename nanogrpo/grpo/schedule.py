"""Decide which rank trains on which samples, in which micro-batches.

In: the `Facts` about all samples of a generation, such as lengths and advantages. Out: an `Update`
for each optimizer step, with a strip for each rank and micro-batch:

    A generation consists of updates: one per optimizer step, made of complete groups.
    An update consists of strips: one per rank and micro-batch, within the token budget.
    A strip consists of pieces: completions of one prompt, which share the prompt's tokens.

The schedule is a pure function of the facts, so all ranks compute the same schedule without
communication. The schedule affects only the speed, and not the gradient, so you can skip this file
if you use one GPU. Completions whose advantage is 0 have no gradient, unless the loss has a term
without the advantage (`has_gradient` in loss.py). If a data set is very easy or very hard, the
advantages of most groups are 0. Completions without a gradient are in no strip, but the normalizer
counts their tokens. Read next: packing.py (how a strip becomes tensors).
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanogrpo.config import Config
from nanogrpo.grpo.loss import has_gradient, is_trained
from nanogrpo.types import Facts

KEY_ROWS = 4  # maximum number of key rows in a strip, per token of the budget (see Piece.size)


class Piece(NamedTuple):
    """The completions of one prompt that are in the same strip."""

    samples: list[int]  # as indices into the generation
    # number of input tokens: the prompt once, and each completion without its last token
    tokens: int
    # number of key rows that attention reads (Tk): the prompt counts once per completion
    key_rows: int
    cost: float  # number of tokens + pair_cost · number of query-key pairs

    @property
    def size(self) -> int:
        """How much of the token budget the piece uses.

        A key row takes only a few percent of the memory that a token takes, but a piece can have
        many key rows. For example, 64 completions of 100 tokens for a prompt of 1,000 tokens have
        about 7,400 tokens and 71,400 key rows. So the number of tokens is limited to the budget,
        and the number of key rows to KEY_ROWS times the budget.
        """
        return max(self.tokens, math.ceil(self.key_rows / KEY_ROWS))


Strip = list[Piece]


@dataclass
class Update:
    """One optimizer step: its samples over all ranks, and their strips."""

    samples: Sequence[int]  # as indices into the generation
    n_tokens: int  # number of trained tokens over all ranks and micro-batches: the normalizer
    strips: list[list[Strip]]  # [ranks][micro-batch]


def skipped(facts: Sequence[Facts], cfg: Config) -> float:
    """Return the fraction of trained tokens whose completions have no gradient and are left out."""
    trained = [f for f in facts if is_trained(f, cfg)]
    out = sum(f.length for f in trained if not has_gradient(f, cfg))
    return out / max(sum(f.length for f in trained), 1)


def schedule(
    facts: Sequence[Facts],
    cfg: Config,
    step: int,
    ranks: int = 1,
    pair_cost: float = 0.0,
) -> list[Update]:
    """Split a generation into `steps_per_generation` updates of complete groups.

    The result is a pure function of the arguments. `facts` describes the samples of all ranks.
    For `pair_cost`, see ModelConfig.
    """
    groups = [range(i, i + cfg.num_generations) for i in range(0, len(facts), cfg.num_generations)]
    if cfg.steps_per_generation > 1:
        random.Random(f"{cfg.seed},{step}").shuffle(groups)
    each = len(groups) // cfg.steps_per_generation
    updates = [[*itertools.chain(*groups[i : i + each])] for i in range(0, len(groups), each)]
    return [plan(update, facts, cfg, ranks, pair_cost) for update in updates]


def wanted(updates: Sequence[Update], ranks: int) -> list[set[int]]:
    """Return the indices of the samples that each rank computes."""
    return [
        {i for u in updates for strip in u.strips[rank] for piece in strip for i in piece.samples}
        for rank in range(ranks)
    ]


def plan(
    samples: Sequence[int],
    facts: Sequence[Facts],
    cfg: Config,
    ranks: int = 1,
    pair_cost: float = 0.0,
) -> Update:
    """Divide the samples of one update into strips [ranks][micro-batch].

    Samples without a gradient are left out. If no sample has a gradient, the smallest sample is
    kept. If all samples are masked, each rank gets an empty strip. In both cases, the gradient is
    0, and AdamW takes the same step as with all samples.

    Strips stay within the token budget and have about the same cost. All ranks have the same number
    of strips, at least one. If there is too little work for all ranks, some strips are empty. A
    group is split into several pieces if the split makes the step cheaper: the prompt is then
    computed several times, but the work is divided more evenly.
    """
    # a masked completion is neither trained on nor computed
    facts = [f if is_trained(f, cfg) else f._replace(length=0, end=0) for f in facts]
    computed = [i for i in samples if facts[i].end]
    trained = [i for i in computed if has_gradient(facts[i], cfg)]
    if computed and not trained:
        trained = [min(computed, key=lambda i: facts[i].prompt_length + facts[i].end)]
    share = math.ceil(len(facts) / ranks)  # rank r drew the samples r·share to (r + 1)·share
    # the same prompt in another group may have other tokens, such as those of an environment
    groups: dict[tuple, list[int]] = {}
    for i in trained:
        groups.setdefault((i // cfg.num_generations, facts[i].prompt), []).append(i)
    best: list[Strip] = [[]] * ranks
    least = math.inf
    most = max(map(len, groups.values()), default=0) if cfg.share_prompts else min(len(groups), 1)
    while most:  # the maximum number of completions in a piece
        pieces = [
            _piece(group[j : j + most], facts, pair_cost)
            for group in groups.values()
            for j in range(0, len(group), most)
        ]
        # A piece may exceed the budget only if it is a single completion.
        if all(p.size <= cfg.strip_tokens or len(p.samples) == 1 for p in pieces):
            strips, cost = _spread(pieces, cfg.strip_tokens, ranks, share)
            if cost < least:
                best, least = strips, cost
        most = math.ceil(most / 2) if most > 1 else 0
    batches = [_assign(best[i : i + ranks], facts, share) for i in range(0, len(best), ranks)]
    by_rank = [[sorted(batch[rank]) for batch in batches] for rank in range(ranks)]
    return Update(samples, sum(facts[i].length for i in samples), by_rank)


def _piece(samples: list[int], facts: Sequence[Facts], pair_cost: float) -> Piece:
    p = facts[samples[0]].prompt_length
    ends = [facts[i].end - 1 for i in samples]  # the last token predicts nothing
    tokens = p + sum(ends)
    key_rows = tokens if len(samples) == 1 else p + sum(p + n for n in ends if n)
    pairs = p * (p + 1) / 2 + sum(n * p + n * (n + 1) / 2 for n in ends)
    return Piece(samples, tokens, key_rows, tokens + pair_cost * pairs)


def _spread(pieces: list[Piece], budget: int, ranks: int, share: int) -> tuple[list[Strip], float]:
    """Distribute the pieces over as few strips as possible. The number of strips is a multiple of
    `ranks`.

    Return the strips, most expensive first, and the total cost of all micro-batches. Each group of
    `ranks` consecutive strips is one micro-batch, with one strip per rank. Ranks wait for each
    other, so the cost of a micro-batch is the cost of its first strip, which is the most expensive
    one. A piece that exceeds the budget gets its own strip.

    Pieces are assigned from the most expensive to the cheapest, each to the cheapest strip that can
    still hold it ("longest processing time first"). If every strip always has room for the next
    piece, the cost is at most 4/3 of the optimum (Graham 1969). Pieces of equal cost are taken from
    the ranks in turn, and are given to the strips in turn. So samples of the same rank tend to end
    up in the same strip.
    """

    pieces = sorted(pieces, key=lambda p: (-p.cost, p.samples[0] % share, p.samples))
    needed = min(sum(p.size for p in pieces) / budget, len(pieces))  # strips
    count = ranks * math.ceil(needed / ranks)
    while True:
        strips: list[Strip] = [[] for _ in range(count)]
        costs, left = [0.0] * count, [budget] * count
        for piece in pieces:
            fits = [b for b in range(count) if piece.size <= left[b] or not strips[b]]
            if not fits:
                break
            b = min(fits, key=costs.__getitem__)
            strips[b].append(piece)
            costs[b] += piece.cost
            left[b] -= piece.size
        else:
            by_cost = sorted(range(count), key=lambda b: -costs[b])
            return [strips[b] for b in by_cost], sum(costs[b] for b in by_cost[::ranks])
        count += ranks


def _assign(strips: list[Strip], facts: Sequence[Facts], share: int) -> list[Strip]:
    """Return the strips of a micro-batch in the order of the ranks that compute them.

    The order does not affect the computing time, so we choose an order in which few tokens are sent
    between ranks. The strip and the rank with the most tokens in common are matched first, and so
    on.
    """

    def kept(pair: tuple[int, ...]) -> int:
        """Return how many tokens of a strip this rank already has."""
        b, rank = pair
        own = (i for piece in strips[b] for i in piece.samples if i // share == rank)
        return sum(facts[i].end for i in own)

    strip_of: dict[int, int] = {}  # by rank
    for b, rank in sorted(itertools.product(range(len(strips)), repeat=2), key=kept, reverse=True):
        if b not in strip_of.values() and rank not in strip_of:
            strip_of[rank] = b
    return [strips[b] for _, b in sorted(strip_of.items())]
