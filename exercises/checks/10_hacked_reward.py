"""Check exercise 10: train a policy that cannot read its prompt with both rewards."""

from exercises import blind
from exercises.hints import expect, given

START = "A grader that looks for the answer anywhere in the text is a good start."


def highest(reward, name) -> float:
    """Return the reward of just the right digit, which must be above that of just a wrong one."""
    pairs = [(said, wanted) for said in blind.ANSWERS for wanted in blind.ANSWERS]
    later = "Compare the completion with the answer." if name == "honest" else ""
    table = {pair: float(given(reward(*pair), name, later)) for pair in pairs}
    right = {v for (said, wanted), v in table.items() if said == wanted}
    expect(len(right) == 1, f"`{name}` must treat all right digits alike.")
    best = right.pop()
    expect(best > 0, f"`{name}` must give the right digit a reward above 0.")
    expect(
        best > max(v for (said, wanted), v in table.items() if said != wanted),
        f"`{name}` does not look reasonable: a right digit must get more than a wrong one.",
    )
    return best


def watch(reward, name, best) -> blind.State:
    """Train the policy, and return its last state. No completion may get more than `best`."""

    def limited(completion, answer):
        value = float(reward(completion, answer))
        expect(
            value <= best + 1e-9,
            f"`{name}` gives {completion!r} {value:g} if the answer is {answer}, and just the right"
            f" digit only {best:g}. That must be the highest value.",
        )
        return value

    print(f"   a policy that cannot read its prompt learns from `{name}`:")
    states = blind.train(limited)
    for s in states:
        values = f"reward {s.reward:6.2f}   right {s.accuracy:5.2f}   says {s.example!r}"
        print(f"   step {s.step:3}   {values}")
    return states[-1]


def check(answer) -> None:
    best = highest(answer.hackable, "hackable")
    state = watch(answer.hackable, "hackable", best)
    expect(
        state.reward >= 0.9 * best,
        f"`hackable` resists: the policy gets {state.reward:.2f} of {best:g}. Think of a"
        " completion that satisfies your reward for every answer at once.",
    )
    best = highest(answer.honest, "honest")
    state = watch(answer.honest, "honest", best)
    expect(
        state.reward <= 0.25 * best,
        f"`honest` is hacked: the policy gets {state.reward:.2f} of {best:g} by saying"
        f" {state.example!r}. Accept one answer only, and give everything else much less.",
    )
