"""The types that contain the data of a step: `Prompt` → `Sample` → `PackedBatch`.

This module imports nothing from nanogrpo, and every folder uses it. Read next: grpo/loss.py (what
is computed from these types), grpo/packing.py (how samples become batches).

The letters below are the dimensions in the shape comments of nanogrpo/. In kernels/, N is the
number of rows of logits, and C the number of rows in a chunk.

T tokens of a strip (one rank's part of a micro-batch) · N sequences in the strip · M completion
tokens in the strip that are trained on · D hidden · H query heads · K key/value heads · E head size
· F MLP width · V vocabulary · G group size · P prompts per step.
"""

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

    # position in the data set; random numbers depend on it, so it must be the same in every run
    id: int
    # as in the data: plain text, or messages [{"role": ..., "content": ...}]
    text: str | list[dict]
    token_ids: list[int]  # after the chat template
    # all other columns of the data set, which reward functions receive
    columns: dict = field(default_factory=dict)
    # Only features set max_tokens and inputs.
    # the maximum number of completion tokens; None: SamplingParams.max_tokens
    max_tokens: int | None = None
    # inputs of the model other than tokens; None: there are none
    inputs: Any = None


@dataclass
class Conversation:
    """The conversation that reward functions receive instead of the text of a completion."""

    messages: list[dict]


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
    # True: the engine reported a stop; False: the completion was truncated at the length limit
    stopped: bool
    versions: list[int]  # the version of the weights that sampled each token
    # True for each token that the model sampled, False for inserted tokens (not trained on);
    # None if the model sampled all tokens, which is always the case without features
    is_model_token: list[bool] | None = None
    text: str = ""  # the decoded completion, without special tokens
    # replaces `text` as the argument of reward functions; None: the text
    conversation: Conversation | None = None
    # further arguments of reward functions, by name; emptied once the reward is known
    arguments: dict = field(default_factory=dict)
    # the reward from each function, by function name; None if the function does not apply
    rewards: dict[str, float | None] = field(default_factory=dict)
    # one value per token, from functions that return a list; the sum of a list is in `rewards`
    token_rewards: dict[str, list[float | None]] = field(default_factory=dict)
    # the weighted sum of the rewards; None if no function applied, or if the rewards were lost
    reward: float | None = None
    extra: dict = field(default_factory=dict)  # values that reward functions passed to log_extra
    # if `token_advantages` is set: the entry of this list with the largest absolute value
    advantage: float = 0.0
    # an advantage for each token, set only by features; None: `advantage` holds for all tokens
    token_advantages: list[float] | None = None

    @property
    def model_token_indices(self) -> Sequence[int]:
        """The indices of the tokens that the model sampled. Only these tokens can be trained on."""
        if self.is_model_token is None:
            return range(len(self.token_ids))
        return [i for i, from_model in enumerate(self.is_model_token) if from_model]

    @property
    def facts(self) -> "Facts":
        written = self.model_token_indices
        lengths = len(self.prompt.token_ids), len(written), written[-1] + 1 if written else 0
        return Facts(
            self.prompt.id, *lengths, self.stopped, self.rewards, self.reward, self.advantage
        )


class Facts(NamedTuple):
    """The facts that every rank must know about a sample of a step. Ranks exchange facts instead of
    tokens.
    """

    prompt: int  # its id
    prompt_length: int
    length: int  # tokens that the model wrote
    end: int  # number of tokens up to the last token that the model wrote
    stopped: bool
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float = 0.0
    all_gradients: bool = False  # whether the loss has a term without the advantage


@dataclass
class PackedBatch:
    """The tensors of a strip: packed sequences, and the completion tokens that are trained on.

    The decoder computes all T tokens. The output head computes only the M rows that contribute to
    the loss, so no logits are computed for prompt tokens. For each j, the hidden state in row
    `rows[j]` predicts the token `targets[j]`. The last token of a completion is a target but not an
    input, because no token was sampled after it.

    Example: two samples of one prompt (p0 p1), with the completions (a b c) and (d e). The samples
    are on policy, and the loss is averaged over 5 tokens. The prompt is computed once, as sequence
    0. Each completion attends to the keys of the prompt and then to its own keys:

        tokens        = p0 p1 a  b  d             [T=5]
        positions     = 0  1  2  3  2             [T]
        cu_seqlens    = 0 2 4 5                   [N+1]
        kv_rows       = 0 1 · 0 1 2 3 · 0 1 4     [Tk=9]
        kv_cu_seqlens = 0 2 6 9                   [N+1]
        rows          = 1  2  3  1  4             [M=5]: p1 predicts both a and d
        targets       = a  b  c  d  e             [M]
        sample        = 0  0  0  1  1             [M]
        advantage     = 1  1  1  -1 -1            [M]
        weight        = 1/5 …                     [M]

    If each sequence has its own copy of the prompt: tokens = p0 p1 a b p0 p1 d, cu_seqlens = 0 4 7,
    rows = 1 2 3 5 6, and kv_rows is None.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N+1] int32: sequence n is tokens[cu_seqlens[n] : cu_seqlens[n+1]]
    max_len: int  # length of the longest sequence
    # [Tk] int64: the rows whose keys each sequence attends to, ending with its own rows;
    # None if each sequence attends only to its own rows
    kv_rows: Tensor | None
    # [N+1] int32: sequence n attends to kv_rows[kv_cu_seqlens[n] : kv_cu_seqlens[n+1]]
    kv_cu_seqlens: Tensor | None
    kv_max_len: int
    rows: Tensor  # [M] int64: row of the hidden state that predicts the target
    targets: Tensor  # [M] int64: the completion token
    # [M] int64: the token's sample, as an index into the step's samples on all ranks
    sample: Tensor
    advantage: Tensor  # [M] float32
    # [M] float32: the weight of the token in the loss (`token_weight` in grpo/loss.py)
    weight: Tensor
    sampling_logp: Tensor  # [M] float32: the engine's log-prob
    # [M] float32: the log-prob under the policy that sampled the token. None: on policy (ratio 1).
    # The trainer computes old_logp before the first update, unless a feature has set it.
    old_logp: Tensor | None = None
    # [M] float32: the log-prob under the reference model; None: beta is 0
    ref_logp: Tensor | None = None
    # Only features set the following fields.
    # [M] float32: a factor of the clipped term of the loss; None: 1
    importance: Tensor | None = None
    # [M] float32: the factor of the entropy bonus in the objective; None: no bonus
    entropy_weight: Tensor | None = None
    # replaces nanogrpo/model/head.py for this batch; None: nothing does
    head: Any = None
    # (first row, `Prompt.inputs`) of each prompt that has such inputs
    inputs: list[tuple[int, Any]] = field(default_factory=list)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return a copy of the batch on a device. The host does not wait for the copy to a GPU."""
        found: dict[str, Any] = {
            name: moved(x, device) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return dataclasses.replace(self, **found)


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x on a device. The host does not wait for the copy to a GPU."""
    cuda = torch.device(device).type == "cuda"
    # only a copy from pinned memory is asynchronous
    return (x.pin_memory() if cuda else x).to(device, non_blocking=True)
