"""The embedded engine: samples completions from our own decoder, in the trainer's process, with a
key/value cache.

In: prompts (token ids), the number of completions per prompt, and `SamplingParams`. Out: `Sample`s.

    waiting ──► schedule: give free rows ──► decode: one new token ──► postprocess: append it, ──┐
                to waiting completions       for each active row       free the finished rows    │
                          ▲                                                                      │
                          └──────────────────────────────────────────────────────────────────────┘

A finished row is refilled immediately, by a waiting completion or by the last active one. So the
active rows are always rows 0 … b-1 of the cache, and a step only computes active rows. If the cache
of a GPU is full, the youngest completion returns to the queue and later goes on from its tokens.

A prompt is prefilled once for its group, *without its last token*, which is the first input of
decoding. So prefill needs neither the output head nor sampling, and all tokens are sampled in one
place.

Read before: engine/base.py (the interface), engine/cache.py (the caches). Read next:
engine/sampler.py (how a token is sampled), engine/gpu.py (a decode step on a GPU), vllm/client.py
(the other engine).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.engine import sampler
from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.engine.cache import KVCache, PagedCache, Prefix
from nanogrpo.engine.gpu import GPUStep
from nanogrpo.kernels.linear import PACK_FROM, packed
from nanogrpo.model import checkpoint, lora
from nanogrpo.model.attention import Packed
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample

PREFILL_TOKENS = 8192  # maximum number of tokens prefilled together, which limits the memory


@dataclass
class Completion:
    """A sample that is being generated."""

    sample: Sample
    limit: int  # maximum number of completion tokens
    key: int  # key of its random stream
    turn: int  # its place in the order of all completions
    # The tokens it starts from: its prompt, the same list for its whole group; or, after it was put
    # back, a list of its own with all tokens so far.
    start: list[int]

    @property
    def finished(self) -> bool:
        return self.sample.stopped or not self.room

    @property
    def room(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.limit - len(self.sample.token_ids)

    @property
    def position(self) -> int:
        """The position of the next input token."""
        return len(self.sample.prompt.token_ids) - 1 + len(self.sample.token_ids)


class Scheduler:
    """Assigns rows to completions: row r of the cache and of `state` belongs to active[r]."""

    def __init__(self, cache: KVCache | PagedCache, slots: int, device: torch.device):
        self.cache, self.slots = cache, slots
        self.put_back = 0  # completions that left the full cache, since the last `metrics`
        # [4, slots]: the next input token of each row, the token's position, the row's last
        # position, and its random key. The tensor is never replaced, because CUDA graphs use its
        # address.
        self.state = torch.zeros(4, slots, dtype=torch.int64, device=device)

    def start(self, completions: Iterable[Completion]) -> None:
        """Queue these completions, and drop all others."""
        self.waiting: deque[Completion] = deque(completions)
        self.active: list[Completion] = []
        self.prefixes: dict[int, Prefix] = {}  # by id(completion.start)
        self.cache.clear()

    def schedule(
        self, prefill: Callable[[Iterable[Completion]], dict[int, Prefix]], ahead: int
    ) -> bool:
        """Make room for the next `ahead` tokens of each row, and assign the free rows to waiting
        completions. Return whether any row is active.

        However small the cache is, it holds one completion of any length. So the oldest one is
        never put back, and all of them finish.
        """
        while not self.cache.reserve(c.position + min(ahead, c.room) for c in self.active):
            self._put_back_youngest()
        while self.waiting and len(self.active) < self.slots:
            ids, first = self.waiting[0].start, len(self.active)
            if id(ids) not in self.prefixes:
                if not self.cache.fits(len(ids) - 1 + ahead):
                    break
                # Completions are queued in order, so the old prefixes are no longer needed.
                self.prefixes = prefill(self.waiting)
            free = min(self.slots - first, len(self.waiting))
            group = next((i for i in range(free) if self.waiting[i].start is not ids), free)
            filled = self.cache.fill(first, group, self.prefixes[id(ids)], ahead)
            if not filled:
                break
            self.active += [self.waiting.popleft() for _ in range(filled)]
            new = [
                (ids[-1], c.position, c.position + c.room - 1, c.key) for c in self.active[first:]
            ]
            self.state[:, first : len(self.active)] = torch.tensor(new, device=self.state.device).T
        return bool(self.active)

    def postprocess(
        self, tokens: Tensor, logp: Tensor, version: int, stops: Container[int]
    ) -> None:
        """Append the new tokens [steps, b] to their samples, then drop the finished rows."""
        for c, ids, values in zip(self.active, tokens.T.tolist(), logp.T.tolist()):
            # tokens after a stop token, or above the limit, are discarded
            ids = ids[: c.room]
            size = next((i + 1 for i, t in enumerate(ids) if t in stops), len(ids))
            c.sample.token_ids += ids[:size]
            c.sample.logp += values[:size]
            c.sample.versions += [version] * size
            c.sample.stopped = ids[size - 1] in stops
        kept = [r for r, c in enumerate(self.active) if not c.finished]
        if len(kept) < len(self.active):
            self._keep(kept)

    def _put_back_youngest(self) -> None:
        """Return the youngest active completion to the front of the queue."""
        row = max(range(len(self.active)), key=lambda r: self.active[r].turn)
        c = self.active[row]
        c.start = c.sample.prompt.token_ids + c.sample.token_ids
        self.waiting.appendleft(c)
        self.put_back += 1
        self._keep([r for r in range(len(self.active)) if r != row])

    def _keep(self, kept: list[int]) -> None:
        """Keep only these rows, in increasing order; the last of them move into the gaps."""
        rows = list(range(len(kept)))
        gaps = sorted({*rows} - {*kept})
        moved = kept[len(kept) - len(gaps) :]
        for gap, row in zip(gaps, moved):
            rows[gap] = row
        self.cache.keep(rows, max((self.active[r].position for r in moved), default=0))
        self.active = [self.active[r] for r in rows]
        if gaps:
            self.state[:, gaps] = self.state[:, moved]


class LocalEngine:
    """Samples from a copy of the trainer's weights (an `engine.base.Engine`).

    Copying takes one pass over the weights. The copy keeps an optimizer step from changing the
    weights of a `version`, and lets the engine use a different dtype: float32 on a CPU, bfloat16 on
    CUDA unless `dtype` is given. Log-probs are always float32.

    With `four_bits`, it uses the trainer's frozen weights themselves, which no step changes, and
    copies only the adapters. It does not merge them. Where the trainer's weights are sharded, the
    shards are gathered once, in four bits.

    On a GPU, `cache_tokens` limits the memory of the cache: see `engine.cache.cache_tokens`. If it
    is too small for all slots, fewer completions are decoded at the same time.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        max_len: int,  # length of the context: prompt and completion
        device: torch.device | str,
        slots: int = 64,  # maximum number of completions decoded at the same time
        cache_tokens: int | None = None,  # None: enough for all slots
        dtype: torch.dtype | None = None,
        paged: bool | None = None,  # None: on a GPU
        four_bits: Config | None = None,  # the options of a run with --load-in-4bit
    ):
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.max_len, self.slots, self.version = max_len, slots, -1
        # on the meta device, because a random initialization takes time and changes the global
        # random state
        with torch.device("meta"):
            self.model = checkpoint.decoder_for(cfg)
            if four_bits:
                lora.attach(self.model, four_bits)
            self.model.to(self.dtype).requires_grad_(False)
        self.shares = four_bits is not None
        if not self.shares:
            self.model.to_empty(device=self.device).tie()
        size = cfg.num_hidden_layers, slots, cfg.num_key_value_heads, max_len, cfg.head_dim
        self.cache: KVCache | PagedCache
        self.gpu_step: GPUStep | None = None
        if on_gpu if paged is None else paged:
            self.cache = PagedCache(*size, self.dtype, self.device, cache_tokens)
            self.gpu_step = GPUStep(self.model, self.cache, max_len)
        else:
            self.cache = KVCache(*size, self.dtype, self.device)
        self.scheduler = Scheduler(self.cache, slots, self.device)
        self.logp = torch.zeros(slots, device=self.device)  # log-prob of each row's newest token
        # Number of decode steps per transfer to the host, because each transfer waits for the GPU.
        # A row that finishes in between is computed to the end; with 8 steps, that is about 2 % of
        # the work at 170 tokens per completion.
        self.stride = 8 if on_gpu else 1
        self.replays = on_gpu  # whether decode steps run as CUDA graphs
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def load(self, model: nn.Module, version: int) -> None:
        """Copy the weights of a Decoder with the same configuration, with its adapters merged.

        Every rank calls this, because shards are gathered.
        """
        mine = dict(self.model.named_parameters())
        if self.shares:
            self._share(model, mine)
        else:
            for name, weight in lora.full_parameters(model, computed=True):
                mine[name].copy_(weight)
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and module.weight.numel() >= PACK_FROM:
                # replace the forward of this module, not of its class
                linear = packed(module.weight, module.bias, self.slots)
                module.forward = linear  # type: ignore[method-assign]
        # the head operation (decoder.Head)
        self.head = packed(self.model.lm_head.weight, None, self.slots)
        self.version = version

    def _share(self, model: nn.Module, mine: dict[str, nn.Parameter]) -> None:
        """Take the frozen weights, only the first time, and copy the adapters."""
        first = self.version < 0
        fsdp.reshard(model)  # FSDP would free a gathered parameter
        taken = {}
        for name, p in model.named_parameters():
            if first or lora.is_adapter(name):
                where = self.device, mine[name].dtype
                taken[name] = lora.gathered(p).to(*where, copy=lora.is_adapter(name))
        self.model.load_state_dict(taken, strict=False, assign=first)  # no tied head in them
        self.model.tie()

    def metrics(self) -> dict[str, float]:
        if self.gpu_step is None:
            return {}
        count, self.scheduler.put_back = self.scheduler.put_back, 0
        return {"sampling/put_back": count}

    def close(self) -> None:
        """Free weights, cache and graphs; the engine cannot be used afterwards."""
        vars(self).clear()

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
    ) -> list[Sample]:
        """Return n completions of each prompt, in order (see Engine.sample)."""
        samples: list[Sample] = []
        for growing in self.sample_steps(prompts, n, params, step):
            samples = growing
        return samples

    @torch.inference_mode()
    def sample_steps(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> Iterator[list[Sample]]:
        """Yield the completions of `sample` after each decode step, while they grow."""
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
        self.scheduler.start(completions)
        while self.scheduler.schedule(self._prefill, self.stride):
            tokens, logp = self._decode(self.scheduler.active, params)
            self.scheduler.postprocess(tokens, logp, self.version, params.stop_token_ids)
            yield [c.sample for c in completions]

    def _prefill(self, waiting: Iterable[Completion]) -> dict[int, Prefix]:
        """Compute the keys and values of as many of the first prompts as PREFILL_TOKENS allows."""
        pack: dict[int, list[int]] = {}
        images: list[tuple[int, Any]] = []  # as in PackedBatch
        room, row = PREFILL_TOKENS, 0
        for c in {id(c.start): c for c in waiting}.values():
            ids = c.start
            room -= len(ids)
            if pack and room < 0:
                break
            pack[id(ids)] = ids
            if c.sample.prompt.images is not None:
                images.append((row, c.sample.prompt.images))
            row += len(ids) - 1
        lengths = [len(ids) - 1 for ids in pack.values()]
        some = [n for n in lengths if n]  # a prompt of one token leaves nothing to prefill
        if not some:
            nothing = self.cache.k[:, 0, :, :0]  # [L, K, 0, E]
            return {key: Prefix(ids, nothing, nothing) for key, ids in pack.items()}
        tokens = [t for ids in pack.values() for t in ids[:-1]]
        positions = torch.cat([torch.arange(n, device=self.device) for n in some])  # [T]
        cu_seqlens = torch.tensor([0, *some], device=self.device).cumsum(0).int()  # [N+1]
        attend = Packed(cu_seqlens, max(some), keep=True)
        # without the head: nothing is sampled here
        self.model.model(torch.tensor(tokens, device=self.device), positions, attend, *images)
        layers = zip(*(attend.kept or {}).values())  # first the keys of all layers, then the values
        keys, values = (torch.stack(kept).transpose(1, 2) for kept in layers)  # [L, K, T, E] each
        split = zip(pack.items(), keys.split(lengths, dim=2), values.split(lengths, dim=2))
        return {key: Prefix(ids, k, v) for (key, ids), k, v in split}

    def _decode(
        self, active: Sequence[Completion], params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Sample up to `stride` tokens per active row. Return tokens and log-probs [steps, b]."""
        rows = b = len(active)
        steps = min(self.stride, max(c.room for c in active))
        span = max(c.position + min(steps, c.room) for c in active)
        forward = self._forward
        # A graph has fixed shapes, so rows b … rows-1 are computed too, at a valid position.
        if self.replays:
            rows = min(1 << (b - 1).bit_length(), self.slots)
            self.scheduler.state[1, b:rows] = 0
            forward = self._replay
        sampled = []
        for _ in range(steps):
            forward(rows, span, params)
            sampled.append((self.scheduler.state[0, :b].clone(), self.logp[:b].clone()))
        tokens, logp = (torch.stack(x).cpu() for x in zip(*sampled))  # the host waits for the GPU
        if not logp.isfinite().all():
            bad = active[int(logp.isfinite().all(0).int().argmin())].sample.prompt.id
            raise FloatingPointError(
                f"Logits are not finite (prompt {bad}, weights {self.version}): the weights "
                f"diverged or overflow {self.dtype}."
            )
        return tokens, logp

    def _forward(self, rows: int, span: int, params: SamplingParams) -> None:
        """Sample one token for each of the first `rows` rows. This advances `state` and writes
        `logp`.

        Nothing in here depends on the host, so a CUDA graph can replay it.
        """
        token, position, last, key = self.scheduler.state[:, :rows]  # [rows] each
        self.cache.begin(position, span)
        if self.gpu_step:
            logits = self.gpu_step(token, position)  # [rows, V]
        else:
            logits = self.model(token, position, self.cache, None, self.head)  # [rows, V]
        sampled, self.logp[:rows] = sampler.sample(logits, key, position, params)
        token.copy_(sampled)
        torch.minimum(position + 1, last, out=position)  # a finished row stays where it is

    def _replay(self, rows: int, span: int, params: SamplingParams) -> None:
        """Run `_forward` as a CUDA graph, with one launch instead of hundreds. The graph is
        captured when its shape first occurs.
        """
        # Everything that is constant in a graph. The span is not: a paged cache does not need it.
        shape = (rows, params.temperature, params.top_k, params.top_p, params.min_p)
        if shape not in self.graphs:
            state = self.scheduler.state
            now, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            before = state.clone()
            aside.wait_stream(now)
            # Capturing needs a warm-up run, in which libraries allocate their workspaces. The real
            # step overwrites what the warm-up writes to the cache.
            with torch.cuda.stream(aside):
                self._forward(rows, span, params)
            now.wait_stream(aside)
            state.copy_(before)
            graph = torch.cuda.CUDAGraph()
            pool = next((g.pool() for g in self.graphs.values()), None)
            # Another thread may synchronize meanwhile, such as the one that writes a checkpoint.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._forward(rows, span, params)
            self.graphs[shape] = graph
        self.graphs[shape].replay()
