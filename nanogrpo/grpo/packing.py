"""Turn strips into tensors without padding. A strip is one rank's part of a micro-batch.

In: an `Update` of schedule.py, and the samples that this rank computes. Out: the rank's
micro-batches (`PackedBatch`), one at a time. A strip consists of pieces. A piece is a set of
completions of one prompt, which share the tokens of the prompt. In this example, the prompt pqr has
the completions ab, c and def, and the prompt xy has the completion g. The last token of each
completion is predicted, but is not an input:

    tokens      p q r     │ a       │ d e       │ x y       T = 8 instead of 14
    attends to  p q r     │ p q r a │ p q r d e │ x y
    predicts    · · a,c,d │ b       │ e f       │ · g       M = 7

Read next: model/decoder.py (which computes a strip), model/attention.py (how a completion attends
to its prompt).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.grpo.loss import token_weight
from nanogrpo.grpo.schedule import Strip, Update
from nanogrpo.types import PackedBatch, Sample

Samples = Mapping[int, Sample] | Sequence[Sample]  # samples by their index in the generation
NO_ROWS = range(0)


class Strips(Sequence[PackedBatch]):
    """A rank's micro-batches of an optimizer step. Each micro-batch is built when it is first used.

    A GPU computes asynchronously, so the host builds the next micro-batch while the GPU trains on
    the current one.
    """

    def __init__(self, count: int, samples: Samples, build: Callable[[int], PackedBatch]):
        self.indices, self.samples = range(count), samples  # which `PackedBatch.sample` refers to
        self.build = functools.cache(build)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.build(self.indices[index])


def pack(
    update: Update,
    samples: Samples,
    cfg: Config,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> Strips:
    """Return a rank's micro-batches of an optimizer step.

    `samples` needs to contain only the samples that this rank computes.
    """
    strips = update.strips[rank]
    return Strips(len(strips), samples, lambda k: _pack(strips[k], samples, update, cfg).to(device))


def _pack(strip: Strip, samples: Samples, update: Update, cfg: Config) -> PackedBatch:
    """Return the tensors of a strip, on the CPU."""
    tokens: list[int] = []  # [T]
    # Lists of ranges. The lengths of all ranges add up to T for positions and to Tk for kv_rows.
    positions: list[range] = []
    kv_rows: list[range] = []
    starts, kv_starts = [0], [0]  # [N+1]

    def sequence(ids: list[int], sees: range) -> range:
        """Append a sequence that attends to the rows `sees` and to itself; return its own rows."""
        own = range(len(tokens), len(tokens) + len(ids))
        tokens.extend(ids)
        positions.append(range(len(sees), len(sees) + len(ids)))
        kv_rows.extend((sees, own))
        starts.append(len(tokens))
        kv_starts.append(kv_starts[-1] + len(sees) + len(own))
        return own

    # arrays with total length M
    rows, targets, logp, sample, advantage, weight = [], [], [], [], [], []
    inputs: list[tuple[int, Any]] = []
    for piece in strip:
        prompt = samples[piece.samples[0]].prompt
        if prompt.inputs is not None:  # every piece begins with its prompt
            inputs.append((len(tokens), prompt.inputs))
        many = len(piece.samples) > 1
        shared = sequence(prompt.token_ids, NO_ROWS) if many else NO_ROWS
        for i in piece.samples:
            s, trained = samples[i], np.asarray(samples[i].model_token_indices)
            ids = s.token_ids[: trained[-1]]  # the inputs: all tokens before the last target
            if many:
                own = sequence(ids, shared) if ids else shared
            else:
                own = sequence(prompt.token_ids + ids, NO_ROWS)[len(prompt.token_ids) :]
            # The row of the prompt's last token predicts token 0 of every completion.
            last = shared[-1] if many else own.start - 1
            rows.append(np.where(trained == 0, last, own.start + trained - 1))
            targets.append(np.asarray(s.token_ids)[trained])
            logp.append(np.asarray(s.logp)[trained])
            n = len(trained)
            sample.append(np.full(n, i))
            each = s.advantage if s.token_advantages is None else s.token_advantages
            advantage.append(np.full(len(s.token_ids), each)[trained])
            weight.append(np.full(n, token_weight(n, len(update.samples), update.n_tokens, cfg)))
    if not tokens:  # a dummy token, because a rank without work must also join the collectives
        sequence([0], NO_ROWS)

    def spans(ranges: list[range]) -> Tensor:
        return joined([np.arange(r.start, r.stop) for r in ranges])

    def joined(arrays: list[np.ndarray], dtype: Any = np.int64) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype))

    sharing = kv_starts[-1] > len(tokens)
    return PackedBatch(
        tokens=torch.tensor(tokens),
        positions=spans(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_len=int(np.diff(starts).max()),
        kv_rows=spans(kv_rows) if sharing else None,
        kv_cu_seqlens=torch.tensor(kv_starts, dtype=torch.int32) if sharing else None,
        kv_max_len=int(np.diff(kv_starts).max()) if sharing else 0,
        rows=joined(rows),
        targets=joined(targets),
        sample=joined(sample),
        advantage=joined(advantage, np.float32),
        weight=joined(weight, np.float32),
        sampling_logp=joined(logp, np.float32),
        inputs=inputs,
    )
