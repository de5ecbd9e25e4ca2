"""Exact log-probs if --top-k, --top-p or --min-p truncates the distribution that is sampled.

The engine samples from π_S(y) = exp(z_y) / Σ_{j∈S} exp(z_j), where S is the set of tokens that the
filters keep. The trainer computes this log-prob, too. For this, the engine returns the log-prob and
S of each token together, as a `Logp`. Later updates and the reference model use the same S.
The page docs/precision.md explains why.

In: logits of the local engine, or vLLM's sampling masks. Out: a `Head` for each micro-batch,
which sets the logits of all tokens outside of S to -inf. Read before: engine/sampler.py. Read next:
kernels/head.py, vllm/protocol.py.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.scheduler import Completion
from nanogrpo.errors import UserError
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.model import head
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.head import PolicyOut
from nanogrpo.run.setup import Run
from nanogrpo.types import Sample

ROWS = 128  # rows whose sets are on the device at the same time


class Logp(float):
    """A log-prob, and the set of tokens over which it is normalized."""

    kept: np.ndarray  # see `packed`


def with_sets(logp: Sequence[float], sets: Sequence[np.ndarray]) -> list[float]:
    """Return a `Logp` for each token."""
    out = [*map(Logp, logp)]
    for x, kept in zip(out, sets, strict=True):
        x.kept = kept
    return [*out]


def packed(ids: np.ndarray) -> np.ndarray:
    """Return a set of ids in its smaller form: the ids themselves [n] int32, or one bit for each id
    of the vocabulary [V/8] uint8. `ids` must be in increasing order.
    """
    if 32 * len(ids) <= ids[-1]:
        return ids.astype(np.int32)
    bits = np.zeros(ids[-1] + 1, bool)
    bits[ids] = True
    return np.packbits(bits)


def unpacked(kept: np.ndarray) -> np.ndarray:
    """Return the ids of a set."""
    return np.flatnonzero(np.unpackbits(kept)) if kept.dtype == np.uint8 else kept


@dataclass
class Truncation(Feature):
    min_p: float = 0.0

    def wrap(self, engine: Engine, run: Run) -> Engine | None:
        return KeepingEngine(engine, self.min_p) if isinstance(engine, LocalEngine) else None

    def batches(self, run: Run, batches: Any) -> None:
        for batch in batches:
            samples = [batches.samples[i] for i in batch.sample.unique_consecutive().tolist()]
            logp = [s.logp[t] for s in samples for t in s.model_token_indices]
            if not all(isinstance(x, Logp) for x in logp):
                raise UserError(
                    "--top-k, --top-p and --min-p need the log-prob objects of turns.generate: "
                    "keep these objects in the --rollout function, or leave the options out."
                )
            batch.head = Head([x.kept for x in logp])


class KeepingEngine(Wrapper):
    """A local engine that returns the set of each token.

    After top_k and top_p, as in transformers, it removes the tokens whose probability is below
    min_p times that of the most likely token.
    """

    engine: LocalEngine

    def __init__(self, engine: LocalEngine, min_p: float):
        self.engine, runner, self.min_p = engine, engine.runner, min_p
        self.filters, self.step, self.decode = runner.filters, runner.step, runner.decode
        vars(runner).update(filters=self._filters, step=self._step, decode=self._decode)
        if runner.behind:  # `_decode` waits for the sets after each stride, so use longer strides
            runner.behind, runner.stride = 0, 8
        # the tokens that the newest step has kept; CUDA graphs write to this tensor
        shape = engine.slots, len(engine.model.lm_head.weight)
        self.newest = torch.zeros(shape, dtype=torch.bool, device=engine.device)

    def sample(self, *how: Any, **more: Any) -> list[Sample]:
        self.sets: dict[int, list[np.ndarray]] = defaultdict(list)  # by id(sample)
        samples = self.engine.sample(*how, **more)
        for s in samples:
            s.logp = with_sets(s.logp, self.sets[id(s)][: len(s.logp)])
        return samples

    def _filters(self, logits: Tensor, params: SamplingParams) -> Tensor:
        logits = self.filters(logits, params)
        if self.min_p:  # p / max p = exp((z - max z) / T)
            log_ratio = math.log(self.min_p) * (params.temperature or 1)
            least = logits.amax(-1, keepdim=True).float() + log_ratio  # [b, 1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        self.newest[: len(logits)] = logits > -torch.inf
        return logits

    def _step(self, rows: int, params: SamplingParams) -> Tensor:
        logp = self.step(rows, params)
        self.steps.append(self.newest[:rows].clone())
        return logp

    def _decode(self, active: Sequence[Completion], params: SamplingParams) -> Any:
        self.steps: list[Tensor] = []  # [b, V] bool each
        out = self.decode(active, params)
        sets = [self.sets[id(c.sample)] for c in active]
        for c, own in zip(active, sets):
            del own[len(c.sample.token_ids) :]  # the scheduler has discarded these tokens
        for kept in self.steps:
            ids, ends = kept.nonzero()[:, 1].cpu().numpy(), kept.sum(1).cumsum(0).tolist()
            for own, each in zip(sets, np.split(ids, ends)):
                own.append(packed(each))
        return out


@dataclass
class Head:
    """The operations of model/head.py for truncated sampling: at each position, the logits of the
    tokens that the filters removed are -inf.

    kept: the set of each of the M tokens of a batch, as `packed` returns it.
    """

    kept: Sequence[np.ndarray]

    def head_logp(
        self, hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return head.head_logp(hidden, lm_head, **self.replaced(targets), temperature=temperature)

    def head_policy_loss(
        self, hidden: Tensor, lm_head: Tensor, targets: Tensor, **more: Any
    ) -> PolicyOut:
        return head.head_policy_loss(hidden, lm_head, **self.replaced(targets), **more)

    def replaced(self, targets: Tensor) -> dict[str, Any]:
        """Return row numbers [M] to use as targets, and functions that accept such targets."""

        def of(function: Callable) -> Callable:
            def restricted(logits: Tensor, rows: Tensor, *more: Any, **others: Any) -> Any:
                restrict_(logits, [self.kept[i] for i in rows.tolist()])
                return function(logits, targets[rows], *more, **others)

            return restricted

        functions = vars(functions_for(targets.device))
        taken = "log_softmax_forward", "log_softmax_backward_", "policy_rows_"
        own = SimpleNamespace(**functions | {name: of(functions[name]) for name in taken})
        return {"targets": torch.arange(len(targets)).to(targets), "functions": own}


def restrict_(logits: Tensor, kept: Sequence[np.ndarray]) -> None:
    """Set each row of logits [C, V] to -inf outside of its set, in place."""
    for start in range(0, len(logits), ROWS):
        part = logits[start : start + ROWS].view(-1)  # [rows · V]
        ids = [unpacked(each) + i * logits.shape[1] for i, each in enumerate(kept[start:][:ROWS])]
        at = torch.from_numpy(np.concatenate(ids)).to(logits.device)
        inside = part[at]
        part.fill_(-torch.inf)[at] = inside
