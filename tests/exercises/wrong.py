"""Plausible wrong answers to the exercises: solutions with a mistake, and a part of its hint.

In: nothing. Out: WRONG, a list of (number of the exercise, [(text, replacement), …], part of the
hint). Each replacement is made in the solution. Read next: test_exercises.py.
"""

from __future__ import annotations

from exercises import check

ONE = [  # (number, text, replacement, part of the hint)
    (1, "rewards.mean(dim=1, keepdim=True)", "rewards.mean()", "mean of all prompts"),
    (1, "rewards.std(dim=1, keepdim=True)", "rewards.std()", "std of all prompts"),
    (1, "dim=1, keepdim=True", "", "Mean and std are those of all prompts"),
    (1, "dim=1", "dim=0", "A group is a row"),
    (1, "std(dim=1", "std(correction=0, dim=1", "divides by G - 1"),
    (1, " / (std + EPS)", "", "not divided by the standard deviation"),
    (1, "(std + EPS)", "std", "is NaN: add EPS"),
    (1, "(std + EPS)", "(std**2 + EPS).sqrt()", "added to the variance"),
    (1, "(rewards - mean)", "rewards", "not subtracted the mean"),
    (1, "(rewards - mean)", "(mean - rewards)", "The sign is wrong"),
    (1, "(std + EPS)", "(std + 1)", "`advantages` gives"),
    (1, "(rewards - mean) / (std + EPS)", "float(mean[0])", "return a tensor of shape [3, 4]"),
    (1, "return (rewards - mean)", "return (rewards - means)", "NameError: name 'means'"),
    (1, "return (rewards", "return ((rewards", "Python cannot read line"),
    (1, "    return (rewards - mean) / (std + EPS)", "    raise SystemExit", "raises SystemExit"),
    (2, "(rewards.sum(dim=1, keepdim=True) - rewards) / (G - 1)",
        "rewards.mean(dim=1, keepdim=True)", "still contains the completion's own reward"),
    (2, "- rewards) / (G - 1)", "- rewards) / G", "only G - 1 others"),
    (2, "True) - rewards)", "True))", "still contains the completion itself"),
    (2, "True) - rewards)", "True) - 1)", "You subtract the number 1"),
    (2, "return rewards - others", "return others - rewards", "The sign is wrong"),
    (2, "return rewards - others",
        "return (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)",
        "does not divide by the standard deviation"),
    (2, "return G / (G - 1)", "return (G - 1) / G", "Yours is the reciprocal"),
    (2, "return G / (G - 1)", "return 1.0", "bring it to one fraction"),
    (2, "return G / (G - 1)", "...", "replace its `...`. `advantages` is right. Write A"),
    (3, "return -(", "return (", "The sign is wrong"),
    (3, ".mean()", ".sum()", "divide by M"),
    (3, "log_softmax", "softmax", "gradient of the probability"),
    (3, "logits.log_softmax(dim=-1)", "logits", "You pick raw logits"),
    (3, "dim=-1", "dim=0", "over the tokens (dim 0)"),
    (3, "-(advantage * logp)", "-(advantage[:, None] * logp_all)", "all tokens of the vocabulary"),
    (3, "-(advantage * logp)", "-logp", "The advantage has no effect"),
    (3, ".mean()", ".mean().item()", "The loss has no gradient"),
    (3, ".mean()", "", "its shape must be []"),
    (3, ".squeeze(1)", "", "[M, 1] times [M] is [M, M]"),
    (4, "torch.minimum", "torch.maximum", "larger of the two products"),
    (4, "-torch.minimum(free, held)", "-held", "only the clamped product"),
    (4, "-torch.minimum(free, held)", "-free", "Nothing is clipped yet"),
    (4, "(logp - old_logp)", "(old_logp - logp)", "upside down"),
    (4, ".exp()", "", "Take its exp"),
    (4, "return -", "return ", "The sign is wrong"),
    (4, "-torch.minimum(free, held)",
        "-torch.minimum(ratio, ratio.clamp(1 - epsilon, 1 + epsilon)) * advantage",
        "not of the two ratios"),
    (4, "held)\n", "held).mean()\n", "its shape must be [10]"),
    (4, '("A < 0", "ratio < 1 - epsilon")', '("A < 0", "ratio > 1 + epsilon")', "flat only where"),
    (4, '[("A > 0", "ratio > 1 + epsilon"), ("A < 0", "ratio < 1 - epsilon")]', "...",
        "replace its `...`. `loss` is right. Print it"),
    (5, "(l * mask).sum() / mask.sum()", "(l * mask).mean()", "runs over all B·T places"),
    (5, "mask = is_completion[:, 1:]", "mask = is_completion[:, :-1]", "but the mask is not"),
    (6, "return logp - ref_logp", "return ref_logp - logp", "in the other direction"),
    (6, "return logp - ref_logp", "return (logp - ref_logp).abs()", "absolute value"),
    (6, "x = ref_logp - logp", "x = logp - ref_logp", "x has the wrong sign"),
    (6, "x.exp() - x - 1", "x.exp() - x", "The 1 is missing"),
    (6, "x.exp() - x - 1", "x**2 / 2", "This is k2"),
    (6, "x.exp() - x - 1", "x.exp() - 1", "The x is missing"),
    (6, "DIFFERENCE = 0", "DIFFERENCE = 1", "probabilities sum to 1"),
    (7, "1 / (B * n)", "1 / n", "divide by B too"),
    (7, "[1 / (B * n) for n in lengths]", "[1 / N for n in lengths]", "over its own length"),
    (7, "1 / (B * n)", "n / (B * N)", "which shrinks with the length"),
    (7, "[1 / N for _ in", "[1 / n for n in", "all tokens have the same weight"),
    (7, "[1 / N for _ in", "[1 / (B * n) for n in", "there is no mean over completions"),
    (7, "1 / N", "1 / (B * N)", "not also by B"),
    (7, "(B * limit)", "limit", "still divides by B"),
    (7, "(B * limit)", "(B * max(lengths))", "not the longest one of the batch"),
    (7, "[1 / (B * limit) for _ in", "[1 / (B * n) for n in", "does not matter"),
    (7, 'MISTAKES = "grpo"', 'MISTAKES = "dapo"', "with one loss type only"),
    (8, ".mean().exp()", ".sum().exp()", "The power 1/|y| is missing"),
    (8, ".mean().exp()", ".exp().mean()", "Average their logarithms"),
    (8, "(new - old)", "(old - new)", "upside down"),
    (8, "return -", "return ", "The sign is wrong"),
    (8, "advantage).mean()", "advantage).sum()", "sum over the completions"),
    (8, "torch.minimum", "torch.maximum", "larger of the two products"),
    (8, "return -torch.minimum(s * advantage, held * advantage).mean()",
        "ratios = [(n - o).exp() for n, o in zip(logp, old_logp)]\n"
        "    terms = [torch.minimum(r * a, r.clamp(0.8, 1.2) * a).mean() for r, a in"
        " zip(ratios, advantage)]\n    return -torch.stack(terms).mean()",
        "a ratio and a clip of its own"),
    (8, "(new - old)", "(new - old).detach()", "has no gradient"),
    (9, '{"num_iterations": 4}', "{}", "still one update per step"),
    (9, '{"num_iterations": 4}', '{"learning_rate": 1e-2}', "still one update per step"),
    (9, '{"num_iterations": 4}', '{"num_iteration": 4}', "nanogrpo refuses OPTIONS"),
    (9, '{"num_iterations": 4}', '{"num_iterations": 0}', "nanogrpo refuses OPTIONS"),
    (9, '{"num_iterations": 4}', "[4]", "OPTIONS must be a dict"),
    (9, "clip_ratio/region_mean", "reward", "without OPTIONS already"),
    (9, "clip_ratio/region_mean", "clipping", "There is no metric 'clipping'"),
    (9, "clip_ratio/region_mean", "frac_reward_zero_std", "is still 0 with OPTIONS"),
    (10, "float(answer in completion)", "float(completion == answer)", "`hackable` resists"),
    (10, "float(answer in completion)", "1.0", "does not look reasonable"),
    (10, "completion.strip() == answer", "answer in completion", "`honest` is hacked"),
    (10, "float(completion.strip() == answer)", "len(completion)", "give a right digit more"),
    (10, "float(answer in completion)", "float(int(answer) < 3)", "treat all right digits alike"),
    (12, "torch.maximum(q, z.max())", "torch.zeros_like(q)", "something overflows"),
    (12, "l = l * old", "l = l", "l is not rescaled"),
    (12, "s = s * old", "s = s", "s is not rescaled"),
    (12, "in blocks:", "in [torch.cat(list(blocks))]:", "You have kept the blocks"),
    (12, "in blocks:", "in list(blocks)[-1:]:", "only the last block"),
    (12, "lse = q + l.log()", "lse = l.log()", "Add q to it"),
    (12, "return lse, lse - s / l", "return lse, s / l - lse", "The sign of the entropy"),
    (12, "return lse, lse - s / l", "return lse, s / l", "This is s/l"),
    (12, "return lse, lse - s / l", "return lse", "must return two numbers"),
    (13, "return dz / T", "return dz", "Divide by the temperature"),
    (13, "* (chosen - p)", "* -p", "1[j = y] is missing"),
    (13, "(chosen - p)", "(p - chosen)", "The sign of the log-prob's part"),
    (13, "(z / T).log_softmax", "z.log_softmax", "The softmax must be that of z / T"),
    (13, " - dH[:, None] * p * (logp_all + H)", "", "dH has no effect yet"),
    (13, "(logp_all + H)", "logp_all", "The + H is missing"),
    (13, "(logp_all + H)", "(logp_all + 1)", "a 1 in place of H"),
    (13, "- dH[:, None]", "+ dH[:, None]", "The sign of the entropy's part"),
    (13, "(chosen - p) - dH[:, None]", "(chosen - p) - T * dH[:, None]", "not divided by the temp"),
    (14, "loss -= ", "loss += ", "The sign of the loss"),
    (14, "dz *= c", "dz *= -c", "The sign of dhidden"),
    (14, "dz.scatter_add_(1, y, torch.full_like(h[:, :1], -1.0))", "pass", "the onehot is missing"),
    (14, "dz *= c[rows, None]", "pass", "the c is missing"),
    (14, "dhead += ", "dhead = ", "only that of the last chunk"),
    (14, "dhead += ", "dhead -= ", "The sign of dhead"),
    (14, "dz = logp_all.exp()", "dz = (h @ head.T).softmax(dim=-1)", "12 matrix products for 3"),
    (14, "return loss, dhidden, dhead", "return loss", "must return three tensors"),
    (15, "/ D + eps", "/ BLOCK + eps", "divide by D"),
    (15, "row * D + j, mask=j < D, other=0.0)", "row * D + j)", "The load of x has no mask"),
    (15, "/ D + eps", "/ D", "eps is missing"),
    (15, "x / rms * w", "x / rms", "The weight is missing"),
    (15, "/ D + eps", "+ eps", "sum of squares: divide it by D"),
    (15, "tl.sum(x * x, 0) / D + eps)", "tl.sum(x * x, 0) / D) + eps", "added after the root"),
    (15, "tl.sqrt(tl.sum(x * x, 0) / D + eps)", "tl.sum(x * x, 0) / D + eps", "root is missing"),
    (15, "tl.load(X + row * D", "tl.load(X", "Each program computes row 0"),
    (15, "w, mask=j < D)", "w)", "writes past the end"),
    (15, "mask=j < D)\n", "mask=j < D - 1)\n", "never stored"),
    (15, "tl.sqrt", "tl.root", "AttributeError"),
    (16, "math.sqrt(sum(gather(mine)))", "sum(gather(math.sqrt(mine)))", "Norms do not add up"),
    (16, "math.sqrt(sum(gather(mine)))", "sum(gather(mine))", "Take its root"),
    (16, "math.sqrt(sum(gather(mine)))", "max(gather(math.sqrt(mine)))", "largest norm of a rank"),
    (16, "sum(gather(mine)))", "sum(gather(mine)) / 4)", "This is a mean over the ranks"),
    (16, "math.sqrt(sum(gather(mine)))", "sum(gather(math.sqrt(mine))) / 4", "mean of the norms"),
    (16, "math.sqrt(sum(gather(mine)))", "math.sqrt(mine)", "The ranks have different norms"),
    (16, "    return math", "    if not shards:\n        return 0\n    return math",
        "Every rank must"),
    (16, "sum(gather(mine))",
        "sum(float(x.square().sum()) for part in gather(shards) for x in part)",
        "you send whole tensors"),
    (16, "mine = ", "mine = 1 + ", "`global_norm` gives"),
    (16, "mine = ", "mine = torch.cat(shards).square().sum() or ", "raises"),
    (17, "1.5 * weight", "weight", "changes nothing"),
    (17, "1.5 * weight", "weight[:3]", "changes the shape"),
    (17, "1.5 * weight", "weight / 0", "infinite or NaN"),
    (17, "sampling/sampling_logp_difference/mean", "reward", "Another metric"),
    (17, "sampling/sampling_logp_difference/mean", "gap", "There is no metric 'gap'"),
    (17, "tests/engine/test_local.py::", "test_local.py::", "TEST must name one test"),
    (17, "test_log_probs_equal_the_trainers", "test_nothing", "There is no test"),
    (17, "tests/engine/test_local.py::test_log_probs_equal_the_trainers",
        "tests/grpo/test_loss.py::test_weights_follow_their_definitions",
        "passes all the same"),
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
    (14, [("range(0, len(hidden), chunk)", "[0]"), ("start + chunk", "len(hidden)")],
        "500 numbers"),
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
