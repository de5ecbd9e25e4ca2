"""Exercise 9: leave the policy.

By default, nanogrpo makes one update per step, with samples of the current weights. Then logp
equals old_logp, every ratio is exp(0) = 1, and the clip of exercise 4 never acts. The log shows it:
docs/metrics.md lists every metric.

1. Choose one or more options so that a run also trains on samples of *older* weights. The names are
   those of `python train.py --help`, as in {"learning_rate": 1e-2}. Its section "Optimizer" is a
   good place to look.
2. Find a metric that is 0 at every step without your options, because every ratio is 1, and is
   above 0 with them.

The checker trains a random model for two steps, with and without your options.

    python -m exercises.check 9
"""

OPTIONS = ...  # a dict
METRIC = ...  # a name
