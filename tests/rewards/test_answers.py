"""The built-in rewards: find the answer in any text, compare it exactly, and take little time.

Read next: test_rewards.py, which runs any function on samples.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogrpo.rewards.builtin import (
    accuracy_reward,
    extract_answer,
    format_reward,
    length_reward,
    load_function,
    same_answer,
)
from nanogrpo.rewards.runner import Runner
from nanogrpo.types import Prompt, Sample

# --- answers ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no, \boxed{ 42 }.", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and an unclosed \boxed{6", "5"),
        (r"{ \boxed{ unclosed around \boxed{5}", "5"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{1} <answer>2</answer> #### 3", "1"),
        ("<answer>1</answer> #### 3", "1"),
        ("<answer>1</answer><answer>\n 2 \n</answer>", "2"),
        ("<answer>1", None),
        ("1</answer>", None),
        ("</answer><answer>", None),
        ("It is 7.\n#### 7\nas said", "7"),
        ("#### 7 #### 8", "8"),
        (r"<think>\boxed{1}</think> I do not know", None),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"thoughts \boxed{1}</think>#### 2", "2"),
        ("42", None),
        ("", None),
    ],
)
def test_the_answer_is_extracted(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("1,234", "1234.0", True),
        ("-1,234,567.50", "-1234567.5", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"-\dfrac{1}{2}", "-.5", True),
        (r"\frac12", "1/2", True),
        ("2/4", "1/2", True),
        ("$5", "5", True),
        (r"\$5.00", "5", True),
        (r"50\%", "50", True),
        ("50%", "50", True),
        ("+3", "3", True),
        ("7.", "7", True),
        (r"1\,234", "1234", True),
        ("  x +  1 ", "x+1", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"\text{Monday}.", "Monday", True),
        (r"50\%", "0.5", False),
        ("1,2", "12", False),
        ("1 2", "12", False),
        ("12,34", "1234", False),
        ("0.333", "1/3", False),
        ("1/0", "0", False),
        ("1/0", "1/0", True),
        ("", "0", False),
        ("x", "X", False),
        ("1e3", "1000", False),
        ("9" * 5000, "9" * 5000, True),
        ("nan", "nan", True),
    ],
)
def test_answers_are_compared_as_numbers_or_texts(a, b, same):
    assert same_answer(a, b) is same
    assert same_answer(b, a) is same


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
    assert accuracy_reward([text], solution=[text])[0] in (0.0, 1.0)
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


# --- reward functions ---


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>7</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>\n7\n</answer>\n", 1),
        ("a</think><answer>7</answer>", 1),  # the template ended the prompt with <think>
        ("<think></think><answer>7</answer>", 1),
        ("<answer>7</answer>", 0),
        ("<think>a</think>7", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think><answer>7</answer> done", 0),
        ("so <think>a</think><answer>7</answer>", 0),
        ("<think>a</think> so <answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("<think>a<think>b</think><answer>7</answer>", 0),
        ("<answer>7</answer><think>a</think>", 0),
        ("<think><answer>7</answer></think>", 0),
        ("", 0),
    ],
)
def test_the_format_is_rewarded(text, reward):
    assert format_reward([text]) == [reward]
    assert format_reward([[{"role": "assistant", "content": text}]]) == [reward]


def test_accuracy_prefers_solution_to_answer_and_skips_records_without_either():
    completions = ["#### 1", "#### 2", "#### 3", "#### 4", "4", "#### 6"]
    solution = ["1", None, None, r"\boxed{5}", "4", 6]
    answer = ["9", "so 2\n#### 2.0", None, "4", "4", None]
    assert accuracy_reward(completions, solution=solution, answer=answer) == [
        1.0,
        1.0,
        None,
        0.0,
        0.0,
        1.0,
    ]
    assert accuracy_reward([[{"role": "assistant", "content": "#### 1"}]], answer=["1"]) == [1.0]


# --- the length reward ---


def test_the_length_reward_is_that_of_dapo_and_depends_on_one_completion():
    lengths = [0, 80, 85, 90, 100, 250]
    ids = [[0] * n for n in lengths]
    want = [0, 0, -0.25, -0.5, -1, -1]  # L_max 100, L_cache 20
    assert length_reward(100, completion_ids=ids) == want
    assert [length_reward(100, completion_ids=[one])[0] for one in ids] == want
    for function in (
        load_function("length:100"),
        load_function("length", max_completion_length=100),
    ):
        assert function(completion_ids=[[0] * 100, [0] * 80]) == [-1.0, 0.0]
    function = load_function("length:100")
    # a column of the data with the name of the function's parameter
    prompt = Prompt(0, "?", [1], {"limit": "3 apples"})
    samples = [Sample(prompt, 0, one, [0.0] * len(one), True, [0] * len(one)) for one in ids]
    Runner([function]).score(samples)
    assert [sample.rewards for sample in samples] == [{"length_reward": reward} for reward in want]
