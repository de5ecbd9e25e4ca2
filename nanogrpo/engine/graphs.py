"""Decode with CUDA graphs: one launch for each step instead of hundreds.

In and out: as in runner.py. A graph has fixed shapes, so the number of rows is rounded up
(`rounded`). The added rows have position 0 and write to page 0 of the cache. No row owns this page.

A decode step computes only one token per row, so most of its kernels run for less time than the
host needs to launch them. A step therefore has few kernels, and a graph launches all of them at
once. One product computes q, k and v. Another product computes gate and up (`join`). A layer of
Qwen3-0.6B has eight kernels, of which four are matrix products:

    residual add and norm · qkv · QK-norm, rotation and attention · o
    residual add and norm · gate and up · SwiGLU · down

Read before: runner.py. Read next: kernels/triton/paged.py (attention).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.runner import Runner
from nanogrpo.model.decoder import Decoder


class GraphRunner(Runner):
    # While the GPU computes a stride, the host reads the previous stride and prepares the next one.
    # A row that finishes in a stride is computed until the end of the next stride.
    # With 3 steps per stride and 170 tokens per completion, about 2 % of the work is wasted.
    stride, behind = 3, 1

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.graphs: dict[tuple, Any] = {}  # with the log-probs that each graph writes

    def step(self, rows: int, params: SamplingParams) -> Tensor:
        """Replay the graph of a step. A graph is captured after the first step with its shape."""
        padded = min(rounded(rows), self.state.shape[1])
        self.state[1, rows:padded] = 0
        # the values that do not change within a graph
        shape = (padded, params.temperature, params.top_k, params.top_p)
        if shape in self.graphs:
            graph, logp = self.graphs[shape]
            graph.replay()
        else:
            # This step compiles the kernels, which is not possible during a capture.
            logp = super().step(padded, params)
            self.graphs[shape] = self.capture(padded, params)
        return logp[:rows]

    def capture(self, rows: int, params: SamplingParams) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g, _ in self.graphs.values()), None)
        # "thread_local" lets other threads synchronize during the capture,
        # for example to save a checkpoint.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logp = super().step(rows, params)
        return graph, logp


def rounded(rows: int) -> int:
    """Round up to a power of two. Numbers above 16 become a multiple of 16, and numbers above 64 a
    multiple of 32."""
    step = 32 if rows > 64 else min(16, 1 << (rows - 1).bit_length())
    return -(-rows // step) * step


def join_layers(model: Decoder) -> None:
    """Compute q, k and v in one product, and gate and up in another product, if these layers are
    `nn.Linear`."""
    blocks: Any = model.model.layers
    for block in blocks:
        attention, mlp = block.self_attn, block.mlp
        if isinstance(mlp.up_proj, nn.Linear):
            attention.project = join(attention.q_proj, attention.k_proj, attention.v_proj)
            mlp.project = join(mlp.gate_proj, mlp.up_proj)


def join(*layers: nn.Linear) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Store the weights of several layers in one tensor. Return a function that computes the
    results of all layers for the same input in one product.

    The parameters of each layer become views of this joint tensor. So copying weights to a layer
    also changes the joint tensor.
    """
    sizes, joint = [len(layer.weight) for layer in layers], []
    for parts in zip(*(layer.parameters() for layer in layers)):  # the weights, then any biases
        joint.append(torch.cat(parts))
        for part, view in zip(parts, joint[-1].split(sizes)):
            part.data = view
    return lambda x: F.linear(x, *joint).split(sizes, dim=-1)
