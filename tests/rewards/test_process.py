"""Reward functions that run in the process, hang, or crash: what each case costs.

The functions are in functions.py and are given by name, as a user's are. They run in the process
that the trainer would start. Read next: clock.py, test_shutdown.py.
"""

import logging
import os
import pickle
import re
import signal
import time

import pytest

from nanogrpo.distributed.failure import Stop
from nanogrpo.errors import UserError
from nanogrpo.rewards import process as reward_process
from nanogrpo.rewards.builtin import load_function
from nanogrpo.rewards.call import Functions, TrainerState
from nanogrpo.rewards.process import CallLost, RewardProcess, public_variables, read_result
from nanogrpo.rewards.runner import MAX_LOST_CALLS, Runner
from tests.rewards.clock import only_hangs_take_time
from tests.rewards.conftest import FUNCTIONS, groups, make_samples


def named(*names: str) -> list[str]:
    return [f"{FUNCTIONS}:{name}" for name in names]


def rewards(samples):
    return [sample.reward for sample in samples]


# Functions that do not end their process, so one process can serve many tests.
SHARED = ["raises", "calls_exit", "awaits_and_raises", "awaits_and_is_cancelled", "nan", "short"]
SHARED += ["verdicts", "forks", "raises_interrupt", "raises_generator_exit", "raises_unprintable"]
SHARED += ["unreadable", "awaits_and_interrupts"]


@pytest.fixture(scope="module")
def process() -> RewardProcess:
    return RewardProcess(named(*SHARED))


def call(backend, name: str, prompts: list[str]):
    arguments = {
        "prompts": prompts,
        "completions": [""] * len(prompts),
        "completion_ids": [[5]] * len(prompts),
    }
    labels = [f"sample 0 of prompt {p}" for p in prompts]
    return backend.call([(SHARED.index(name), name)], arguments, labels, timeout=60.0)


# --- healthy functions ---


def test_one_process_serves_all_functions_and_all_steps():
    runner = Runner(
        [*named("calls"), "format", *named("pid", "length")], [1.0, 0.0, 0.0, 10.0], timeout=60
    )
    for step in (1, 2, 3):
        runner.score(samples := groups(2))
        assert rewards(samples) == [step, step + 10.0] * 2
        assert list(samples[0].rewards) == ["calls", "format_reward", "pid", "length"]
        assert samples[0].rewards["pid"] == runner.process.process.pid != os.getpid()
    assert runner.process.starts == 1
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 0}


def test_results_are_the_same_with_and_without_the_process():
    specs = [*named("length", "part", "judge"), "length:9", *named("judge", "logs", "length")]
    found = []
    for timeout in (0, 60):
        samples, runner = groups(), Runner(specs, timeout=timeout)
        assert (runner.process is None) == (timeout == 0)
        runner.score(samples, TrainerState(4, 10, 0.5))
        logged = runner.metrics(lambda mine: [mine, mine])
        assert logged.pop("rewards/failures", 0) == 0
        found.append(([(s.reward, s.rewards, s.extra) for s in samples], logged))
    assert found[0] == found[1]
    scores, logged = found[0]
    names = [
        "length",
        "part",
        "Judge",
        "soft_overlong_punishment_reward",
        "Judge_2",
        "logs",
        "length_2",
    ]
    assert scores[1][:2] == (3.5, dict(zip(names, [1.0, 1.0, 0.25, 0.0, 0.25, None, 1.0])))
    assert scores[1][2] == {"letters": 1, "object": "<class 'object'>"}
    assert logged == {"mine/step": 7.5}  # the mean of 4 and 11


def test_async_functions_run_at_once_on_one_loop(tmp_path):
    file = tmp_path / "own.py"  # no other test has run this copy in this process
    file.write_text(FUNCTIONS.read_text())
    spec = f"{file}:waits_for_the_other"
    for timeout in (0, 60):
        runner = Runner([spec, "format", spec], timeout=timeout)
        for _ in range(3):  # two that wait for each other would never end one after the other
            runner.score(samples := groups())
            assert [list(s.rewards.values()) for s in samples] == [[1.0, 0.0, 1.0]] * 10


def test_a_call_costs_little(monkeypatch):
    """It sends one message, no larger than its content, and neither starts a process nor waits.

    The bound is on processor time, which other processes on a busy machine do not affect.
    """
    runner, samples = Runner(named("length"), timeout=60), groups(32)
    for sample in samples:
        sample.token_ids, sample.text = list(range(500)), "word " * 500
    sent, dumps, times = [], pickle.dumps, []
    monkeypatch.setattr(pickle, "dumps", lambda message: sent.append(dumps(message)) or sent[-1])
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it sleeps"))
    for _ in range(9):
        begun = time.process_time()
        runner.score(samples)
        times.append(time.process_time() - begun)
    assert len(sent) == 9
    assert max(map(len, sent)) < 64 * (2500 + 3 * 500 + 100)
    assert runner.process.starts == 1
    assert min(times) < 0.05  # a few milliseconds


def test_classes_of_the_user_do_not_reach_the_trainer(process):
    (column, values), *_ = call(process, "verdicts", ["a", "b"]).extra
    assert (column, values, [type(v) for v in values]) == ("verdict", ["good"] * 2, [str] * 2)


def test_a_forgotten_child_does_not_answer(process):
    for value in (1.0, 2.0, 3.0) * 4:  # its answer would be taken for the answer to the next call
        assert call(process, "forks", [str(value)]).rewards == [[value]]


SECRETS = {
    *("NANOGRPO_SECRET", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"),
    *(
        "PGPASSWORD",
        "MYSQL_PASSWD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SSH_AUTH_SOCK",
        "my_api_key",
    ),
    *("DB_PASS", "MYSQL_PWD", "GH_PAT", "XAUTHORITY", "SESSION_COOKIE"),
}
HARMLESS = {"TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "AUTHORS", "LD_RUN_PATH", "MY_SETTING"}


@pytest.mark.parametrize("passed", [(), ("HF_TOKEN", "my_api_key", "MY_SETTING")])
def test_secrets_of_the_environment_do_not_reach_reward_functions(monkeypatch, tmp_path, passed):
    for name in SECRETS | HARMLESS:
        monkeypatch.setenv(name, "value")
    (tmp_path / "own.py").write_text(
        "import os\n\ndef f(prompts, log_extra, **kwargs):\n"
        "    names = sorted(n for n, v in os.environ.items() if v == 'value')\n"
        "    log_extra('names', [' '.join(names)])\n    return [1.0]\n"
    )
    runner = Runner([f"{tmp_path / 'own.py'}:f"], timeout=60, env=passed)
    for _ in range(2):
        runner.score(samples := make_samples(("7",)))
        assert set(samples[0].extra["names"].split()) == HARMLESS | {*passed}
        runner.process.kill()  # the next process has the same variables
    assert os.environ["HF_TOKEN"] == "value"


def test_addresses_with_a_password_do_not_reach_reward_functions(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:word@host/rows")
    monkeypatch.setenv("http_proxy", "http://word@proxy:3128/")
    monkeypatch.setenv("JUDGE_URL", "https://host:8000/a@b")
    found = public_variables()
    assert {"DATABASE_URL", "http_proxy", "JUDGE_URL"} & found.keys() == {"JUDGE_URL"}
    assert public_variables(["http_proxy"])["http_proxy"] == "http://word@proxy:3128/"


@pytest.mark.parametrize("name", ["NOT_SET_ANYWHERE", ""])
def test_a_variable_that_is_not_there_cannot_be_passed(name):
    with pytest.raises(UserError, match=f"--reward-env {name}: the environment has no such vari"):
        Runner(named("length"), timeout=60, env=[name])


# --- lost calls ---


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("backtracks", "gave no answer within"),
        ("exits", "exited with status 7"),
        ("segfaults", "was killed by SIGSEGV"),
        ("awaits_and_hangs", "gave no answer within"),
    ],
)
def test_a_hang_or_crash_on_one_prompt_loses_only_its_group(caplog, monkeypatch, name, reason):
    samples, limit, hangs = groups(), 0.4, "no answer" in reason
    clock = only_hangs_take_time(monkeypatch, lambda prompts: hangs and "3" in prompts)
    runner = Runner(["format", *named(name, "calls")], [1.0, 1.0, 0.0], timeout=limit)
    runner.score(samples)
    # The limit for all at once; then half of what is left, because one group is still to come.
    assert clock.now == pytest.approx(hangs * (limit + limit / 2))
    value = 2.0 if name.startswith("awaits") else 1.0
    assert rewards(samples) == [value] * 6 + [None] * 2 + [value] * 2
    # No function's reward counts for a lost group.
    assert samples[6].rewards == {"format_reward": None, name: None, "calls": None}
    assert samples[8].rewards["format_reward"] == 0.0
    assert runner.process.starts <= 3
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 1}
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 0}
    both = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    start = rf"the reward function {name} {reason}.* for "
    assert re.fullmatch(start + "5 prompts; trying them one by one", both[0])
    assert re.fullmatch(start + "prompt 3; its 2 completions are left out of the step", both[1])
    assert len(both) == 2
    runner.score(samples[:6])  # the next step works
    assert rewards(samples[:6]) == [value] * 6


def test_slow_imports_do_not_take_the_time_of_healthy_groups(tmp_path, monkeypatch):
    clock = only_hangs_take_time(monkeypatch, imports=0.9)
    (tmp_path / "slow.py").write_text(
        "import os\n\ndef f(prompts, **kwargs):\n"
        '    if {"1", "2", "3"} & {*prompts}:\n        os._exit(1)\n'
        "    return [1.0] * len(prompts)\n"
    )
    runner = Runner([f"{tmp_path / 'slow.py'}:f"], timeout=1.5)
    runner.score(samples := groups(6))
    assert rewards(samples) == [1.0] * 2 + [None] * 6 + [1.0] * 4
    assert len(clock.limits) == 1 + 6
    assert min(clock.limits) > 0.999 * 1.5 / 6  # at least an equal part, up to rounding


def test_the_time_is_bounded_and_shared_when_all_groups_hang(caplog, monkeypatch):
    samples, limit = groups(2), 0.4
    clock = only_hangs_take_time(monkeypatch, lambda prompts: True)
    runner = Runner(named("always_hangs"), timeout=limit)
    begun = time.monotonic()
    runner.score(samples)
    assert clock.now == pytest.approx(2 * limit)
    assert 2 * limit <= time.monotonic() - begun < 60  # on the real clock too
    assert rewards(samples) == [None] * 4
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 2}
    assert len(caplog.records) == 3


def test_a_run_ends_when_three_calls_in_a_row_lose_every_group():
    runner = Runner(["format", *named("always_hangs")], timeout=0.2)
    for _ in range(MAX_LOST_CALLS - 1):
        runner.score(groups(1))
    with pytest.raises(
        UserError,
        match=r"always_hangs returned nothing in 3 calls in a row.* --reward-timeout \(0\.2\)",
    ):
        runner.score(groups(1))
    runner = Runner(named("exits"), timeout=60)
    for _ in range(MAX_LOST_CALLS):  # with a success in between they are not in a row
        runner.score(groups()[6:8])
        runner.score(groups(1))


def test_a_killed_process_loses_its_state_but_no_group():
    runner = Runner(named("calls"), timeout=60)
    for expected in (1.0, 2.0):
        runner.score(samples := groups(1))
        assert rewards(samples) == [expected] * 2
    os.kill(runner.process.process.pid, signal.SIGKILL)  # between two calls, as the kernel may
    runner.score(samples := groups(3))
    # Each group was tried by itself.
    assert rewards(samples) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert runner.metrics(lambda mine: [mine]) == {"rewards/failures": 0}


def test_a_child_that_holds_the_connection_open_does_not_hide_a_crash():
    process = RewardProcess(named("dies_but_leaves_a_child"))
    begun = time.monotonic()
    with pytest.raises(CallLost, match="exited with status 1"):
        process.call(
            [(0, "f")], {"prompts": ["a"], "completion_ids": [[5]]}, ["sample 0"], timeout=600.0
        )
    assert time.monotonic() - begun < 60


def test_a_process_that_closes_its_connection_is_not_called_killed():
    process = RewardProcess(named("closes_its_connection"))
    with pytest.raises(CallLost, match=r"^closed its connection$"):
        process.call(
            [(0, "f")], {"prompts": ["a"], "completion_ids": [[5]]}, ["sample 0"], timeout=60.0
        )


# --- mistakes ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises",
            r"raises raised ZeroDivisionError: division by zero \(at functions\.py:\d+, "
            r"called with 2 completions, the first is sample 0 of prompt 3\); fix the function",
        ),
        ("calls_exit", r"calls_exit raised SystemExit: 3 \(at functions\.py"),
        (
            "awaits_and_raises",
            r"awaits_and_raises raised KeyError: 'no such judge' \(at functions\.py:\d+",
        ),
        (
            "awaits_and_is_cancelled",
            r"awaits_and_is_cancelled raised CancelledError: judge \(at functions\.py:\d+",
        ),
        ("raises_interrupt", r"raises_interrupt raised KeyboardInterrupt: no \(at functions\.py"),
        (
            "raises_generator_exit",
            r"raises_generator_exit raised GeneratorExit: {1,2}\(at functions",
        ),
        (
            "raises_unprintable",
            r"raised Unprintable: its text raises SystemExit \(at functions\.py:\d+",
        ),
        (
            "awaits_and_interrupts",
            r"awaits_and_interrupts raised KeyboardInterrupt: {1,2}\(at func",
        ),
        (
            "unreadable",
            r"unreadable returned a Unreadable that cannot be read \(KeyboardInterrupt: \); it",
        ),
        ("nan", "nan returned nan for sample 0 of prompt 4; it must return a number"),
        ("short", "short returned 1 values for 2 completions"),
    ],
)
def test_a_mistake_gives_the_same_error_with_and_without_the_process(process, name, message):
    errors = []
    for backend in (Functions([load_function(spec) for spec in named(*SHARED)]), process):
        with Stop(), pytest.raises(UserError, match=message) as caught:
            call(backend, name, ["3", "4"])
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert process.kill.alive  # the process has survived, so no group was lost
    assert process.starts == 1


def test_ctrl_c_is_not_taken_for_a_mistake_of_the_function():
    """Without the handlers of a training run, for example in `nanogrpo eval`."""
    functions = Functions([load_function(spec) for spec in named(*SHARED)])
    # a shell starts `command &` with Ctrl-C ignored, and the tests may run like that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(functions, "raises_interrupt", ["3"])
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_long_for_json", r"too_long_for_json failed \(ValueError: Exceeds the limit"),
        ("writes_to_its_connection", "sent no answer but other data"),
    ],
)
def test_an_answer_that_cannot_be_sent_or_read_ends_the_run(name, message):
    with pytest.raises(UserError, match=message):
        Runner(named(name), timeout=60).score(groups(2))


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 7, "abc", [], [[], [], [], []], {"a": 1, "b": 2, "c": 3}, [1, 2, 3]),
        *([[[1.0]], [], []], [[[1.0, 2.0], [1.0, 2.0]], [], []]),  # other numbers of values
        *([[[1.0, x]], [], []] for x in ("1", 1, True, float("nan"), float("inf"), 1e31, [1.0])),
        *([[[1.0, 2.0]], [x], []] for x in (7, "ab", ["a"], ["a", [1]], ["a", "xy"], [1, [1, 2]])),
        *([[[1.0, 2.0]], [], [x]] for x in (7, "ab", ["a"], ["a", "b"], ["a", 10**400], [1, 2.0])),
        [[[1.0, 2.0]], [], [["a", float("nan")]]],
    ],
)
def test_what_no_function_can_return_is_refused(answer):
    right = [[[1.0, None]], [["a", [1, "b"]]], [["m", 0.5]]]
    assert read_result(right, 1, 2) == tuple(right)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        read_result(answer, 1, 2)


def test_a_forged_answer_ends_the_run():
    """The function writes it to the trainer's connection, and returns something else."""
    for name in ("forges_a_text", "forges_a_nan", "forges_another_shape"):
        with pytest.raises(UserError, match="sent no answer but other data"):
            Runner(named(name), timeout=60).score(groups(2))


def test_an_answer_is_not_taken_for_that_of_the_next_call():
    runner = Runner(named("answers_twice"), timeout=60)

    def score_twice() -> None:
        for _ in range(2):
            runner.score(groups(2))

    with pytest.raises(UserError, match="sent no answer but other data"):
        score_twice()


def test_an_answer_without_end_is_not_kept(monkeypatch):
    monkeypatch.setattr(reward_process, "LONGEST", 1 << 20)
    runner = Runner(named("writes_without_end"), timeout=60)
    with pytest.raises(UserError, match="sent no answer but other data"):
        runner.score(groups(2))


def test_data_that_cannot_be_copied_ends_the_run():
    samples = make_samples(function=lambda: 0)
    with pytest.raises(UserError, match=r"the data cannot be copied to the process of .*lambda"):
        Runner(named("length"), timeout=60).score(samples)


def logs_by(how):
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
            r"log_metric\('step', …\): the log already uses this name",
        ),
        (
            lambda extra, metric: metric("rewards/failures", 1),
            r"function raised ValueError: log_metric\('rewards/failures', …\): the log already",
        ),
        (
            lambda extra, metric: extra("advantage", [1, 2]),
            r"log_extra\('advantage', …\): the completions table already has this column",
        ),
        (
            lambda extra, metric: extra("format_reward", [1, 2]),
            r"log_extra\('format_reward', …\): the completions table already has this column",
        ),
        (lambda extra, metric: metric("x", "high"), r"could not convert string to float"),
        (
            lambda extra, metric: [extra("x", [1, 2]) for _ in "ab"],
            r"log_extra\('x', …\): the completions table already has this column",
        ),
    ],
)
def test_logged_values_are_checked(how, message):
    samples = make_samples()
    with pytest.raises(UserError, match=message):
        Runner([logs_by(how), "format"]).score(samples)
    assert all(sample.reward is None for sample in samples)


def test_failing_imports_are_reported_at_the_start(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "fails.py").write_text("1 / 0\n")
    for spec, message in (
        (*named("nothing"), "has no function 'nothing'"),
        (f"{tmp_path}/fails.py:f", "raised ZeroDivisionError"),
        (f"{tmp_path}/dies.py:f", r"the process that imports \S+dies\.py:f exited with status 5"),
    ):
        with pytest.raises(UserError, match=message):
            Runner([spec], timeout=60)
