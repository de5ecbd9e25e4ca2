"""Dashboards: read back the event files of a real run, and use a stand-in for W&B.

Read before: test_console.py. Read next: test_plot.py.
"""

import sys
from types import SimpleNamespace

import pytest

import train
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.logs.report import REPORTERS
from tests.conftest import arguments, lines

# in an extra
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """Return name → [(step, value)] as TensorBoard shows it; repeated steps count once."""
    events = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


class FakeWandb(SimpleNamespace):
    """Record the four calls that we make."""

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


@pytest.fixture(scope="module")
def reported(tiny_base, files, tmp_path_factory):
    """A run that reports to both dashboards, is killed in its third step, and is resumed."""
    folder, wandb = tmp_path_factory.mktemp("report") / "mine", FakeWandb()
    argv = arguments(tiny_base, files, folder, "--report-to", "tensorboard", "wandb")
    argv += ["--save-steps", "2", "--eval-steps", "3", "--eval-samples", "2"]
    argv += ["--eval-data", str(files / "data.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        assert train.main([*argv, "--max-steps", "3"]) == 0
        (folder / "checkpoint-3").rename(folder.parent / "gone")  # as if it had been killed
        wandb.rows.clear()
        assert train.main([*argv, "--max-steps", "4", "--resume"]) == 0
    return folder, wandb


def test_tensorboard_shows_the_log_and_each_step_once_after_a_resume(reported):
    folder, _ = reported
    shown = curves(folder)
    expected: dict[str, list] = {}
    for row in lines(folder):
        for name, value in row.items() if "step" in row else ():
            if name not in ("step", "eval/after"):
                point = row.get("eval/after", row["step"] + 1), value
                expected.setdefault(name, []).append(point)
    assert set(shown) == set(expected)
    assert [step for step, _ in shown["reward"]] == [1, 2, 3, 4]
    assert [step for step, _ in shown["eval/reward"]] == [0, 3, 4]
    for name, points in expected.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in points]
        values = [value for _, value in points]
        assert [value for _, value in shown[name]] == pytest.approx(values, rel=1e-6)


def test_wandb_gets_the_same_numbers_and_a_resumed_run_the_same_id(reported):
    folder, wandb = reported
    first, second = wandb.inits
    assert first["id"] == second["id"]
    assert (first["name"], first["resume"]) == ("mine", "allow")
    assert [about["config"]["max_steps"] for about in wandb.inits] == [3, 4]
    assert wandb.metrics[0] == (("*",), {"step_metric": "done"})
    records = lines(folder)
    after_resume = max(i for i, row in enumerate(records) if "run" in row)
    expected = []
    for row in records[after_resume + 1 :]:
        done = row.pop("eval/after", row["step"] + 1)
        del row["step"]
        expected.append({**row, "done": done})
    assert wandb.rows == expected
    assert wandb.finished == 2


def test_a_failed_run_sends_its_records(reported, tiny_base, files, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    function = f"{files / 'reward.py'}:fails_in_the_third_step"
    options = ["--reward-funcs", function, "--max-steps", "5", "--report-to", "wandb"]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 2
    assert (len(wandb.rows), wandb.finished) == (2, 1)
    assert wandb.inits[0]["id"] != reported[1].inits[0]["id"]  # each run has its own


def start_reporter(name: str, folder) -> None:
    cfg = Config(model="-", data=("-",), output_dir=str(folder))
    REPORTERS[name](cfg, {"run": {}}, 0)


def test_an_error_of_wandb_is_a_user_error(tmp_path, monkeypatch):
    def init(**about):
        raise RuntimeError("no API key.\nlog in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    message = "^--report-to wandb: no API key: log in, set WANDB_MODE=offline, or leave it out.$"
    with pytest.raises(UserError, match=message):
        start_reporter("wandb", tmp_path)


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_is_a_user_error(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"^--report-to {name} needs its package: pip install -e \.\[{name}\]$"
    with pytest.raises(UserError, match=message):
        start_reporter(name, tmp_path)
