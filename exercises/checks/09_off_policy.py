"""Check exercise 9 with two runs."""

from exercises import tiny
from exercises.hints import Hint, expect, given
from nanogrpo import Config
from nanogrpo.errors import UserError

START = (
    "How often are samples used? `python train.py --help` says it of num_iterations and of"
    " steps_per_generation. docs/metrics.md says which metrics are 0 when every ratio is 1."
)


def check(answer) -> None:
    options, metric = given(answer.OPTIONS, "OPTIONS"), given(answer.METRIC, "METRIC")
    expect(isinstance(options, dict), "OPTIONS must be a dict, such as {'learning_rate': 1e-4}.")
    try:
        expect(
            Config(**options).updates_per_step > 1,
            "With OPTIONS there is still one update per step, so every ratio is still 1. Use the"
            " same samples for several updates.",
        )
        after = tiny.run(**options)
    except (UserError, TypeError) as e:  # TypeError: an unknown option
        raise Hint(f"nanogrpo refuses OPTIONS: {str(e).rstrip('.')}.") from e
    before = tiny.usual()
    expect(metric in after[-1], f"There is no metric {metric!r}. docs/metrics.md lists them all.")
    expect(
        metric in before[-1],
        f"{metric} is logged only with OPTIONS. Find a metric that is also there without them, and"
        " 0 because every ratio is 1.",
    )
    old, new = ([row[metric] for row in rows if metric in row] for rows in (before, after))
    expect(
        not any(old),
        f"{metric} is {old[-1]:.4g} without OPTIONS already. Find a metric that is 0 because every"
        " ratio is 1.",
    )
    expect(
        any(new),
        f"{metric} is still 0 with OPTIONS. It does not depend on the ratio, or the ratio moves too"
        " little to be clipped: make more updates with the same samples, or larger ones.",
    )
    expect(
        metric.startswith("clip_ratio/"),
        f"{metric} is 0 without OPTIONS and {max(new):.4g} with them, but not because of the ratio."
        " Find one that counts ratios outside the clip.",
    )
