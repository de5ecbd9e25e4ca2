"""Write the numbers that training computed for each token (`--log-tokens`), for `nanogrpo view`.

In: each micro-batch with the output of its loss (`TokenMeter.add`), and at the end of the step its
samples. Out: `output_dir/completions/tokens_00001.jsonl.gz`, next to the completions of the same
step. Each line is one completion, with a list per column and an entry per token:

    row      the line of completions_00001.jsonl that has the completion, counted from 0
    id, text the token; tokens that share a character have "", but the last one has the character
    logp     the engine's log-prob at the sampling temperature
    entropy  of the trainer's distribution, in nats
    ratio    policy / old policy, before the update
    gap      the trainer's log-prob before the first update, minus the engine's
    share    the share of the token in the gradient of its update: see `gradient`

A number is null if there is none: no column for a tool's answer, and only `logp` for a completion
that training skips. If --num-iterations repeats the updates, ratio, entropy and share are those of
the last one. Read before: metrics.py. Read next: view.py.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.grpo.loss import loss
from nanogrpo.kernels import reference
from nanogrpo.logs.files import replace
from nanogrpo.model.head import PolicyOut
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import PackedBatch, Sample

logger = logging.getLogger(__name__)
COLUMNS = ("entropy", "ratio", "gap", "share")
# More than a token takes in the file (docs/log.md): the groups are chosen before they are written.
BYTES = 24
Columns = dict[str, list]


def gradient(batch: PackedBatch, out: PolicyOut, cfg: Config) -> Tensor:
    """Return the size of each token's part of the gradient, [M], up to a common factor.

    It is |dloss/dlogp| · (1 - p). The logits z of the token's row have dlogp/dz_j =
    (1[j = y] - p_j) / T, whose absolute values sum to ((1 - p_y) + Σ_{j≠y} p_j) / T = 2(1 - p_y) /
    T. So up to the factor 2/T this is the L1 norm of the gradient of the loss at these logits. The
    slope dloss/dlogp has the weight, the advantage, the ratio, the clip, the KL and every mask of
    the objective. It leaves out the entropy bonus.
    """
    logp = out.logp.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(logp, out.entropy, batch, cfg).loss, logp)
    return slope.abs() * -torch.expm1(out.logp.detach())


class TokenMeter:
    """Collect the results of this rank's tokens. Nothing waits for the GPU before `results`."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.parts: list[tuple[int, Tensor, dict[str, Tensor]]] = []

    def add(self, batch: PackedBatch, out: PolicyOut, update: int) -> None:
        """Add one micro-batch of the update with this number in the step."""
        old, logp = batch.old_logp, out.logp
        ratio = torch.ones_like(logp) if old is None else reference.exp(logp - old)
        before = None if self.cfg.old_from_engine else old
        if before is None and update == 0 and not self.cfg.lora_dropout:
            before = logp
        gap = torch.full_like(logp, math.nan) if before is None else before - batch.sampling_logp
        columns = out.entropy, ratio, gap, gradient(batch, out, self.cfg)
        self.parts.append((update, batch.sample, dict(zip(COLUMNS, columns))))

    def results(self, wanted: Iterable[int]) -> tuple[dict[int, tuple[int, Columns]], list[float]]:
        """Return (update, columns) of each wanted sample that this rank trained on, and the sum of
        the gradients of each update.
        """
        wanted = set(wanted)
        totals: dict[int, float] = defaultdict(float)
        found = {}
        for update, sample, columns in self.parts:
            totals[update] += columns["share"].double().sum().item()
            values = torch.stack([columns[name].float() for name in COLUMNS]).cpu()  # [4, M]
            ids, counts = sample.cpu().unique_consecutive(return_counts=True)
            for i, part in zip(ids.tolist(), values.split(counts.tolist(), dim=1)):
                if i in wanted:  # a later update replaces an earlier one
                    found[i] = update, dict(zip(COLUMNS, part.tolist()))
        return found, [totals[u] for u in range(max(totals, default=-1) + 1)]


class TokenLog:
    """Call `step` after each step on every rank. The main rank writes the file."""

    def __init__(self, cfg: Config, world: World):
        """Continue in the folder that logs/completions.py has prepared."""
        self.cfg, self.world, self.folder = cfg, world, Path(cfg.output_dir) / "completions"
        self.limit = int(cfg.log_tokens_mib * 2**20)
        self.used = sum(path.stat().st_size for path in self.folder.glob("tokens_*.gz"))
        self.texts: dict[int, str] = {}

    def step(
        self,
        step: int,
        samples: Sequence[Sample],
        advantages: Sequence[float],
        meter: TokenMeter,
        tokenizer: Tokenizer,
    ) -> None:
        """Write the tokens of some complete groups. advantages: of the samples of all ranks."""
        lengths = self.world.gather([len(s.token_ids) for s in samples])
        first = sum(map(len, lengths[: self.world.rank]))  # index of this rank's first sample
        everyone = [n for part in lengths for n in part]
        chosen = set(self.world.once(lambda: self._choose(step, everyone, advantages)))
        own = {i: self._sample(s, tokenizer) for i, s in enumerate(samples, first) if i in chosen}
        # Every rank gets all of it, but --log-tokens-mib keeps it small.
        parts = self.world.gather((own, *meter.results(chosen)))
        if not self.world.main or not chosen:
            return
        computed = {i: result for _, found, _ in parts for i, result in found.items()}
        totals = [sum(x) for x in zip(*(totals for _, _, totals in parts))]
        drawn = {i: columns for own, _, _ in parts for i, columns in own.items()}
        lines = []
        for i in sorted(chosen):
            update, columns = computed.get(i, (0, {}))
            if columns:
                columns["share"] = [x / (totals[update] or 1.0) for x in columns["share"]]
            lines.append(json.dumps(_line(i, drawn[i], columns)) + "\n")
        data = gzip.compress("".join(lines).encode(), 6, mtime=0)
        if self.used + len(data) <= self.limit:
            replace(self.folder / f"tokens_{step + 1:05d}.jsonl.gz", data)
            self.used += len(data)

    def _choose(self, step: int, lengths: list[int], advantages: Sequence[float]) -> list[int]:
        """Return the samples of as many groups as the step may use, first those with a gradient.

        After step s of S, s/S of the limit may be used. So a group that is larger than the share of
        one step is written every few steps, and the first one at once.
        """
        n = self.cfg.num_generations
        groups = [range(i, i + n) for i in range(0, len(lengths), n)]
        groups.sort(key=lambda group: not any(advantages[i] for i in group))  # keeps their order
        sizes = [BYTES * sum(lengths[i] for i in group) for group in groups]
        room = self.limit * (step + 1) / self.cfg.max_steps - self.used
        if not self.used:
            room = max(room, sizes[0])
        room = min(room, self.limit - self.used)
        if not self.used and sizes[0] > room:
            logger.warning(
                "--log-tokens-mib %g has no room for the %.2f MiB of one group: no tokens are "
                "written in this step",
                *(self.cfg.log_tokens_mib, sizes[0] / 2**20),
            )
        chosen: list[int] = []
        for group, size in zip(groups, sizes):
            if size <= room:
                chosen += group
                room -= size
        return chosen

    def _sample(self, sample: Sample, tokenizer: Tokenizer) -> Columns:
        """Return the columns that the rank knows which drew the sample."""
        trained = sample.model_token_indices
        return {
            "id": list(sample.token_ids),
            "text": self._pieces(sample.token_ids, tokenizer),
            "logp": _placed([sample.logp[i] for i in trained], trained, len(sample.token_ids)),
            "trained": list(trained),
        }

    def _pieces(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
        """Return the text of each token, including special tokens.

        A token is decoded after another one, because some tokenizers drop the space at the start of
        a text. Tokens that end within a character are decoded together.
        """
        before = tokenizer.encode("a", special=False)
        cut = len(tokenizer.decode(before))

        def decoded(run: list[int]) -> str:
            return tokenizer.decode(before + run, skip_special_tokens=False)[cut:]

        out: list[str] = []
        run: list[int] = []  # tokens that have not given a whole character yet
        for i in ids:
            if i not in self.texts:
                self.texts[i] = decoded([i])
            run.append(i)
            text = self.texts[i] if len(run) == 1 else decoded(run)
            if text.endswith("\ufffd") and len(run) < 4:  # UTF-8 has at most four bytes
                out.append("")
            else:
                out.append(text)
                run.clear()
        if run:
            out[-1] = decoded(run)
        return out


def _line(row: int, drawn: Columns, computed: Columns) -> dict:
    """Return a line of the file: what was sampled, and what training computed, if it did."""
    trained, length = drawn.pop("trained"), len(drawn["id"])
    placed = {name: _placed(values, trained, length) for name, values in computed.items()}
    return {"row": row, **drawn, **placed}


def _placed(values: Sequence[float], at: Sequence[int], length: int) -> list[float | None]:
    """Return a list of this length with the values, rounded to four digits, at these places."""
    out: list[float | None] = [None] * length
    for i, x in zip(at, values):
        out[i] = float(f"{x:.4g}") if math.isfinite(x) else None
    return out
