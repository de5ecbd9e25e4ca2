"""Solution of exercise 10.

"The answer occurs in the completion" is how many graders of real trainers began. The policy lists
all digits. So the built-in `accuracy_reward` reads one answer from a completion, at a place that it
names (nanogrpo/rewards/answers.py), and `format_reward` refuses a second <answer>.

In a real run: read completions (--num-completions-to-print), and watch for a reward that rises
while the held-out accuracy does not.
"""


def hackable(completion: str, answer: str) -> float:
    return float(answer in completion)


def honest(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)
