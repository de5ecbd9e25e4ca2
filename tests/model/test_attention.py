"""Attention over packed sequences: the reference equals the equation, and the backend is chosen by
what the installed packages export.

The key/value cache is tested with the engine that owns it. Read next: test_decoder.py.
"""

import ast
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

from nanogrpo.errors import UserError
from nanogrpo.model import attention
from nanogrpo.model.attention import Packed, reference
from tests.conftest import (
    COMPLETIONS,
    PROMPT,
    positions_of,
    random_tokens,
    shared_prompt,
    tiny_model,
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def by_hand(q, k, v, lengths, causal=True):
    """Compute softmax(q kᵀ / √E) v over each query's past or, unless causal, its sequence, in
    float64. Query head h reads key head h // (H / K).
    """
    q, k, v = q.double(), k.double(), v.double()
    out, start = torch.zeros_like(q), 0
    for n in lengths:
        for t in range(start, start + n):
            end = t + 1 if causal else start + n
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                weights = (k[start:end, g] @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
                out[t, h] = weights @ v[start:end, g]
        start += n
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (6, 1)])
def test_the_reference_attention_is_the_equation(H, K, causal):
    lengths = [5, 1, 9]
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(15, heads, 8) for heads in (H, K, K))
    attend = Packed(*positions_of(lengths)[1].bounds[:2], causal=causal)
    torch.testing.assert_close(
        attend(0, q, k, v).double(),
        by_hand(q, k, v, lengths, causal),
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


def test_shared_keys_get_the_gradients_of_index_select_on_a_cpu():
    """Bit for bit in float32, and one rounding away from float64 in bfloat16."""
    attend = shared_prompt()
    q, k, v = (torch.randn(17, heads, 8, generator=seeded(heads)) for heads in (4, 2, 2))
    for dtype in (torch.float32, torch.bfloat16):
        ours, plain = ([x.to(dtype).requires_grad_() for x in (k, v)] for _ in range(2))
        gathered = [x.index_select(0, attend.kv_rows) for x in plain]
        expected = torch.autograd.grad(
            reference(q.to(dtype), *gathered, *attend.bounds).sum(), plain
        )
        got = torch.autograd.grad(shared_prompt()(0, q.to(dtype), *ours).sum(), ours)
        for a, b in zip(got, expected):
            if dtype == torch.float32:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


# --- the choice of a backend ---

# The parameters of the functions that we call, as the sources of these versions define them.
SIGNATURES = {
    "flash-attn 2.8.3": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
    " softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    " block_table",
    "flash-attn-4 4.0.0b36": "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    " min_seqlen_k seqused_q seqused_k gather_kv_indices page_table softmax_scale causal"
    " window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd"
    " mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata"
    " seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p gather_bwd_token_chunk",
    "torch 2.11": "query key value cu_seq_q cu_seq_k max_q max_k * return_aux scale window_size",
    "torch 2.13": "query key value cu_seq_q cu_seq_k max_q max_k * return_aux scale window_size"
    " enable_gqa seqused_k block_table num_splits",
}


def stub(name: str, parameters: str, bounds: str, result: str = "out") -> str:
    """Return the source of a function that computes the reference, and records its arguments."""
    q, k, v, *rest = parameters.split()
    parameters = ", ".join([q, k, v, *(word if word == "*" else f"{word}=None" for word in rest)])
    return f"""
from nanogrpo.model.attention import reference
calls = []
def {name}({parameters}):
    calls.append(dict(locals()))
    out = reference({q}, {k}, {v}, {bounds})
    return {result}
"""


def flash_stub(version: str, result: str = "out") -> str:
    bounds = "cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k"
    return stub("flash_attn_varlen_func", SIGNATURES[version], bounds, result)


# the files of packages that may be installed
EMPTY = {"flash_attn/other/__init__.py": ""}  # flash_attn is a namespace package
OLD = {"flash_attn/__init__.py": "def flash_attn_func(): pass"}
FLASH2 = {"flash_attn/__init__.py": flash_stub("flash-attn 2.8.3")}
FLASH4 = {"flash_attn/cute/__init__.py": flash_stub("flash-attn-4 4.0.0b36", "(out, None)")}
EARLY4 = {
    "flash_attn/cute/__init__.py": "def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None,"
    " cu_seqlens_k=None, seqused_q=None, seqused_k=None, causal=False): pass"
}
BROKEN4 = {"flash_attn/cute/__init__.py": "import cutlass_that_is_not_there"}
BROKEN2 = {"flash_attn/__init__.py": "raise ImportError('undefined symbol')"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs the files of packages, and forgets what was imported."""
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed: the stubs would not be alone")

    def forget():
        attention.flash_function.cache_clear(), attention.backend.cache_clear()
        attention._varlen_attn.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]

    def install(files: dict[str, str]) -> None:
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        importlib.invalidate_caches()

    monkeypatch.delenv("NANOGRPO_ATTENTION", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield install
    forget()


@pytest.mark.parametrize(
    ("files", "capability", "expected"),
    [
        ({}, (9, 0), "torch"),
        (EMPTY, (9, 0), "torch"),
        (OLD, (9, 0), "torch"),
        (FLASH2, (8, 9), "flash"),
        (FLASH4, (9, 0), "flash4"),
        (FLASH4, (10, 0), "flash4"),
        (FLASH4, (8, 0), "torch"),
        (FLASH4, (12, 0), "torch"),
        (FLASH2 | FLASH4, (9, 0), "flash4"),
        (FLASH2 | FLASH4, (8, 0), "flash"),
        (FLASH2 | EARLY4, (9, 0), "flash"),
    ],
)
def test_packages_are_told_apart_by_what_they_export(
    files, capability, expected, install, monkeypatch
):
    install(files)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert attention.backend("cuda", torch.bfloat16) == expected
    if expected == "flash4":
        assert attention.backend("cuda", torch.bfloat16, 256) != "flash4"


@pytest.mark.parametrize(
    ("files", "reason"), [(BROKEN4, "cutlass_that_is_not_there"), (BROKEN2, "undefined symbol")]
)
def test_a_package_that_cannot_be_imported_is_reported(files, reason, install, caplog):
    install(files)
    assert attention.backend("cuda", torch.bfloat16) == "torch"
    assert caplog.records
    assert all(reason in r.message for r in caplog.records)


@pytest.mark.parametrize("name", ["flash", "flash4"])
def test_a_backend_that_is_not_installed_is_one_sentence(name, install, monkeypatch):
    monkeypatch.setenv("NANOGRPO_ATTENTION", name)
    with pytest.raises(UserError, match=rf"NANOGRPO_ATTENTION={name} needs .*: install flash-attn"):
        attention.backend("cuda", torch.bfloat16)


@pytest.fixture
def determinism():
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("files", [FLASH2, FLASH4])
def test_our_call_fits_flash_attn(files, install, determinism):
    """It is causal unless we say no, and by torch's rule deterministic."""
    install(files)
    name = "flash" if files is FLASH2 else "flash4"
    attend = shared_prompt()
    q, k, v = (torch.randn(n, h, 8, generator=seeded(n)) for n, h in ((17, 4), (32, 2), (32, 2)))
    calls = sys.modules[attention.flash_function(attention.FLASH[name]).__module__].calls
    for settings in ({"mode": False}, {"mode": True, "warn_only": True}, {"mode": True}):
        determinism(**settings)
        out = attention.BACKENDS[name](q, k, v, *attend.bounds)
        assert torch.equal(out, reference(q, k, v, *attend.bounds))
    attention.BACKENDS[name](q, k, v, *attend.bounds[:-1], False)
    assert [call["causal"] for call in calls] == [True, True, True, False]
    assert [call["deterministic"] for call in calls] == [False, False, True, True]


@pytest.mark.parametrize("version", ["torch 2.11", "torch 2.13"])
def test_our_call_fits_torch_and_repeats_no_keys(version, install, monkeypatch):
    module = {}
    bounds = "cu_seq_q, max_q, cu_seq_k, max_k"
    exec(stub("varlen_attn", SIGNATURES[version], bounds), module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", module["varlen_attn"])
    attend = shared_prompt()
    q, k, v = (torch.randn(n, h, 8, generator=seeded(n)) for n, h in ((17, 4), (32, 2), (32, 2)))
    out = attention.torch_varlen(q, k, v, *attend.bounds)
    assert torch.equal(out, reference(q, k, v, *attend.bounds))
    attention.torch_varlen(q, k, v, *attend.bounds[:-1], False)
    causal, full = module["calls"]
    assert causal["window_size"] == (-1, 0)
    assert full["window_size"] == (-1, -1)
    for call in (causal, full):
        assert call["key"] is k
        assert call.get("enable_gqa") is (True if version == "torch 2.13" else None)


def test_the_installed_torch_has_the_signature_of_the_table():
    """Read from its source, because on other machines it might not be importable."""
    version = "torch 2.11" if torch.__version__.startswith("2.11.") else "torch 2.13"
    path = Path(torch.__file__).parent / "nn" / "attention" / "varlen.py"
    (function,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "varlen_attn"
    )
    a = function.args
    found = [*(arg.arg for arg in a.args), "*", *(arg.arg for arg in a.kwonlyargs)]
    assert found == SIGNATURES[version].split()


def test_the_backend_can_be_chosen(monkeypatch):
    choose = attention.backend.__wrapped__
    monkeypatch.delenv("NANOGRPO_ATTENTION", raising=False)
    assert choose("cpu", torch.float32) == "reference"
    # the fast ones compute in half precision only, and for some sizes of heads
    assert choose("cuda", torch.float32) == "reference"
    assert choose("cuda", torch.bfloat16, 12) == "reference"
    assert choose("cuda", torch.bfloat16) in ("flash4", "flash", "torch")
    monkeypatch.setenv("NANOGRPO_ATTENTION", "reference")
    assert choose("cuda", torch.bfloat16) == "reference"
    monkeypatch.setenv("NANOGRPO_ATTENTION", "sparse")
    with pytest.raises(
        UserError, match=r"NANOGRPO_ATTENTION=sparse is not .*flash4, flash, torch, reference\."
    ):
        choose("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "shared prompt", "both directions"])
@pytest.mark.parametrize("name", ["torch", "flash", "flash4"])
def test_fast_backends_agree_with_the_equation(name, kind):
    """With grouped queries. flash4 has no backward before Hopper."""
    if name in attention.FLASH and not attention.flash_function(attention.FLASH[name]):
        pytest.skip(f"{name} is not installed")
    if name == "flash4" and torch.cuda.get_device_capability()[0] not in (9, 10, 11):
        pytest.skip("flash-attn 4 needs Hopper or Blackwell")
    torch.manual_seed(0)
    lengths = [130, 1, 77, 300]
    attend = shared_prompt() if kind == "shared prompt" else positions_of(lengths)[1]
    attend.bounds = *attend.bounds[:-1], kind != "both directions"
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
