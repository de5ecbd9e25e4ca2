"""Dashboards: read back the event files and Trackio's database of a real run, and use a stand-in
for W&B. Nothing here uses the network.

Read before: test_console.py. Read next: test_plot.py.
"""

import sys
from types import SimpleNamespace

import pytest

import train
from nanogrpo import Config
from nanogrpo.extras.dashboards import Dashboards
from tests.conftest import arguments, lines, refused, write_rows
from tests.logs.conftest import completions_of

# in an extra
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


class FakeWandb(SimpleNamespace):
    """Record the calls that we make."""

    def __init__(self):
        super().__init__(inits=[], rows=[], tables=[], finished=0)

    def init(self, **about):
        self.inits.append(about)

    def log(self, row, step):
        (self.tables if "completions" in row else self.rows).append((step, row))

    def finish(self):
        self.finished += 1

    class Table(SimpleNamespace):
        """A table as W&B takes it: columns, data, allow_mixed_types."""


@pytest.fixture(scope="module")
def reported(tiny_base, files, tmp_path_factory):
    """A run that reports to two dashboards, is killed in its third step, and is resumed."""
    folder, wandb = tmp_path_factory.mktemp("report") / "mine", FakeWandb()
    options = f"--eval-data {files}/data.jsonl --eval-steps 3 --eval-samples 2 --save-steps 2"
    options += " --log-completions --report-to tensorboard wandb"
    argv = arguments(tiny_base, files, folder, options, "--run-name", "first try")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        assert train.main([*argv, "--max-steps", "3"]) == 0
        (folder / "checkpoint-3").rename(folder.parent / "gone")  # as if it had been killed
        wandb.rows.clear()
        wandb.tables.clear()
        assert train.main([*argv, "--max-steps", "4", "--resume"]) == 0
    return folder, wandb


def points(records: list[dict]) -> list[tuple[int, dict]]:
    """Return (finished steps, metrics) of each step and evaluation."""
    found = [(r.get("eval/after", r["step"] + 1), r) for r in records if "step" in r]
    return [(n, {k: v for k, v in r.items() if k not in ("step", "eval/after")}) for n, r in found]


def test_tensorboard_shows_the_log_and_each_step_once_after_a_resume(reported):
    folder, _ = reported
    events = reader.EventAccumulator(str(folder / "dashboards" / "tensorboard")).Reload()
    shown = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    expected: dict[str, list] = {}
    for done, row in points(lines(folder)):
        for name, value in row.items():
            expected.setdefault(name, []).append((done, value))
    assert set(shown) == set(expected)
    assert [e.step for e in shown["reward"]] == [1, 2, 3, 4]
    assert [e.step for e in shown["eval/reward"]] == [0, 3, 4]
    for name, values in expected.items():
        assert [e.step for e in shown[name]] == [step for step, _ in values]
        assert [e.value for e in shown[name]] == pytest.approx([v for _, v in values], rel=1e-6)


def test_wandb_gets_the_same_numbers_and_tables_and_a_resumed_run_the_same_id(reported):
    folder, wandb = reported
    first, second = wandb.inits
    assert first["id"] == second["id"]
    assert (first["name"], first["resume"]) == ("first try", "allow")
    assert [about["config"]["max_steps"] for about in wandb.inits] == [3, 4]
    records = lines(folder)
    after_resume = max(i for i, row in enumerate(records) if "run" in row)
    assert wandb.rows == points(records[after_resume:])
    assert wandb.finished == 2
    assert [done for done, _ in wandb.tables] == [3, 4]
    for done, row in wandb.tables:
        written = completions_of(folder, done)
        assert row["completions"].columns == [*written[0]]
        assert row["completions"].data == [[*record.values()] for record in written]


# Trackio reads its folder when it is first imported, so tests/conftest.py sets it.
def test_trackio_gets_the_same_numbers_and_completions_without_a_network(
    tiny_base, files, tmp_path
):
    database = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    options = "--report-to trackio --log-completions --save-steps 2"
    argv = arguments(tiny_base, files, tmp_path / "mine", options)
    assert train.main([*argv, "--max-steps", "2"]) == 0
    assert train.main([*argv, "--max-steps", "3", "--resume"]) == 0
    (run,) = database.get_run_records("nanogrpo")  # the resumed run continues the first
    logged = database.get_logs("nanogrpo", "mine", run_id=run["id"])
    tables = [row for row in logged if "completions" in row]
    expected = points(lines(tmp_path / "mine"))
    for row, table, (done, record) in zip(
        (row for row in logged if "reward" in row), tables, expected, strict=True
    ):
        assert (row["step"], table["step"]) == (done, done)
        assert record.items() <= row.items()
        assert table["completions"]["_value"] == completions_of(tmp_path / "mine", done)


def test_a_failed_run_sends_its_records(reported, tiny_base, files, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options = f"--reward-funcs {files}/reward.py:fails_in_the_third_step --report-to wandb"
    assert train.main(arguments(tiny_base, files, tmp_path, options)) == 2
    assert (len(wandb.rows), wandb.finished) == (2, 1)
    assert wandb.inits[0]["id"] != reported[1].inits[0]["id"]  # each run has its own


def test_a_table_has_every_column_and_can_be_encoded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandb())
    cfg = Config(output_dir=str(tmp_path), report_to=("wandb",), log_completions=True)
    (tmp_path / "completions").mkdir()
    first = {"prompt": [{"role": "user", "content": "é?"}], "completion": "a\ud800", "reward": 1.0}
    rows = first, {"prompt": "x", "completion": "b", "reward": None, "source": "s"}
    write_rows(tmp_path / "completions/completions_00001.jsonl", rows)
    dashboards = Dashboards(cfg)
    dashboards.record(0, {"run": {}})
    dashboards.record(1, {"step": 0, "reward": 1.0})
    ((_, row),) = wandb.tables
    assert row["completions"].columns == ["prompt", "completion", "reward", "source"]
    assert row["completions"].data == [
        ["[{'role': 'user', 'content': 'é?'}]", "a\\ud800", 1.0, None],
        ["x", "b", None, "s"],
    ]


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")],
)
def test_a_missing_package_or_login_is_a_user_error(tmp_path, monkeypatch, name, module):
    def init(**about):
        raise RuntimeError("no API key.\nlog in")

    dashboards = Dashboards(Config(output_dir=str(tmp_path), report_to=(name,)))
    monkeypatch.setitem(sys.modules, module, None)
    with refused(rf"^--report-to {name} needs its package: pip install 'nanogrpo\[{name}\]'$"):
        dashboards.record(0, {"run": {}})
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(init=init))
    if name != "tensorboard":
        with refused(f"^--report-to {name}: no API key: log in, correct"):
            dashboards.record(0, {"run": {}})
