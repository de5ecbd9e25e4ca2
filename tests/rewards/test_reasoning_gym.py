"""The reward function `reasoning_gym`: the package's own scores, and answers that attack them.

Read next: tests/data/test_gym.py (where the problems come from).
"""

import builtins
import contextlib
import inspect
import re

import pytest

from nanogrpo import Config
from nanogrpo.extras.gym import data as gym
from nanogrpo.extras.gym.reward import reasoning_gym_reward
from tests.conftest import refused, said
from tests.rewards.conftest import make_samples, runner

package = pytest.importorskip("reasoning_gym")
DATASETS = pytest.importorskip("reasoning_gym.factory").DATASETS


def problems(task, count=3):
    found = gym.records(f"reasoning_gym:{task}:size={count}", held_out=False)
    return [record["reasoning_gym"] for record in found]


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "chain_sum", "word_sorting"])
def test_scores_are_those_of_the_package(task):
    data = package.create_dataset(task, seed=0, size=3)
    answers = [data[i]["answer"] for i in range(3)] + ["1", "a, b", "1 +", "2*(3+4) / 5"]
    completions, origins, want = [], [], []
    for i, origin in enumerate(problems(task)):
        for answer in answers:
            completions.append(f"<think>5</think><answer>{answer}</answer>")
            origins.append(origin)
            want.append(data.score_answer(answer, data[i]))
    chats = [said(text, "assistant") for text in completions]
    for given in (completions, chats):
        assert reasoning_gym_reward(completions=given, reasoning_gym=origins) == want
    assert want.count(1.0) >= 3


def test_other_prompts_get_none_and_a_missing_answer_0():
    (origin,) = problems("chain_sum", 1)
    texts = ["<answer>1</answer>", "no answer"]
    assert reasoning_gym_reward(completions=texts, reasoning_gym=[None, origin]) == [None, 0.0]
    assert reasoning_gym_reward(completions=texts) == [None, None]


@pytest.mark.parametrize("task", sorted(gym.ARITHMETIC))
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch {file}')",
        "open('{file}', 'w')",
        "9**9**9**9",
        "9 ** 9",
        "factorial(10**8)",
        "(" * 3000 + "1" + ")" * 3000,
        "٣+٤",
    ],
)
@pytest.mark.parametrize("prefix", ["reasoning_gym:", ""])  # "": from a user's data
def test_an_answer_that_is_no_arithmetic_is_not_evaluated(prefix, task, answer, tmp_path):
    (origin,) = problems(task, 1)
    origin["source"] = prefix + origin["source"].removeprefix("reasoning_gym:")
    file = tmp_path / "made"
    text = f"<answer>{answer.replace('{file}', str(file))}</answer>"
    assert reasoning_gym_reward(completions=[text], reasoning_gym=[origin])[0] < 0.02
    assert not file.exists()


def test_data_sets_that_evaluate_answers_are_refused(monkeypatch):
    """Both the source of each verifier and its calls of `eval` show whether it evaluates."""
    evaluate = gym.EVALUATE - {"composite"} | gym.ARITHMETIC
    sources = {task: inspect.getsource(kind) for task, (kind, _) in DATASETS.items()}
    call = re.compile(r"(eval|parse_expr)\(answer")
    assert {task for task, text in sources.items() if call.search(text)} == evaluate

    found = set()
    real = eval

    def spy(code, *scopes):
        found.update({task} if "zqx" in str(code) else ())
        return real(code, *scopes)

    monkeypatch.setattr(builtins, "eval", spy)  # sympy calls it, too
    for task in {*DATASETS} - {"composite"}:
        data = package.create_dataset(task, seed=0, size=1)
        for answer in ("zqx", "[['zqx']]", "['zqx', 1]", "1 + zqx"):
            with contextlib.suppress(Exception):
                data.score_answer(answer, data[0])
    assert found == evaluate
    for task in gym.EVALUATE:
        with refused(f"the verifier of {task} evaluates the answer as Pyth"):
            problems(task)


def test_it_runs_in_the_process_of_the_users_functions():
    attached = gym.Gym(Config(data=("reasoning_gym:chain_sum",)))
    own = runner("reasoning_gym", timeout=60.0, features=[attached])
    assert own.process is not None
    (origin,) = problems("chain_sum", 1)
    texts = [f"<answer>{origin['problem']['answer']}</answer>", "\\boxed{x}"]
    own.score(samples := make_samples(texts, reasoning_gym=origin))
    assert [s.reward for s in samples] == [1.0, 0.0]
    assert list(samples[0].rewards) == ["reasoning_gym_reward"]
