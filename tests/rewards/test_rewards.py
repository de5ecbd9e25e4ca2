"""Rewards: the arguments of a function, the checks of its result, and how functions are found.

Here every function runs in this process. In test_process.py they run in one that can be killed.
"""

import asyncio
import functools
import signal
import sys

import numpy as np
import pytest
import torch

from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.rewards.builtin import (
    accuracy_reward,
    format_reward,
    load_function,
    soft_overlong_punishment_reward,
)
from nanogrpo.rewards.call import TrainerState
from nanogrpo.rewards.runner import Runner
from tests.rewards.conftest import make_samples


def score(samples, functions, weights=()):
    Runner(functions, weights).score(samples)


# --- arguments ---


def test_a_function_is_called_once_with_the_arguments_of_trl():
    calls = []

    def spy(prompts, completions, completion_ids, **columns):
        calls.append((prompts, completions, completion_ids, columns))
        return [0.0] * len(prompts)

    messages = [{"role": "user", "content": "hi"}]
    samples = make_samples(["a", "b"], solution="7", level=1) + make_samples(
        ["c"], prompt=messages, solution="8", tag="x"
    )
    Runner([spy]).score(samples, state=TrainerState(3, 10, 0.25))
    (call,) = calls
    assert callable(call[-1].pop("log_extra"))
    assert callable(call[-1].pop("log_metric"))
    state = call[-1].pop("trainer_state")
    assert (state.global_step, state.max_steps, state.epoch) == (3, 10, 0.25)
    assert calls == [
        (
            ["3+4=", "3+4=", messages],
            ["a", "b", [{"role": "assistant", "content": "c"}]],
            [[5, 2]] * 3,
            {"solution": ["7", "7", "8"], "level": [1, 1, None], "tag": [None, None, "x"]},
        )
    ]


def test_a_functions_edits_reach_no_sample_and_no_other_call():
    messages = [{"role": "user", "content": "3+4="}]
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
    assert samples[0].prompt.text == [{"role": "user", "content": "3+4="}]
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
    ):
        samples = make_samples()
        score(samples, [lambda completions, result=result, **kwargs: result])
        assert [sample.reward for sample in samples] == [1.0, 0.0]
        assert all(type(sample.reward) is float for sample in samples)


class Judge:
    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


def test_partials_and_instances_have_names():
    samples = make_samples()
    part = functools.partial(accuracy_reward, answer=None)
    score(samples, [Judge(), part, accuracy_reward, Judge()])
    assert list(samples[0].rewards) == ["Judge", "accuracy_reward", "accuracy_reward_2", "Judge_2"]


# --- mistakes ---


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, float("nan")], "returned nan for sample 1 of prompt 17"),
        ([float("-inf"), 1.0], "returned -inf for sample 0 of prompt 17"),
        ([1.0, "1.0"], "returned '1.0' for sample 1 of prompt 17"),
        ([1.0, 10**400], "for sample 1 of prompt 17"),
        (
            [1.0, -1.1e30],
            r"returned -1\.1e\+30 for sample 1 of prompt 17; it must return a number of at most 1e",
        ),
        ([1.0, [1.0]], r"returned \[1.0\] for sample 1 of prompt 17"),
        ([1.0, 1j], "returned 1j for sample 1"),
        ([1.0, torch.tensor([1.0, 2.0])], "for sample 1 of prompt 17"),
        (torch.ones(2, 1), r"returned \[1.0\] for sample 0"),
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0] * 3, "returned 3 values for 2 completions"),
        ([], "returned 0 values for 2 completions"),
        (None, "returned a NoneType for 2 completions"),
        (1.0, "returned a float for 2 completions"),
        (torch.tensor(1.0), "returned a Tensor for 2 completions"),
        ("ab", "returned a str for 2 completions"),
        ({0: 1.0, 1: 1.0}, "returned a dict for 2 completions"),
    ],
)
def test_a_bad_result_raises_an_error_that_names_the_function_and_the_sample(result, message):
    def broken(completions, **kwargs):
        return result

    samples = make_samples(solution="7")
    with pytest.raises(UserError, match=message) as caught:
        score(samples, [accuracy_reward, broken])
    assert str(caught.value).startswith("the reward function broken ")
    assert all(sample.reward is None for sample in samples)


def test_an_exception_is_reported_with_the_function_and_its_line():
    def divides(completions, **kwargs):
        return [1 / 0 for _ in completions]

    with pytest.raises(
        UserError,
        match=r"divides raised ZeroDivisionError: division by zero \(at test_rewards\.py:\d+,",
    ) as caught:
        score(make_samples(), [divides])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "called with 2 completions, the first is sample 0 of prompt 17)" in str(caught.value)

    def no_kwargs(completions):
        return [0.0] * len(completions)

    with pytest.raises(
        UserError, match=r"no_kwargs raised TypeError: .*unexpected keyword argument 'prompts'"
    ):
        score(make_samples(), [no_kwargs])
    # data/prompts.py refuses a column of this name
    with pytest.raises(TypeError, match="multiple values for keyword argument 'prompts'"):
        score(make_samples(prompts="taken"), [format_reward])


@pytest.mark.parametrize("status", [0, None, 3, "bye"])
def test_sys_exit_in_a_function_or_its_file_is_an_error(tmp_path, status):
    def leaves(completions, **kwargs):
        sys.exit(status)

    samples = make_samples()
    with pytest.raises(
        UserError, match=r"the reward function leaves raised SystemExit: .*at test_rewards\.py:\d+"
    ):
        score(samples, [returns(1.0, 1.0), leaves])
    assert all(sample.reward is None for sample in samples)
    (tmp_path / "leaves.py").write_text(f"import sys\nsys.exit({status!r})\n")
    with pytest.raises(UserError, match=r"importing '\S+leaves\.py' raised SystemExit: "):
        load_function(f"{tmp_path / 'leaves.py'}:f")


def test_the_weighted_sum_must_not_overflow():
    samples = make_samples()
    score(samples, [returns(1e30, -1e30)])
    assert [sample.reward for sample in samples] == [1e30, -1e30]
    for weights in ([1.0, 1.0], [1e300, 1e300], [1e300, -1e300]):
        samples = make_samples()
        with pytest.raises(
            UserError, match=r"sum .* for sample 1 of prompt 17 is .*; lower --reward-weights"
        ) as caught:
            score(samples, [returns(0.0, 1e30), returns(0, 1e30)], weights)
        assert "\n" not in str(caught.value)
        assert samples[1].reward is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_no_exception_ends_the_loop_of_async_functions(kind):
    async def judge(completions, **kwargs):
        raise kind

    runner = Runner([judge])
    for _ in range(2):
        with pytest.raises(UserError, match=f"the reward function judge raised {kind.__name__}: "):
            runner.score(make_samples())


def test_a_task_that_ends_the_loop_of_async_functions_ends_neither_it_nor_the_call():
    async def exits(completions, **kwargs):
        async def helper():
            sys.exit(3)

        await asyncio.gather(helper())

    async def stops(completions, **kwargs):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    samples = make_samples()
    with pytest.raises(UserError, match="the reward function exits raised SystemExit: 3"):
        score(samples, [stops, exits])
    score(samples, [stops])
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def test_an_async_function_may_start_a_program():
    async def runs(completions, **kwargs):
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
        return [float(await program.wait())] * len(completions)

    samples = make_samples()
    score(samples, [runs])
    assert [sample.reward for sample in samples] == [3.0, 3.0]


def test_an_exception_without_a_text_is_reported():
    class Silent(Exception):
        def __str__(self):
            raise KeyError

    def judge(completions, **kwargs):
        raise Silent

    with pytest.raises(
        UserError, match=r"judge raised Silent: its text raises KeyError \(at test_"
    ):
        score(make_samples(), [judge])


def test_ctrl_c_inside_a_function_is_not_its_mistake():
    def interrupted(completions, **kwargs):
        raise KeyboardInterrupt

    # a shell starts `command &` with Ctrl-C ignored, and the tests may run like that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            score(make_samples(), [interrupted])
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_weights": (1.0, 2.0)}, "--reward-weights has 2 values"),
        ({"reward_funcs": ()}, "--reward-funcs is "),
    ],
)
def test_there_is_one_weight_per_function_and_at_least_one_function(options, message):
    with pytest.raises(UserError, match=message):
        Config(**{"model": "-", "data": ("-",), "reward_funcs": ("format",), **options}).validate()


# --- functions by name ---


def test_functions_are_found_by_name_by_module_and_by_file(tmp_path, monkeypatch):
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
    specs = [
        "format",
        "accuracy",
        "length",
        "my_rewards_module:mine",
        f"{path}:mine",
        f"{path}:other",
    ]
    functions = [load_function(spec) for spec in specs]
    assert functions[:2] == [format_reward, accuracy_reward]
    assert functions[2].func is soft_overlong_punishment_reward
    assert functions[4] is functions[5]  # one file, one module
    assert functions[3] is not functions[4]
    samples = make_samples(solution="7")
    score(samples, functions)
    assert list(samples[0].rewards) == [
        "format_reward",
        "accuracy_reward",
        "soft_overlong_punishment_reward",
        "mine",
        "mine_2",
        "mine_3",
    ]
    assert [samples[0].rewards[name] for name in ("mine", "mine_2", "mine_3")] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acuracy", "'acuracy' is neither .* nor one of accuracy, .*, format, .* or model:FOLDER"),
        ("length:0", "'length:0' must have a positive number of tokens"),
        ("length:long", "'length:long' must have a positive number of tokens"),
        ("math:", "is neither package.module:name nor path/file.py:name"),
        (
            "no_such_package.rewards:f",
            "importing 'no_such_package.rewards' raised ModuleNotFoundError",
        ),
        ("nowhere/file.py:f", "importing 'nowhere/file.py' raised FileNotFoundError"),
        ("math:nothing", "'math' has no function 'nothing'"),
        ("math:pi", "'math' has no function 'pi'"),
    ],
)
def test_a_spec_without_a_function_is_an_error(spec, message):
    with pytest.raises(UserError, match=message) as caught:
        load_function(spec)
    assert str(caught.value).startswith("--reward-funcs: ")
