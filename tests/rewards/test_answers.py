"""The built-in rewards: find the answer in any text, compare it, and take little time.

Read next: answer_table.py, test_builtin.py (formats and lengths), test_rewards.py, which runs any
function on samples.
"""

import signal
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from nanogrpo.rewards import symbolic
from nanogrpo.rewards.answers import extract_answer
from nanogrpo.rewards.builtin import accuracy_reward, format_reward, same_answers
from tests.conftest import said
from tests.rewards.answer_table import NUMBERS, ROWS


def same_answer(a: str, b: str) -> bool | None:
    return same_answers([(a, b)])[0]


# --- answers ---


def test_every_output_gets_the_verdict_of_the_table():
    outputs, references, _ = zip(*ROWS)
    rewards = accuracy_reward(outputs, solution=references)
    assert [row for row, reward in zip(ROWS, rewards) if reward != row[2]] == []


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_a_number_equals_itself_however_it_is_written(n, zeros):
    plain = str(n) + ("." + "0" * zeros if zeros else "")
    for written in (f"{n:,}", f"${n}", rf"\boxed{{{n}}}", f"{2 * n}/2", rf"\({n}\)"):
        inner = extract_answer(written) or written.strip(r"\()")
        assert same_answer(inner, plain)
    assert not same_answer(str(n + 1), plain)


@given(st.text(alphabet="\\boxed{}<answer>/#4 \n$%,.", max_size=80))
def test_any_text_gets_a_reward(text):
    assert format_reward([text])[0] in (0.0, 1.0)
    verdict = accuracy_reward([text], solution=[text])[0]
    assert verdict in (0.0, 1.0) if text.strip() else verdict is None  # no reference
    assert same_answer(text, text)


def test_degenerate_completions_take_linear_time():
    """A collapsed policy repeats itself for 32k characters. Quadratic work would take minutes."""
    start = time.process_time()  # of this process alone
    for piece in (
        "\\boxed{",
        "\\boxed",
        "<answer>",
        "</answer>",
        "<think>",
        "#### ",
        "{",
        "}",
        "1",
        "1,111",
        "\\frac",
        " ",
        "answer $1$ ",
        "\\boxed{1}, ",
        "$\\$",
        "answer $\\$1",
    ):
        text = piece * (32000 // len(piece))
        for form in (
            text,
            f"<think></think><answer>{text}</answer>",
            f"</think><answer>{text}</answer> x",
            rf"\boxed{{{text}}}",
        ):
            format_reward([form])
            accuracy_reward([form], solution=["1"])
    assert time.process_time() - start < 5


# --- the reward ---


def test_accuracy_prefers_solution_to_answer_and_skips_records_without_either():
    completions = ["#### 1", "#### 2", "#### 3", "#### 4", "4", "#### 6"]
    solution = ["1", float("nan"), None, r"\boxed{5}", "", 6]
    answer = ["9", "so 2\n#### 2.0", None, "4", "4", None]
    rewards = accuracy_reward(completions, solution=solution, answer=answer)
    assert rewards == [1.0, 1.0, None, 0.0, 0.0, 1.0]
    assert accuracy_reward([said("#### 1", "assistant")], answer=["1"]) == [1.0]


def test_a_worked_solution_without_a_marked_answer_does_not_hide_the_bare_answer():
    worked = "She sells 9 eggs, so she makes $18$ dollars a day, which is $126$ a week."
    completions = ["#### 18", "#### 126"]
    assert accuracy_reward(completions, solution=[worked] * 2, answer=["18"] * 2) == [1.0, 0.0]
    assert accuracy_reward(completions, solution=[worked] * 2) == [0.0, 1.0]
    marked = [worked + "\n#### 18"] * 2
    assert accuracy_reward(completions, solution=marked, answer=["126"] * 2) == [1.0, 0.0]
    for unmarked in ("To answer this, note that $a=9$.", "#### Solution\nThe answer is $a=9$."):
        assert accuracy_reward(["#### 18"], solution=[unmarked], answer=["18"]) == [1.0]


# --- math-verify ---


def test_numbers_do_not_need_math_verify(monkeypatch):
    asked = []
    monkeypatch.setattr(symbolic, "equal", lambda pairs: asked.extend(pairs) or {})
    outputs, references, right = zip(*ROWS[: len(NUMBERS)])
    rewards = accuracy_reward(outputs, solution=references)
    assert all(reward in (None, verdict) for reward, verdict in zip(rewards, right))
    assert len(NUMBERS) > 100
    assert asked == [
        ("18x", "18"),
        ("10^3", "1000"),
        ("2^{10}", "1024"),
    ]


def test_endless_algebra_is_wrong_and_costs_the_trainer_nothing(caplog):
    """The process that computes is ended; the next answer gets its verdict from a new one."""
    alarm, begun = signal.getsignal(signal.SIGALRM), time.process_time()
    assert accuracy_reward([r"\boxed{10^{10^{10}}}"], solution=["7"]) == [0.0]
    assert "math-verify gave up on 1 answers, which count as wrong" in caplog.messages
    assert [*symbolic.equal([("(x+1)(x+2)", "x^2+3x+2")]).values()] == [True]
    assert time.process_time() - begun < 1
    assert signal.getsignal(signal.SIGALRM) == alarm


def test_a_lower_hard_limit_of_the_system_is_kept():
    code = "from nanogrpo.rewards.symbolic import equal; print(equal([('x+x', '2x')]))"
    command = ["bash", "-c", 'ulimit -v 2000000; exec "$@"', "-", sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.stdout == "{('x+x', '2x'): True}\n", out.stderr


def test_pairs_after_too_many_lost_ones_get_no_reward(monkeypatch):
    monkeypatch.setattr(symbolic, "MAX_LOST", 0)
    assert accuracy_reward([r"\boxed{z^2-z}", "#### 1"], solution=["z(z-1)", "1"]) == [None, 1.0]
