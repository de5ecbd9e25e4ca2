"""The step bench of real sizes, run small on a CPU: the same code, FSDP2 included, in a world of
one.

What only a GPU has is faked: its name, its group's backend, its allocator's counts, and memory that
runs out. Read next: bench/step_large.py.
"""

import dataclasses
import subprocess
import sys
import weakref

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
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL to transformers
]
TINY = common.small_qwen3(32, 2, 104, 32)
CASE = step_sides.Case(P=2, G=4, prompt=8, longest=24)


@pytest.fixture(autouse=True)
def group_of_one(monkeypatch):
    """What `join` does on one GPU: a process group, so that the parameters are shards; here gloo's."""

    def connect(cfg, world):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(world, "_connect", connect)
    yield
    assert not dist.is_initialized()


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """The counts of a GPU's allocator, another peak each time; of this process, the peak may be
    over before a step begins.
    """
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
    # raises unless the gradients' norms are equal
    ours, theirs, recomputed = measure(tmp_path, step_large.SETTINGS)
    assert set(kinds) == {DTensor}  # it went through FSDP
    assert common.read("step_large", tmp_path) == [ours, theirs, recomputed]
    assert ours["command"] == "python -m bench.step_time --shape 0.6B"
    _, samples = step_sides.options_of(CASE)
    padded = CASE.prompt + max(len(s.token_ids) for s in samples)
    assert theirs["micro_batches"] == 4  # of two rows, so that they have 48 tokens or more
    assert (
        8 * padded
        == theirs["computed_tokens"]
        > ours["computed_tokens"]
        > 48 * (ours["micro_batches"] - 1)
    )
    assert ours["micro_batches"] == 2
    assert len(ours["seconds"]) == len(theirs["seconds"]) == 2
    for row in (ours, theirs):
        assert row["gradient_checkpointing"] == "none"
        assert row["needed_flops"] == ours["needed_flops"]
        assert row["mfu"] == pytest.approx(row["needed_flops"] / row["seconds_median"] / 1e9)
        assert row["tokens_per_second"] == pytest.approx(
            row["completion_tokens"] / row["seconds_median"]
        )
    assert ours["speedup_over_trl"] == pytest.approx(
        theirs["seconds_median"] / ours["seconds_median"]
    )
    # above what the process held before
    assert [row["peak_bytes"] for row in (ours, theirs, recomputed)] == [300, 600, 900]
    assert [row["memory_over_trl"] for row in (ours, theirs, recomputed)] == [0.5, 1, 1.5]
    assert (recomputed["side"], recomputed["gradient_checkpointing"]) == (
        "TRL, checkpointing",
        "full",
    )
    first, second = tables_step.step_large([ours, theirs])
    assert first[-1] == "2 micro-batches, checkpointing none"
    assert first[5].endswith("%")
    assert "| tiny | nanogrpo | " in readme.section("step_large", [ours, theirs])
    assert len(first) == len(second) == len(readme.tables.BENCHES["step_large"].columns)


@pytest.mark.parametrize("name", ["nanogrpo", "TRL"])
def test_what_does_not_fit_is_tried_with_less_memory(name, tmp_path, monkeypatch):
    """Memory runs out in the backward, where a whole graph is alive; the next attempt finds nothing
    left of it.
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
    (row,) = measure(tmp_path, [name])
    assert (
        tried
        == {"nanogrpo": ["none", "selective", "full"], "TRL": [(False, 4), (False, 8), (True, 4)]}[
            name
        ]
    )
    # a whole model held would be a third; a thread that loaded one may hold its last tensor
    assert len(held) < len(weights) / 4
    # no peak is known of this device
    assert (row["gradient_checkpointing"], row["mfu"]) == ("full", None)
    assert row["gradient_norm"] > 0


def test_a_side_that_never_fits_says_so(tmp_path, monkeypatch, capsys):
    def full(self, samples):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(step_sides.Trl, "step", full)
    ours, theirs = measure(tmp_path)
    assert theirs["why_not"] == "out of memory with every setting"
    assert ours["speedup_over_trl"] is None
    assert capsys.readouterr().out.count("out of memory") == 3
    first, second = tables_step.step_large([ours, theirs])
    assert len(first) == len(second)
    assert second[2] == theirs["why_not"]


def test_sides_that_compute_different_things_are_refused(tmp_path, monkeypatch):
    step = step_sides.Trl.step
    monkeypatch.setattr(step_sides.Trl, "step", lambda self, samples: 1.01 * step(self, samples))
    with pytest.raises(RuntimeError, match="norms differ"):
        measure(tmp_path)
    (ours,) = common.read("step_large", tmp_path)  # what was measured before is kept
    assert ours["side"] == "nanogrpo"


# ---- the figures ---------------------------------------------------------------------------------


def test_flops_are_those_of_the_matrix_products():
    """Counted by torch with a plain head (ours hides in an operator); a pair by its definition: two
    forward, four back.
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


def test_the_peak_of_a_device_is_known_by_its_name():
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
def test_micro_batches_are_as_large_as_our_strips(tokens, expected):
    _, samples = step_sides.options_of(dataclasses.replace(CASE, even=True))  # 8 rows of 32
    assert step_large.micro_batches(samples, tokens) == expected


def test_the_shapes_are_qwens():
    for name, parameters in (("0.6B", 596_049_920), ("1.7B", 1_720_574_976)):
        with torch.device("meta"):
            assert (
                sum(p.numel() for p in Decoder(common.large_qwen3(name, 1280)).parameters())
                == parameters
            )


def test_the_strips_of_the_case_are_full():
    cfg, samples = step_sides.options_of(step_large.CASE)
    batches = step_sides.strips(samples, cfg, common.large_qwen3("0.6B", 1280).pair_cost)
    assert cfg.token_budget == 16_384
    assert sum(len(b.tokens) for b in batches) > 0.9 * cfg.token_budget * len(batches)


def test_both_sides_start_from_the_same_weights(tmp_path):
    step_large.write_model(TINY, tmp_path, "cpu")
    model = checkpoint.load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, model.lm_head.weight.bfloat16().float())


# ---- the commands --------------------------------------------------------------------------------


def test_without_a_gpu_there_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as e:
        step_time.main(["--shape", "0.6B"])
    assert e.value.code == 2
    assert "--shape 0.6B needs a GPU, and torch finds none." in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_the_script_without_a_gpu_has_a_sentence(tmp_path):
    argv, env = (
        [common.ROOT / "bench/gpu_train.sh", tmp_path / "out"],
        {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench/gpu_train.sh needs a GPU, and torch finds none.\n"


@pytest.mark.parametrize("more", [[], ["--no-trl"]])
def test_with_a_gpu_the_shape_is_measured(more, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    called = {}

    def measured(label, shape, case, repeats, sides, out, argv, **options):
        called.update(
            label=label, shape=shape, case=case, repeats=repeats, sides=sides, argv=argv, **options
        )
        row = {"why_not": "no GPU", "case": label, "side": "TRL"}
        common.write("step_large", [row], out)

    monkeypatch.setattr(step_large, "measure", measured)
    argv = ["--shape", "1.7B", "--repeats", "3", *more, "--out", str(tmp_path)]
    assert step_time.main(argv) == common.read("step_large", tmp_path)
    assert called["label"] == "1.7B, GPU, bfloat16, uneven"
    assert called["shape"] == common.large_qwen3("1.7B", 1280)
    assert called["sides"] == (["nanogrpo"] if more else ["nanogrpo", "TRL", "TRL, checkpointing"])
    assert (called["case"], called["repeats"], called["device"]) == (step_large.CASE, 3, "cuda")
    assert "no GPU" in capsys.readouterr().out
