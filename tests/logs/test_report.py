"""Dashboards: read back the event files and Trackio's database of a real run, and use a stand-in
for W&B. Nothing here uses the network.

Read before: test_console.py. Read next: test_plot.py.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import train
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.logs.report import REPORTERS, table
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
    """Record the five calls that we make."""

    def __init__(self):
        super().__init__(inits=[], rows=[], tables=[], metrics=[], finished=0)

    def init(self, **about):
        self.inits.append(about)
        return self

    def define_metric(self, *names, **how):
        self.metrics.append((names, how))

    def log(self, row):
        (self.tables if "completions" in row else self.rows).append(row)

    def finish(self):
        self.finished += 1

    class Table(SimpleNamespace):
        """A table as W&B takes it: columns, data, allow_mixed_types."""

    Image = None  # these runs have no pictures


@pytest.fixture(scope="module")
def reported(tiny_base, files, tmp_path_factory):
    """A run that reports to both dashboards, is killed in its third step, and is resumed."""
    folder, wandb = tmp_path_factory.mktemp("report") / "mine", FakeWandb()
    argv = arguments(tiny_base, files, folder, "--report-to", "tensorboard", "wandb")
    argv += ["--save-steps", "2", "--eval-steps", "3", "--eval-samples", "2"]
    argv += ["--eval-data", str(files / "data.jsonl"), "--run-name", "first try"]
    argv += ["--log-completions", "--log-unique-prompts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        assert train.main([*argv, "--max-steps", "3"]) == 0
        (folder / "checkpoint-3").rename(folder.parent / "gone")  # as if it had been killed
        wandb.rows.clear()
        wandb.tables.clear()
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
    assert (first["name"], first["resume"]) == ("first try", "allow")
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


def completions(folder, step: int) -> list[dict]:
    path = folder / "completions" / f"completions_{step:05d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_wandb_gets_a_table_with_one_completion_of_each_prompt(reported):
    folder, wandb = reported
    assert [row["done"] for row in wandb.tables] == [3, 4]  # the steps after the resume
    for row in wandb.tables:
        written = completions(folder, row["done"])
        shown = row["completions"]
        assert shown.columns == [*written[0]]
        assert shown.data == [[*record.values()] for record in written[::4]]


# Trackio reads its folder when it is first imported, so tests/conftest.py sets it.
@pytest.fixture
def database():
    return pytest.importorskip("trackio.sqlite_storage").SQLiteStorage


def test_trackio_gets_the_same_numbers_and_all_completions_without_a_network(
    database, tiny_base, files, tmp_path
):
    argv = arguments(tiny_base, files, tmp_path / "mine", "--report-to", "trackio")
    argv += ["--log-completions", "--save-steps", "2"]
    assert train.main([*argv, "--max-steps", "2"]) == 0
    assert train.main([*argv, "--max-steps", "3", "--resume"]) == 0
    (run,) = database.get_run_records("nanogrpo")  # the resumed run continues the first
    assert run["name"] == "mine"
    logged = database.get_logs("nanogrpo", "mine", run_id=run["id"])
    records = [row for row in lines(tmp_path / "mine") if "step" in row]
    assert len(logged) == 2 * len(records)
    numbers = [row for row in logged if "reward" in row]
    assert [row["step"] for row in numbers] == [1, 2, 3]
    for row, record in zip(numbers, records):
        del record["step"]
        assert {name: row[name] for name in record} == record
    tables = [row for row in logged if "completions" in row]
    for row in tables:
        shown = row["completions"]["_value"]
        assert shown == completions(tmp_path / "mine", row["step"])
    # a run that starts over is another run of the same name
    assert train.main([*argv, "--max-steps", "1", "--overwrite-output-dir"]) == 0
    assert [r["name"] for r in database.get_run_records("nanogrpo")] == ["mine", "mine"]


def test_a_table_of_completions_has_every_column_and_can_be_encoded():
    messages = [{"role": "user", "content": "é?"}]
    first = {"step": 1, "prompt": messages, "completion": "a\ud800", "reward": 1.0}
    second = {**first, "completion": "b", "reward": None, "source": "s"}
    other = {**second, "prompt": "x"}
    columns, rows = table([first, second, other], False, no_image, Path())
    assert columns == ["step", "prompt", "completion", "reward", "source"]
    text = '[{"role": "user", "content": "é?"}]'
    assert rows == [
        [1, text, "a\\ud800", 1.0, None],
        [1, text, "b", None, "s"],
        [1, "x", "b", None, "s"],
    ]
    assert table([first, second, other], True, no_image, Path())[1] == [rows[0], rows[2]]


def no_image(path: str) -> None:
    raise AssertionError(f"{path} is not a picture")


def with_pictures(folder: Path) -> list[dict]:
    """Write two pictures; return records of one text with the first, both, and the second."""
    names = []
    for colour in ("red", "blue"):
        names.append(f"pictures/{colour}.webp")
        (folder / "completions/pictures").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), colour).save(folder / "completions" / names[-1])
    shown = [names[:1], names, names[:1], names[1:], ["pictures/gone.webp"]]
    return [{"step": 0, "prompt": "?", "images": images, "completion": "x"} for images in shown]


def test_a_table_has_pictures_and_tells_prompts_apart_by_them(tmp_path):
    records = with_pictures(tmp_path)
    folder = tmp_path / "completions"
    red, blue = (f"{folder}/pictures/{colour}.webp" for colour in ("red", "blue"))
    shown = [red, [red, blue], red, blue, []]
    columns, rows = table(records, False, str, folder)
    assert [row[columns.index("images")] for row in rows] == shown
    _, rows = table(records, True, str, folder)
    assert [row[columns.index("images")] for row in rows] == [shown[i] for i in (0, 1, 3, 4)]


def test_trackio_shows_pictures(database, tmp_path):
    cfg = Config(model="-", data=("-",), output_dir=str(tmp_path), log_completions=True)
    reporter = REPORTERS["trackio"](cfg, {"run": {}}, 0)
    reporter.completions(with_pictures(tmp_path), 1)
    reporter.close()
    (run,) = [r for r in database.get_run_records("nanogrpo") if r["name"] == tmp_path.name]
    (row,) = database.get_logs("nanogrpo", tmp_path.name, run_id=run["id"])
    shown = [r["images"] for r in row["completions"]["_value"]]
    kinds = [len(x) if isinstance(x, list) else x["_type"] for x in shown]
    assert kinds == ["trackio.image", 2, "trackio.image", "trackio.image", 0]


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
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")],
)
def test_a_missing_package_is_a_user_error(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"^--report-to {name} needs its package: pip install 'nanogrpo\[{name}\]'$"
    with pytest.raises(UserError, match=message):
        start_reporter(name, tmp_path)
