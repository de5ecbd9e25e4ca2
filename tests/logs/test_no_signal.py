"""One warning per streak of steps without a learning signal, with the reason that fits.

Read before: test_progress.py. Read next: test_console.py.
"""

import dataclasses

import train
from nanogrpo.config import Config
from nanogrpo.logs import metrics
from nanogrpo.logs.no_signal import STEPS, NoSignal, reason
from tests.conftest import SOLO, arguments, steps
from tests.logs.conftest import sample

CFG = Config(model="-", data=("-",), max_steps=100)
FLAT = {"frac_reward_zero_std": 1.0, "grad_norm": 0.0, "entropy": 1.0}
NOTHING = [0.0] * 4


def why(samples, row=FLAT, advantages=NOTHING, **options) -> str:
    cfg = dataclasses.replace(CFG, **options)
    return reason(cfg, metrics.facts(samples, SOLO), row, advantages)


def test_the_reason_fits_the_rewards():
    zero = [sample(3, accuracy=0.0, format=1.0) for _ in range(4)]
    assert why(zero).startswith("accuracy gave 0 to every completion: the prompts may not ask")
    both = [sample(3, accuracy=0.0, format=0.0) for _ in range(4)]
    assert why(both).startswith("accuracy and format gave 0 to every completion: ")
    one = [sample(3, accuracy=1.0, length=-0.5) for _ in range(4)]
    assert why(one).startswith(
        "accuracy gave 1 and length gave -0.5 to every completion: the task is too easy"
    )
    mixed = [sample(3, accuracy=r) for r in (0.0, 0.0, 1.0, 1.0)]
    assert why(mixed).startswith("the rewards differ between prompts, but all completions of a")
    none = [sample(3, accuracy=None) for _ in range(4)]
    assert why(none).startswith("no reward function returned a number for any completion")
    assert why([dataclasses.replace(s, rewards={}) for s in none]).startswith("no reward function")


def test_the_reason_fits_the_completions():
    cut = [sample(3, stopped=False, accuracy=0.0) for _ in range(4)]
    for some, share in ((cut, "100%"), (cut[:3] + [sample(2, accuracy=0.0)], "75%")):
        assert why(some, max_completion_length=3).startswith(
            f"{share} of the completions were truncated at --max-completion-length 3, before they"
        )
    assert "truncated" not in why(cut[:2] + [sample(2, accuracy=0.0)] * 2)
    same = [sample(3, accuracy=r) for r in (0.0, 0.0, 1.0, 1.0)]
    assert why(same, {**FLAT, "entropy": 2e-5}).startswith(
        "the completions of a prompt are all alike (entropy 2e-05): raise --temperature"
    )
    # of a step without a signal, the entropy is that of its shortest completion
    different = [sample(n, accuracy=0.0) for n in (1, 3, 3, 3)]
    assert "alike" not in why(different, {**FLAT, "entropy": 2e-5})


def test_the_reason_fits_the_options():
    cut = [sample(3, stopped=False, accuracy=float(i)) for i in range(4)]
    signal = [1.0, -1.0, 1.0, -1.0]
    assert "--mask-truncated-completions leaves these out" in why(
        cut, FLAT, signal, mask_truncated_completions=True
    )
    assert "masked out of the loss" in why(cut, FLAT, signal)
    negative = [sample(3, accuracy=-float(i)) for i in range(4)]
    row = {**FLAT, "frac_reward_zero_std": 0.0}
    assert "use rewards of 0 and above" in why(negative, row, advantage_estimator="maxrl")


def warnings(capsys, cfg: Config, start: int, signals: list[float]) -> list[int]:
    """Return the steps after which a warning came, for steps with these advantages."""
    watch, out = NoSignal(cfg, start), []
    facts = metrics.facts([sample(3, accuracy=0.0)] * 2, SOLO)
    for step, advantage in enumerate(signals):
        watch.step(facts, {**FLAT, "grad_norm": abs(advantage)}, [advantage, -advantage])
        out += [step] * capsys.readouterr().err.count("warning: ")
    return out


def test_there_is_one_warning_per_streak(capsys):
    k = STEPS
    assert warnings(capsys, CFG, 0, [0.0] * (k - 1)) == []
    assert warnings(capsys, CFG, 0, [0.0] * 3 * k) == [k - 1]
    assert warnings(capsys, CFG, 0, [0.0] * (k - 1) + [1.0] + [0.0] * 2 * k) == [2 * k - 1]
    assert warnings(capsys, CFG, 0, ([0.0] * k + [1.0]) * 2) == [k - 1, 2 * k]
    assert warnings(capsys, CFG, CFG.max_steps - 2, [0.0] * 2) == [1]  # at the end of a short run


def test_a_real_run_that_learns_nothing_says_so_once_on_the_console(
    tiny_base, files, tmp_path, capsys
):
    options = ["--reward-funcs", "format", "--max-steps", str(STEPS + 2)]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    assert {row["frac_reward_zero_std"] for row in steps(tmp_path)} == {1.0}
    assert {row["grad_norm"] for row in steps(tmp_path)} == {0.0}
    (said,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("warning"))
    assert said.startswith(f"warning: {STEPS} steps in a row had no learning signal: ")
    assert said.endswith("Read completions (--num-completions-to-print 4).")


def test_a_run_that_learns_gets_no_warning(tiny_base, files, tmp_path, capsys):
    assert train.main(arguments(tiny_base, files, tmp_path, "--max-steps", str(STEPS))) == 0
    assert "warning" not in capsys.readouterr().err
