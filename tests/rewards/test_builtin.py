"""The built-in rewards for formats and lengths, their names and their arguments.

Read next: test_trl_rewards.py, which compares them with TRL's functions.
"""

import pytest

from nanogrpo import Config
from nanogrpo.extras.rewards import Rewards
from nanogrpo.rewards.builtin import (
    BUILT_IN,
    format_reward,
    load_function,
)
from nanogrpo.types import Prompt
from tests.conftest import completion, pairs, refused, said
from tests.rewards.conftest import make_samples, runner

# --- formats ---


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>7</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>\n7\n</answer>\n", 1),
        ("a</think><answer>7</answer>", 1),  # the prompt ended with <think>
        ("<think></think><answer>7</answer>", 1),
        ("<answer>7</answer>", 0),
        ("<think>a</think>7", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("so <think>a</think><answer>7</answer>", 0),
        ("<think>a</think> so <answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("<think><answer>7</answer></think>", 0),
        ("", 0),
    ],
)
def test_the_format_is_rewarded(text, reward):
    assert format_reward([text]) == [reward]
    assert format_reward([said(text, "assistant")]) == [reward]


def test_reasoning_that_never_ends_is_wrong():
    texts = [r"<think>\boxed{1}</think>\boxed{2}", r"<think>\boxed{2}", r"\boxed{2}"]
    assert found("reasoning_accuracy")(texts, solution=["2"] * 3) == [1.0, 0.0, 0.0]
    function = found('reasoning_accuracy:reasoning_delimiters=["</r>","</think>"]')
    texts = [r"\boxed{1}</r>\boxed{2}", r"\boxed{1}</think>\boxed{2}", r"</think>\boxed{2}</r>1"]
    assert function(completions=texts, answer=["2"] * 3) == [1.0, 1.0, 0.0]


# --- lengths and repetition ---


LENGTHS = Rewards(Config(max_completion_length=100))


def found(spec: str):
    return LENGTHS.reward(spec, "cpu")


def test_lengths_have_the_limit_of_the_run():
    right = {"completions": ["#### 7"] * 2, "solution": ["7", None]}
    assert found("cosine")(**right, completion_ids=[[0] * 100] * 2) == [0.5, None]
    ids = [[0] * n for n in (0, 80, 85, 90, 100, 250)]
    want = [0, 0, -0.25, -0.5, -1, -1]  # L_max 100, L_cache 20
    # a column of the data with the name of the function's parameter
    prompt = Prompt(0, "?", [1], {"limit": "3 apples"})
    samples = [completion(prompt, one) for one in ids]
    runner("soft_overlong", features=[LENGTHS]).score(samples)
    assert [sample.rewards for sample in samples] == [
        {"soft_overlong_punishment_reward": reward} for reward in want
    ]


def test_a_large_n_takes_no_time():
    assert found("repetition_penalty:ngram_size=1000000000")(completion_ids=[[1] * 9]) == [0.0]


# --- names and arguments ---


def test_every_built_in_function_loads_by_its_name_and_by_the_name_of_trl():
    for name, function in BUILT_IN.items():
        assert load_function(name) is load_function(function.__name__) is function
        assert [*runner(name).calls] == [function.__name__]


@pytest.mark.parametrize("name", ["accuracy", "reasoning_accuracy", "cosine"])
def test_answers_to_compare_with_are_required(name):
    own = runner(name, features=[LENGTHS])

    def prompts(**columns) -> list[Prompt]:
        return [make_samples(**columns)[0].prompt]

    own.check(prompts(answer=7), prompts(solution="7"))
    for columns in ({}, {"answer": None}, {"solution": " "}, {"answer": [7]}):
        for given in ((prompts(**columns), []), (prompts(answer=7), prompts(**columns))):
            with refused("has no text or number in the columns solution"):
                own.check(*given)
    runner("format").check(prompts(), prompts())


OWN = """
class Judge:
    def __init__(self, value=1.0):
        self.value = value
    def __call__(self, completions, **kwargs):
        return [self.value] * len(completions)

def brief(completions, strength=1.0, word="", **kwargs):
    return [strength * len(text.split()) + len(word) for text in completions]

def factory(value, times=2):
    return Judge(value * times)

def fails(value):
    raise KeyError(value)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}"


@pytest.mark.parametrize("timeout", [0.0, 60.0])
def test_functions_factories_and_classes_of_the_user_take_arguments(own, timeout):
    names = {
        "brief": 2.0,
        "brief:strength=-.5": -1.0,
        "brief:strength=1e1,word=abc": 23.0,
        "brief:word='a,b:c=d'": 9.0,
        "factory:value=3": 6.0,
        "factory:value=-1,times=0.5": -0.5,
        "Judge": 1.0,
        "Judge:value=4": 4.0,
    }
    (sample,) = make_samples(["two words"])
    runner(*(f"{own}:{name}" for name in names), timeout=timeout).score([sample])
    assert list(sample.rewards.values()) == list(names.values())
    assert list(sample.rewards)[:2] == ["brief", "brief_2"]


MISTAKES = pairs(r"""
{own}:brief:strenght=2
    argument 'strenght', but the function has only .completions
{own}:brief:strength=
    the arguments in .* cannot be read: write .*:key=value
{own}:brief:strength=1+x
    cannot be read
{own}:brief:word=a,b
    cannot be read
{own}:factory
    raised TypeError: .*'value'; give arguments that fit \(value, times=2\)
{own}:fails:value=1
    these arguments raised KeyError: 1; give arg
accuracy:strict=True
    the argument 'strict', but the function has only .completions
cosine:max_len=0
    max_len is 0 but must be positive
soft_overlong:max_completion_len=0
    max_completion_len is 0 and
soft_overlong:soft_punish_cache=1000
    max_completion_len is 100 and soft_punish_cache
repetition_penalty:ngram_size=0
    ngram_size is 0 and
repetition_penalty:max_penalty=1
    max_penalty is 1: the
acuracy
    or one of accuracy, .*docs/rewards.md.; did you mean accuracy?
math:
    is neither package.module:name nor path/file.py:name
no_such_package.rewards:f
    importing .* raised ModuleNotFoundError
nowhere/file.py:f
    importing 'nowhere/file.py' raised FileNotFoundError
math:pi
    'math' has no function 'pi'
""")


@pytest.mark.parametrize(
    ("spec", "message"),
    MISTAKES,
)
def test_a_mistake_in_a_name_or_an_argument_is_one_sentence(own, spec, message):
    with refused(f"^--reward-funcs: .*{message}"):
        runner(spec.format(own=own), features=[LENGTHS])
