"""The embedded engine: samples completions from our own decoder, in the trainer's process, with a
key/value cache.

In: prompts (token ids), n completions of each, `SamplingParams`. Out: `Sample`s: ids, their
log-probs, stopped or cut.

    waiting completions ──► rows 0 … b-1 of the cache ──► one decode step for all b rows ──► one new token a row ──┐
         prompt prefilled once,      ▲                                                                             │
         copied to its group's rows  └── a finished row leaves at once: a waiting completion, or the last row, ◄───┘
                                         takes its place, so that rows stay dense and a step costs what is alive

A completion starts one token early: the prompt *without its last token* is prefilled, and the last
prompt token is the first input of decoding. So prefill needs no output head and no sampling, and
tokens are drawn in one place.

Read before: rollout.py (the interface), attention.py (the cache). Read next: draw.py (how a token
is drawn), vllm_engine.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.engine.sampler import draw
from nanogrpo.errors import UserError
from nanogrpo.model import lora
from nanogrpo.model.attention import KVCache, Packed
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Prompt, Sample

# prompts are prefilled in packs of at most this many tokens: bounds the memory of a pack
PREFILL_TOKENS = 8192
PACK_FROM = 1 << 14  # elements of a weight from which packing pays for itself (see `_packed`)


@dataclass
class _Completion:
    """One completion under way: what the host knows of it."""

    prompt: Prompt
    index: int
    limit: int  # completion tokens at most
    key: int
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.token_ids) == self.limit

    @property
    def position(self) -> int:  # of the token that is fed next
        return len(self.prompt.token_ids) - 1 + len(self.token_ids)


def _bucket(x: int, least: int, most: int) -> int:
    """x rounded up to least · 2ⁱ, at most `most`: few shapes, so few graphs."""
    return min(least << (-(-x // least) - 1).bit_length(), most)


def _packed(weight: Tensor, bias: Tensor | None, rows: int):
    """F.linear(x, weight, bias), float32 on a CPU, for the weight as it is now, laid out as oneDNN
    wants it for `rows` rows.

    64 rows by a weight [2048, 256] on one core of an AMD EPYC: 0.29 ms, against 0.72 ms by the BLAS
    behind F.linear; below PACK_FROM elements the call itself costs what is gained. Inference only:
    a packed weight has no gradient.
    """
    ready = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x, *_: torch.ops.mkldnn._linear_pointwise(x, ready, bias, "none", [], "")


class LocalEngine:
    """Samples from a copy of the trainer's weights (rollout.Engine).

    The copy costs one pass over the weights and buys safety: an optimizer step cannot change what
    `version` means midway, and the engine has its own dtype: float32 on a CPU, bfloat16 on CUDA
    unless told. Log-probs are float32 everywhere.
    """

    def __init__(
        self,
        model_cfg: ModelConfig,
        *,
        max_len: int,  # the context: prompt and completion
        slots: int = 64,  # completions decoded at once
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        graphs: bool | None = None,  # CUDA graphs for decoding; None: on a GPU
    ):
        c = model_cfg
        if max_len > c.max_position_embeddings:
            raise UserError(
                f"max_len {max_len} exceeds max_position_embeddings {c.max_position_embeddings}; lower it."
            )
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.max_len, self.slots, self.version = max_len, slots, -1
        # no random initialisation: it would take time and move the global random state
        with torch.device("meta"):
            self.model = Decoder(c).to(self.dtype).requires_grad_(False)
        self.model.to_empty(device=self.device).tie()
        self.cache = KVCache(
            c.num_hidden_layers,
            slots,
            c.num_key_value_heads,
            max_len,
            c.head_dim,
            self.dtype,
            self.device,
        )
        # each row's next token, its position, its key
        self.state = torch.zeros(3, slots, dtype=torch.int64, device=self.device)
        # [slots] float32, of the token just drawn
        self.logp = torch.zeros(slots, device=self.device)
        self.head = logits  # the head operation (model.Head)
        self.packs = (
            self.device.type == "cpu"
            and self.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        )
        # decode steps between two looks of the host: each look waits for the GPU
        self.stride = 8 if on_gpu else 1
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] | None = (
            {} if (on_gpu if graphs is None else graphs) else None
        )

    @torch.no_grad()
    def load(self, model: nn.Module, version: int) -> None:
        """Copies the weights of a Decoder with the same configuration, adapters merged; shards are
        gathered: all ranks call.
        """
        mine = dict(self.model.named_parameters())
        for name, weight in lora.full_parameters(model, self.dtype):
            mine[name].copy_(weight)
        if self.packs:
            for module in self.model.modules():
                if isinstance(module, nn.Linear) and module.weight.numel() >= PACK_FROM:
                    module.forward = _packed(module.weight, module.bias, self.slots)
            self.head = _packed(self.model.lm_head.weight, None, self.slots)
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Frees weights, cache and graphs; the engine cannot be used afterwards."""
        del self.graphs, self.cache, self.model

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
        limits: Sequence[int] | None = None,
    ) -> list[Sample]:
        """n completions of each prompt, in order. `limits` [len(prompts)]: a max_tokens for each
        prompt's completions.
        """
        if self.version < 0:
            raise RuntimeError("LocalEngine.load must be called before sample.")
        asked = list(zip(prompts, limits or [params.max_tokens] * len(prompts)))
        for p, limit in asked:
            size = len(p.token_ids)
            if size == 0 or limit < 1:
                raise UserError(
                    f"Prompt {p.id}: {size} tokens and max_tokens {limit} were given; both must be at least 1."
                )
            if size + limit > self.max_len:
                raise UserError(
                    f"Prompt {p.id}: its {size} tokens and max_tokens {limit} exceed the engine's context of {self.max_len}; "
                    "shorten one of them or raise the context."
                )
        todo = [
            _Completion(p, j, limit, stream(params.seed, step, p.id, j))
            for p, limit in asked
            for j in range(n)
        ]
        waiting, active, prefilled = deque(todo), [], {}
        stops = frozenset() if params.ignore_stop else frozenset(params.stop_token_ids)
        self.cache.clear()
        while waiting or active:
            self._admit(waiting, active, prefilled)
            self._step(active, params, stops)
            self._compact(active)
        return [
            Sample(
                c.prompt, c.index, c.token_ids, c.logp, c.stopped, [self.version] * len(c.token_ids)
            )
            for c in todo
        ]

    # --- who sits where: row r of the cache and of `state` belongs to active[r] ---

    def _admit(
        self, waiting: deque[_Completion], active: list[_Completion], prefilled: dict
    ) -> None:
        """Waiting completions take the free rows, those of one prompt together. `prefilled`: the
        keys and values at hand.
        """
        while waiting and len(active) < self.slots:
            prompt, first = waiting[0].prompt, len(active)
            # completions wait in order: the prompts prefilled before all have their rows
            if id(prompt) not in prefilled:
                prefilled.clear()
                prefilled.update(self._prefill(waiting))
            while waiting and waiting[0].prompt is prompt and len(active) < self.slots:
                active.append(waiting.popleft())
            self.cache.fill(first, len(active), *prefilled[id(prompt)])
            state = [(prompt.token_ids[-1], c.position, c.key) for c in active[first:]]
            self.state[:, first : len(active)] = torch.tensor(state, device=self.device).T

    def _compact(self, active: list[_Completion]) -> None:
        """Finished completions leave; the last living rows move into their places, so that the
        living are rows 0 … b-1.
        """
        living = [r for r, c in enumerate(active) if not c.finished]
        gaps = [r for r in range(len(living)) if active[r].finished]
        # as many living rows lie beyond the end as gaps before it
        movers = living[len(living) - len(gaps) :]
        if gaps:
            self.cache.move(movers, gaps, max(active[r].position for r in movers))
            self.state[:, gaps] = self.state[:, movers]
        for mover, gap in zip(movers, gaps):
            active[gap] = active[mover]
        del active[len(living) :]

    def _prefill(self, waiting: Sequence[_Completion]) -> dict[int, tuple[Tensor, Tensor]]:
        """The first prompts that wait, as many as PREFILL_TOKENS allows: id(prompt) → keys, values
        [L, K, length - 1, E].
        """
        pack, room = {}, PREFILL_TOKENS
        for prompt in {id(c.prompt): c.prompt for c in waiting}.values():
            room -= len(prompt.token_ids)
            if pack and room < 0:
                break
            pack[id(prompt)] = prompt
        lengths = [len(p.token_ids) - 1 for p in pack.values()]
        # [T]
        tokens = torch.tensor(
            [t for p in pack.values() for t in p.token_ids[:-1]],
            dtype=torch.int64,
            device=self.device,
        )
        some = [n for n in lengths if n]  # a prompt of one token leaves nothing to prefill
        if not some:
            nothing = self.cache.k[:, 0, :, :0]  # [L, K, 0, E]
            return dict.fromkeys(pack, (nothing, nothing))
        positions = torch.cat([torch.arange(n, device=self.device) for n in some])  # [T]
        attend = Packed(
            torch.tensor([0, *some], device=self.device).cumsum(0).int(), max(some), keep=True
        )
        self.model.model(tokens, positions, attend)  # the body alone: no row needs the vocabulary
        # [L, K, T, E] each
        keys, values = (torch.stack(kept).transpose(1, 2) for kept in zip(*attend.kept.values()))
        return dict(zip(pack, zip(keys.split(lengths, dim=2), values.split(lengths, dim=2))))

    # --- decoding ---

    def _step(
        self, active: list[_Completion], params: SamplingParams, stops: frozenset[int]
    ) -> None:
        """Up to `stride` tokens for every active row, then one look: what was drawn, who is done."""
        rows = b = len(active)
        steps = min(self.stride, min(c.limit - len(c.token_ids) for c in active))
        span = max(c.position for c in active) + steps
        # a graph has fixed shapes: rows b … rows-1 idle along, at positions that surely exist
        if self.graphs is not None:
            rows, span = _bucket(b, 1, self.slots), _bucket(span, 64, self.max_len)
            self.state[1, b:rows] = 0
        drawn = []
        for _ in range(steps):
            self._forward(rows, span, params) if self.graphs is None else self._replay(
                rows, span, params
            )
            drawn.append((self.state[0, :b].clone(), self.logp[:b].clone()))
        # [steps, b] each; here the host waits for the GPU
        tokens, logps = (torch.stack(x).cpu() for x in zip(*drawn))
        if not logps.isfinite().all():
            bad = active[int(logps.isfinite().all(0).int().argmin())].prompt.id
            raise FloatingPointError(
                f"Logits are not finite (prompt {bad}, weights {self.version}): the weights diverged or overflow {self.dtype}."
            )
        for c, ids, logp in zip(active, tokens.T.tolist(), logps.T.tolist()):
            # what follows a stop token is discarded
            end = next((i + 1 for i, t in enumerate(ids) if t in stops), steps)
            c.token_ids += ids[:end]
            c.logp += logp[:end]
            c.stopped = c.token_ids[-1] in stops

    def _forward(self, rows: int, span: int, params: SamplingParams) -> None:
        """One token for each of the first `rows` rows: reads and advances `state`, writes `logp`.
        No word from the host.
        """
        token, position, key = self.state[:, :rows]  # [rows] each
        self.cache.begin(position, span)
        scores = self.model(token, position, self.cache, None, self.head)  # [rows, V]
        drawn, self.logp[:rows] = draw(scores, key, position, params)
        token.copy_(drawn)
        position += 1

    def _replay(self, rows: int, span: int, params: SamplingParams) -> None:
        """`_forward` as a CUDA graph, captured when its shape is first met: one launch in place of
        hundreds.
        """
        # all that a graph bakes in
        shape = (rows, span, params.temperature, params.top_k, params.top_p, params.min_p)
        if shape not in self.graphs:
            before, aside, now = (
                self.state.clone(),
                torch.cuda.Stream(),
                torch.cuda.current_stream(),
            )
            aside.wait_stream(now)
            # a rehearsal, as capturing asks for: libraries allocate their workspaces
            with torch.cuda.stream(aside):
                self._forward(rows, span, params)
            now.wait_stream(aside)
            # what the rehearsal wrote to the cache, the real step writes again
            self.state.copy_(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=next((g.pool() for g in self.graphs.values()), None)):
                self._forward(rows, span, params)
            self.graphs[shape] = graph
        self.graphs[shape].replay()
