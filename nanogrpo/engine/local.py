"""The embedded engine: samples completions from our own decoder, in the trainer's process, with a
key/value cache.

In: prompts (token ids), the number of completions per prompt, and `SamplingParams`. Out: `Sample`s.

    waiting ──► schedule: give free rows ──► decode: one new token ──► postprocess: append it, ──┐
                to waiting completions       for each active row       free the finished rows    │
                          ▲                                                                      │
                          └──────────────────────────────────────────────────────────────────────┘

A finished row is refilled immediately, by a waiting completion or by the last active one. So the
active rows are always rows 0 … b-1 of the cache, and a step only computes active rows.

A prompt is prefilled once for its group, *without its last token*, which is the first input of
decoding. So prefill needs neither the output head nor sampling, and all tokens are sampled in one
place.

Read before: engine/base.py (the interface), model/attention.py (the cache). Read next:
engine/sampler.py (how a token is sampled), vllm/client.py (the other engine).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanogrpo.engine import sampler
from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.kernels.linear import PACK_FROM, packed
from nanogrpo.model import lora
from nanogrpo.model.attention import KVCache, Packed
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample

PREFILL_TOKENS = 8192  # maximum number of tokens prefilled together, which limits the memory

# keys and values of a prompt without its last token, [L, K, length - 1, E] each
Prefix = tuple[Tensor, Tensor]


@dataclass
class Completion:
    """A sample that is being generated."""

    sample: Sample
    limit: int  # maximum number of completion tokens
    key: int  # key of its random stream

    @property
    def finished(self) -> bool:
        return self.sample.stopped or len(self.sample.token_ids) == self.limit

    @property
    def position(self) -> int:
        """The position of the next input token."""
        return len(self.sample.prompt.token_ids) - 1 + len(self.sample.token_ids)


class Scheduler:
    """Assigns rows to completions: row r of the cache and of `state` belongs to active[r]."""

    def __init__(self, cache: KVCache, slots: int, device: torch.device):
        self.cache, self.slots = cache, slots
        # [3, slots]: the next input token of each row, the token's position, and the row's random
        # key. The tensor is never replaced, because CUDA graphs use its address.
        self.state = torch.zeros(3, slots, dtype=torch.int64, device=device)

    def start(self, completions: Iterable[Completion]) -> None:
        """Queue these completions, and drop all others."""
        self.waiting: deque[Completion] = deque(completions)
        self.active: list[Completion] = []
        self.prefixes: dict[int, Prefix] = {}  # by id(prompt.token_ids)
        self.cache.clear()

    def schedule(self, prefill: Callable[[list[list[int]]], dict[int, Prefix]]) -> bool:
        """Assign the free rows to waiting completions. Return whether any row is active."""
        while self.waiting and len(self.active) < self.slots:
            ids, first = self.waiting[0].sample.prompt.token_ids, len(self.active)
            if id(ids) not in self.prefixes:
                # Completions are queued in prompt order, so the old prefixes are no longer needed.
                self.prefixes.clear()
                self.prefixes |= prefill([c.sample.prompt.token_ids for c in self.waiting])
            while (
                len(self.active) < self.slots
                and self.waiting
                and self.waiting[0].sample.prompt.token_ids is ids
            ):
                self.active.append(self.waiting.popleft())
            self.cache.fill(first, len(self.active), *self.prefixes[id(ids)])
            new = [(ids[-1], c.position, c.key) for c in self.active[first:]]
            self.state[:, first : len(self.active)] = torch.tensor(new, device=self.state.device).T
        return bool(self.active)

    def postprocess(
        self, tokens: Tensor, logp: Tensor, version: int, stops: Container[int]
    ) -> None:
        """Append the new tokens [steps, b] to their samples, then fill the gaps in the rows."""
        for c, ids, values in zip(self.active, tokens.T.tolist(), logp.T.tolist()):
            # tokens after a stop token are discarded
            size = next((i + 1 for i, t in enumerate(ids) if t in stops), len(ids))
            c.sample.token_ids += ids[:size]
            c.sample.logp += values[:size]
            c.sample.versions += [version] * size
            c.sample.stopped = ids[size - 1] in stops
        kept = [r for r, c in enumerate(self.active) if not c.finished]
        gaps = [r for r in range(len(kept)) if self.active[r].finished]
        if gaps:  # fill them with the last unfinished rows
            moved = kept[-len(gaps) :]
            self.cache.move(moved, gaps, max(self.active[r].position for r in moved))
            self.state[:, gaps] = self.state[:, moved]
            for gap, row in zip(gaps, moved):
                self.active[gap] = self.active[row]
        del self.active[len(kept) :]


def _bucket(x: int, least: int, most: int) -> int:
    """Round x up to least · 2ⁱ, but at most to `most`, so that there are few shapes and graphs."""
    return min(least << (-(-x // least) - 1).bit_length(), most)


class LocalEngine:
    """Samples from a copy of the trainer's weights (an `engine.base.Engine`).

    Copying takes one pass over the weights. The copy keeps an optimizer step from changing the
    weights of a `version`, and lets the engine use a different dtype: float32 on a CPU, bfloat16 on
    CUDA unless `dtype` is given. Log-probs are always float32.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        max_len: int,  # length of the context: prompt and completion
        device: torch.device | str,
        slots: int = 64,  # number of completions decoded at the same time
        dtype: torch.dtype | None = None,
    ):
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.max_len, self.slots, self.version = max_len, slots, -1
        # on the meta device, because a random initialization takes time and changes the global
        # random state
        with torch.device("meta"):
            self.model = Decoder(cfg).to(self.dtype).requires_grad_(False)
        self.model.to_empty(device=self.device).tie()
        size = cfg.num_hidden_layers, slots, cfg.num_key_value_heads, max_len, cfg.head_dim
        self.cache = KVCache(*size, self.dtype, self.device)
        self.scheduler = Scheduler(self.cache, slots, self.device)
        self.logp = torch.zeros(slots, device=self.device)  # log-prob of each row's newest token
        # number of decode steps per transfer to the host, because each transfer waits for the GPU
        self.stride = 8 if on_gpu else 1
        self.replays = on_gpu  # whether decode steps run as CUDA graphs
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def load(self, model: nn.Module, version: int) -> None:
        """Copy the weights of a Decoder with the same configuration, with its adapters merged.

        Every rank calls this, because shards are gathered.
        """
        mine = dict(self.model.named_parameters())
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

    def metrics(self) -> dict[str, float]:
        return {}

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
            )
            for p in prompts
            for j in range(n)
        ]
        self.scheduler.start(completions)
        while self.scheduler.schedule(self._prefill):
            tokens, logp = self._decode(self.scheduler.active, params)
            self.scheduler.postprocess(tokens, logp, self.version, params.stop_token_ids)
            yield [c.sample for c in completions]

    def _prefill(self, prompts: Sequence[list[int]]) -> dict[int, Prefix]:
        """Compute the keys and values of as many of the first prompts as PREFILL_TOKENS allows."""
        pack: dict[int, list[int]] = {}
        room = PREFILL_TOKENS
        for ids in {id(p): p for p in prompts}.values():
            room -= len(ids)
            if pack and room < 0:
                break
            pack[id(ids)] = ids[:-1]
        lengths = [len(ids) for ids in pack.values()]
        some = [n for n in lengths if n]  # a prompt of one token leaves nothing to prefill
        if not some:
            nothing = self.cache.k[:, 0, :, :0]  # [L, K, 0, E]
            return dict.fromkeys(pack, (nothing, nothing))
        tokens = torch.tensor(list(itertools.chain(*pack.values())), device=self.device)  # [T]
        positions = torch.cat([torch.arange(n, device=self.device) for n in some])  # [T]
        cu_seqlens = torch.tensor([0, *some], device=self.device).cumsum(0).int()  # [N+1]
        attend = Packed(cu_seqlens, max(some), keep=True)
        self.model.model(tokens, positions, attend)  # without the head: nothing is sampled here
        layers = zip(*(attend.kept or {}).values())  # first the keys of all layers, then the values
        keys, values = (torch.stack(kept).transpose(1, 2) for kept in layers)  # [L, K, T, E] each
        return dict(zip(pack, zip(keys.split(lengths, dim=2), values.split(lengths, dim=2))))

    def _decode(
        self, active: Sequence[Completion], params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Sample up to `stride` tokens per active row. Return tokens and log-probs [steps, b]."""
        rows = b = len(active)
        steps = min(self.stride, min(c.limit - len(c.sample.token_ids) for c in active))
        span = max(c.position for c in active) + steps
        forward = self._forward
        # A graph has fixed shapes, so rows b … rows-1 are computed too, at a valid position.
        if self.replays:
            rows, span = _bucket(b, 1, self.slots), _bucket(span, 64, self.max_len)
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
        token, position, key = self.scheduler.state[:, :rows]  # [rows] each
        self.cache.begin(position, span)
        logits = self.model(token, position, self.cache, None, self.head)  # [rows, V]
        sampled, self.logp[:rows] = sampler.sample(logits, key, position, params)
        token.copy_(sampled)
        position += 1

    def _replay(self, rows: int, span: int, params: SamplingParams) -> None:
        """Run `_forward` as a CUDA graph, with one launch instead of hundreds. The graph is
        captured when its shape first occurs.
        """
        # everything that is constant in a graph
        shape = (rows, span, params.temperature, params.top_k, params.top_p, params.min_p)
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
