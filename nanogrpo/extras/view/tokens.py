"""Write the numbers that training computed for each token (`--log-tokens`), for `nanogrpo view`.

In: each micro-batch with the output of its loss, and the samples at the end of the step. Out:
`output_dir/completions/tokens_00001.jsonl.gz`, next to the completions of the same step. Each line
is one completion, with a list per column and an entry per token:

    row      the line of completions_00001.jsonl that has the completion, counted from 0
    id, text the token; tokens that share a character have "", but the last one has the character
    logp     the engine's log-prob at the sampling temperature
    advantage  the token's own advantage, if tokens have their own
    entropy  the entropy of the trainer's distribution, in nats
    ratio    policy / old policy, before the update
    gap      the trainer's log-prob before the first update, minus the engine's
    share    the token's share of the gradient of its update: see `gradient`

If a number does not exist, the entry is null. Inserted text, such as a tool's answer, has no
numbers, and a completion that training skips has only `logp`. If --num-iterations repeats the
updates, ratio, entropy and share come from the last update. Read next: data.py (what the page
reads).
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanogrpo.extras.objectives import loss
from nanogrpo.extras.options import Config
from nanogrpo.feature import Feature
from nanogrpo.kernels.reference import policy
from nanogrpo.logs.files import replace
from nanogrpo.model.head import PolicyOut
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run.setup import Run
from nanogrpo.types import PackedBatch, Sample

COLUMNS = ("entropy", "ratio", "gap", "share")
LIMIT = 256 * 2**20  # bytes of all files of a run
# The maximum number of bytes that a token takes in the file (docs/log.md).
# This number is used to choose groups.
BYTES = 24


def gradient(batch: PackedBatch, out: PolicyOut, cfg: Config) -> Tensor:
    """Return the size of each token's part of the gradient, [M], up to a common factor.

    The size is |dloss/dlogp| · (1 - p). For the logits z of the token y, dlogp/dz_j is (1[j = y] -
    p_j) / T. The absolute values of these derivatives sum to ((1 - p_y) + Σ_{j≠y} p_j) / T = 2(1 -
    p_y) / T. So up to the factor 2/T, the size is the L1 norm of the gradient of the loss at these
    logits. The slope dloss/dlogp includes the weight, the advantage, the ratio, the clip, the KL
    and every mask of the objective, but not the entropy bonus.
    """
    logp = out.logp.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(logp, out.entropy, batch, cfg).loss, logp)
    return slope.abs() * -torch.expm1(out.logp.detach())


class TokenLog(Feature):
    def __init__(self, cfg: Config):
        self.cfg, self.folder = cfg, Path(cfg.output_dir) / "completions"
        # for each micro-batch of the step: the update, the samples [M], and the columns [4, M]
        self.parts: list[tuple[int, Tensor, Tensor]] = []
        self.texts: dict[int, str] = {}

    def measured(self, batch: PackedBatch, out: PolicyOut, update: int) -> None:
        """Keep the results of a micro-batch, without waiting for the GPU."""
        old, logp = batch.old_logp, out.logp.detach()
        ratio = torch.ones_like(logp) if old is None else policy.exp(logp - old)
        before = logp if update == 0 else torch.full_like(logp, math.nan)
        if old is not None and not self.cfg.old_from_engine:
            before = old
        columns = out.entropy, ratio, before - batch.sampling_logp, gradient(batch, out, self.cfg)
        self.parts.append((update, batch.sample, torch.stack([x.float() for x in columns])))

    def step(self, run: Run, step: int, samples: list[Sample]) -> None:
        """Write the tokens of some complete groups."""
        world, parts, self.parts = run.world, self.parts, []
        sizes = world.gather([(len(s.token_ids), s.advantage) for s in samples])
        first = sum(map(len, sizes[: world.rank]))  # index of this rank's first sample
        everyone = [size for part in sizes for size in part]
        chosen = set(world.once(lambda: self._choose(run, step, everyone)))
        own = {
            i: (s.model_token_indices, self._drawn(i, s, run.tokenizer))
            for i, s in enumerate(samples, first)
            if i in chosen
        }
        ranks = world.gather((own, *computed(parts, chosen)))  # LIMIT keeps it small
        if not (world.main and chosen):
            return
        totals: Counter[int] = Counter()
        lines: dict = {}
        for own, _, each in ranks:
            lines |= own
            totals.update(each)
        for _, found, _ in ranks:
            for i, (update, columns) in found.items():
                written, line = lines[i]
                columns["share"] = [x / (totals[update] or 1.0) for x in columns["share"]]
                for name, values in columns.items():
                    line[name] = placed(values, written, len(line["id"]))
        text = "".join(json.dumps(lines[i][1]) + "\n" for i in sorted(lines))
        data = gzip.compress(text.encode(), 6, mtime=0)
        replace(self.folder / f"tokens_{step + 1:05d}.jsonl.gz", data)

    def _choose(self, run: Run, step: int, everyone: Sequence[tuple[int, float]]) -> list[int]:
        """Return the samples of the groups to write. Groups with a gradient come first.

        After step s of S, all files together may have s/S of LIMIT bytes. So if a group is larger
        than one step's share, one group is written every few steps. The first group is always
        written immediately. `everyone` has (number of tokens, advantage) of each sample.
        """
        n = run.cfg.num_generations
        groups = [range(i, i + n) for i in range(0, len(everyone), n)]
        groups.sort(key=lambda group: not any(everyone[i][1] for i in group))  # keeps their order
        used = sum(path.stat().st_size for path in self.folder.glob("tokens_*.gz"))
        room = LIMIT * (step + 1) / run.cfg.max_steps - used
        chosen: list[int] = []
        for group in groups:
            size = BYTES * sum(everyone[i][0] for i in group)
            if size <= room or not (used or chosen):
                chosen += group
                room -= size
        return chosen

    def _drawn(self, row: int, sample: Sample, tokenizer: Tokenizer) -> dict:
        """Return the columns that are known only to the rank that drew the sample."""
        ids, written = sample.token_ids, sample.model_token_indices
        logp = placed([sample.logp[i] for i in written], written, len(ids))
        line = {"row": row, "id": [*ids], "text": pieces(ids, tokenizer, self.texts), "logp": logp}
        if each := sample.token_advantages:
            line["advantage"] = placed([each[i] for i in written], written, len(ids))
        return line


def pieces(ids: Sequence[int], tokenizer: Tokenizer, texts: dict[int, str]) -> list[str]:
    """Return the text of each token, including special tokens. `texts` is a cache that all
    calls share.

    The tokens of "a" are put in front of each token before it is decoded, because some tokenizers
    drop a space at the start of a text. If a character consists of several tokens, these tokens are
    decoded together.
    """
    before = tokenizer.encode("a", special=False)
    cut = len(tokenizer.decode(before))

    def decoded(run: list[int]) -> str:
        return tokenizer.decode(before + run, skip_special_tokens=False)[cut:]

    out = []
    run = []  # tokens that do not form a whole character yet
    for i in ids:
        if i not in texts:
            texts[i] = decoded([i])
        run.append(i)
        text = texts[i] if len(run) == 1 else decoded(run)
        if text.endswith("\ufffd") and len(run) < 4:  # UTF-8 has at most four bytes
            out.append("")
        else:
            out.append(text)
            run.clear()
    if run:
        out[-1] = decoded(run)
    return out


def computed(
    parts: Iterable[tuple[int, Tensor, Tensor]], wanted: set[int]
) -> tuple[dict[int, tuple[int, dict]], Counter[int]]:
    """Return (update, columns) of each wanted sample that this rank trained on, and the sum of the
    gradients of each update.
    """
    totals: Any = Counter()  # by update
    found = {}
    for update, sample, columns in parts:
        totals[update] += columns[-1].double().sum().item()
        ids, counts = sample.unique_consecutive(return_counts=True)
        values = columns.cpu().split(counts.tolist(), dim=1)  # per sample, [4, its tokens]
        for i, part in zip(ids.tolist(), values):
            if i in wanted:  # a later update replaces an earlier one
                found[i] = update, dict(zip(COLUMNS, part.tolist()))
    return found, totals


def placed(values: Sequence[float], at: Sequence[int], length: int) -> list[float | None]:
    """Return a list with `values`, rounded to four digits, at the indices `at`. All other entries
    are None.
    """
    out: list[float | None] = [None] * length
    for i, x in zip(at, values):
        out[i] = float(f"{x:.4g}") if math.isfinite(x) else None
    return out
