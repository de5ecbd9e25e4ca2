"""Run the model of an engine: prefill prompts, and decode one token for each active row.

In: completions (scheduler.py). Out: a `Prefix` for each prompt, or the next tokens of all rows. A
prompt is prefilled once for all its completions. Prefill leaves out the last token of a prompt,
because this token is the first input of decoding. So prefill needs neither the output head nor
sampling, and all tokens are sampled in `step`.

Read next: sampler.py (how a token is sampled), graphs.py (the same on a GPU).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nanogrpo.engine import sampler
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.cache import KVCache, Prefix
from nanogrpo.engine.paged_cache import PagedCache
from nanogrpo.engine.scheduler import Completion
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.model.head import HeadOp
from nanogrpo.types import moved

PREFILL_TOKENS = 8192  # maximum number of tokens prefilled together, to limit memory


class Runner:
    # Number of decode steps between two transfers to the host.
    stride = 1
    # The host launches this many later strides before it reads the tokens of a stride.
    behind = 0

    def __init__(self, model: Decoder, cache: KVCache | PagedCache, state: Tensor):
        self.model, self.cache, self.state = model, cache, state  # state: see Scheduler
        self.head: HeadOp = logits
        self.filters = sampler.filter_logits

    def prefill(self, waiting: Iterable[Completion]) -> dict[int, Prefix]:
        """Compute the keys and values of the first waiting prompts, up to PREFILL_TOKENS tokens."""
        prompts: list[list[int]] = []
        tokens: list[int] = []  # [T]
        inputs: list[tuple[int, Any]] = []  # as in PackedBatch
        for c in {id(c.start): c for c in waiting}.values():
            # the count includes the last token of each prompt
            if prompts and len(tokens) + len(prompts) + len(c.start) > PREFILL_TOKENS:
                break
            if c.sample.prompt.inputs is not None:
                inputs.append((len(tokens), c.sample.prompt.inputs))
            prompts.append(c.start)
            tokens += c.start[:-1]
        lengths = [len(ids) - 1 for ids in prompts]
        some = [n for n in lengths if n]  # a prompt of one token needs no prefill
        if not some:
            nothing = self.cache.kv[:, :, 0, :, :0]  # [2, L, K, 0, E]
            return {id(prompt): Prefix(prompt, nothing) for prompt in prompts}
        T, positions = len(tokens), [p for n in some for p in range(n)]
        host = torch.tensor([*tokens, *positions, *accumulate(some, initial=0)])
        ids, at, cu_seqlens = moved(host, self.state.device).split((T, T, len(some) + 1))
        strip = StripAttention(cu_seqlens.int(), max(some))
        kept: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            kept.append(torch.stack((k, v)))  # [2, T, K, E]
            return strip(layer, q, k, v, window)

        self.model.model(ids, at, attend, *inputs)  # without the head
        split = torch.stack(kept, 1).transpose(2, 3).split(lengths, dim=3)  # [2, L, K, t, E] each
        return {id(prompt): Prefix(prompt, kv) for prompt, kv in zip(prompts, split)}

    def decode(self, active: Sequence[Completion], params: SamplingParams) -> Any:
        """Sample up to `stride` tokens per active row. Return a function that waits for them, and
        returns the rows, tokens and log-probs for `Scheduler.postprocess`.
        """
        b = len(active)
        steps = min(self.stride, max(c.room for c in active))
        sampled = []
        for _ in range(steps):
            logp = self.step(b, params)
            # log-probs travel as integers with the same bits, so one transfer is enough
            sampled.append(torch.stack((self.state[0, :b], logp.view(torch.int32))))  # [2, b] int64
        tokens, bits = torch.stack(sampled, 1).to("cpu", non_blocking=True)  # to pinned memory
        copied = self.state.is_cuda and torch.cuda.current_stream().record_event()

        def read() -> tuple:
            if copied:
                copied.synchronize()  # the host waits for the GPU
            logp = bits.int().view(torch.float32)
            if not logp.isfinite().all():
                bad = active[int(logp.isfinite().all(0).int().argmin())].sample.prompt.id
                raise FloatingPointError(
                    f"Logits are not finite (prompt {bad}): the weights diverged or overflow "
                    f"{self.cache.kv.dtype}; lower --learning-rate in a new run, or remove the "
                    "last checkpoint before --resume."
                )
            return active, tokens, logp

        return read

    def step(self, rows: int, params: SamplingParams) -> Tensor:
        """Sample one token for each of the first `rows` rows, and advance `state`. Return the
        log-probs of the tokens, [rows] float32.

        This step needs no data from the host, so a CUDA graph can replay it.
        """
        token, position, key = self.state[:, :rows]  # [rows] each
        self.cache.begin(position)
        found = self.model(token, position, self.cache, None, self.head)  # [rows, V]
        kept = self.filters(found, params)
        sampled, logp = sampler.sample(kept, key, position, params)
        token.copy_(sampled)
        position += 1
        return logp
