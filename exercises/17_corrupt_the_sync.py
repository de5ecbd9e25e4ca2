"""Exercise 17: corrupt the weight sync.

Before each step, the trainer's weights are copied to the engine that samples. If that copy is
faulty, nothing crashes: there are completions, rewards and updates. But the samples are from
another model than the one that is trained. What would notice?

1. `corrupt` changes weights on their way to the engine. Change at least one of them, by more than
   rounding, but so that the run goes on: keep shapes, and add no NaN. Names are such as
   "model.layers.0.self_attn.q_proj.weight" and "model.norm.weight".
2. Find the metric in docs/metrics.md that is made for this. With your corruption it must be at
   least a hundred times as large.
3. Find a test that fails, such as "tests/engine/test_local.py::test_a_name". Search tests/engine
   for what compares the engine with the trainer.

    python -m exercises.check 17
"""

from torch import Tensor


def corrupt(name: str, weight: Tensor) -> Tensor:
    """Return the weight that the engine gets."""
    return weight


METRIC = ...
TEST = ...
