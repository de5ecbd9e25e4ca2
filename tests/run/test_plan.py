"""`nanogrpo plan`: the formulas against independent counts, and the command.

Read next: nanogrpo/run/cost.py, nanogrpo/run/plan.py.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.common import small_qwen3
from nanogrpo.config import Config
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import cost, plan
from tests.kernels.traffic import QWEN3, TOKENS, block_traffic

H100 = cost.GPUS["H100"]
SMALL = small_qwen3(64, 2, 256, 128)
# everything is free, except for what a test asks about
INF = float("inf")
FREE = cost.Device(*[INF] * 3, *[0.0] * 5, *[INF] * 3, memory=1 << 40, link=INF)


def works(prompt: int, completion: int, groups: int = 2, group: int = 2) -> cost.Work:
    return cost.Work([prompt] * groups, [completion] * groups * group)


def test_the_flop_of_training_are_those_that_torch_counts():
    """On one sequence without a prompt, where every token is trained."""
    model = Decoder(SMALL)
    tokens = torch.randint(256, (48,))
    causal = cost.Work([0], [48])

    def attend(layer, q, k, v):
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


@pytest.mark.parametrize(("mean", "longest"), [(10, 100), (300, 1024), (50, 64), (1, 8)])
def test_lengths_have_the_mean_and_the_limit(mean, longest):
    found = cost.lengths(512, mean, longest)
    assert len(found) == 512
    assert 1 <= min(found) <= max(found) <= longest
    assert sum(found) / 512 == pytest.approx(mean, rel=0.05)


def test_more_gpus_and_a_faster_link_never_make_training_slower_to_compute():
    work, c = works(256, 1000, 64, 8), plan.shape_of("0.6B").cfg
    seconds = [cost.train(c, work, H100._replace(link=INF), n) for n in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    over_network = cost.train(c, work, H100._replace(network=1.0), 16)
    assert over_network > cost.train(c, work, H100, 16)


def test_each_option_of_training_costs_its_own_passes_and_bytes():
    work, device = works(16, 48), FREE._replace(flops=1.0)
    w, tokens = cost.Weights.of(SMALL), 2 * 16 + 4 * 48
    blocks, head = 2 * w.layers * w.block * tokens, 2 * w.head * 4 * 48
    assert cost.train(SMALL, work, device, adapters=9) == 2 * blocks + 2 * head
    assert cost.train(SMALL, work, device, scored=1) == 4 * blocks + 4 * head
    assert cost.train(SMALL, work, device, iterations=2) == 6 * blocks + 6 * head
    assert cost.train(SMALL, work, device, checkpointing="full") == 4 * blocks + 3 * head
    assert cost.train(SMALL, work, device, checkpointing="selective") == 3 * blocks + 3 * head
    linked = FREE._replace(link=1.0, item=2)
    gathers, reduction = 4 * w.total, 4 * w.total  # by two GPUs, which send half of it
    for reduces_each, reductions in ((False, 1), (True, 7)):
        seconds = cost.train(SMALL, work, linked, 2, budget=16, reduces_each=reduces_each)
        assert seconds == (7 * gathers + reductions * reduction) / 2
    updated = FREE._replace(bandwidth=1.0, item=0)
    steps = [cost.train(SMALL, work, updated, updates=n, adapters=1) for n in (1, 4)]
    cast = 4 * w.total  # the weights, which one GPU casts once per update
    assert steps[1] - steps[0] == 3 * (40 + cast)
    parts = [cost.train(SMALL, work, updated, budget=n, adapters=1) for n in (224, 112)]
    assert parts[1] - parts[0] == 10  # the gradients of the second micro-batch are added
    started = FREE._replace(host=1.0)
    ops = cost.layer(SMALL, FREE)
    assert cost.train(SMALL, work, started, scored=1) == 2 * (2 * ops.forward + ops.backward)


def test_a_sync_sends_the_weights_to_every_server_over_the_link_or_the_network():
    device = FREE._replace(link=4.0, network=1.0)
    size = 2 * cost.Weights.of(SMALL).total
    assert cost.sync(SMALL, device, 1) == 0
    assert cost.sync(SMALL, device, 1, near=7) == 7 * size / 4
    assert cost.sync(SMALL, device, 1, near=7, far=16) == 16 * size


def test_a_ring_between_machines_uses_the_adapters_of_all_gpus():
    device = FREE._replace(link=4.0, network=1.0)
    assert [cost.ring(device, gpus, per) for gpus, per in ((2, 2), (4, 2), (64, 8))] == [4, 2, 4]


def test_a_split_server_divides_the_products_and_waits_for_two_all_reduces_per_layer():
    assert cost.decode_step(SMALL, FREE, gpus=2)(1, 1) == 2 * 2 * cost.ALL_REDUCE
    device = FREE._replace(decode=1.0)
    whole, half = (cost.decode_step(SMALL, device, gpus=n)(1, 1) for n in (1, 2))
    assert half == pytest.approx(whole / 2)


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


def test_the_plan_of_one_card_says_how_to_start_it(capsys):
    out = run(capsys, "0.6B", "--gpu", "H100", "--num-generations", "16")
    assert "embedded" in out
    assert "on the GPU together" in out
    assert "a checkpoint on the disk" in out
    (command,) = [line for line in out.splitlines() if "train.py" in line]
    assert command.startswith(
        "python train.py --model Qwen/Qwen3-0.6B --data DATA --num-generations 16"
    )


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


def test_servers_share_the_last_machine_of_the_trainers():
    Machines = plan.Machines
    assert plan.placed(8, 4, 1, 8) == [Machines(1, 4, 4)]
    assert plan.placed(16, 4, 2, 8) == [Machines(1, 4, 2), Machines(1, 0, 4)]
    assert plan.placed(16, 8, 4, 8) == [Machines(1, 0, 2)]
    assert plan.placed(2, 1, 1, 8) == [Machines(1, 1, 1)]
    assert plan.placed(8, 8, 1, 8) == []


def test_bash_expands_the_commands_to_one_server_per_gpu():
    layout = plan.Layout(4, plan.placed(24, 4, 2, 8), 2, Config(), [], {})
    lines = plan.commands(layout, "M", [], 8)
    echo = [
        re.sub(r"python .*--port", "echo --port", x).replace("do ", "do echo ")
        for x in lines[1:4:2]
    ]
    script = "\n".join(x.replace(" &", "; ").replace("; ;", ";") for x in echo)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    cards = re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", done.stdout)
    assert cards == ["4,5", "6,7", "0,1", "2,3", "4,5", "6,7"]
    hosts = subprocess.run(
        ["bash", "-c", "echo " + lines[-1].partition("--server ")[2]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert hosts.stdout.split() == [
        *(f"http://127.0.0.1:{port}" for port in (8000, 8001)),
        *(f"http://HOST{n}:{port}" for n in (1, 2) for port in (8000, 8001, 8002, 8003)),
    ]


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


def test_torchrun_starts_as_many_processes_on_each_machine():
    cfg = Config(data=("DATA",), generation_batch_size=96)  # 12 prompts
    args = plan.checked(plan.arguments().parse_args(["0.6B", "--gpus", "16"]), cfg)
    found = list(plan.layouts(plan.shape_of("0.6B"), cfg, args))
    assert sorted(x.trainers for x in found) == [1, 2, 3, 4, 6]  # not 12


def test_the_commands_keep_quotes_and_open_remote_servers_to_the_trainer():
    layout = plan.Layout(8, plan.placed(16, 8, 1, 8), 1, Config(), [], {})
    _, serve, *_, train = plan.commands(layout, "my model", ["--system-prompt", "be brief"], 8)
    assert "--host 0.0.0.0" in serve
    assert "--model 'my model' --data DATA --system-prompt 'be brief'" in train


def test_the_old_log_probs_of_several_updates_and_the_reference_take_a_pass_each():
    assert plan._scored(Config()) == 0
    assert plan._scored(Config(steps_per_generation=4)) == 1
    assert plan._scored(Config(steps_per_generation=4, beta=0.1)) == 2
    assert plan._scored(Config(engine="vllm", max_staleness=1)) == 0


def test_sampling_ahead_hides_the_shorter_of_sampling_and_training():
    layout = plan.Layout(
        1, 1, 1, Config(max_staleness=1), [], {"sync": 1, "sample": 5, "score": 1, "train": 4}
    )
    assert layout.total == 7
    assert layout._replace(cfg=Config()).total == 11


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("8B --gpu H10", "--gpu H10 is not known: choose one of 4090"),
        ("8B --gpus 0", "--gpus must be at least 1"),
        ("8B --gpus 12", "--gpus 12 is not a multiple of the 8 GPUs per machine"),
        ("8B --completion-length 999", "--completion-length 999 is above --max-completion-length"),
        ("8B --prompt-length 9 --longest-prompt 5", "--prompt-length is above --longest-prompt"),
        ("8B --skipped 1", "--skipped in [0, 1)"),
        ("8B --score-seconds nan", "--score-seconds must be at least 0"),
        ("8B --score-seconds inf", "--score-seconds must be at least 0"),
        ("8B --generation-batch-size 80000000", "--generation-batch-size 80000000 is too large"),
        ("8B --model 4B", "the model is given twice, 8B and --model: leave out --model"),
        ("8B --cpu-offload", "--cpu-offload is not part of a plan: leave it out"),
        ("8B --engine vllm --vllm-gpus 1", "--vllm-gpus is not part of a plan"),
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
