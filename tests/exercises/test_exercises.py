"""Every solution passes its checker, every empty file fails with a hint, and every wrong answer of
wrong.py gets the hint that fits it.

Read next: wrong.py, exercises/check.py.
"""

import subprocess
from pathlib import Path

import pytest

from exercises import check
from tests.exercises.wrong import WRONG

ROOT = Path(__file__).resolve().parents[2]
FILES = check.files()
NUMBERS = list(FILES)


def solution(number: int) -> Path:
    return check.FOLDER / "solutions" / FILES[number].name


def empty(number: int) -> str:
    """Return the file to fill in as it was committed. A reader may have filled it in since."""
    name = FILES[number].relative_to(ROOT)
    done = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else FILES[number].read_text()


def sentence(hint: str | None) -> bool:
    """Return whether this is a hint, and not a traceback."""
    return bool(hint) and "Traceback" not in hint and "\n" not in hint and hint.endswith(".")


@pytest.mark.parametrize("number", NUMBERS)
def test_every_solution_is_right(number):
    assert check.check(number, solution(number)) is None


@pytest.mark.parametrize("number", NUMBERS)
def test_every_empty_file_fails_with_its_hint(number, tmp_path):
    path = tmp_path / FILES[number].name
    path.write_text(empty(number))
    hint = check.check(number, path)
    assert sentence(hint), hint
    if number == 5:  # it is full of bugs instead of empty
        assert hint.startswith("Three bugs remain. log_softmax(z) / T is no log-prob")
    else:
        assert " yet" in hint
        assert hint.endswith(check.load(check.FOLDER / "checks" / path.name).START)


@pytest.mark.parametrize(("number", "edits", "expected"), WRONG)
def test_every_wrong_answer_gets_a_hint_that_fits(number, edits, expected, tmp_path):
    text = solution(number).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / FILES[number].name
    path.write_text(text)
    hint = check.check(number, path)
    assert sentence(hint), hint
    assert expected in hint


def test_code_that_never_ends_gets_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 0.2)
    path = tmp_path / "01_advantage.py"
    path.write_text("def advantages(rewards):\n    while True:\n        pass\n")
    assert "Look for a loop that never ends." in check.check(1, path)


def test_the_command_prints_right_or_a_hint(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    solved = {1: solution(1), 2: solution(2)}
    monkeypatch.setattr(check, "files", lambda: solved)
    assert check.main(["1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(" 1 exercises/01_advantage.py: right\n")
    assert "Compare with exercises/solutions/01_advantage.py." in out
    assert check.main(["3"]) == 2
    assert capsys.readouterr().err == "error: there is no exercise 3: choose from 1 to 2.\n"


def test_every_exercise_has_its_place_in_the_docs_and_names_its_command():
    page = (ROOT / "docs/exercises.md").read_text()
    assert list(range(1, len(NUMBERS) + 1)) == NUMBERS
    assert len(NUMBERS) >= 15
    for number, path in FILES.items():
        assert f"exercises/{path.name})" in page
        assert f"python -m exercises.check {number}\n" in path.read_text()
