"""Check exercise 10: train a policy that cannot read its prompt with both rewards."""

from exercises import blind
from exercises.hints import expect, given

START = "A grader that looks for the answer anywhere in the text is a good start."


def values(reward, name) -> tuple[float, float]:
    """Return the reward of just the right digit and the highest of just a wrong one."""
    pairs = [(said, wanted) for said in blind.ANSWERS for wanted in blind.ANSWERS]
    table = {pair: float(given(reward(*pair), name)) for pair in pairs}
    right = {v for (said, wanted), v in table.items() if said == wanted}
    expect(len(right) == 1, f"`{name}` must treat all right digits alike.")
    return right.pop(), max(v for (said, wanted), v in table.items() if said != wanted)


def watch(reward, name) -> blind.State:
    print(f"   a policy that cannot read its prompt learns from `{name}`:")
    states = blind.train(reward)
    for s in states:
        values = f"reward {s.reward:6.2f}   right {s.accuracy:5.2f}   says {s.example!r}"
        print(f"   step {s.step:3}   {values}")
    return states[-1]


def check(answer) -> None:
    best, wrong = values(answer.hackable, "hackable")
    expect(
        best > wrong,
        "`hackable` does not look reasonable: a right digit must get more than a wrong one.",
    )
    values(answer.honest, "honest")
    state = watch(answer.hackable, "hackable")
    expect(
        state.reward >= 0.9 * best,
        f"`hackable` resists: the policy gets {state.reward:.2f} of {best:g}. Think of a"
        " completion that satisfies your reward for every answer at once.",
    )
    best, wrong = values(answer.honest, "honest")
    expect(best > wrong, "`honest` must give a right digit more than a wrong one.")
    state = watch(answer.honest, "honest")
    expect(
        state.reward <= 0.25 * best,
        f"`honest` is hacked: the policy gets {state.reward:.2f} of {best:g} by saying"
        f" {state.example!r}. Accept one answer only.",
    )
