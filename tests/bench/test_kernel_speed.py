"""The bench of the kernels is right on small shapes, and says that it needs a GPU. How fast they
are is the bench's to say.

Read next: test_rollout_speed.py.
"""

import torch

from bench import kernel_speed


def test_the_bench_is_right_without_a_gpu_and_says_that_it_needs_one(capsys):
    assert kernel_speed.main(["--check"]) == 0
    if not torch.cuda.is_available():
        assert kernel_speed.main([]) == 2
        assert "GPU" in capsys.readouterr().err
