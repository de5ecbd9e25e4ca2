"""The bench over the objectives: its cases are valid, it goes on where it was interrupted, its page
is made of its rows.
"""

import shlex

import pytest

from bench import objectives
from nanogrpo.cli import parse
from nanogrpo.config import CHOICES
from nanogrpo.run import warmup


@pytest.mark.parametrize("case", objectives.CASES)
def test_the_options_of_a_case_are_valid(case):
    argv = f"{objectives.SETTINGS} {objectives.CASES[case]} --model base --data arithmetic"
    parse(shlex.split(argv)).validate()


def test_every_loss_type_is_in_the_table():
    used = {parse(shlex.split(options)).loss_type for options in objectives.CASES.values()}
    assert used == set(CHOICES["loss_type"]) - {"bnpo"}  # which is dapo here


def test_an_interrupted_bench_goes_on(tmp_path):
    warmup.make_base(tmp_path / "base", steps=2, quiet=True)
    argv = [
        "--base",
        str(tmp_path / "base"),
        "--out",
        str(tmp_path),
        "--page",
        str(tmp_path / "page.md"),
        "--steps",
        "1",
    ]
    argv += ["--workers", "1", "--cases", "dapo"]
    (first,) = objectives.main([*argv, "--seeds", "1"])
    rows = objectives.main([*argv, "--seeds", "2"])
    assert rows[0] == first  # its time stamp too: not run again
    assert [row["seed"] for row in rows] == [0, 1]
    assert len(first["held_out"]) == 2
    assert len(first["rewards"]) == 1
    page = (tmp_path / "page.md").read_text()
    assert "| dapo | `the defaults` | 2 | " in page
