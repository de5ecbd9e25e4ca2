"""Solution of exercise 9.

With num_iterations=4, the step repeats its samples four times. From the second update on, they are
samples of older weights. steps_per_generation=2 also works: it splits the samples into two updates,
and the second one trains on samples of the weights before the first.

That is why the clip exists, and why a run whose clip_ratio is above 0.2 wastes its samples: so many
tokens have no gradient any more.
"""

OPTIONS = {"num_iterations": 4}
METRIC = "clip_ratio/region_mean"
