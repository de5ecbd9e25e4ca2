"""The three types that carry the data of a step: `Prompt` → `Sample` → `PackedBatch`.

In: nothing of ours. Out: used by every file. Read next: grpo.py (what is computed on them),
packing.py (how samples become batches).

Dimension key, used in every shape comment of the project: T tokens of a packed strip · N sequences
in it · M completion tokens in it that are trained · D hidden · H query heads · K key/value heads ·
E head size · F MLP width · V vocabulary · G group size · P prompts a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Prompt:
    """One question, asked G times.

    Example: Prompt(id=7, text="3+4=", token_ids=[1, 18, 14, 19, 30, 2], columns={"answer": "7"})
    """

    # position in the data set: part of the random key, so that it must be stable between runs
    id: int
    # as in the data: plain text, or messages [{"role": ..., "content": ...}]
    text: str | list[dict]
    token_ids: list[int]  # after the chat template
    # every other column of the data set, handed to the rewards
    columns: dict = field(default_factory=dict)


@dataclass
class Sample:
    """One completion of a prompt.

    Example: Sample(prompt, index=2, token_ids=[9, 26, 10, 3], logp=[-0.1, -1.2, -0.0, -0.3],
    stopped=True, versions=[4, 4, 4, 4])
    """

    prompt: Prompt
    index: int  # 0 … G-1 within the group
    token_ids: list[int]  # the completion; the stop token is its last id when it stopped
    logp: list[float]  # the engine's log-prob of each id, at the sampling temperature
    stopped: bool  # told by the engine, never guessed from ids; False: cut at the length limit
    versions: list[int]  # the weight version that wrote each token
    # which tokens the model wrote: a tool's answers are not trained (turns.py); None: all
    is_model_token: list[bool] | None = None
    text: str = ""  # decoded completion, without special tokens
    # one entry a reward function; None: does not apply
    rewards: dict[str, float | None] = field(default_factory=dict)
    # the weighted sum; None when no function applied, or the group's rewards were lost
    reward: float | None = None
    extra: dict = field(default_factory=dict)  # what reward functions gave to log_extra, by column
    advantage: float = 0.0

    @property
    def model_token_indices(self) -> list[int]:
        """Where in the completion the tokens stand that the model wrote: those that can be trained."""
        flags = self.is_model_token or [True] * len(self.token_ids)
        return [i for i, from_model in enumerate(flags) if from_model]


@dataclass
class PackedBatch:
    """A strip of sequences laid end to end, without padding, and the completion tokens in it that
    are trained.

    The decoder computes all T tokens; the output head only the M rows that carry loss, so that
    prompt tokens never meet the vocabulary. Row j says: "hidden state `rows[j]` predicts token
    `targets[j]`". A completion's last token is a target but no input: what would follow it was
    never sampled.

    Example: two samples of one prompt (p0 p1), completions (a b c) and (d e), on policy, token-mean
    over 5 tokens. With the prompt once for both, sequence 0 is the prompt, and the completions see
    its keys beside their own:
        tokens        = p0 p1 a  b  d             [T=5]
        positions     = 0  1  2  3  2             [T]
        cu_seqlens    = 0 2 4 5                   [N+1]
        kv_rows       = 0 1 · 0 1 2 3 · 0 1 4     [Tk=9]
        kv_cu_seqlens = 0 2 6 9                   [N+1]
        rows          = 1  2  3  1  4             [M=5]: both completions start from the hidden state of p1
        targets       = a  b  c  d  e             [M]
        sample        = 0  0  0  1  1             [M]
        advantage     = 1  1  1  -1 -1            [M]
        weight        = 1/5 …                     [M]
    With a copy of the prompt for each: tokens = p0 p1 a b p0 p1 d, cu_seqlens = 0 4 7, rows = 1 2 3
    5 6, and no kv_rows.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N+1] int32: sequence n is tokens[cu_seqlens[n] : cu_seqlens[n+1]]
    max_len: int  # length of the longest sequence
    # [Tk] int64: the rows whose keys each sequence sees, itself last; None: each sees itself only
    kv_rows: Tensor | None
    # [N+1] int32: sequence n sees kv_rows[kv_cu_seqlens[n] : kv_cu_seqlens[n+1]]
    kv_cu_seqlens: Tensor | None
    kv_max_len: int
    rows: Tensor  # [M] int64: index into T of the hidden state that predicts the target
    targets: Tensor  # [M] int64: the completion token
    # [M] int64: index in the generation, over all ranks, of the sample that the token belongs to
    sample: Tensor
    advantage: Tensor  # [M] float32
    # [M] float32: the normaliser of the loss type, over the whole optimizer step and all ranks
    weight: Tensor
    sampling_logp: Tensor  # [M] float32: the engine's log-prob
    # [M] float32: log-prob before the first update; None: on policy, the ratio is 1
    old_logp: Tensor | None = None
    # [M] float32: the reference model's log-prob; None when beta is 0
    ref_logp: Tensor | None = None
    # [M] float32: trainer over engine, of mismatch.correction; multiplies all but the KL
    importance: Tensor | None = None
    # [M] bool: tokens among the least certain of the step; None: all are trained
    entropy_mask: Tensor | None = None
    # [M] float32: factor of the entropy that is added to the objective; None: no bonus
    entropy_weight: Tensor | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {
            k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v
            for k, v in vars(self).items()
        }
        return PackedBatch(**moved)
