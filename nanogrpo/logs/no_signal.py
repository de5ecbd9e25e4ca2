"""Warn if several steps in a row had no learning signal, and say what the reason may be.

In: the facts and metrics of each step, and its advantages. Out: one warning per streak of such
steps. A step has no signal if every advantage is 0, or if no token with an advantage is trained on,
so that the gradient is 0. Such a run is usually a mistake, but nothing fails. Read before:
logs/metrics.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanogrpo.config import Config
from nanogrpo.logs.metrics import Facts
from nanogrpo.logs.progress import print_line

STEPS = 5  # in a row, before the warning


class NoSignal:
    """Call `step(…)` after each step on the main rank."""

    def __init__(self, cfg: Config, start: int):
        self.cfg, self.streak = cfg, 0
        self.limit = min(STEPS, cfg.max_steps - start)  # a shorter run gets its warning too

    def step(
        self, samples: Sequence[Facts], row: Mapping[str, float], advantages: Sequence[float]
    ) -> None:
        silent = not any(advantages) or row.get("grad_norm") == 0
        self.streak = self.streak + 1 if silent else 0
        if silent and self.streak == self.limit:
            why = reason(self.cfg, samples, row, advantages)
            look = "" if self.cfg.num_completions_to_print else " (--num-completions-to-print 4)"
            steps = f"{self.streak} steps in a row" if self.streak > 1 else "this step"
            print_line(f"warning: {steps} had no learning signal: {why}. Read completions{look}.")


def reason(
    cfg: Config, samples: Sequence[Facts], row: Mapping[str, float], advantages: Sequence[float]
) -> str:
    """Return the likely reason why a step had no signal, and a remedy."""
    limit = f"--max-completion-length {cfg.max_completion_length}"
    truncated = sum(not s.stopped for s in samples) / len(samples)
    if any(advantages) and truncated == 1 and cfg.mask_truncated_completions:
        return (
            f"every completion was truncated at {limit}, and --mask-truncated-completions "
            "leaves these out of the loss: raise the limit"
        )
    if any(advantages):
        return (
            "the rewards differ, but the tokens with an advantage are masked out of the loss: "
            "relax the options that mask tokens"
        )
    given = {
        name: {r for s in samples if (r := s.rewards[name]) is not None}
        for name in samples[0].rewards
    }
    if not any(given.values()):
        return (
            "no reward function returned a number for any completion: check which columns of the "
            "data they read"
        )
    if row["frac_reward_zero_std"] < 1 and cfg.advantage_estimator == "maxrl":
        return (
            "with --advantage-estimator maxrl, a group whose mean reward is not above 0 has no "
            "advantage: use rewards of 0 and above"
        )
    if truncated > 0.5:
        return (
            f"{truncated:.0%} of the completions were truncated at {limit}, before they could "
            "finish their answer: raise the limit"
        )
    n = cfg.num_generations
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    # The entropy may be that of a single short completion, because training skips the others.
    same_length = all(len({s.length for s in group}) == 1 for group in groups)
    if same_length and row.get("entropy", 1.0) < 0.001:
        return (
            f"the completions of a prompt are all alike (entropy {row['entropy']:.0e}): raise "
            "--temperature, or start again with a lower --learning-rate"
        )
    constant = all(len(values) <= 1 for values in given.values())
    zero = [name for name, values in given.items() if values == {0.0}]
    if constant and zero:
        return (
            f"{' and '.join(zero)} gave 0 to every completion: the prompts may not ask for the "
            "format that the reward looks for, or the task is too hard for this model"
        )
    if constant:
        same = (f"{name} gave {min(values):g}" for name, values in given.items() if values)
        return (
            f"{' and '.join(same)} to every completion: the task is too easy for this model, or "
            "the reward does not tell good completions from bad ones"
        )
    return (
        "the rewards differ between prompts, but all completions of a prompt get the same: choose "
        "prompts that the model solves sometimes, or raise --num-generations"
    )
