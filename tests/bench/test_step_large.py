"""Tests of the step bench for real sizes, run small on a CPU: the same code, FSDP2 included, in a
world of one.

Only what a GPU would provide is faked: its name, its process group, its allocator's counts, and
running out of memory. Read next: bench/step_large.py.
"""

import contextlib
import dataclasses
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from bench import common, readme, runs, step_large, step_sides, step_time, tables_step
from nanogrpo.distributed import world
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder, logits

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    # TRL uses deprecated parts of transformers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TINY = common.small_qwen3(32, 2, 104, 32)
CASE = step_sides.Case(P=2, G=4, prompt=8, longest=24)


@pytest.fixture(autouse=True)
def group_of_one(monkeypatch):
    """Give `join` a gloo group of one, so the parameters are sharded as on a GPU."""

    def connect(cfg, world):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(world, "_connect", connect)
    yield
    assert not dist.is_initialized()


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """Fake the counts of a GPU's allocator, with another peak for each side."""
    peaks = []
    monkeypatch.setattr(runs, "reset_peak", lambda: peaks.append(1000 + 300 * (len(peaks) + 1)))
    monkeypatch.setattr(runs, "memory", lambda: {"now": 1000, "peak": peaks[-1] if peaks else 0})


def measure(out, sides=("nanogrpo", "TRL")):
    return step_large.measure(
        "tiny", TINY, CASE, 2, sides, out, ["--shape", "0.6B"], device="cpu", token_budget=48
    )


def test_both_sides_are_measured_and_find_the_same_gradient(tmp_path, monkeypatch):
    monkeypatch.setitem(step_large.PEAK_FLOPS, "Tiny", 1e9)
    machine = common.machine()
    monkeypatch.setattr(common, "machine", lambda: {**machine, "gpu": "NVIDIA Tiny"})
    kinds = []
    step = step_sides.Ours.step

    def watched(self, samples):
        kinds.extend(type(p) for p in self.model.parameters())
        return step(self, samples)

    monkeypatch.setattr(step_sides.Ours, "step", watched)
    # raises if the gradient norms differ
    records = measure(tmp_path, step_large.SETTINGS)
    ours, theirs, *both_recomputed = records
    assert set(kinds) == {DTensor}  # FSDP sharded them
    assert common.read("step_large", tmp_path) == records
    assert ours["command"] == "python -m bench.step_time --shape 0.6B"
    _, samples = step_sides.options_of(CASE)
    padded = CASE.prompt + max(len(s.token_ids) for s in samples)
    assert theirs["micro_batches"] == 4  # two completions each, so at least 48 tokens
    assert (
        8 * padded
        == theirs["computed_tokens"]
        > ours["computed_tokens"]
        > 48 * (ours["micro_batches"] - 1)
    )
    assert ours["micro_batches"] == 2
    assert len(ours["seconds"]) == len(theirs["seconds"]) == 2
    for record in (ours, theirs):
        assert record["gradient_checkpointing"] == "none"
        assert record["needed_flops"] == ours["needed_flops"]
        assert record["mfu"] == pytest.approx(
            record["needed_flops"] / record["seconds_median"] / 1e9
        )
        assert record["tokens_per_second"] == pytest.approx(
            record["completion_tokens"] / record["seconds_median"]
        )
    assert ours["speedup_over_trl"] == pytest.approx(
        theirs["seconds_median"] / ours["seconds_median"]
    )
    # above the memory in use before
    assert [record["peak_bytes"] for record in records] == [300, 600, 900, 1200]
    assert [record["memory_over_trl"] for record in records] == [0.5, 1, 1.5, 2]
    assert [(r["side"], r["gradient_checkpointing"]) for r in both_recomputed] == [
        ("nanogrpo, checkpointing", "full"),
        ("TRL, checkpointing", "full"),
    ]
    first, second = tables_step.step_large([ours, theirs])
    assert first[-1] == "2 micro-batches, checkpointing none"
    assert first[5].endswith("%")
    assert "| tiny | nanogrpo | " in readme.section("step_large", [ours, theirs])
    assert len(first) == len(second) == len(readme.tables.BENCHES["step_large"].columns)


@pytest.mark.parametrize("name", ["nanogrpo", "TRL"])
def test_a_setting_that_does_not_fit_is_followed_by_the_next(name, tmp_path, monkeypatch):
    """Memory runs out in the backward pass, where the full graph is alive. The next attempt must
    find that memory freed.
    """
    side = {"nanogrpo": step_sides.Ours, "TRL": step_sides.Trl}[name]
    built, backward = side.__init__, torch.Tensor.backward
    tried, held, weights = [], [], []

    def begun(self, *args, **kwargs):
        held.extend(ref for ref in weights if ref() is not None)
        built(self, *args, **kwargs)
        model = self.model if name == "nanogrpo" else self.trainer.model
        weights.extend(weakref.ref(p) for p in model.parameters())
        tried.append(
            self.cfg.gradient_checkpointing
            if name == "nanogrpo"
            else (model.is_gradient_checkpointing, self.micro)
        )

    def full(self, *args, **kwargs):
        if len(tried) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        backward(self, *args, **kwargs)

    monkeypatch.setattr(side, "__init__", begun)
    monkeypatch.setattr(torch.Tensor, "backward", full)
    (record,) = measure(tmp_path, [name])
    assert (
        tried
        == {"nanogrpo": ["none", "selective", "full"], "TRL": [(False, 4), (False, 8), (True, 4)]}[
            name
        ]
    )
    # A third would be a full model; a thread that loaded one may still hold its last tensor.
    assert len(held) < len(weights) / 4
    # the peak of this device is unknown
    assert (record["gradient_checkpointing"], record["mfu"]) == ("full", None)
    assert record["gradient_norm"] > 0


def fake_side(norm: float = 1.0, fits: bool = True):
    """Return a side that computes nothing, for SETTINGS."""

    def step(samples):
        if not fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return norm

    @contextlib.contextmanager
    def build(folder, cfg, samples, setting):
        yield SimpleNamespace(step=step, computed=len, micro=1)

    return build, [("none", 1.0), ("none", 0.5), ("full", 1.0)]


def test_the_record_of_a_side_that_never_fits_has_the_reason(tmp_path, monkeypatch, capsys):
    fakes = {"nanogrpo": fake_side(), "TRL": fake_side(fits=False)}
    monkeypatch.setattr(step_large, "SETTINGS", fakes)
    monkeypatch.setattr(step_large.gc, "collect", lambda: None)  # slow, and nothing to free here
    ours, theirs = measure(tmp_path)
    assert theirs["why_not"] == "out of memory with every setting"
    assert ours["speedup_over_trl"] is None
    assert capsys.readouterr().out.count("out of memory") == 3
    first, second = tables_step.step_large([ours, theirs])
    assert len(first) == len(second)
    assert second[2] == theirs["why_not"]


def test_different_gradient_norms_are_an_error(tmp_path, monkeypatch):
    fakes = {"nanogrpo": fake_side(), "TRL": fake_side(norm=1.01)}
    monkeypatch.setattr(step_large, "SETTINGS", fakes)
    monkeypatch.setattr(step_large.gc, "collect", lambda: None)  # slow, and nothing to free here
    with pytest.raises(RuntimeError, match="norms differ"):
        measure(tmp_path)
    (ours,) = common.read("step_large", tmp_path)  # what was measured before is kept
    assert ours["side"] == "nanogrpo"


# --- the figures ---


def test_flops_equal_those_of_the_matrix_products():
    """torch counts the matrix products, with a plain head. Pairs are counted by their definition:
    two products forward, four backward.
    """
    cfg, samples = step_sides.options_of(CASE, token_budget=64)
    batches = step_sides.strips(samples, cfg, TINY.pair_cost)
    model, pairs = Decoder(TINY), 0
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            model.forward_packed(batch, logits).square().sum().backward()
    for batch in batches:
        keys = batch.cu_seqlens if batch.kv_cu_seqlens is None else batch.kv_cu_seqlens
        for q, k in zip(batch.cu_seqlens.diff().tolist(), keys.diff().tolist()):
            pairs += sum(k - q + i + 1 for i in range(q))
    counted = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)
    )
    attention = (
        pairs * TINY.num_hidden_layers * TINY.num_attention_heads * TINY.head_dim * 2 * (2 + 4)
    )
    assert step_large.needed_flops(TINY, batches) == counted + attention


def test_peak_flops_are_looked_up_by_device_name():
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert step_large.peak_flops(name) == 989e12
    for name in (
        None,
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB",
    ):
        assert step_large.peak_flops(name) is None


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 8), (32, 8), (33, 4), (64, 4), (129, 1), (1000, 1)]
)
def test_micro_batches_are_at_least_as_large_as_our_strips(tokens, expected):
    _, samples = step_sides.options_of(dataclasses.replace(CASE, even=True))  # 8 rows of 32
    assert step_large.micro_batches(samples, tokens) == expected


def test_the_shapes_are_those_of_qwen3():
    for name, parameters in (("0.6B", 596_049_920), ("1.7B", 1_720_574_976)):
        with torch.device("meta"):
            assert (
                sum(p.numel() for p in Decoder(common.large_qwen3(name, 1280)).parameters())
                == parameters
            )


def test_the_strips_of_the_case_are_full():
    cfg, samples = step_sides.options_of(step_large.CASE)
    batches = step_sides.strips(samples, cfg, common.large_qwen3("0.6B", 1280).pair_cost)
    assert cfg.strip_tokens == 16_384
    assert sum(len(b.tokens) for b in batches) > 0.9 * cfg.strip_tokens * len(batches)


def test_both_sides_start_from_the_same_weights(tmp_path):
    step_large.write_model(TINY, tmp_path, "cpu")
    model = checkpoint.load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, model.lm_head.weight.bfloat16().float())


# --- the commands ---


def test_the_shape_option_without_a_gpu_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as e:
        step_time.main(["--shape", "0.6B"])
    assert e.value.code == 2
    assert "--shape 0.6B needs a GPU, and torch finds none." in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--no-trl"]])
def test_the_shape_option_with_a_gpu_measures_that_shape(more, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    called = {}

    def measured(label, shape, case, repeats, sides, out, argv, **options):
        called.update(
            label=label, shape=shape, case=case, repeats=repeats, sides=sides, argv=argv, **options
        )
        record = {"why_not": "no GPU", "case": label, "side": "TRL"}
        common.write("step_large", [record], out)

    monkeypatch.setattr(step_large, "measure", measured)
    argv = ["--shape", "1.7B", "--repeats", "3", *more, "--out", str(tmp_path)]
    assert step_time.main(argv) == common.read("step_large", tmp_path)
    assert called["label"] == "1.7B, GPU, bfloat16, uneven"
    assert called["shape"] == common.large_qwen3("1.7B", 1280)
    wanted = [s for s in step_large.SETTINGS if s.startswith("nanogrpo") or not more]
    assert called["sides"] == wanted
    assert (called["case"], called["repeats"], called["device"]) == (step_large.CASE, 3, "cuda")
    assert "no GPU" in capsys.readouterr().out
