"""Reward functions that run in the process, hang, or crash: what each case costs.

The functions are in functions.py and are given by name, as a user's are. They run in the process
that the trainer would start. Read next: test_shutdown.py.
"""

import os
import pickle
import re
import sys
import time
import types

import pytest

from nanogrpo.rewards.call import TrainerState
from nanogrpo.rewards.scorer import MAX_LOST
from tests.conftest import refused
from tests.ranks import alive, until
from tests.rewards.conftest import FUNCTIONS, groups, make_samples, runner


def named(*names: str) -> list[str]:
    return [f"{FUNCTIONS}:{name}" for name in names]


def rewards(samples):
    return [sample.reward for sample in samples]


# --- healthy functions ---


def test_one_process_serves_all_functions_and_all_steps():
    specs = [*named("calls"), "format", *named("pid", "length")]
    own = runner(*specs, weights=[1.0, 0.0, 0.0, 10.0], timeout=60)
    for step in (1, 2, 3):
        own.score(samples := groups(2))
        assert rewards(samples) == [step, step + 10.0] * 2
        assert list(samples[0].rewards) == ["calls", "format_reward", "pid", "length"]
        assert samples[0].rewards["pid"] == own.process.process.pid != os.getpid()
    assert own.metrics(lambda mine: [mine]) == {"rewards/failures": 0}


def test_results_are_the_same_with_and_without_the_process():
    specs = [*named("length", "part", "judge"), "format", *named("judge", "logs", "length")]
    found = []
    for timeout in (0, 60):
        samples, own = groups(), runner(*specs, timeout=timeout)
        assert (own.process is None) == (timeout == 0)
        own.score(samples, TrainerState(4, 10, 0.5))
        logged = own.metrics(lambda mine: [mine, mine])
        assert logged.pop("rewards/failures", 0) == 0
        found.append(([(s.reward, s.rewards, s.extra) for s in samples], logged))
    assert found[0] == found[1]
    scores, logged = found[0]
    names = ["length", "part", "Judge", "format_reward", "Judge_2", "logs", "length_2"]
    assert scores[1][:2] == (3.5, dict(zip(names, [1.0, 1.0, 0.25, 0.0, 0.25, None, 1.0])))
    assert scores[1][2] == {"letters": 1, "('a', 1)": "<class 'object'>"}
    assert logged == {"mine/step": 7.5}  # the mean of 4 and 11


@pytest.mark.parametrize("timeout", [0, 60])
def test_all_calls_of_async_functions_use_one_loop(tmp_path, timeout):
    file = tmp_path / "own.py"  # no other test has run this copy in this process
    file.write_text(FUNCTIONS.read_text())
    own = runner(f"{file}:awaits", "format", f"{file}:awaits", timeout=timeout)
    for _ in range(3):
        own.score(samples := groups())
        assert [list(s.rewards.values()) for s in samples] == [[1.0, 0.0, 1.0]] * 10


def test_a_call_costs_little(monkeypatch):
    """It sends one message, no larger than its content, and neither starts a process nor waits.

    The bound is on processor time, which other processes on a busy machine do not affect.
    """
    own, samples = runner(*named("length"), timeout=60), groups(32)
    process = own.process.process
    for sample in samples:
        sample.token_ids, sample.text = list(range(500)), "word " * 500
    sent, dumps, times = [], pickle.dumps, []
    monkeypatch.setattr(pickle, "dumps", lambda message: sent.append(dumps(message)) or sent[-1])
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it sleeps"))
    for _ in range(9):
        begun = time.process_time()
        own.score(samples)
        times.append(time.process_time() - begun)
    assert len(sent) == 9
    assert max(map(len, sent)) < 64 * (2500 + 3 * 500 + 100)
    assert own.process.process.pid == process.pid
    assert min(times) < 0.05  # a few milliseconds


# --- lost calls ---


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("backtracks", "gave no answer within 1 s"),
        ("awaits_and_hangs", "gave no answer within 1 s"),
        ("exits", "exited with status 7"),
        ("segfaults", "was killed by SIGSEGV"),
    ],
)
def test_a_hang_or_crash_loses_the_step_and_after_three_the_run_ends(caplog, name, reason):
    by_token = lambda prompts, **_: [[0.0, 0.0]] * len(prompts)  # noqa: E731
    own = runner(by_token, *named(name, "calls"), weights=[1.0, 1.0, 0.0], timeout=60)
    limit = 1.0 if "answer" in reason else 60.0
    for _ in range(MAX_LOST - 1):
        own.process.timeout = limit
        own.score(samples := groups())
        assert rewards(samples) == [None] * 10
        assert samples[0].rewards == {"<lambda>": None, name: None, "calls": None}
        assert samples[0].token_rewards == {}
        assert own.metrics(lambda mine: [mine]) == {"rewards/failures": 5}
        message = f"the reward function {name} {reason}; the 10 completions get no rewards"
        assert caplog.messages[-1] == message
        own.process.timeout = 60.0
        own.score(samples := groups(3))  # the next step works, and they are not in a row
        assert rewards(samples) == [1.0] * 6
        assert own.metrics(lambda mine: [mine]) == {"rewards/failures": 0}
    own.process.timeout = limit
    for _ in range(MAX_LOST - 1):
        own.score(groups())
    with refused(f"{name} .*, and the 2 steps before .* --reward-timeout"):
        own.score(groups())


@pytest.mark.parametrize("name", ["writes_to_its_connection", "writes_without_end"])
def test_code_that_writes_to_the_connection_loses_the_step(name):
    own = runner(*named(name), timeout=60)
    own.score(samples := groups(2))
    assert rewards(samples) == [None] * 4


def test_a_child_that_holds_the_connection_open_does_not_hang_the_trainer():
    own = runner(*named("dies_but_leaves_a_child"), timeout=1)
    own.score(samples := groups(1))
    assert rewards(samples) == [None] * 2


def test_if_the_process_dies_between_calls_its_children_end_and_no_step_is_lost():
    own = runner(*named("child"), timeout=60)
    own.score(first := groups(1))
    own.process.process.kill()
    own.process.process.wait()
    own.score(second := groups(1))
    until(lambda: not alive(int(first[0].reward)))
    assert alive(int(second[0].reward))


# --- mistakes ---


@pytest.mark.parametrize("timeout", [0, 60])
def test_a_mistake_gives_the_same_error_with_and_without_the_process(timeout):
    for name, message in {
        "raises": "ZeroDivisionError: division by zero",
        "calls_exit": "SystemExit: 3",
        "awaits_and_raises": "KeyError: 'no such judge'",
        "awaits_and_is_cancelled": "CancelledError: judge",
        "logs_in_eval": "ValueError: log_metric('eval/reward', 0.5) needs",
        "logs_too_much": "ValueError: log_metric('large', 1e+308) needs",
    }.items():
        own = runner(*named(name), timeout=timeout)
        place = r"\(at functions\.py:\d+\); fix the function$"
        with refused(f"^the reward function {name} raised {re.escape(message)}.* {place}"):
            own.score(make_samples(prompt="3"))
    with refused("nan returned nan for sample 1 of prompt 17; it must"):
        runner(*named("nan"), timeout=timeout).score(make_samples())


def test_data_that_cannot_be_copied_ends_the_run():
    module = types.ModuleType("module_of_the_trainer")  # the other process cannot import it
    sys.modules[module.__name__] = module
    module.Number = type("Number", (int,), {"__module__": module.__name__})
    for value, reason in ((lambda: 0, "lambda"), (module.Number(3), "No module named")):
        samples = make_samples(value=value)
        with refused(f"the data cannot be copied to the process .*{reason}"):
            runner(*named("length"), timeout=60).score(samples)


def test_a_file_that_replaces_a_function_of_json_is_answered(tmp_path):
    (tmp_path / "own.py").write_text(
        "import json\njson.dumps = json.loads = None\n"
        "def f(completions, **kwargs): return [1] * len(completions)\n"
    )
    runner(f"{tmp_path}/own.py:f", timeout=60).score(samples := make_samples())
    assert {*rewards(samples)} == {1.0}


def test_failing_imports_are_reported_at_the_start(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(5)\n")
    for spec, message in (
        (*named("nothing"), "has no function 'nothing'"),
        (f"{tmp_path}/dies.py:f", r"the process that imports \S+dies\.py:f exited with status 5"),
    ):
        with refused(message):
            runner(spec, timeout=60)
