"""Rewards that hang, crash, or are lost otherwise: what it costs, and that nothing hangs with them.

The functions are in functions.py and given by name, as a user's are; they run in the process that
the trainer would start. Read next: reward_clock.py, test_reward_ends.py.
"""

import logging
import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest

from nanogrpo.errors import UserError
from nanogrpo.rewards.call import TrainerState
from nanogrpo.rewards.process import Lost, RewardProcess
from nanogrpo.rewards.runner import PATIENCE, Runner
from nanogrpo.types import Prompt, Sample
from tests.rewards.clock import only_hangs_take_time
from tests.rewards.test_rewards import make_samples

FUNCTIONS = Path(__file__).with_name("functions.py")


@pytest.fixture
def file() -> str:
    return str(FUNCTIONS)


def samples(P=5, G=2):
    """P groups, of the prompts "0", "1", …"""
    prompts = [Prompt(id=p, text=str(p), token_ids=[1]) for p in range(P)]
    return [
        Sample(p, i, [5, 2], [-1.0, -0.1], True, [0, 0], text="a" * i)
        for p in prompts
        for i in range(G)
    ]


def rewards(given):
    return [sample.reward for sample in given]


# ---- what works ----------------------------------------------------------------------------------


def test_one_process_for_all_functions_that_stays(file):
    runner = Runner(
        [f"{file}:calls", "format", f"{file}:pid", f"{file}:length"],
        [1.0, 0.0, 0.0, 10.0],
        timeout=60,
    )
    for step in (1, 2, 3):
        given = samples(2)
        runner.score(given)
        assert rewards(given) == [step, step + 10.0] * 2
        assert list(given[0].rewards) == ["calls", "format_reward", "pid", "length"]
        assert given[0].rewards["pid"] == runner.process.process.pid != os.getpid()
    assert runner.process.starts == 1
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 0}


def test_in_the_process_as_without_it(file):
    specs = [
        f"{file}:length",
        f"{file}:part",
        f"{file}:judge",
        "length:9",
        f"{file}:judge",
        f"{file}:logs",
        f"{file}:length",
    ]
    found = []
    for timeout in (0, 60):
        given, runner = samples(), Runner(specs, timeout=timeout)
        assert (runner.process is None) == (timeout == 0)
        runner.score(given, TrainerState(4, 10, 0.5))
        logged = runner.metrics(lambda mine: [mine, mine])
        assert logged.pop("rewards/failures", 0) == 0
        found.append(([(s.reward, s.rewards, s.extra) for s in given], logged))
    assert found[0] == found[1]
    facts, logged = found[0]
    names = ["length", "part", "Judge", "length_reward", "Judge_2", "logs", "length_2"]
    assert facts[1][:2] == (3.5, dict(zip(names, [1.0, 1.0, 0.25, 0.0, 0.25, None, 1.0])))
    assert facts[1][2] == {"letters": 1, "object": "<class 'object'>"}
    assert logged == {"mine/step": 7.5}  # the mean of 4 and 11


def test_async_functions_run_at_once_on_one_loop_that_stays(tmp_path):
    file = tmp_path / "own.py"  # which no other test has run in this process
    file.write_text(FUNCTIONS.read_text())
    for timeout in (0, 60):
        runner = Runner([f"{file}:meets", "format", f"{file}:meets"], timeout=timeout)
        for _ in range(3):  # two that wait for each other: one after the other they would never end
            given = samples()
            runner.score(given)
            assert [list(s.rewards.values()) for s in given] == [[1.0, 0.0, 1.0]] * 10


def test_a_call_costs_little(file, monkeypatch):
    """One message, no larger than what it tells, no start, and no pause. Processor time: a busy
    machine takes none of ours.
    """
    runner, given = Runner([f"{file}:length"], timeout=60), samples(8, 8)
    for sample in given:
        sample.token_ids, sample.text = list(range(500)), "word " * 500
    sent, dumps, times = [], pickle.dumps, []
    monkeypatch.setattr(pickle, "dumps", lambda message: sent.append(dumps(message)) or sent[-1])
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it pauses"))
    for _ in range(9):
        begun = time.process_time()
        runner.score(given)
        times.append(time.process_time() - begun)
    assert len(sent) == 9
    assert max(map(len, sent)) < 64 * (2500 + 3 * 500 + 100)
    assert runner.process.starts == 1
    assert min(times) < 0.05  # a few milliseconds


def test_what_comes_back_is_plain_and_a_class_of_the_users_does_not_reach_the_trainer(file):
    runner = Runner([f"{file}:verdicts"], timeout=60)
    runner.score(given := samples(P=1))
    assert [(s.reward, s.extra, type(s.extra["verdict"])) for s in given] == [
        (1.0, {"verdict": "good"}, str)
    ] * 2


def test_a_forgotten_child_does_not_answer_too(file):
    process = RewardProcess([f"{file}:forks"])
    for value in (1.0, 2.0, 3.0) * 4:  # its answer would be taken for that to the next call
        found = process.call(
            [(0, "forks")], {"prompts": [str(value)]}, ["sample 0 of prompt 0"], limit=60.0
        )
        assert found.rewards == [[value]]


# ---- what is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sleeps", "gave no answer within"),
        ("backtracks", "gave no answer within"),
        ("exits", "exited with status 7"),
        ("segfaults", "was killed by SIGSEGV"),
        ("out_of_memory", "was killed by SIGKILL"),
        ("awaits_and_hangs", "gave no answer within"),
    ],
)
def test_a_function_that_hangs_or_crashes_on_one_prompt_costs_its_group(
    file, caplog, monkeypatch, name, why
):
    given, limit, hangs = samples(), 1.0, "no answer" in why
    clock = only_hangs_take_time(monkeypatch, lambda prompts: hangs and "3" in prompts)
    runner = Runner(["format", f"{file}:{name}", f"{file}:calls"], [1.0, 1.0, 0.0], timeout=limit)
    runner.score(given)
    # all at once; then half of what is left, one group to come
    assert clock.now == pytest.approx(hangs * (limit + limit / 2))
    value = 2.0 if name.startswith("awaits") else 1.0
    assert rewards(given) == [value] * 6 + [None] * 2 + [value] * 2
    # out of the step, and no sum without its part
    assert given[6].rewards == {"format_reward": None, name: None, "calls": None}
    assert given[8].rewards["format_reward"] == 0.0
    assert runner.process.starts <= 3
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 1}
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 0}
    whole, single = [
        record.message for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert re.fullmatch(
        rf"the reward function {name} {why}.* for 5 prompts: they are tried one by one\.", whole
    )
    assert re.fullmatch(
        rf"the reward function {name} {why}.* for prompt 3: its 2 completions are left out\.",
        single,
    )
    runner.score(given[:6])  # and it goes on
    assert rewards(given[:6]) == [value] * 6


def test_the_time_is_bounded_and_shared_when_all_groups_hang(file, caplog, monkeypatch):
    given, limit = samples(P=4), 0.8
    clock = only_hangs_take_time(monkeypatch, lambda prompts: True)
    runner = Runner([f"{file}:always_hangs"], timeout=limit)
    begun = time.monotonic()
    runner.score(given)
    assert clock.now == pytest.approx(2 * limit)
    assert 2 * limit <= time.monotonic() - begun < 60  # no limit is a mere number
    assert rewards(given) == [None] * 8
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 4}
    assert len(caplog.records) == 5


def test_nothing_but_loss_ends_the_run(file):
    runner = Runner(["format", f"{file}:always_hangs"], timeout=0.2)
    for _ in range(PATIENCE - 1):
        runner.score(samples(P=1))
    with pytest.raises(
        UserError,
        match=r"always_hangs gave nothing in 3 calls in a row.* raise --reward-timeout \(0\.2\)",
    ):
        runner.score(samples(P=1))
    runner = Runner([f"{file}:exits"], timeout=60)
    for _ in range(PATIENCE):  # one success between them, and it is not in a row
        runner.score(samples()[6:8])
        runner.score(samples())


def test_state_of_a_killed_process_is_gone_and_the_next_call_is_right(file):
    runner = Runner([f"{file}:calls"], timeout=60)
    for expected in (1.0, 2.0):
        runner.score(given := samples(P=1))
        assert rewards(given) == [expected] * 2
    os.kill(runner.process.process.pid, signal.SIGKILL)  # between two calls, as the kernel may
    runner.score(given := samples(P=3))
    # no group is lost: each was tried by itself
    assert rewards(given) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 0}


def test_a_child_that_holds_the_connection_open_does_not_hide_the_end(file):
    process = RewardProcess([f"{file}:child"])
    begun = time.monotonic()
    with pytest.raises(Lost, match="exited with status 1"):
        process.call([(0, "child")], {"prompts": ["a"]}, ["sample 0 of prompt 0"], limit=600.0)
    assert time.monotonic() - begun < 60


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises",
            r"raises raised ZeroDivisionError: division by zero \(at functions\.py:\d+, given 10 completions of prom",
        ),
        ("leaves", r"leaves raised SystemExit: 3 \(at functions\.py"),
        (
            "awaits_and_raises",
            r"awaits_and_raises raised KeyError: 'no such judge' \(at functions\.py:\d+",
        ),
        (
            "awaits_and_is_cancelled",
            r"awaits_and_is_cancelled raised CancelledError: judge \(at functions\.py:\d+",
        ),
        ("nan", "nan returned nan for sample 1 of prompt 4; it must return a number"),
        ("short", "short returned 1 values for 10 completions"),
    ],
)
def test_a_mistake_stops_the_run_and_says_the_same_in_the_process(file, name, message):
    told = []
    for timeout in (0, 60):
        given, runner = samples(), Runner(["format", f"{file}:{name}"], timeout=timeout)
        with pytest.raises(UserError, match=message) as caught:
            runner.score(given)
        told.append(str(caught.value))
        assert all(sample.rewards == {} for sample in given)
    assert told[0] == told[1]


def log_wrong(how):
    def function(completions, log_extra, log_metric, **kwargs):
        how(log_extra, log_metric)
        return [0.0] * len(completions)

    return function


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda extra, metric: extra("x", [1]),
            r"log_extra\('x', …\) has 1 values for 2 completions",
        ),
        (lambda extra, metric: extra(1, [1, 2]), r"log_extra\(1, …\)"),
        (
            lambda extra, metric: metric("x", float("nan")),
            r"log_metric\('x', nan\) needs a name and a finite number",
        ),
        (
            lambda extra, metric: metric("step", 3.0),
            r"log_metric\('step', …\): the log has that name for itself",
        ),
        (lambda extra, metric: metric("x", "high"), r"could not convert string to float"),
        (
            lambda extra, metric: [extra("x", [1, 2]) for _ in "ab"],
            r"log_extra\('x', …\) was called twice for one sample",
        ),
    ],
)
def test_what_is_logged_is_checked_too(how, message):
    with pytest.raises(UserError, match=message):
        Runner([log_wrong(how)]).score(make_samples())


def test_imports_that_fail_are_told_at_the_start(file, tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "fails.py").write_text("1 / 0\n")
    for spec, message in (
        (f"{file}:nothing", "has no function 'nothing'"),
        ("acuracy", "'acuracy' is neither one of"),
        (f"{tmp_path}/fails.py:f", "raised ZeroDivisionError"),
        (f"{tmp_path}/dies.py:f", r"the process that imports \S+dies\.py:f exited with status 5"),
    ):
        with pytest.raises(UserError, match=message):
            Runner([spec], timeout=60)
