"""The speeds of a CPU, from which bench/plan.py predicts its steps.

Read next: tests/run/test_plan.py.
"""

import math

from bench import plan
from bench.common import small_qwen3
from nanogrpo.run import cost
from nanogrpo.types import Prompt, Sample


def test_every_speed_is_measured_and_predicts_some_seconds():
    c, prompts = small_qwen3(64, 2, 256, 64), [Prompt(i, "", [1] * 9) for i in range(2)]
    samples = [
        Sample(prompts[i // 4], i % 4, [2] * n, [-1.0] * n, True, [0] * n)
        for i, n in enumerate((3, 9, 1, 6, 20, 2, 5, 4))
    ]
    for sample in samples:
        sample.advantage = 1.0
    device = plan.measured(c, samples)
    speeds = device._replace(memory=1, link=1, network=1, layer=1)
    assert all(0 < x < math.inf for x in speeds), device
    work = plan.work_of(samples)
    assert 0 < cost.sample(c, work, device, 8) < cost.sample(c, work, device, 2) < 60
    assert 0 < cost.train(c, work, device) < 60


def test_the_operations_of_a_layer_are_counted_on_the_meta_device():
    """The bytes per token are those of PyTorch's functions: more than of the fused kernels."""
    c = small_qwen3(64, 2, 256, 64)
    found, fused = plan.operations(c), cost.layer(c, cost.GPUS["H100"]._replace(item=4))
    assert found.forward_bytes > fused.forward_bytes
    assert found.backward_bytes > found.forward_bytes
    assert found.backward > found.forward == found.decode > fused.forward
