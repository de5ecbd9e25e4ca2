"""Tests of what all benches share: command lines, turns, records. Read next: bench/common.py."""

import importlib
import sys

import pytest

from bench import common

FILES = (common.ROOT / "bench").glob("*.py")
COMMANDS = sorted(path.stem for path in FILES if "__main__" in path.read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name, capsys):
    if name == "parity_trl" and sys.version_info < (3, 11):
        pytest.skip("TRL needs Python 3.11")
    with pytest.raises(SystemExit) as e:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert e.value.code == 0
    assert f"python -m bench.{name}" in capsys.readouterr().out


def test_commands_in_records_name_no_places():
    argv = ["--repeats", "3", "--vllm-python", "/x/python", "--out", "/y", "--cases", "even"]
    record = common.record("rollout_speed", "", "", argv)
    assert record["command"] == "python -m bench.rollout_speed --repeats 3 --cases even"


def test_records_of_cases_that_are_not_run_again_are_kept(tmp_path):
    records = [
        {"case": case, "side": side, "x": 1} for case in ("a", "b") for side in ("ours", "theirs")
    ]
    common.write("some", records, tmp_path)
    again = [{"case": case, "side": "ours", "x": x} for case, x in (("b", 2), ("c", 3))]
    common.merge("some", again, tmp_path)
    found = common.read("some", tmp_path)
    assert [(r["case"], r["side"], r["x"]) for r in found] == [
        ("a", "ours", 1),
        ("a", "theirs", 1),
        ("b", "ours", 2),
        ("b", "theirs", 1),
        ("c", "ours", 3),
    ]


def test_interleaving_takes_turns():
    order = []
    timings = common.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warmup=1
    )
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"  # the untimed round first
    assert [len(t.seconds) for t in timings.values()] == [3, 3]
    t = common.Timing([3.0, 1.0, 2.0])
    assert (t.median, t.spread) == (2.0, [1.0, 3.0])
