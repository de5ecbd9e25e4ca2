"""Solution of exercise 17.

The trainer computes the log-prob of every token that it trains on, and the engine has reported its
own: their difference costs nothing to measure and shows every fault of the sync. In float32 it is
about 1e-6. See nanogrpo/grpo/mismatch.py, and docs/metrics.md.
"""

from torch import Tensor


def corrupt(name: str, weight: Tensor) -> Tensor:
    return 1.5 * weight if name == "model.norm.weight" else weight


METRIC = "sampling/sampling_logp_difference/mean"
TEST = "tests/engine/test_local.py::test_log_probs_equal_the_trainers_after_each_load"
