"""The decoder: Qwen3, and by the same config.json fields Qwen2 and Qwen2.5.

In: token ids `[T]` and positions `[T]` of packed sequences, a way to attend (attention.py), the
rows whose next token is wanted. Out: whatever the head operation makes of the hidden states of
those rows: logits `[M, V]`, log-probs `[M]`, or a loss. Parameter names are Hugging Face's, so that
checkpoints load and save without a mapping (checkpoint.py).

    x → embed ─┬→ RMSNorm → attention ─(+)─┬→ RMSNorm → SwiGLU ─(+)→ … → RMSNorm → head operation
               └───────────────────────────┘└────────────────────┘

The model knows nothing of GRPO, of sharding (fsdp.py wraps it from outside) or of engines: the
packed forward for training and the cached forward for decoding are the same code, handed another
`attend`. Read next: attention.py, then ops.py (the head).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.errors import UserError
from nanogrpo.kernels.linear import linear
from nanogrpo.model.attention import Packed
from nanogrpo.model.head import HeadOp
from nanogrpo.types import PackedBatch

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# (layer, q [T,H,E], k [T,K,E], v [T,K,E]) → [T,H,E]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that decide the computation, under their Hugging Face names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    # Qwen3 only: a bias on q, k, v and o; Qwen2 always has one on q, k and v
    attention_bias: bool = False

    @property
    def pair_cost(self) -> float:
        """What a query-key pair costs in units of a token's matrix products: 4·H·E FLOP against 2 a
        weight, in each layer.
        """
        heads, kv_heads = (
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        weights = self.hidden_size * (2 * heads + 2 * kv_heads + 3 * self.intermediate_size)
        return 2 * heads / weights

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> ModelConfig:
        """Reads the dict of a config.json; UserError on an architecture or a feature that this
        decoder does not compute.

        A field that is absent means what it means to transformers, or is an error.
        """
        kind = raw.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise UserError(
                f"{where}: model_type {kind!r} is not supported; use a dense model of type {' or '.join(ARCHITECTURES)}."
            )
        # transformers 5 and 4 name it differently
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UserError(
                f"{where}: rope_parameters is {rope!r:.60} and no object; take the config.json that belongs to the weights."
            )
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UserError(
                f"{where}: rope_type {rope.get('rope_type', rope.get('type'))!r} is not supported; remove the scaling."
            )
        if raw.get("use_sliding_window"):
            raise UserError(
                f"{where}: use_sliding_window is not supported; set it to false if every layer attends to everything."
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise UserError(
                f"{where}: hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is."
            )
        # the inner one wins
        raw = {**raw, "rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0}
        fields = {f.name: f for f in dataclasses.fields(cls)}
        found = {
            n: _checked(n, raw[n], f.type, where)
            for n, f in fields.items()
            if raw.get(n) is not None
        }
        if kind == "qwen3":
            # Qwen3's is its own; not D / H, which it may well differ from
            found.setdefault("head_dim", 128)
        elif "hidden_size" in found and "num_attention_heads" in found:
            found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
        missing = [
            n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in found
        ]
        if missing:
            raise UserError(
                f"{where}: the field {missing[0]} is missing; take the config.json that belongs to the weights."
            )
        cfg = cls(**found)
        if cfg.num_attention_heads % cfg.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads must be a multiple of num_key_value_heads, one of them is wrong."
            )
        if cfg.head_dim % 2:
            raise UserError(
                f"{where}: head_dim {cfg.head_dim} is odd, but the rotation pairs dimensions; correct it."
            )
        return cfg

    def to_dict(self) -> dict:
        """A config.json that transformers (4 and 5) and vLLM read."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            **dataclasses.asdict(self),
            "rope_parameters": rope,
            "hidden_act": "silu",
            "use_sliding_window": False,
        }


KINDS = {
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
}
MOST = {
    "int": 2**31,
    "float": 2**100,
    "num_hidden_layers": 2**12,
}  # beyond these it is no model, and would only take forever to build


def _checked(name: str, value, kind: str, where: str):
    """The value of a field of config.json, when it is what the field's type says and, a number,
    above 0 and not absurd.
    """
    types, wanted = KINDS[kind]
    # to Python, True is an int
    right = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
    most = MOST.get(name, MOST.get(kind, math.inf))
    if not right or (kind in MOST and not 0 < value < most):
        wanted += " above 0" if kind in MOST else ""
        wanted += f" and below {most}" if right and kind in MOST and value >= most else ""
        raise UserError(
            f"{where}: {name} is {value!r:.60} but must be {wanted}; take the config.json that belongs to the weights."
        )
    return value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), pairing dimension i with i + E/2 as Hugging Face
    does.

    x: [T, heads, E]; cos, sin: [T, 1, E] float32. Computed in float32 or, of float64, in float64;
    returned in x's dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension; statistics in float32 (Zhang and
    Sennrich 2019).
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Linear(nn.Linear):
    """nn.Linear whose larger float32 products on a CPU are made by the faster library
    (kernels/linear.py).
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        D, H, K, E = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        qkv_bias = cfg.model_type == "qwen2" or cfg.attention_bias
        self.layer, self.E = layer, E
        self.q_proj = Linear(D, H * E, bias=qkv_bias)
        self.k_proj = Linear(D, K * E, bias=qkv_bias)
        self.v_proj = Linear(D, K * E, bias=qkv_bias)
        self.o_proj = Linear(H * E, D, bias=cfg.model_type == "qwen3" and cfg.attention_bias)
        # Qwen3 normalises each head's query and key before the rotation; Qwen2 does not.
        self.q_norm = RMSNorm(E, cfg.rms_norm_eps) if cfg.model_type == "qwen3" else nn.Identity()
        self.k_norm = RMSNorm(E, cfg.rms_norm_eps) if cfg.model_type == "qwen3" else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.E)))  # [T, H, E]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.E)))  # [T, K, E]
        v = self.v_proj(x).unflatten(-1, (-1, self.E))  # [T, K, E]
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)  # [T, H, E]
        return self.o_proj(out.flatten(-2))  # [T, D]


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [T, F] inside, [T, D] out
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, blocks and the last norm: tokens [T] → hidden states [T, D]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # Angles in float32 whatever the model's dtype: bf16 positions beyond 256 would coincide.
        even = torch.arange(0, self.cfg.head_dim, 2, device=tokens.device, dtype=torch.float32)
        # [T, E/2]
        angles = positions[:, None].float() * (
            1.0 / self.cfg.rope_theta ** (even / self.cfg.head_dim)
        )
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [T, 1, E]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(tokens)  # [T, D]
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class Head(nn.Module):
    """The output matrix [V, D]. What is done with it is the caller's: `op(hidden, weight)`.

    A module of its own, whose forward is the only place where the weight is read, so that sharding
    can gather it once a call.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden_size))

    def forward(self, hidden: Tensor, op: HeadOp):
        return op(hidden, self.weight)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The head operation of decoding: [M, D] → [M, V]. Training never calls it: ops.py scores
    targets without keeping logits.
    """
    return F.linear(hidden, weight)


class Decoder(nn.Module):
    """A Qwen3 or Qwen2 language model.

    >>> out = model(tokens, positions, Packed(cu_seqlens, max_len), rows, logits)     # [T], [T], [M] → [M, V]
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = Body(cfg)  # named as in Hugging Face checkpoints: model.layers.0.…
        self.lm_head = Head(cfg)
        self.tie()
        self.reset_parameters()

    def tie(self) -> None:
        """Makes head and embedding one parameter where the config says so; again after `to_empty`,
        which parts them.
        """
        if self.cfg.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal(0, 0.02) matrices, as transformers initialises Qwen; norms one, biases zero."""
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.normal_(0.0, std)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        op: HeadOp = logits,
    ):
        """tokens, positions: [T]; rows: [M] indices into T (None: all); op: what to do with the M
        hidden states (see Head).
        """
        hidden = self.model(tokens, positions, attend)  # [T, D]
        return self.lm_head(hidden if rows is None else hidden.index_select(0, rows), op)

    def forward_packed(self, batch: PackedBatch, op: HeadOp):
        """Runs over a strip, and `op` over the hidden states that predict its completion tokens."""
        attend = Packed(
            batch.cu_seqlens, batch.max_len, batch.kv_rows, batch.kv_cu_seqlens, batch.kv_max_len
        )
        return self(batch.tokens, batch.positions, attend, batch.rows, op)
