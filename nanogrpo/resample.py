"""Dynamic sampling: groups that teach nothing are replaced by groups of other prompts (DAPO, Yu et
al. 2025, section 3.2).

In: the scored samples of a step, on each rank its part. Out: the same list, in which fresh groups
have taken the places of those whose advantages are all 0. That is asked of the advantages
themselves: rewards that differ give maxrl nothing where their mean is not above 0, and under
normalize_then_sum equal sums may be of functions that differ. What is still without a signal after
`max_resample_times` rounds stays.

Which prompts come in, and their random streams, are functions of (seed, step, round, place among
the replaced): so a resumed run repeats the interrupted one, and the number of ranks changes
nothing. Each rank samples the replacements of its own groups. Read before: grpo.py (the
advantages). Read next: experience.py, which calls this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nanogrpo.engine.base import stream
from nanogrpo.run.setup import Run
from nanogrpo.types import Sample


def resample(
    run: Run,
    samples: list[Sample],
    step: int,
    score: Callable[[Run, list[Sample]], None],
    advantages: Callable[[Run, list[Sample]], tuple[list[float], object]],
) -> int:
    """Replaces groups without a signal in place; returns how many were sampled for it, over all
    ranks. Every rank calls.

    score, advantages: experience.py's own, given because it imports this file; advantages(…)[0]
    holds those of all ranks.
    """
    n, world, count = run.cfg.num_generations, run.world, 0
    groups = len(samples) // n
    # this rank's groups are first … first + groups - 1 of the step
    first = sum(world.gather(groups)[: world.rank])
    for times in range(1, run.cfg.max_resample_times + 1):
        found, _ = advantages(run, samples)
        flat = [g for g in range(len(found) // n) if not any(found[g * n : (g + 1) * n])]
        if not flat:
            break
        # another order of the prompts, and other draws should one come twice
        seed = stream(run.cfg.seed, step, times, 0)
        places = [
            (g - first, prompt)
            for g, prompt in zip(flat, run.draw(seed, step))
            if first <= g < first + groups
        ]
        fresh = run.engine.sample(
            [p for _, p in places], n, dataclasses.replace(run.sampling, seed=seed), step
        )
        score(run, fresh)
        for i, (g, _) in enumerate(places):
            samples[g * n : (g + 1) * n] = fresh[i * n : (i + 1) * n]
        count += len(flat)
    return count
