"""Run the model of an engine, to prefill prompts and to decode one token for each active row.

In: completions (scheduler.py). Out: a `Prefix` for each prompt, or the next tokens of all rows. A
prompt is prefilled once for all its completions. The last token of a prompt is left out, because
this token is the first input of decoding. So prefill needs neither the output head nor sampling,
and all tokens are sampled in `step`.

Read next: sampler.py (how a token is sampled), graphs.py (the same on a GPU).
"""

from collections.abc import Iterable, Sequence
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

PREFILL_TOKENS = 8192  # maximum number of tokens prefilled together, to limit memory


class Runner:
    # Number of decode steps between two transfers to the host.
    stride = 1

    def __init__(self, model: Decoder, cache: KVCache | PagedCache, state: Tensor):
        self.model, self.cache, self.state = model, cache, state  # state: see Scheduler
        self.logp = torch.zeros(state.shape[1], device=state.device)  # of each row's newest token
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
            return {id(ids): Prefix(ids, nothing) for ids in prompts}
        device = self.state.device
        positions = torch.cat([torch.arange(n, device=device) for n in some])  # [T]
        cu_seqlens = torch.tensor([0, *some], device=device).cumsum(0).int()  # [N+1]
        strip = StripAttention(cu_seqlens, max(some))
        kept: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            kept.append(torch.stack((k, v)))  # [2, T, K, E]
            return strip(layer, q, k, v, window)

        self.model.model(torch.tensor(tokens, device=device), positions, attend, *inputs)  # no head
        split = torch.stack(kept, 1).transpose(2, 3).split(lengths, dim=3)  # [2, L, K, t, E] each
        return {id(ids): Prefix(ids, kv) for ids, kv in zip(prompts, split)}

    def decode(self, active: Sequence[Completion], params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Sample up to `stride` tokens per active row. Return tokens and log-probs [steps, b]."""
        b = len(active)
        steps = min(self.stride, max(c.room for c in active))
        span = max(c.position + min(steps, c.room) for c in active)
        sampled = []
        for _ in range(steps):
            self.step(b, span, params)
            sampled.append((self.state[0, :b].clone(), self.logp[:b].clone()))
        tokens, logp = (torch.stack(x).cpu() for x in zip(*sampled))  # the host waits for the GPU
        if not logp.isfinite().all():
            bad = active[int(logp.isfinite().all(0).int().argmin())].sample.prompt.id
            raise FloatingPointError(
                f"Logits are not finite (prompt {bad}): the weights diverged or overflow "
                f"{self.cache.kv.dtype}; lower --learning-rate in a new run, or remove the last "
                "checkpoint before --resume."
            )
        return tokens, logp

    def step(self, rows: int, span: int, params: SamplingParams) -> None:
        """Sample one token for each of the first `rows` rows, advance `state`, and write `logp`.

        No computation here depends on the host, so a CUDA graph can replay this step.
        """
        token, position, last, key = self.state[:, :rows]  # [rows] each
        self.cache.begin(position, span)
        found = self.model(token, position, self.cache, None, self.head)  # [rows, V]
        kept = self.filters(found, params)
        sampled, self.logp[:rows] = sampler.sample(kept, key, position, params)
        token.copy_(sampled)
        torch.minimum(position + 1, last, out=position)  # a finished row keeps its position
