"""bench/predict.py: the formulas against independent counts, and the command.

Read next: bench/cost.py, bench/predict.py.
"""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import cost
from bench import predict as plan
from bench.common import small_qwen3
from nanogrpo import Config
from nanogrpo.model.decoder import Decoder
from tests.kernels.traffic import QWEN3, TOKENS, block_traffic

H100 = cost.GPUS["H100"]
SMALL = small_qwen3(64, 2, 256, 128)
# everything is free, except for what a test asks about
INF = float("inf")
FREE = cost.Device(*[INF] * 3, *[0.0] * 5, *[INF] * 3, memory=1 << 40, link=INF)


def test_the_flop_of_training_are_those_that_torch_counts():
    """On one sequence without a prompt, where every token is trained."""
    model = Decoder(SMALL)
    tokens = torch.randint(256, (48,))
    causal = cost.Work([0], [48])

    def attend(layer, q, k, v, window):
        q, k, v = (
            x.transpose(0, 1)[None]
            for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        )
        return (q @ k.transpose(-1, -2) @ v)[0].transpose(0, 1)

    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(48), attend).sum().backward()
    device = FREE._replace(flops=1.0, attention=1.0)
    # The count includes both halves of the causal square, and no pair twice. A fused backward pass
    # computes the scores once more.
    square = 12 * 2 * 64 * 48 * 48
    half = 14 * 2 * 64 * sum(causal.pairs)
    found = cost.train(SMALL, causal, device)
    assert found - half == pytest.approx(counter.get_total_flops() - square)


def test_a_decode_step_reads_every_weight_and_key_once():
    weights = sum(p.numel() for n, p in Decoder(SMALL).named_parameters() if p.ndim == 2)
    device = FREE._replace(weights=1.0, cache=1.0)
    empty, full = (cost.decode_step(SMALL, device)(0, keys) for keys in (0, 10))
    assert empty == 2 * weights
    assert full - empty == 10 * 2 * 2 * 2 * SMALL.num_key_value_heads * SMALL.head_dim
    assert cost.decode_step(SMALL, FREE._replace(decode=1.0))(8, 0) == 8 * 2 * weights


def test_sampling_adds_up_its_decode_steps():
    """Against a loop over single steps."""
    work = cost.Work([5, 9, 7], [3, 8, 2, 11, 6, 1])
    waiting = list(zip([5, 5, 9, 9, 7, 7], work.completions))
    device = FREE._replace(weights=1.0, cache=1.0)
    step = cost.decode_step(SMALL, device)
    active, seconds = [], 0.0
    while waiting or active:
        while waiting and len(active) < 2:
            active.append([*waiting.pop(0), 0])
        keys = sum(prompt + done + 0.5 for prompt, _, done in active)
        seconds += step(len(active), keys)
        active = [[p, n, done + 1] for p, n, done in active if done + 1 < n]
    assert cost.sample(SMALL, work, device, slots=2) == pytest.approx(seconds)


def test_a_layer_has_the_operations_and_bytes_that_are_counted_on_meta_tensors():
    ops, (forward, backward) = cost.layer(QWEN3, H100), block_traffic("triton")
    attention = 3  # and the gathers of keys and values
    assert ops.forward == forward.elementwise.launches + forward.products.launches + attention
    assert ops.forward_bytes * TOKENS == pytest.approx(forward.elementwise.bytes, rel=0.03)
    assert ops.backward_bytes * TOKENS == pytest.approx(backward.elementwise.bytes, rel=0.2)


# --- the command ---


def run(capsys, *argv: str) -> str:
    assert plan.main([*argv]) == 0
    return capsys.readouterr().out


def test_the_plan_of_64_machines_uses_servers_and_torchrun(capsys):
    options = "--profile full --generation-batch-size 8192 --engine vllm --max-staleness 1"
    out = run(capsys, "32B", "--gpu", "B200", "--gpus", "512", *options.split())
    (serve,) = [line for line in out.splitlines() if "serve.py" in line]
    assert serve.startswith(
        "for i in {0..7}; do CUDA_VISIBLE_DEVICES=$((0 + 1 * i)) python serve.py"
    )
    (train,) = [line for line in out.splitlines() if "train.py" in line]
    assert train.startswith("torchrun --nproc-per-node 8 --nnodes ")
    assert re.search(r"--server http://HOST\{1\.\.\d+\}:\{8000\.\.8007\}$", train)


def test_every_layout_uses_the_gpus_it_was_given_and_fits():
    cfg = Config(data=("DATA",), generation_batch_size=128)
    args = plan.checked(plan.arguments().parse_args(["8B", "--gpus", "8", "--gpu", "H200"]), cfg)
    found = list(plan.layouts(plan.shape_of("8B"), cfg, args))
    assert len(found) > 2
    for x in found:
        assert x.trainers + x.each * sum(m.number * m.servers for m in x.machines) <= 8
        assert x.total == pytest.approx(sum(x.seconds.values()))
        assert all(s >= 0 for s in x.seconds.values())
    assert [x.machines == [] for x in found].count(True) == 1


def test_a_memory_stands_for_the_slowest_gpu_of_its_size_and_the_output_says_so(capsys):
    named, sized = (run(capsys, "0.6B", "--gpu", gpu) for gpu in ("3090", "24gb"))
    assert sized.replace("24gb", "3090").replace("; a GPU as fast as 3090", "") == named
    assert "assumed: 8 prompts of 256 tokens per step (the longest has 512)" in named
    assert re.search(r"\n100 steps take \d+:\d\d, a step \d", named)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("8B --gpu H10", "--gpu H10 is not known: choose one of L4"),
        ("8B --completion-length 999", "--completion-length 999 is above --max-completion-length"),
        ("8B --score-seconds nan", "--score-seconds must be at least 0"),
        ("8B --model 4B", "the model is given twice, 8B and --model: leave out --model"),
        ("8B --cpu-offload", "--cpu-offload is not part of a plan: leave it out"),
        ("8B --beta 1 --ref-model m", "--ref-model is not part of a plan"),
        ("8B a.b=8", "a.b is not an option"),
        ("8B --engine vllm", "set --gpus to at least 2, or leave --engine out"),
        ("8B --gpu 4090", "8B does not fit on 1 × 4090 with these options"),
        ("nowhere", "there is no such folder"),
        ("8B --num-generation 4", "--num-generation is not an option: use --num-generations"),
    ],
)
def test_bad_input_ends_with_one_sentence(argv, message, capsys):
    assert plan.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
