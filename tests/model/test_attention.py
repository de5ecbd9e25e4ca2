"""Attention over packed sequences: the reference equals the equation, and the backend is chosen and
logged.

The key/value cache is tested with the engine that owns it. Read next: test_decoder.py.
"""

import itertools
import logging

import pytest
import torch

from nanogrpo.errors import UserError
from nanogrpo.model import attention
from nanogrpo.model.attention import Packed, reference
from tests.conftest import positions_of, random_tokens, tiny_model


def by_hand(q, k, v, lengths):
    """Compute softmax(q kᵀ / √E) v over each query's past, in float64. Query head h reads key head
    h // (H / K).
    """
    q, k, v = q.double(), k.double(), v.double()
    out, start = torch.zeros_like(q), 0
    for n in lengths:
        for t in range(start, start + n):
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                weights = (k[start : t + 1, g] @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
                out[t, h] = weights @ v[start : t + 1, g]
        start += n
    return out


@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (6, 1)])
def test_the_reference_attention_is_the_equation(H, K):
    lengths = [5, 1, 9]
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(15, heads, 8) for heads in (H, K, K))
    _, attend = positions_of(lengths)
    torch.testing.assert_close(
        reference(q, k, v, *attend.bounds).double(),
        by_hand(q, k, v, lengths),
        rtol=0,
        atol=1e-5,
    )


def test_packed_remembers_the_keys_and_values_when_asked():
    model = tiny_model()
    tokens = random_tokens(9)
    positions, attend = positions_of([4, 5])
    keeping = Packed(*attend.bounds[:2], keep=True)
    assert torch.equal(model(tokens, positions, attend), model(tokens, positions, keeping))
    assert attend.kept is None
    assert sorted(keeping.kept) == [0, 1]
    assert all(x.shape == (9, 2, 16) for pair in keeping.kept.values() for x in pair)


PROMPT, COMPLETIONS = 5, [4, 1, 7]


def shared_prompt() -> Packed:
    """Pack one prompt, then its completions. Each sees the keys of the prompt and its own."""
    cu_seqlens = torch.tensor([0, PROMPT, *COMPLETIONS]).cumsum(0)  # [N+1]
    own = [torch.arange(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]
    rows = [own[0], *(torch.cat((own[0], mine)) for mine in own[1:])]
    kv_cu_seqlens = torch.tensor([0, *map(len, rows)]).cumsum(0, dtype=torch.int32)
    return Packed(
        cu_seqlens.int(),
        max(COMPLETIONS),
        torch.cat(rows),
        kv_cu_seqlens,
        PROMPT + max(COMPLETIONS),
    )


def test_completions_that_share_a_prompt_equal_those_that_repeat_it():
    """Compares outputs and gradients. The keys of the prompt receive the sum of the completions'
    gradients.
    """
    model = tiny_model()
    prompt, *completions = random_tokens(PROMPT + sum(COMPLETIONS)).split([PROMPT, *COMPLETIONS])
    positions = torch.cat([torch.arange(PROMPT), *(PROMPT + torch.arange(n) for n in COMPLETIONS)])

    def run(tokens, positions, attend, rows):
        model.zero_grad()
        out = model(tokens, positions, attend, torch.cat(rows))
        out.square().sum().backward()
        return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

    ends = torch.tensor([0, PROMPT, *COMPLETIONS]).cumsum(0).tolist()
    rows = [torch.arange(a, b) for a, b in itertools.pairwise(ends[1:])]
    shared, gradients = run(torch.cat((prompt, *completions)), positions, shared_prompt(), rows)

    lengths = [PROMPT + n for n in COMPLETIONS]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = [torch.arange(end - n, end) for end, n in zip(ends, COMPLETIONS)]
    tokens = torch.cat([torch.cat((prompt, mine)) for mine in completions])
    repeated, expected = run(tokens, *positions_of(lengths), rows)

    torch.testing.assert_close(shared, repeated, rtol=0, atol=1e-5)
    for name in expected:
        assert (gradients[name] - expected[name]).abs().max() <= 1e-5 * expected[
            name
        ].abs().max(), name


def test_the_backend_is_logged_once_and_can_be_chosen(monkeypatch, caplog):
    monkeypatch.delenv("NANOGRPO_ATTENTION", raising=False)
    attention.backend.cache_clear()
    with caplog.at_level(logging.INFO, logger="nanogrpo"):
        assert [attention.backend("cpu", torch.float32) for _ in range(3)] == ["reference"] * 3
    assert [r.message for r in caplog.records] == ["attention: reference (cpu, torch.float32)"]
    # the fast ones compute in half precision only
    assert attention.backend.__wrapped__("cuda", torch.float32) == "reference"
    assert attention.backend.__wrapped__("cuda", torch.bfloat16) in ("flash", "torch")
    monkeypatch.setenv("NANOGRPO_ATTENTION", "reference")
    assert attention.backend.__wrapped__("cuda", torch.bfloat16) == "reference"
    monkeypatch.setenv("NANOGRPO_ATTENTION", "sparse")
    with pytest.raises(
        UserError, match=r"NANOGRPO_ATTENTION=sparse is not .*reference, torch, flash"
    ):
        attention.backend.__wrapped__("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["torch", "flash"])
def test_fast_backends_agree_with_the_equation(name, shared):
    if name == "flash":
        pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    lengths = [130, 1, 77, 300]
    attend = shared_prompt() if shared else positions_of(lengths)[1]
    bounds = [x.cuda() if isinstance(x, torch.Tensor) else x for x in attend.bounds]
    queries, keys = int(bounds[0][-1]), int(bounds[2][-1])
    q, k, v, g = (
        torch.randn(n, heads, 128, device="cuda")
        for n, heads in ((queries, 8), (keys, 2), (keys, 2), (queries, 8))
    )

    def run(backend, dtype):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = attention.BACKENDS[backend](*inputs, *bounds)
        return [out, *torch.autograd.grad(out, inputs, g.to(dtype))]

    exact, plain, fast = (
        run("reference", torch.float64),
        run("reference", torch.bfloat16),
        run(name, torch.bfloat16),
    )
    for want, eager, got in zip(exact, plain, fast):
        assert (got - want).abs().max() <= 2 * (eager - want).abs().max()
