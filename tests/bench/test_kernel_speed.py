"""Tests that the kernel bench computes the right thing. Its speeds are not tested.

Read next: test_rollout_speed.py.
"""

import torch

from bench import kernel_speed


def test_check_runs_without_a_gpu_and_the_timing_asks_for_one(capsys):
    assert kernel_speed.main(["--check"]) == 0
    if not torch.cuda.is_available():
        assert kernel_speed.main([]) == 2
        assert "GPU" in capsys.readouterr().err
