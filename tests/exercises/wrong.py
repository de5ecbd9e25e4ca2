"""Plausible wrong answers to the exercises: solutions with a mistake, and a part of its hint.

In: nothing. Out: WRONG, a list of (number of the exercise, [(text, replacement), …], part of the
hint). Each replacement is made in the solution. Read next: test_exercises.py.
"""

from exercises import check

ONE = [  # (number, text, replacement, part of the hint)
    (1, "rewards.mean(dim=1, keepdim=True)", "rewards.mean()", "mean of all prompts"),
    (1, "dim=1, keepdim=True", "", "Mean and std are those of all prompts"),
    (1, "std(dim=1", "std(correction=0, dim=1", "divides by G - 1"),
    (1, "(rewards - mean)", "rewards", "not subtracted the mean"),
    (2, "(rewards.sum(dim=1, keepdim=True) - rewards) / (G - 1)",
        "rewards.mean(dim=1, keepdim=True)", "still contains the completion's own reward"),
    (2, "- rewards) / (G - 1)", "- rewards) / 3", "right for G = 4, but not for G = 2"),
    (2, "return rewards - others",
        "return (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)",
        "does not divide by the standard deviation"),
    (2, "return G / (G - 1)", "return 1.0", "bring it to one fraction"),
    (3, "return -(", "return (", "The sign is wrong"),
    (3, "log_softmax", "softmax", "gradient of the probability"),
    (3, "dim=-1", "dim=0", "over the tokens (dim 0)"),
    (4, "torch.minimum", "torch.maximum", "larger of the two products"),
    (4, "-torch.minimum(free, held)", "-free", "Nothing is clipped yet"),
    (4, "logp - old_logp", "logp.detach() - old_logp", "has no gradient"),
    (4, "-torch.minimum(free, held)",
        "-torch.minimum(ratio, ratio.clamp(1 - epsilon, 1 + epsilon)) * advantage",
        "not of the two ratios"),
    (5, "(l * mask).sum() / mask.sum()", "(l * mask).mean()", "runs over all B·T places"),
    (6, "return logp - ref_logp", "return ref_logp - logp", "in the other direction"),
    (6, "x.exp() - x - 1", "x**2 / 2", "This is k2"),
    (6, "DIFFERENCE = 0", "DIFFERENCE = 1", "probabilities sum to 1"),
    (7, "1 / (B * n)", "1 / n", "divide by B too"),
    (7, "[1 / N for _ in", "[1 / (B * n) for n in", "there is no mean over completions"),
    (7, "[1 / (B * limit) for _ in", "[1 / (B * n) for n in", "does not matter"),
    (8, ".mean().exp()", ".sum().exp()", "The power 1/|y| is missing"),
    (8, "return -torch.minimum(s * advantage, held * advantage).mean()",
        "ratios = [(n - o).exp() for n, o in zip(logp, old_logp)]\n"
        "    clips = [r.clamp(1 - epsilon, 1 + epsilon) for r in ratios]\n"
        "    all = zip(ratios, clips, advantage)\n"
        "    return -torch.stack([torch.minimum(r * a, c * a).mean() for r, c, a in all]).mean()",
        "a ratio and a clip of its own"),
    (8, "(new - old).mean().exp()", "(new.sum().exp() / old.sum().exp()) ** (1 / len(new))",
        "The loss is NaN"),
    (9, '{"num_iterations": 4}', "{}", "still one update per step"),
    (9, '{"num_iterations": 4}', "[4]", "OPTIONS must be a dict"),
    (10, "float(answer in completion)", "float(completion == answer)", "`hackable` resists"),
    (10, "float(answer in completion)", "completion.count(answer)", "must be the highest value"),
    (10, "float(completion.strip() == answer)", "...", "Compare the completion with the answer"),
    (12, "torch.maximum(q, z.max())", "torch.zeros_like(q)", "something overflows"),
    (12, "in blocks:", "in list(blocks)[-1:]:", "only the last block"),
    (12, "return lse, lse - s / l", "return lse", "must return two numbers"),
    (13, "return dz / T", "return dz", "Divide by the temperature"),
    (13, " - dH[:, None] * p * (logp_all + H)", "", "dH has no effect yet"),
    (13, "(chosen - p) - dH[:, None]", "(chosen - p) - T * dH[:, None]", "not divided by the temp"),
    (14, "range(0, len(hidden), chunk)", "range(0, len(hidden) // chunk * chunk, chunk)",
        "The last chunk is missing"),
    (14, "dz.scatter_add_(1, y, torch.full_like(h[:, :1], -1.0))", "pass", "the onehot is missing"),
    (14, "dz = logp_all.exp()", "dz = (h @ head.T).softmax(dim=-1)", "80 matrix products for 20"),
    (15, "/ D + eps", "/ D", "eps is missing"),
    (15, "tl.sqrt(tl.sum(x * x, 0) / D + eps)", "tl.sum(x * x, 0) / D + eps", "root is missing"),
    (15, "w, mask=j < D)", "w)", "writes past the end"),
    (16, "math.sqrt(sum(gather(mine)))", "sum(gather(math.sqrt(mine)))", "Norms do not add up"),
    (16, "math.sqrt(sum(gather(mine)))", "sum(gather(math.sqrt(mine))) / 4", "mean of the norms"),
    (16, "    return math", "    if not shards:\n        return 0\n    return math",
        "Every rank must"),
    (17, "1.5 * weight", "weight", "changes nothing"),
    (17, "sampling/sampling_logp_difference/mean", "frac_tokens_skipped", "Another metric"),
    (18, "matmul(full, b)", "matmul(tile, b)", "fill up the last tile"),
    (18, "matmul(full, b)", "matmul(full, b).bfloat16().float()", "You round the result"),
    (18, "ROWS = 64", "ROWS = 1", "200 calls of `matmul`"),
]  # fmt: skip

BEFORE = (
    "(logits / temperature).log_softmax(dim=-1)",
    "(logits.log_softmax(dim=-1) / temperature)",
)
UNSHIFTED = [("[:, :-1]", ""), ("tokens[:, 1:, None]", "tokens[:, :, None]")]
ALL_PLACES = ("(l * mask).sum() / mask.sum()", "(l * mask).mean()")
MASK, SQUARES = "is_completion[:, 1:]", "sum(m * m for m in gather(mine))"

CROSS_ENTROPY = "torch.nn.functional.cross_entropy(logits, tokens) * advantage.mean()"

SEVERAL = [  # (number, [(text, replacement), …], part of the hint)
    (3, [("from torch", "import torch\nfrom torch"), ("-(advantage * logp).mean()", CROSS_ENTROPY)],
        "meet its own token only"),
    (5, [*UNSHIFTED, (MASK, "is_completion")], "predicts tokens[b, t + 1]"),
    (5, [*UNSHIFTED, (MASK, "is_completion.roll(-1, 1)")], "shifted the mask, but not"),
    (5, [BEFORE, ALL_PLACES], "Corrected so far: the shift."),
    (5, [BEFORE], "no log-prob"),
    (5, [("l * mask", "l * is_completion[:, :-1]")], "but the mask is not"),
    (5, [("l * mask", "l * is_completion")], "all have T - 1 places"),
    (9, [('{"num_iterations": 4}', '{"num_iterations": 4, "beta": 0.1}'),
         ("clip_ratio/region_mean", "kl")], "logged only with OPTIONS"),
    (9, [('{"num_iterations": 4}', '{"num_iterations": 2, "max_completion_length": 2}'),
         ("clip_ratio/region_mean", "frac_tokens_skipped")], "not because of the ratio"),
    (14, [("range(0, len(hidden), chunk)", "[0]"), ("start + chunk", "len(hidden)")],
        "all logits are 3,900"),
    (14, [("    for start", "    kept = []\n    for start"),
          ("dhead += ", "kept += [dz]\n        dhead += ")],
        "forget it before the next one"),
    (16, [("float(shard.square().sum())", "float(shard.norm())"), ("sum(gather(mine))", SQUARES)],
        "the shards of one rank are not"),
]  # fmt: skip


def packed() -> list[tuple[int, list[tuple[str, str]], str]]:
    """Return every list that the checker of exercise 11 knows, in place of the right one."""
    lines = (check.FOLDER / "solutions/11_pack.py").read_text().splitlines()
    right = {line.split(" =")[0]: line for line in lines if " = " in line}
    mistakes = check.load(check.FOLDER / "checks/11_pack.py").MISTAKES
    return [
        (11, [(right[name], f"{name} = {list(wrong)}")], hint)
        for name, table in {
            **mistakes,
            "ROWS": {**mistakes["ROWS"], (2, 3, 9, 2, 5): "ROWS[2] is 9", (2, 3): "and needs 5"},
        }.items()
        for wrong, hint in table.items()
    ]


WRONG = [(number, [(text, new)], hint) for number, text, new, hint in ONE] + SEVERAL + packed()
