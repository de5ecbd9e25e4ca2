"""Exercise 10: a reward that gets hacked.

A policy learns what the reward measures, and not what you meant. Here the answer to each prompt is
a digit from 1 to 6, and the policy of blind.py cannot even read its prompt. It writes up to eight
of the characters "123456 ", so an honest reward can never be above 1/6 on average. All the same,
some rewards that look reasonable will rise to nearly 1.

1. Write `hackable`. Its highest value is above 0, and a completion that is just the right digit
   gets it. A completion that is just a wrong digit gets less. But a policy that cannot read learns
   to get at least 0.9 of the highest value.
2. Write `honest`. The same holds for the right digit and for a wrong one, but this policy cannot
   learn to get more than a quarter of the highest value.

The checker trains the blind policy with both and prints what it learns to say.

    python -m exercises.check 10
"""


def hackable(completion: str, answer: str) -> float:
    """completion: such as "3", "1 26" or "". answer: such as "3"."""
    ...


def honest(completion: str, answer: str) -> float: ...
