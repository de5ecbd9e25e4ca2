"""Dashboards: event files of a real run read back, a stand-in for W&B, and one sentence where the
package is missing.

Read before: test_log.py. Read next: test_plot.py.
"""

import sys
from types import SimpleNamespace

import pytest

import train
from tests.conftest import arguments, lines

# in an extra
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """name → (step, value) of what TensorBoard shows: what a resumed run repeats counts once."""
    events = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_every_number_of_the_log_and_each_step_once_after_a_resume(
    tiny_base, files, tmp_path
):
    options = [
        "--report-to",
        "tensorboard",
        "--save-steps",
        "2",
        "--eval-steps",
        "3",
        "--eval-data",
        str(files / "data.jsonl"),
    ]
    argv = arguments(tiny_base, files, tmp_path, *options, "--eval-samples", "2")
    assert train.main([*argv, "--max-steps", "3"]) == 0
    (tmp_path / "checkpoint-3").rename(tmp_path / "gone")  # as if it had been killed in step 3
    assert train.main([*argv, "--max-steps", "4", "--resume"]) == 0
    shown = curves(tmp_path)
    expected: dict[str, list] = {}
    for row in lines(tmp_path):
        for name, value in row.items() if "step" in row else ():
            if name not in ("step", "eval/after"):
                expected.setdefault(name, []).append(
                    (row.get("eval/after", row["step"] + 1), value)
                )
    assert set(shown) == set(expected)
    assert [step for step, _ in shown["reward"]] == [1, 2, 3, 4]
    assert [step for step, _ in shown["eval/reward"]] == [0, 3, 4]
    for name, points in expected.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in points]
        assert [value for _, value in shown[name]] == pytest.approx(
            [value for _, value in points], rel=1e-6
        )


class FakeWandb(SimpleNamespace):
    """The four calls that we make, remembered."""

    def __init__(self):
        super().__init__(inits=[], rows=[], metrics=[], finished=0)

    def init(self, **about):
        self.inits.append(about)
        return self

    def define_metric(self, *names, **how):
        self.metrics.append((names, how))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished += 1


def test_wandb_is_given_the_same_numbers_and_a_resumed_run_the_same_id(
    tiny_base, files, tmp_path, monkeypatch
):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    argv = arguments(
        tiny_base, files, tmp_path / "mine", "--report-to", "wandb", "--max-steps", "2"
    )
    assert train.main(argv) == 0
    assert train.main([*argv, "--max-steps", "3", "--resume"]) == 0
    first, second = wandb.inits
    assert first["id"] == second["id"]
    assert (
        first["name"],
        first["resume"],
        first["config"]["max_steps"],
        second["config"]["max_steps"],
    ) == (
        "mine",
        "allow",
        2,
        3,
    )
    assert wandb.metrics[0] == (("*",), {"step_metric": "done"})
    logged = [row for row in lines(tmp_path / "mine") if "step" in row]
    assert wandb.rows == [
        {**{k: v for k, v in row.items() if k != "step"}, "done": row["step"] + 1} for row in logged
    ]
    assert wandb.finished == 2
    assert (
        train.main(
            arguments(
                tiny_base, files, tmp_path / "other", "--report-to", "wandb", "--max-steps", "1"
            )
        )
        == 0
    )
    assert wandb.inits[2]["id"] != first["id"]


def test_what_wandb_refuses_is_one_sentence(tiny_base, files, tmp_path, monkeypatch, capsys):
    wandb = FakeWandb()
    monkeypatch.setattr(
        wandb,
        "init",
        lambda **_: (_ for _ in ()).throw(RuntimeError("no API key.\nlog in")),
        raising=False,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert train.main(arguments(tiny_base, files, tmp_path, "--report-to", "wandb")) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        told
        == "error: --report-to wandb: no API key: log in, set WANDB_MODE=offline, or leave it out."
    )


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_is_one_sentence(
    tiny_base, files, tmp_path, monkeypatch, capsys, name, module
):
    monkeypatch.setitem(sys.modules, module, None)
    assert train.main(arguments(tiny_base, files, tmp_path, "--report-to", name)) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"error: --report-to {name} needs its package: pip install -e .[{name}]"


def test_one_failed_run_still_sends_what_it_has(tiny_base, files, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options = [
        "--reward-funcs",
        f"{files / 'reward.py'}:fails_in_the_third_step",
        "--max-steps",
        "5",
        "--report-to",
        "wandb",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 2
    assert (len(wandb.rows), wandb.finished) == (2, 1)
