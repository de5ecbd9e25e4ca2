"""The three types that contain the data of a step: `Prompt` → `Sample` → `PackedBatch`.

This module imports nothing from nanogrpo, and every folder uses it. Read next: grpo/loss.py (what
is computed from these types), grpo/packing.py (how samples become batches).

Dimension key, used in every shape comment of the project: T tokens of a packed strip · N sequences
in the strip · M completion tokens in the strip that are trained on · D hidden · H query heads · K
key/value heads · E head size · F MLP width · V vocabulary · G group size · P prompts per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Prompt:
    """One question, which the model answers G times.

    Example: Prompt(id=7, text="3+4=", token_ids=[1, 18, 14, 19, 30, 2], columns={"answer": "7"})
    """

    # position in the data set; it is part of the random key, so it must be the same in every run
    id: int
    # as in the data: plain text, or messages [{"role": ..., "content": ...}]
    text: str | list[dict]
    token_ids: list[int]  # after the chat template
    # all other columns of the data set, which reward functions receive
    columns: dict = field(default_factory=dict)
    # maximum number of completion tokens; None: SamplingParams.max_tokens
    max_tokens: int | None = None
    # what the model takes besides tokens; None: nothing
    inputs: Any = None


@dataclass
class Conversation:
    """What reward functions receive instead of the text of a completion."""

    messages: list[dict]
    # what else reward functions receive, by the name of the argument, until the reward is known
    arguments: dict = field(default_factory=dict)


@dataclass
class Sample:
    """One completion of a prompt.

    Example: Sample(prompt, index=2, token_ids=[9, 26, 10, 3], logp=[-0.1, -1.2, -0.0, -0.3],
    stopped=True, versions=[4, 4, 4, 4])
    """

    prompt: Prompt
    index: int  # 0 … G-1 within the group
    token_ids: list[int]  # the completion; if it stopped, the last id is the stop token
    logp: list[float]  # the engine's log-prob of each id, at the sampling temperature
    # reported by the engine, never guessed from the ids; False: truncated at the length limit
    stopped: bool
    versions: list[int]  # the version of the weights that sampled each token
    # per token: True if the model sampled it, False if it was inserted, so it is not trained on;
    # None: the model sampled all of them
    is_model_token: list[bool] | None = None
    text: str = ""  # the decoded completion, without special tokens
    # what reward functions receive instead of the text; None: the text
    conversation: Conversation | None = None
    # the reward from each function, by function name; None: the function does not apply
    rewards: dict[str, float | None] = field(default_factory=dict)
    # the weighted sum; None: no function applied, or the rewards of the group were lost
    reward: float | None = None
    extra: dict = field(default_factory=dict)  # what reward functions passed to log_extra
    advantage: float = 0.0

    @property
    def model_token_indices(self) -> Sequence[int]:
        """The indices of the tokens that the model sampled, which can be trained on."""
        if self.is_model_token is None:
            return range(len(self.token_ids))
        return [i for i, from_model in enumerate(self.is_model_token) if from_model]

    @property
    def facts(self) -> Facts:
        written = self.model_token_indices
        lengths = len(self.prompt.token_ids), len(written), written[-1] + 1 if written else 0
        scored = self.rewards, self.reward, self.advantage
        return Facts(self.prompt.id, *lengths, self.stopped, *scored)


class Facts(NamedTuple):
    """What every rank must know about each sample of a step. Ranks exchange these, not tokens."""

    prompt: int  # its id
    prompt_length: int
    length: int  # tokens that the model wrote
    end: int  # tokens up to the last one that the model wrote
    stopped: bool
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float = 0.0


@dataclass
class PackedBatch:
    """A strip: sequences laid end to end without padding, and the completion tokens in it that are
    trained on.

    The decoder computes all T tokens. The output head computes only the M rows that contribute to
    the loss, so no logits are computed for prompt tokens. For each j, the hidden state in row
    `rows[j]` predicts the token `targets[j]`. The last token of a completion is a target but not an
    input, because its successor was never sampled.

    Example: two samples of one prompt (p0 p1), with completions (a b c) and (d e), on policy, with
    the loss averaged over 5 tokens. The prompt is computed once: it is sequence 0, and each
    completion attends to the prompt's keys and then to its own:
        tokens        = p0 p1 a  b  d             [T=5]
        positions     = 0  1  2  3  2             [T]
        cu_seqlens    = 0 2 4 5                   [N+1]
        kv_rows       = 0 1 · 0 1 2 3 · 0 1 4     [Tk=9]
        kv_cu_seqlens = 0 2 6 9                   [N+1]
        rows          = 1  2  3  1  4             [M=5]: both completions start at the state of p1
        targets       = a  b  c  d  e             [M]
        sample        = 0  0  0  1  1             [M]
        advantage     = 1  1  1  -1 -1            [M]
        weight        = 1/5 …                     [M]
    With a copy of the prompt in each sequence: tokens = p0 p1 a b p0 p1 d, cu_seqlens = 0 4 7,
    rows = 1 2 3 5 6, and kv_rows is None.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N+1] int32: sequence n is tokens[cu_seqlens[n] : cu_seqlens[n+1]]
    max_len: int  # length of the longest sequence
    # [Tk] int64: the rows whose keys each sequence attends to, its own last; None: only its own
    kv_rows: Tensor | None
    # [N+1] int32: sequence n attends to kv_rows[kv_cu_seqlens[n] : kv_cu_seqlens[n+1]]
    kv_cu_seqlens: Tensor | None
    kv_max_len: int
    rows: Tensor  # [M] int64: index into T of the hidden state that predicts the target
    targets: Tensor  # [M] int64: the completion token
    # [M] int64: which sample the token belongs to, as an index into the step's samples of all ranks
    sample: Tensor
    advantage: Tensor  # [M] float32
    # [M] float32: the normalizer of the loss type, over the full optimizer step and all ranks
    weight: Tensor
    sampling_logp: Tensor  # [M] float32: the engine's log-prob
    # [M] float32: the log-prob under the policy that sampled, computed by the trainer before the
    # first update or by the engine; None: on policy, so the ratio is 1
    old_logp: Tensor | None = None
    # [M] float32: the log-prob under the reference model; None: beta is 0
    ref_logp: Tensor | None = None
    # [M] float32: a factor of every term except the KL; None: 1
    importance: Tensor | None = None
    # [M] float32: the factor of the entropy bonus in the objective; None: no bonus
    entropy_weight: Tensor | None = None
    # (first row of a prompt, its `Prompt.inputs`) wherever a prompt with further inputs begins
    inputs: list[tuple[int, Any]] = field(default_factory=list)

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return a copy of the batch on a device. The host does not wait for the copy to a GPU."""
        cuda = torch.device(device).type == "cuda"
        moved: dict[str, Any] = {}
        for name, x in vars(self).items():
            if isinstance(x, Tensor):  # only from pinned memory is the copy asynchronous
                moved[name] = (x.pin_memory() if cuda else x).to(device, non_blocking=True)
        return dataclasses.replace(self, **moved)
