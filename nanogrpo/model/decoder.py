"""The decoder of Qwen3, Qwen2, Llama and Mistral models.

In: token ids `[T]` and positions `[T]` of packed sequences, an attention object (attention.py), and
the rows whose predictions are needed. Out: the result of the head operation on the hidden states of
those rows: logits `[M, V]`, log-probs `[M]`, or a loss. Parameters have the same names as in
Hugging Face, so loading and saving checkpoints needs no mapping (checkpoint.py).

    x → embed ─┬→ RMSNorm → attention ─(+)─┬→ RMSNorm → SwiGLU ─(+)→ … → RMSNorm → head operation
               └───────────────────────────┘└────────────────────┘

The model knows nothing about GRPO, engines, or sharding (distributed/fsdp.py). Training, prefill
and decoding run the same code and differ only in `attend`. A block returns two tensors instead of
their sum. On a GPU, the kernel of the next block's norm adds the two tensors. Norms, rotation and
SwiGLU are functions from kernels/reference/ on a CPU, and Triton kernels with the same names on a
GPU (dispatch.py). Read next: attention.py, then head.py.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.kernels.linear import linear
from nanogrpo.model import rope
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.head import HeadOp
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import PackedBatch

# (layer, q [T, H, E], k [T, K, E], v [T, K, E], window) → [T, H, E]
# A token attends to itself and to the window - 1 tokens before it.
# If `window` is 0, it attends to itself and to all tokens before it.
Attend = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


class Linear(nn.Linear):
    """nn.Linear, but faster for large float32 matrix products on a CPU (kernels/linear.py).

    The weights of an engine rarely change, so an engine may replace `product` with a function that
    prepares the weights once.
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """An nn.RMSNorm that can also add the residual in the same kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return functions_for(x.device).rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum itself, [T, D] each. None stands for a
        residual of 0.
        """
        if residual is None:
            return self(x), x
        return functions_for(x.device).add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        D, H, K, E = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        qkv_bias = cfg.attention_bias or cfg.model_type == "qwen2"
        self.layer, self.E = layer, E
        self.window = cfg.layers.window(layer) if cfg.layers else 0
        self.q_proj = Linear(D, H * E, bias=qkv_bias)
        self.k_proj = Linear(D, K * E, bias=qkv_bias)
        self.v_proj = Linear(D, K * E, bias=qkv_bias)
        self.o_proj = Linear(H * E, D, bias=cfg.attention_bias)
        # Only Qwen3 normalizes each head's query and key before the rotation.
        self.q_norm = RMSNorm(E, cfg.rms_norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(E, cfg.rms_norm_eps) if cfg.qk_norm else None
        self.eps = cfg.rms_norm_eps + 0.0  # raises TypeError here if the value is a string

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries [T, H·E], keys and values [T, K·E]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.E)) for y in self.project(x))  # [T, H or K, E]
        weights = [norm and norm.weight for norm in (self.q_norm, self.k_norm)]  # [E] or None
        # in a decode step on a GPU, the attention kernel does the rotation
        rotate = getattr(attend, "rotate", functions_for(x.device).norm_rope)
        q, k = rotate(q, k, *weights, cos, sin, self.eps)
        return self.o_proj(attend(self.layer, q, k, v, self.window).flatten(-2))  # [T, D]


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, width, bias = cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias
        self.gate_proj = Linear(D, width, bias=bias)
        self.up_proj = Linear(D, width, bias=bias)
        self.down_proj = Linear(width, D, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up, [T, F] each."""
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        inner = functions_for(x.device).swiglu(*self.project(x))  # [T, F]
        return self.down_proj(inner)  # [T, D]


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """Return two tensors [T, D] whose sum is the block's output. The sum of x and residual (if
        it is not None) is the block's input.
        """
        normed, residual = self.input_layernorm.of_sum(x, residual)
        attended = self.self_attn(normed, cos, sin, attend)
        normed, residual = self.post_attention_layernorm.of_sum(attended, residual)
        return self.mlp(normed), residual


class Body(nn.Module):
    """The embedding, the blocks and the final norm: tokens [T] → hidden states [T, D]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines that rotate queries and keys at positions [T]. With
        positions [T, E], each dimension has its own position.
        """
        c = self.cfg
        frequencies, factor = rope.frequencies(
            c.rope_theta, c.head_dim, c.rope_scaling, positions.device
        )
        # Angles are always float32, because bf16 cannot represent all positions above 256.
        angles = (positions.view(len(positions), -1) * frequencies).unsqueeze(1)  # [T, 1, E]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if factor == 1 else (cos * factor, sin * factor)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        cos, sin = self.angles(positions)
        x, residual = self.embed_tokens(tokens), None  # [T, D]
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, attend)
        return self.norm.of_sum(x, residual)[0]


class Head(nn.Module):
    """The output matrix [V, D]. `forward` returns the result of `op`, a function that the caller
    passes.

    Only this module's `forward` uses the weight, so FSDP can gather it once per call.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden_size))

    def forward(self, hidden: Tensor, op: HeadOp):
        return op(hidden, self.weight)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The head operation for decoding: [M, D] → [M, V]. Training uses the operations of head.py,
    which do not store all logits.
    """
    return F.linear(hidden, weight)


class Decoder(nn.Module):
    """A Qwen3, Qwen2, Llama or Mistral language model.

    >>> attend = StripAttention(cu_seqlens, max_len)
    >>> out = model(tokens, positions, attend, rows, logits)  # [T], [T], [M] → [M, V]
    """

    saved_dtype = torch.float32  # dtype of the checkpoints, set by checkpoint.empty_model
    # A context in which the model acts as its own frozen reference model; None: no such context.
    own_reference: Callable[[], AbstractContextManager] | None = None
    sharding: Any = None  # distributed/fsdp.py sets it

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = Body(cfg)  # named as in Hugging Face checkpoints: model.layers.0.…
        self.lm_head = Head(cfg)
        self.tie()
        self.reset_parameters()

    @classmethod
    def from_config(cls, raw: dict, where: str) -> "Decoder":
        """Return a new model for the fields of a config.json. Errors call this file `where`."""
        return cls(ModelConfig.from_dict(raw, where))

    def arranged(self, found: Iterable[tuple[str, Any]], where: str) -> Iterable[tuple[str, Any]]:
        """Rename a checkpoint's tensors to match the model's parameters. In this class, parameters
        have the same names as in checkpoints.
        """
        return found

    def tie(self) -> None:
        """Make the head and the embedding share one parameter if the config says so. Call this
        method again after `to_empty`, which separates head and embedding.
        """
        if self.cfg.tie_word_embeddings:
            # nn.Embedding declares its weight as a Tensor
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that are sharded and recomputed separately, in the order of computation."""
        return [*self.model.layers]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices from Normal(0, 0.02), as transformers does. Set the weights of norms to 1,
        and biases to 0.
        """
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif "norm" in name:
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.02)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        op: HeadOp = logits,
        *inputs,
    ):
        """Return `op` of the hidden states in `rows`.

        `tokens` and `positions` are [T]. `rows` holds indices [M] into T, or is None for all rows.
        `Head` explains `op`. `inputs` holds the inputs other than tokens, if the model has any (see
        PackedBatch).
        """
        hidden = self.model(tokens, positions, attend, *inputs)  # [T, D]
        if rows is not None:
            # Rows may repeat: the last token of a shared prompt predicts all first tokens.
            hidden = functions_for(hidden.device).gather_rows(hidden, rows)  # [M, D]
        return self.lm_head(hidden, op)

    def forward_strip(self, batch: PackedBatch, op: HeadOp):
        """Return `op` of the hidden states that predict the completion tokens of a packed batch."""
        attend = StripAttention(
            batch.cu_seqlens, batch.max_len, batch.kv_rows, batch.kv_cu_seqlens, batch.kv_max_len
        )
        return self(batch.tokens, batch.positions, attend, batch.rows, op, *batch.inputs)
