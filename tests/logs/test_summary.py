"""The summary of a run has its first, last and best value, and `nanogrpo runs` lists the runs.

Read next: nanogrpo/extras/summary.py.
"""

import pytest

from nanogrpo.extras import commands
from nanogrpo.extras.summary import summarize
from tests.conftest import write_rows

STEPS = [
    {"step": i, "reward": x, "step_time": 30.0, "num_tokens": 1000 * i + 500}
    for i, x in enumerate([0.1, 0.9, 0.4])
]
EVALUATIONS = [
    {"step": i - 1, "eval/after": i, "eval/reward": x, "eval/rewards/f": x + 1}
    for i, x in enumerate([0.0, 0.5, 0.5, 0.25])
]
TIME = "3 steps in 1:30, 2,500 tokens"


def head(**options) -> dict:
    return {"run": {"model": "base", **options}}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "0 steps in 0:00, 0 tokens"),
        ([head(), *STEPS], f"reward 0.100 → 0.400, best 0.900 after step 2; {TIME}"),
        (
            [head(), *STEPS, *EVALUATIONS],
            f"held-out reward 0.000 → 0.250, best 0.500 after step 1; {TIME}",
        ),
        *(  # the last header counts, and a metric is found by all its names
            (
                [head(), *EVALUATIONS, head(metric_for_best_model=name), *STEPS],
                f"held-out f 1.000 → 1.250, best 1.500 after step 1; {TIME}",
            )
            for name in ("f", "eval/rewards/f", "rewards/f", "eval_rewards/f/mean")
        ),
    ],
)
def test_a_summary_has_the_first_the_last_and_the_best_value(records, expected):
    assert str(summarize(records)) == expected


def test_runs_are_listed_with_the_checkpoint_to_use(tmp_path, capsys):
    assert commands.main(["runs", str(tmp_path)]) == 2
    for name, best in {"a": False, "b": True, "c": True}.items():
        for step in (2, 3) if name < "c" else ():
            (tmp_path / name / f"checkpoint-{step}").mkdir(parents=True)
        records = [head(load_best_model_at_end=best), *STEPS, *EVALUATIONS]
        (tmp_path / name).mkdir(exist_ok=True)
        write_rows(tmp_path / name / "metrics.jsonl", records)
    capsys.readouterr()
    assert commands.main(["runs", str(tmp_path / "a"), str(tmp_path)]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    used = (*2 * ["a/checkpoint-3"], "b/checkpoint-2", "c")
    assert shown == [[str(tmp_path / path), "base"] for path in used]
