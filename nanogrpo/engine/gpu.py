"""One decode step on a GPU, with few kernel launches.

In: the newest token of each row and its position, [b] each. Out: logits [b, V]. A row is one token,
so most of its kernels take less time than their launch: at 64 rows, a layer of Qwen3-0.6B is ten
launches, of which four are matrix products:

    residual add and norm · qkv · QK-norm and rotation · attention (two) · o
    residual add and norm · gate and up · SwiGLU · down

Compared with `Decoder.forward`, q, k and v come from one product, as do gate and up. The sum that
ends a block is computed by the norm of the next one, and cosines and sines come from a table. The
results are the same, except that a product may be rounded differently. With --load-in-4bit, the
products are those of `Decoder.forward`. Read next:
kernels/paged.py (attention), kernels/norm.py (the other kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.engine.cache import PagedCache
from nanogrpo.model.decoder import Decoder


def join(*layers: nn.Linear) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Store the weights of layers with the same input in one tensor, and return a function that
    computes all their results in one product.

    Each layer keeps its own parameters, as views of that tensor. So whoever copies weights to the
    layers also changes the joint tensor.
    """
    sizes = [len(layer.weight) for layer in layers]
    weight = layers[0].weight.new_empty(sum(sizes), layers[0].in_features)
    bias = None if layers[0].bias is None else weight.new_empty(sum(sizes))
    for i, layer in enumerate(layers):
        layer.weight = nn.Parameter(weight.split(sizes)[i], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.split(sizes)[i], requires_grad=False)
    return lambda x: F.linear(x, weight, bias).split(sizes, dim=-1)


class GPUStep:
    """Call it with the tokens and positions of a step, after `cache.begin(positions, …)`."""

    def __init__(self, model: Decoder, cache: PagedCache, max_len: int):
        self.model, self.cache = model, cache
        blocks: Any = model.model.layers
        for block in blocks:
            attention, mlp = block.self_attn, block.mlp
            if not isinstance(mlp.up_proj, nn.Linear):  # in four bits, with adapters
                continue
            attention.project = join(attention.q_proj, attention.k_proj, attention.v_proj)
            mlp.project = join(mlp.gate_proj, mlp.up_proj)
        everywhere = torch.arange(max_len, device=cache.table.device)
        self.cos, self.sin = model.model.angles(everywhere)  # [max_len, 1, E] each

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        body: Any = self.model.model
        residual = None
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        x = body.embed_tokens(tokens)  # [b, D]
        for block in body.layers:
            if residual is None:
                normed, residual = block.input_layernorm(x), x
            else:
                normed, residual = block.input_layernorm.of_sum(x, residual)
            x = block.self_attn(normed, cos, sin, self.cache)
            normed, residual = block.post_attention_layernorm.of_sum(x, residual)
            x = block.mlp(normed)
        return F.linear(body.norm.of_sum(x, residual)[0], self.model.lm_head.weight)
