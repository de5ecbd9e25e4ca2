"""Contract: kernels of a decoder block move the bytes that kernels/README.md says, in few launches.

The counts come from meta tensors (traffic.py); times need a GPU. Read next: test_contracts.py.
"""

import functools
from pathlib import Path

import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs

from nanogrpo.extras import head_dtype
from nanogrpo.extras.bitwise import swapped
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from tests.kernels.traffic import QWEN3, Traffic, block_traffic, rows

block_traffic = functools.cache(block_traffic)
ROOT = Path(__file__).resolve().parents[2]


def test_one_gpu_needs_4_products_instead_of_7_and_copies_only_the_gradient_of_v():
    joint = block_traffic("triton", joint=True)
    for found, apart, count in zip(joint, block_traffic("triton"), (4, 8)):
        assert (found.products.launches, apart.products.launches) == (count, 7 * count // 4)
    assert joint[1].elementwise.names.count("copy_") == 1


def test_float32_logits_are_written_and_read_but_their_gradient_has_16_bits(monkeypatch):
    """The product of float32 logits writes 2·M·V bytes more. The counter has each argument of the
    row kernel once: 6·M·V bytes instead of 2·M·V.
    """
    monkeypatch.setattr(dispatch, "choice", "triton")
    meta, M, V = torch.device("meta"), 64, QWEN3.vocab_size
    numbers = torch.empty(M, device=meta)
    hidden, weight = (torch.empty(n, 8, device=meta).bfloat16() for n in (M, V))
    batch = numbers.long(), LossInputs(numbers, numbers), Clip(0.2, 0.2)
    counts = []
    for functions in (dispatch.functions_for(meta), head_dtype.functions(meta)):
        found = Traffic()
        with swapped(meta, functions), found.counting():
            ops.head_policy_loss(hidden.requires_grad_(), weight, *batch, chunk=M)
        counts.append((found.elementwise.bytes, found.products.bytes))
    (elementwise, products), wide = counts
    assert wide == (elementwise + 4 * M * V, products + 2 * M * V)


def test_the_readme_prints_the_traffic():
    text = (ROOT / "kernels" / "README.md").read_text()
    for row in rows():
        assert row in text
