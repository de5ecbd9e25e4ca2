"""Rewards: the arguments of a function, the checks of its result, and how functions are found.

Here every function runs in this process. In test_process.py they run in one that can be killed.
"""

import asyncio
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from nanogrpo.rewards.builtin import accuracy_reward, format_reward, load_function
from nanogrpo.rewards.call import TrainerState
from tests.conftest import refused, said
from tests.rewards.conftest import make_samples, runner


def score(samples, functions, weights=()):
    runner(*functions, weights=weights).score(samples)


# --- arguments ---


def test_a_function_is_called_once_with_the_arguments_of_trl():
    calls = []

    def spy(prompts, completions, completion_ids, **columns):
        calls.append((prompts, completions, completion_ids, columns))
        return [0.0] * len(prompts)

    messages = said("hi")
    samples = make_samples(["a", "b"], solution="7", level=1) + make_samples(
        ["c"], prompt=messages, solution="8", tag="x"
    )
    runner(spy).score(samples, state=TrainerState(3, 10, 0.25))
    (call,) = calls
    assert callable(call[-1].pop("log_extra"))
    assert callable(call[-1].pop("log_metric"))
    state = call[-1].pop("trainer_state")
    assert (state.global_step, state.max_steps, state.epoch) == (3, 10, 0.25)
    assert calls == [
        (
            ["3+4=", "3+4=", messages],
            ["a", "b", said("c", "assistant")],
            [[5, 2]] * 3,
            {"solution": ["7", "7", "8"], "level": [1, 1, None], "tag": [None, None, "x"]},
        )
    ]


def test_a_functions_edits_reach_no_sample_and_no_other_call():
    messages = said("3+4=")
    samples = make_samples(
        ["#### 7", "#### 8"], prompt=messages, solution="7", tests=[{"in": [3, 4]}], tag=None
    )
    seen = []

    def vandal(prompts, completions, completion_ids, tests, solution, **columns):
        seen.append((prompts[0][-1]["content"], tests[0][0]["in"][:], completions[0][0]["content"]))
        for values in (solution, *completion_ids):
            values.clear()
        prompts[0][-1]["content"] = completions[0][0]["content"] = "gone"
        prompts[0].append({"role": "assistant", "content": "gone"})
        tests[0][0]["in"].clear()
        return [1.0] * len(prompts)

    for _ in range(2):  # two steps with the same prompt
        score(samples, [vandal, accuracy_reward, vandal])
        assert [sample.rewards["accuracy_reward"] for sample in samples] == [1.0, 0.0]
    assert seen == [("3+4=", [3, 4], "#### 7")] * 4
    assert [sample.token_ids for sample in samples] == [[5, 2], [5, 2]]
    assert samples[0].prompt.text == said("3+4=")
    assert samples[0].prompt.columns == {"solution": "7", "tests": [{"in": [3, 4]}], "tag": None}


# --- sums ---


def returns(*values):
    def constant(completions, **kwargs):
        return list(values)

    return constant


def test_rewards_are_weighted_and_none_is_left_out():
    samples = make_samples(["a"] * 4)
    score(samples, [returns(1, 2, None, None), returns(10, None, 30, None)], weights=[0.5, -1.0])
    assert [sample.rewards for sample in samples] == [
        {"constant": 1.0, "constant_2": 10.0},
        {"constant": 2.0, "constant_2": None},
        {"constant": None, "constant_2": 30.0},
        {"constant": None, "constant_2": None},
    ]
    assert [sample.reward for sample in samples] == [-9.5, 1.0, -30.0, None]
    score(samples, [returns([1, None], torch.tensor([2.0, 3.0]), (None, None), 1)], weights=[2.0])
    assert [sample.reward for sample in samples] == [2.0, 10.0, None, 2.0]
    given = [sample.token_rewards.get("constant") for sample in samples]
    assert given == [[1.0, None], [2.0, 3.0], [None, None], None]
    score(samples, [returns(1, 2, None, None), returns(10, None, 30, None)])
    assert [sample.reward for sample in samples] == [11.0, 2.0, 30.0, None]


def test_every_kind_of_number_becomes_a_float():
    for result in (
        [True, False],
        (1, 0),
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        [torch.tensor(1.0), torch.tensor(False)],
        np.array([1, 0], dtype=np.int8),
        [np.float32(1), np.bool_(False)],
        [Fraction(1), Decimal(0)],
    ):
        samples = make_samples()
        score(samples, [lambda completions, result=result, **kwargs: result])
        assert [sample.reward for sample in samples] == [1.0, 0.0]
        assert all(type(sample.reward) is float for sample in samples)


class Judge:
    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


# --- mistakes ---


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, float("nan")], "returned nan for sample 1 of prompt 17"),
        ([1.0, "1.0"], "returned 1.0 for sample 1 of prompt 17"),
        (
            [1.0, -1.1e30],
            r"returned -1\.1e\+30 for sample 1 of prompt 17; it must return a number from -1e",
        ),
        (
            [1.0, torch.ones(3)],
            "for sample 1 of prompt 17; .* such a number or None for each of the 2 tokens",
        ),
        (torch.ones(2, 1), r"returned \[1.0\] for sample 0"),
        ([1.0, Fraction(10**400)], "raised OverflowError: "),
        ([1.0], "returned 1 values; it must return a list of 2 values, one for each"),
        (None, "returned a NoneType"),
        (1.0, "returned a float; it must"),
        ({0: 1.0, 1: 1.0}, "returned a dict; it must"),
    ],
)
def test_a_bad_result_raises_an_error_that_names_the_function_and_the_sample(result, message):
    def broken(completions, **kwargs):
        return result

    samples = make_samples(solution="7")
    with refused(f"^the reward function broken .*{message}"):
        score(samples, [accuracy_reward, broken])
    assert all(sample.reward is None for sample in samples)


def test_a_function_needs_keyword_arguments_and_columns_must_not_take_their_names():
    def no_kwargs(completions):
        return [0.0] * len(completions)

    with refused(r"Judge raised .*Can't pickle .*; fix the function"):
        score(make_samples(column=lambda: 0), [Judge()])  # each function gets a copy of the columns
    message = r"no_kwargs raised TypeError: .*unexpected keyword argument 'prompts'"
    with refused(message) as caught:
        score(make_samples(), [no_kwargs])
    assert isinstance(caught.value.__cause__, TypeError)
    # data/prompts.py refuses a column of this name
    with pytest.raises(TypeError, match="multiple values for keyword argument 'prompts'"):
        score(make_samples(prompts="taken"), [format_reward])


def test_sys_exit_in_a_file_is_an_error(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit()\n")
    with refused(r"importing '\S+leaves\.py' raised SystemExit: "):
        load_function(f"{tmp_path / 'leaves.py'}:f")


def test_an_async_function_may_start_a_program():
    async def runs(completions, **kwargs):
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
        return [float(await program.wait())] * len(completions)

    samples = make_samples()
    score(samples, [runs])
    assert [sample.reward for sample in samples] == [3.0, 3.0]


# --- functions by name ---


def test_functions_are_found_by_module_and_by_file_which_runs_once(tmp_path, monkeypatch):
    source = """
from dataclasses import dataclass

@dataclass
class State:
    n: int = 0

state = State()

def mine(completions, **kwargs):
    state.n += 1
    return [state.n] * len(completions)

other = mine
"""
    (tmp_path / "my.file.py").write_text(source)
    (tmp_path / "my_rewards_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    path = str(tmp_path / "my.file.py")
    specs = ["my_rewards_module:mine", f"{path}:mine", f"{path}:other"]
    score(samples := make_samples(), specs)
    assert samples[0].rewards == {"mine": 1.0, "mine_2": 1.0, "mine_3": 2.0}
