"""The reward function `reasoning_gym`: the package's own scores, and answers that attack them.

Read next: tests/data/test_gym.py (where the problems come from).
"""

import time

import pytest

from nanogrpo.data import gym
from nanogrpo.rewards import reasoning_gym as module
from nanogrpo.rewards.builtin import full_name, is_users, load_function
from nanogrpo.rewards.reasoning_gym import reasoning_gym_reward
from nanogrpo.rewards.runner import Runner
from nanogrpo.types import Prompt, Sample

package = pytest.importorskip("reasoning_gym")


def problems(task, count=3):
    found = gym.records(f"reasoning_gym:{task}:size={count}", held_out=False)
    return [record["reasoning_gym"] for record in found]


@pytest.mark.parametrize("task", ["countdown", "chain_sum", "word_sorting"])
def test_scores_are_those_of_the_package(task):
    data = package.create_dataset(task, seed=0, size=3)
    answers = [data[i]["answer"] for i in range(3)] + ["1", "a, b", "1 +"]
    completions, origins, want = [], [], []
    for i, origin in enumerate(problems(task)):
        for answer in answers:
            completions.append(f"<think>5</think><answer>{answer}</answer>")
            origins.append(origin)
            want.append(data.score_answer(answer, data[i]))
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    for given in (completions, chats):
        assert reasoning_gym_reward(completions=given, reasoning_gym=origins) == want
    assert want.count(1.0) == 3


def test_other_prompts_get_none_and_a_missing_answer_0():
    (origin,) = problems("chain_sum", 1)
    texts = ["<answer>1</answer>", "no answer"]
    assert reasoning_gym_reward(completions=texts, reasoning_gym=[None, origin]) == [None, 0.0]
    assert reasoning_gym_reward(completions=texts) == [None, None]


HANGS = ["9**9**9**9", "factorial(10**8)", "(" * 3000 + "1" + ")" * 3000]
ATTACKS = [
    "__import__('os').system('touch {file}')",
    "open('{file}', 'w')",
    "exec('import os; os.open(\"{file}\", os.O_CREAT | os.O_WRONLY)')",
    "__import__('subprocess').run(['touch', '{file}'])",
    "__import__('os').fork()",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os')._exit(0)",
    "__import__('sys').exit(1)",
    "__import__('ctypes').CDLL(None).system(b'touch {file}')",
    "__import__('socket').socket()",
    "bytearray(10**11)",
]


@pytest.mark.parametrize("task", ["countdown", "n_queens"])
def test_a_hostile_answer_scores_0_and_does_nothing(task, tmp_path, monkeypatch):
    """sympy evaluates answers to countdown, and Python's eval those to n_queens."""
    monkeypatch.setattr(module, "SECONDS", 1.0)
    (origin,) = problems(task, 1)
    right = origin["problem"]["answer"]
    right = right if isinstance(right, str) else origin["problem"]["metadata"]["valid_answers"][0]
    verifier = gym.dataset(origin["source"]).score_answer
    file = tmp_path / "made"
    hostile = [text.replace("{file}", str(file)) for text in ATTACKS + HANGS[:2]]
    begun = time.monotonic()
    jobs = [(verifier, origin["problem"], answer) for text in hostile for answer in (text, right)]
    scores = module.scores(jobs)
    assert max(scores[::2]) < 0.02  # countdown gives 0.01 for what it cannot read
    assert scores[1::2] == [1.0] * len(hostile)
    assert not file.exists()
    assert time.monotonic() - begun < 60


def test_a_verifier_that_fails_or_gives_no_number_scores_0():
    def raises(answer, problem):
        raise AttributeError(answer)

    jobs = [(raises, {}, "a"), (lambda a, p: float("nan"), {}, "a"), (lambda a, p: 0.5, {}, "a")]
    assert module.scores(jobs) == [0.0, 0.0, 0.5]
    assert module.scores([]) == []


def test_it_runs_in_the_process_of_the_users_functions():
    assert is_users(full_name("reasoning_gym"))
    assert load_function("reasoning_gym") is reasoning_gym_reward
    runner = Runner(["reasoning_gym"], timeout=60.0)
    assert runner.process is not None
    (origin,) = problems("chain_sum", 1)
    prompt = Prompt(0, "1+1=", [1], {"reasoning_gym": origin})
    texts = [f"<answer>{origin['problem']['answer']}</answer>", "\\boxed{x}"]
    samples = [Sample(prompt, i, [1], [0.0], True, [0], text=text) for i, text in enumerate(texts)]
    runner.score(samples)
    assert [s.reward for s in samples] == [1.0, 0.0]
    assert list(samples[0].rewards) == ["reasoning_gym_reward"]
