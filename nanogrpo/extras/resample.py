"""Dynamic sampling: replace groups whose advantages are all 0 with groups of other prompts (DAPO,
Yu et al. 2025, 2503.14476, section 3.2).

In: the scored samples of a step on this rank. Out: the same list, in which some groups are
replaced. Read before: step.py.
"""

import dataclasses
from typing import Any

from nanogrpo import step as loop
from nanogrpo.engine.base import stream
from nanogrpo.feature import Feature
from nanogrpo.run.setup import Run
from nanogrpo.types import Sample


class Resample(Feature):
    groups = 0  # groups replaced in this step, on all ranks

    def scored(self, run: Run, samples: list[Sample], step: int) -> None:
        """Replace the groups in which all advantages are 0, for `max_resample_times` rounds.

        It would be wrong to test for equal rewards. The estimator maxrl also gives 0 if the mean
        reward is not positive. With normalize_then_sum, the rewards of individual functions may
        differ although their sums are equal. Groups whose advantages are still all 0 after the last
        round are kept.

        The new prompts and their random streams depend only on (seed, step, round, index of the
        replaced group). So the new prompts are the same in a resumed run, and for any number of
        ranks. Every rank must call this method, and each rank samples the replacements of its own
        groups.
        """
        cfg: Any = run.cfg
        n, world, self.groups = cfg.num_generations, run.world, 0
        groups = len(samples) // n
        first = sum(world.gather(groups)[: world.rank])  # index of this rank's first group
        for attempt in range(1, cfg.max_resample_times + 1):
            found = [fact.advantage for fact in loop.assign_advantages(run, samples).facts]
            flat = [g for g in range(len(found) // n) if not any(found[g * n : (g + 1) * n])]
            if not flat:
                break
            # Each round has its own seed, so a prompt that is drawn again gets new completions.
            seed = stream(cfg.seed, step, attempt, 0)
            pairs = zip(flat, run.draw(seed, step))
            mine = [(g - first, prompt) for g, prompt in pairs if first <= g < first + groups]
            params = dataclasses.replace(run.sampling, seed=seed)
            fresh = run.engine.sample([prompt for _, prompt in mine], n, params, step)
            loop.fill_rewards(run, fresh)
            for i, (g, _) in enumerate(mine):
                samples[g * n : (g + 1) * n] = fresh[i * n : (i + 1) * n]
            self.groups += len(flat)

    def step(self, *_: Any) -> dict[str, float]:
        return {"resampled_groups": self.groups}
