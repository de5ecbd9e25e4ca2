"""Solution of exercise 7.

With grpo, a token of a completion of n tokens has the weight 1/(B·n). So a wrong answer is cheaper,
per token, the longer it is, and wrong answers grow. With dapo and dr_grpo all tokens have the same
weight. They differ in what it depends on: with dapo, on the lengths of the other completions; with
dr_grpo, on nothing.

The project's function is `token_weight` in nanogrpo/grpo/loss.py.
"""


def weights(lengths: list[int], loss_type: str, limit: int) -> list[float]:
    B, N = len(lengths), sum(lengths)
    if loss_type == "grpo":
        return [1 / (B * n) for n in lengths]
    if loss_type == "dapo":
        return [1 / N for _ in lengths]
    return [1 / (B * limit) for _ in lengths]


MERCIFUL_TO_LONG_MISTAKES = "grpo"
