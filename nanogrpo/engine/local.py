"""The local engine, which samples completions from our own decoder, in the trainer's process,
with a key/value cache.

In: prompts (token ids), the number of completions per prompt, and `SamplingParams`. Out: `Sample`s.
Read before: base.py (the interface). Read next: cache.py, scheduler.py (which completions
are decoded), runner.py (how they are decoded).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.engine.cache import KVCache
from nanogrpo.engine.graphs import GraphRunner, join_layers
from nanogrpo.engine.paged_cache import PagedCache
from nanogrpo.engine.runner import Runner
from nanogrpo.engine.scheduler import Completion, Scheduler
from nanogrpo.kernels.linear import REPACK_FROM, repacked
from nanogrpo.model import weights
from nanogrpo.model.decoder import Decoder, Linear
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample


class LocalEngine:
    """An `engine.base.Engine` that samples from a copy of the trainer's weights.

    Because of the copy, an optimizer step does not change the engine's weights, and the engine
    can use a different dtype. The default `dtype` is float32 on a CPU and bfloat16 on CUDA.
    Log-probs are always float32.

    On a GPU, `cache_tokens` limits the memory of the cache (see paged_cache.py). If the cache is
    too small for all slots, fewer completions are decoded at the same time.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        decoder: type[Decoder] = Decoder,
        max_len: int,  # maximum length of prompt and completion together
        device: torch.device | str,
        slots: int = 64,  # maximum number of completions decoded at the same time
        cache_tokens: int | None = None,  # None: enough for all slots
        dtype: torch.dtype | None = None,
        paged: bool = False,  # use the paged cache on a CPU, too
    ):
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.slots, self.version = slots, -1
        # A random initialization would take time and change the global random state.
        with torch.device("meta"):
            self.model = decoder(cfg)
        self.prepare(self.model)
        size = cfg, slots, max_len, self.dtype, self.device
        self.cache: KVCache | PagedCache
        if on_gpu or paged:
            self.cache = PagedCache(*size, cache_tokens)
            join_layers(self.model)
        else:
            self.cache = KVCache(*size)
        self.scheduler = Scheduler(self.cache, slots, self.device)
        kind = GraphRunner if on_gpu else Runner
        self.runner = kind(self.model, self.cache, self.scheduler.state)

    def prepare(self, model: Decoder) -> None:
        """Move a new model from the meta device to the engine's device, with uninitialized
        weights.
        """
        model.to(self.dtype).requires_grad_(False).to_empty(device=self.device).tie()

    def copy(self, model: nn.Module) -> None:
        """Copy the weights that `model` uses in its forward pass."""
        mine = dict(self.model.named_parameters())
        for name, weight in weights.full_parameters(model, computed=True):
            mine[name].copy_(weight)

    @torch.no_grad()
    def load(self, model: nn.Module, version: int) -> None:
        """Copy the weights of a Decoder with the same configuration.

        Every rank must call this method, because it gathers the shards of the weights.
        """
        self.copy(model)
        self.version = version
        for module in self.model.modules():
            if isinstance(module, Linear) and module.weight.numel() >= REPACK_FROM:
                module.product = repacked(module.weight, module.bias, self.slots)
        self.runner.head = repacked(self.model.lm_head.weight, None, self.slots)

    def metrics(self) -> dict[str, float]:
        if isinstance(self.cache, KVCache):
            return {}
        count, self.scheduler.put_back = self.scheduler.put_back, 0
        return {"sampling/put_back": count}

    def close(self) -> None:
        """Free the weights, the cache and the graphs. The engine cannot be used afterwards."""
        vars(self).clear()

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Return n completions of each prompt, in order (see Engine.sample)."""
        return [[], *self.sample_steps(prompts, n, params, step)][-1]

    @torch.inference_mode()
    def sample_steps(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> Iterator[list[Sample]]:
        """Yield the completions with their tokens so far, each time the host has read tokens. Do
        not load weights until the iteration has ended.
        """
        completions = [
            Completion(
                Sample(p, j, [], [], False, []),
                p.max_tokens or params.max_tokens,
                stream(params.seed, step, p.id, j),
                i * n + j,
                p.token_ids,
            )
            for i, p in enumerate(prompts)
            for j in range(n)
        ]
        samples = [c.sample for c in completions]
        self.scheduler.start(completions)
        runner, unread = self.runner, []
        while self.scheduler.schedule(runner.prefill, runner.stride * (1 + runner.behind)):
            unread.append(runner.decode(self.scheduler.active, params))
            if len(unread) > runner.behind:
                found = unread.pop(0)()  # waits for the GPU
                self.scheduler.postprocess(self.version, params.stop_token_ids, *found)
                yield samples
