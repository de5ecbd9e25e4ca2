"""Plausible wrong answers to the exercises: solutions with a mistake, and a part of its hint.

In: nothing. Out: WRONG, a list of (number of the exercise, [(text, replacement), …], part of the
hint). Each replacement is made in the solution. A block of EDITS has the number, the part of the
hint, and the replacements as in a diff. Read next: test_exercises.py.
"""

import re

from exercises import check

EDITS = """
1: mean of all prompts
- rewards.mean(dim=1, keepdim=True)
+ rewards.mean()

1: Mean and std are those of all prompts
- dim=1, keepdim=True

1: divides by G - 1
- std(dim=1
+ std(correction=0, dim=1

1: not subtracted the mean
- (rewards - mean)
+ rewards

2: still contains the completion's own reward
- (rewards.sum(dim=1, keepdim=True) - rewards) / (G - 1)
+ rewards.mean(dim=1, keepdim=True)

2: right for G = 4, but not for G = 2
- - rewards) / (G - 1)
+ - rewards) / 3

2: does not divide by the standard deviation
- return rewards - others
+ return (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)

2: bring it to one fraction
- return G / (G - 1)
+ return 1.0

3: The sign is wrong
- return -(
+ return (

3: gradient of the probability
- log_softmax
+ softmax

3: over the tokens (dim 0)
- dim=-1
+ dim=0

3: meet its own token only
- from torch
+ import torch
+ from torch
- -(advantage * logp).mean()
+ torch.nn.functional.cross_entropy(logits, tokens) * advantage.mean()

4: larger of the two products
- torch.minimum
+ torch.maximum

4: Nothing is clipped yet
- -torch.minimum(free, held)
+ -free

4: has no gradient
- logp - old_logp
+ logp.detach() - old_logp

4: not of the two ratios
- -torch.minimum(free, held)
+ -torch.minimum(ratio, ratio.clamp(1 - epsilon, 1 + epsilon)) * advantage

5: runs over all B·T places
- (l * mask).sum() / mask.sum()
+ (l * mask).mean()

5: predicts tokens[b, t + 1]
- [:, :-1]
- tokens[:, 1:, None]
+ tokens[:, :, None]
- is_completion[:, 1:]
+ is_completion

5: shifted the mask, but not
- [:, :-1]
- tokens[:, 1:, None]
+ tokens[:, :, None]
- is_completion[:, 1:]
+ is_completion.roll(-1, 1)

5: Corrected so far: the shift.
- (logits / temperature).log_softmax(dim=-1)
+ (logits.log_softmax(dim=-1) / temperature)
- (l * mask).sum() / mask.sum()
+ (l * mask).mean()

5: no log-prob
- (logits / temperature).log_softmax(dim=-1)
+ (logits.log_softmax(dim=-1) / temperature)

5: but the mask is not
- l * mask
+ l * is_completion[:, :-1]

5: all have T - 1 places
- l * mask
+ l * is_completion

6: in the other direction
- return logp - ref_logp
+ return ref_logp - logp

6: This is k2
- x.exp() - x - 1
+ x**2 / 2

6: probabilities sum to 1
- DIFFERENCE = 0
+ DIFFERENCE = 1

7: divide by B too
- 1 / (B * n)
+ 1 / n

7: there is no mean over completions
- [1 / N for _ in
+ [1 / (B * n) for n in

7: does not matter
- [1 / (B * limit) for _ in
+ [1 / (B * n) for n in

8: The power 1/|y| is missing
- .mean().exp()
+ .sum().exp()

8: a ratio and a clip of its own
- return -torch.minimum(s * advantage, held * advantage).mean()
+ ratios = [(n - o).exp() for n, o in zip(logp, old_logp)]
+     clips = [r.clamp(1 - epsilon, 1 + epsilon) for r in ratios]
+     all = zip(ratios, clips, advantage)
+     return -torch.stack([torch.minimum(r * a, c * a).mean() for r, c, a in all]).mean()

8: The loss is NaN
- (new - old).mean().exp()
+ (new.sum().exp() / old.sum().exp()) ** (1 / len(new))

9: still one update per step
- {"num_iterations": 4}
+ {}

9: OPTIONS must be a dict
- {"num_iterations": 4}
+ [4]

9: logged only with OPTIONS
- {"num_iterations": 4}
+ {"num_iterations": 4, "beta": 0.1}
- clip_ratio/region_mean
+ kl

9: not because of the ratio
- {"num_iterations": 4}
+ {"num_iterations": 2, "max_completion_length": 2}
- clip_ratio/region_mean
+ frac_tokens_skipped

10: `hackable` resists
- float(answer in completion)
+ float(completion == answer)

10: must be the highest value
- float(answer in completion)
+ completion.count(answer)

10: Compare the completion with the answer
- float(completion.strip() == answer)
+ ...

12: something overflows
- torch.maximum(q, z.max())
+ torch.zeros_like(q)

12: only the last block
- in blocks:
+ in list(blocks)[-1:]:

12: must return two numbers
- return lse, lse - s / l
+ return lse

13: Divide by the temperature
- return dz / T
+ return dz

13: dH has no effect yet
-  - dH[:, None] * p * (logp_all + H)

13: not divided by the temp
- (chosen - p) - dH[:, None]
+ (chosen - p) - T * dH[:, None]

14: The last chunk is missing
- range(0, len(hidden), chunk)
+ range(0, len(hidden) // chunk * chunk, chunk)

14: the onehot is missing
- dz.scatter_add_(1, y, torch.full_like(h[:, :1], -1.0))
+ pass

14: 80 matrix products for 20
- dz = logp_all.exp()
+ dz = (h @ head.T).softmax(dim=-1)

14: all logits are 3,900
- range(0, len(hidden), chunk)
+ [0]
- start + chunk
+ len(hidden)

14: forget it before the next one
-     for start
+     kept = []
+     for start
- dhead +=
+ kept += [dz]
+         dhead +=

15: eps is missing
- / D + eps
+ / D

15: root is missing
- tl.sqrt(tl.sum(x * x, 0) / D + eps)
+ tl.sum(x * x, 0) / D + eps

15: writes past the end
- w, mask=j < D)
+ w)

16: Norms do not add up
- math.sqrt(sum(gather(mine)))
+ sum(gather(math.sqrt(mine)))

16: mean of the norms
- math.sqrt(sum(gather(mine)))
+ sum(gather(math.sqrt(mine))) / 4

16: Every rank must
-     return math
+     if not shards:
+         return 0
+     return math

16: the shards of one rank are not
- float(shard.square().sum())
+ float(shard.norm())
- sum(gather(mine))
+ sum(m * m for m in gather(mine))

17: changes nothing
- 1.5 * weight
+ weight

17: Another metric
- sampling/sampling_logp_difference/mean
+ frac_tokens_skipped

18: fill up the last tile
- matmul(full, b)
+ matmul(tile, b)

18: You round the result
- matmul(full, b)
+ matmul(full, b).bfloat16().float()

18: 200 calls of `matmul`
- ROWS = 64
+ ROWS = 1
"""


def edited() -> list[tuple[int, list[tuple[str, str]], str]]:
    """Return the rows of EDITS."""
    rows = []
    for block in EDITS.strip("\n").split("\n\n"):
        number, _, hint = block.partition("\n")[0].partition(": ")
        edits = re.findall(r"^- (.*)((?:\n\+ .*)*)", block, re.MULTILINE)
        rows.append(
            (int(number), [(old, new[3:].replace("\n+ ", "\n")) for old, new in edits], hint)
        )
    return rows


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


WRONG = edited() + packed()
