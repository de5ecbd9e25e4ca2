"""Tool calls: what a model may write, what it reads, and what reward functions receive. Most of it
is compared with TRL in test_trl_tools.py.

Read next: nanogrpo/extras/tools/calls.py.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import nanogrpo
import train
from nanogrpo import Config
from nanogrpo.engine.base import SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.extras.tools.calls import ToolCalls, parse
from nanogrpo.extras.tools.environments import Environments
from nanogrpo.extras.tools.feature import Tools
from nanogrpo.extras.tools.timelimit import limited
from nanogrpo.extras.tools.turns import TurnsEngine
from nanogrpo.rewards import call as rewards
from nanogrpo.rewards import plugin
from nanogrpo.rewards.builtin import accuracy_reward, format_reward
from nanogrpo.rewards.scorer import Scorer
from nanogrpo.types import Prompt
from tests.conftest import SOLO, lines, read_rows, refused, steps
from tests.engine.chat import TEMPLATE, call, converse, write_chat_tokenizer

EXAMPLE = Path(train.__file__).parent / "examples" / "tools.py"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_chat_tokenizer(tmp_path_factory.mktemp("chat"))


def calls_of(tokenizer, *functions, environment=None, timeout=30.0) -> ToolCalls:
    environments = Environments(environment, timeout) if environment else None
    return ToolCalls(Config(tool_timeout=timeout), tokenizer, functions, environments)


# --- the model's text ---


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "add"}',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        f"<tool_call>{'[' * 100_000}</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_kept_as_text(text):
    message, calls = parse(f"I call: {text}")
    assert [c.name for c in calls] == [""]
    assert message == {"role": "assistant", "content": f"I call:\n{text}"}


def test_a_call_in_a_thought_is_not_made():
    message, calls = parse(f"<think>{call('add')}</think>{call('f', a=1)}<think>not closed")
    assert [c.name for c in calls] == ["f"]
    assert message["reasoning_content"] == f"{call('add')}\nnot closed"


# --- calls ---


def add(a: int, b: float | None = None) -> str:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return f"{a!r}+{b!r}"


def say(text: str) -> str:
    """Say.

    Args:
        text: The text.
    """
    return text


def leave() -> None:
    """Leave."""
    raise SystemExit(0)


def fork() -> None:
    """Fork."""
    if os.fork() == 0:
        raise SystemExit(9)


def spin() -> None:
    """Never return."""
    while True:
        with contextlib.suppress(Exception):  # so no Exception can end it
            time.sleep(10)


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


async def block() -> None:
    """Block the event loop."""
    time.sleep(3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call("no_such"), "Tool no_such not found."),
        (call("add"), "missing 1 required positional argument: 'a'"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "cannot be read: write"),
        (call("__init__"), "Tool __init__ not found."),
        ("<tool_call>{</tool_call>", 'cannot be read: write <tool_call>{"name": '),
        (call("leave"), "0"),
    ],
)
def test_a_call_that_fails_is_answered_with_the_error(tokenizer, text, problem):
    (s,) = converse(calls_of(tokenizer, add, leave), [[text + END, "Sorry." + END]])
    *_, answer, last = s.conversation.messages
    assert answer["role"] == "tool"
    assert answer["content"].startswith("{'error': ")
    assert problem in answer["content"]
    assert last == {"role": "assistant", "content": "Sorry."}
    assert (s.conversation.calls, s.conversation.failures, s.stopped) == (1, 1, True)


def test_answers_have_the_order_of_the_calls(tokenizer):
    calls = [call("wait", seconds=0.02), call("add", a="7", b="x"), call("wait", seconds="0")]
    (s,) = converse(calls_of(tokenizer, add, wait), [["\n".join(calls) + END, "So." + END]])
    # "7" is converted, because `a` is a number, and "x" is not one
    answers = [m["content"] for m in s.conversation.messages[1:4]]
    assert answers == ["waited 0.02", "7+'x'", "waited 0"]


def test_async_calls_of_all_samples_wait_together(tokenizer):
    arrived = []

    async def meet() -> str:
        """Wait for the others."""
        arrived.append(None)
        while len(arrived) < 20:
            await asyncio.sleep(0.01)
        return "met"

    conversations = [[f"{i} {call('meet')}{END}", "So." + END] for i in range(20)]
    samples = converse(calls_of(tokenizer, meet, timeout=60.0), conversations)
    assert [s.conversation.messages[1]["content"] for s in samples] == ["met"] * 20


def test_a_call_that_takes_too_long_is_ended(tokenizer):
    """In pure Python, in a coroutine that waits, and in one that blocks the event loop."""
    turns = [call("spin"), call("wait", seconds=600), call("block"), call("wait", seconds=0)]
    before = {*threading.enumerate()}
    tools = calls_of(tokenizer, spin, wait, block, timeout=0.2)
    (s,) = converse(tools, [[f"{turn}{END}" for turn in turns] + ["So." + END]])
    *late, in_time = (m["content"] for m in s.conversation.messages[1::2])
    assert late == ["{'error': 'no answer within 0.2 s'}", *["{'error': 'TimeoutError'}"] * 2]
    assert in_time == "waited 0"
    assert (s.conversation.calls, s.conversation.failures) == (4, 3)
    for _ in range(200):  # the blocked loop ends when its tool returns
        if len({*threading.enumerate()} - before) > 1:
            time.sleep(0.05)
    assert len({*threading.enumerate()} - before) == 1


@pytest.mark.parametrize("where", ["tool", "rollout"])
def test_a_child_of_the_users_code_does_not_return_into_the_loop(tokenizer, where):
    me = os.getpid()
    if where == "tool":
        converse(calls_of(tokenizer, fork), [[call("fork") + END, "So." + END]])
    else:
        engine = TurnsEngine(None, lambda *_: fork(), tokenizer, 9, SOLO.gather)
        engine.sample([], 1, SamplingParams(max_tokens=9), 0)
    if os.getpid() != me:
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9


@pytest.mark.parametrize(
    ("end", "status"),
    [(lambda: None, 0), (lambda: sys.exit(0), 0), (lambda: sys.exit(3), 3), (lambda: 1 / 0, 1)],
)
def test_a_child_ends_with_the_status_of_a_program(end, status):
    """A reward function may fork to try a program."""

    def tried(completions, **kwargs):
        if not (child := os.fork()):
            return end()
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

    assert rewards.call(tried, {"completions": [""]}, {})[0] == [status]


def test_a_time_limit_leaves_no_timer_and_the_handler_that_it_found():
    handler = signal.getsignal(signal.SIGALRM)
    assert limited(lambda: 7, 60.0) == 7
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        limited(lambda: time.sleep(600), 0.05)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is handler


# --- what the model reads ---


def say_much() -> str:
    """Say much."""
    return "x" * 10**6


SPECIAL = f"a{END}<|im_start|>b"


def special() -> str:
    """Return special tokens."""
    return SPECIAL


def test_an_answer_that_cannot_fit_is_not_encoded(tokenizer, monkeypatch):
    tools = calls_of(tokenizer, say_much)
    assert tools.longest == len("</tool_response>")
    monkeypatch.setattr(tools, "_between", lambda _: pytest.fail("it is encoded"))
    (s,) = converse(tools, [[call("say_much") + END]])
    assert (s.stopped, len(s.conversation.messages)) == (False, 1)


def test_special_tokens_in_an_answer_do_not_end_a_turn(tokenizer):
    calls = call("special") + call("say", text="x")
    (s,) = converse(calls_of(tokenizer, special, say), [[calls + END, "So." + END]])
    answers = s.conversation.messages[1:3]
    assert [m["content"] for m in answers] == [SPECIAL, "x"]
    # the text is as the template writes it, but only the template's own tokens are special
    written = tokenizer.decode(s.token_ids, skip_special_tokens=False)
    question = [*s.prompt.text, {"role": "assistant", "content": calls}]
    assert written in tokenizer.render([*question, *answers]) + "So." + END
    (end,) = tokenizer.encode(END)
    assert s.token_ids.count(end) == 3


def test_half_a_surrogate_pair_in_an_argument_does_not_stop_the_run(tokenizer):
    text = '<tool_call>{"name": "say", "arguments": {"text": "\\ud800"}}</tool_call>'
    (s,) = converse(calls_of(tokenizer, say), [[text + END, "So." + END]])
    assert s.conversation.messages[1]["content"] == "?"


def test_the_model_starts_inside_a_thought_if_the_template_opens_it(tmp_path):
    template = TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    tools = calls_of(write_chat_tokenizer(tmp_path, template), add)
    turns = ["I add.</think>" + call("add", a=1) + END, f"{call('add', a=2)} </think>So." + END]
    (s,) = converse(tools, [turns])
    first, _, last = s.conversation.messages
    assert first["reasoning_content"] == "I add."
    assert last == {"role": "assistant", "content": "So.", "reasoning_content": call("add", a=2)}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # neither tools nor calls
        TEMPLATE.replace("tool | tojson", "'?'"),  # no tools
        TEMPLATE.replace("'arguments'", "'parameters'").replace('"arguments"', '"parameters"'),
        TEMPLATE.replace("<|im_end|>", ""),  # turns have no end
    ],
)
def test_a_template_without_tool_calls_is_an_error(tmp_path, template):
    tokenizer = write_chat_tokenizer(tmp_path, template)
    with refused("--tools: the model's chat template does not support"):
        calls_of(tokenizer, add)


def undescribed(a: int):
    """Do it."""


def starred(*a: int):
    """Do it.

    Args:
        a: A.
    """


def deep(a: str):
    """Do it."""


deep.__doc__ = f"Do it.\n\nArgs:\n    a: A. (choices: {'[' * 100_000})"


def test_tools_that_cannot_be_described_are_errors(tokenizer):
    for function in (starred, deep):
        with refused(r"cannot be described to the model \("):
            calls_of(tokenizer, function)
    with refused(r"no description for the argument 'a'.*: give it type"):
        calls_of(tokenizer, undescribed)
    with refused("two tools have the name add: rename one"):
        calls_of(tokenizer, add, add)


def test_built_in_rewards_judge_the_last_message_with_its_thought(tokenizer):
    turns = [call("add", a=1) + END, "<think>.</think><answer>1</answer>" + END]
    (s,) = converse(calls_of(tokenizer, add), [turns])
    assert format_reward([s.conversation.messages]) == [1.0]
    assert accuracy_reward([s.conversation.messages], answer=["1"]) == [1.0]


# --- environments ---


class Counter:
    """Counts up to the column `goal`, and starts with a greeting."""

    def reset(self, goal: int = 0, greeting: str | None = None, **row):
        self.total, self.goal, self.row = 0, goal, row
        return greeting

    def step(self, by: int) -> int:
        """Count.

        Args:
            by: How far.
        """
        self.total += by
        return self.total

    def get_reward(self) -> float:
        return float(self.total == self.goal)

    def _hidden(self): ...


class Broken(Counter):
    def get_reward(self) -> float:
        raise ValueError("\x1b]0;x")


class Later(Counter):
    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


STEPS = [
    [f"{i} {call('step', by=i)}{END}", f"{i} {call('step', by=i)}{END}", f"{i}.{END}"]
    for i in range(3)
]


def test_each_sample_has_an_environment_of_its_own_that_is_reset(tokenizer):
    tools = calls_of(tokenizer, add, environment=Counter)
    assert tools.names == ["add", "step"]
    made = []
    for _ in range(2):
        samples = converse(tools, STEPS, columns=[{"goal": 2}, {"goal": 4}])
        used = [s.arguments["environments"] for s in samples]
        assert [e.total for e in used] == [0, 2, 4] * 2
        assert [e.goal for e in used] == [2] * 3 + [4] * 3
        assert used[0].row == {"prompt": [{"role": "user", "content": "6 times 7?"}]}
        made.append([*map(id, used)])
    assert made[0] == made[1]  # as in TRL, they are made once
    assert len(set(made[0])) == 6


class ByTurn(Counter):
    async def get_reward(self) -> list[float]:
        return [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("kind", "rewards"), [(Counter, [0, 1, 0]), (Later, [0.5] * 3), (ByTurn, [0.6] * 3)]
)
def test_an_environment_rewards_its_completions(tokenizer, kind, rewards):
    cfg = Config(
        reward_funcs=("environment",),
        environment_factory="given",
        chat_template_kwargs={"tools": ["a"]},
    )
    feature = Tools(cfg, (), kind)
    columns = [{"goal": 2, "rewards": 7}]  # any name but those of the arguments
    samples = converse(calls_of(tokenizer, environment=kind), STEPS, columns=columns)
    for name in ("turns", "environments"):
        with refused(f"get their own `{name}`: rename the column"):
            feature.encode(Prompt(0, "", [], {name: 1}), {})
    for name in ("documents", "tools"):
        with refused(f"its columns or --chat-template-kwargs set {name}: remove them"):
            feature.encode(Prompt(0, "", []), {name: ["a"]})
    function, turns = feature.reward("environment"), [s.arguments["turns"] for s in samples]
    Scorer(Config(), SOLO.device, given=[function]).score(samples)
    assert [s.reward for s in samples] == pytest.approx(rewards)
    assert all(
        s.token_ids[end - 1] == s.token_ids[-1] for s, t in zip(samples, turns) for _, end in t
    )
    for s, own in zip(samples, turns) if kind is ByTurn else ():
        ends = {end - 1: r for (_, end), r in zip(own, [0.1, 0.2, 0.3])}
        assert s.token_rewards[kind.__name__] == [ends.get(i) for i in range(len(s.token_ids))]
    assert function.__name__ == kind.__name__
    assert feature.reward("accuracy") is None


def test_an_exception_of_get_reward_names_its_line_without_control_characters():
    function, shared = Environments(Broken).reward(), {"environments": [Broken()], "turns": [[]]}
    with refused(r"raised ValueError: \ufffd\]0;x \(at test_tools.py:"):
        rewards.call(function, {"completions": [""], "completion_ids": [[]]}, shared)


def test_an_observation_becomes_part_of_the_prompt(tokenizer):
    tools = calls_of(tokenizer, environment=Counter)
    columns = [{"goal": 1, "greeting": " Count!"}, {"goal": 2}]
    first, _, _, other, _, _ = samples = converse(tools, STEPS, columns=columns)
    assert samples[2].prompt is first.prompt  # which a group computes once
    assert (first.prompt.id, other.prompt.id) == (0, 1)
    assert first.prompt.text == [{"role": "user", "content": "6 times 7? Count!"}]
    text = tokenizer.decode(first.prompt.token_ids, skip_special_tokens=False)
    assert text.endswith("6 times 7? Count!<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "step"' in text
    assert other.prompt.text[0]["content"] == "6 times 7?"
    tools.max_prompt_length = len(first.prompt.token_ids) - 1
    with refused(r"prompt 0 has \d+ tokens, but the limit is"):
        converse(tools, STEPS, columns=columns)


class Different(Counter):
    made = 0

    def reset(self, **row):
        self.total = 0
        Different.made += 1
        return [" x", None, " y", " x"][Different.made % 4]


def test_different_observations_in_a_group_are_different_prompts(tokenizer):
    samples = converse(calls_of(tokenizer, environment=Different), [*STEPS, STEPS[0]])
    ends = [s.prompt.text[0]["content"][-1] for s in samples]
    assert sorted(ends) == ["?", "x", "x", "y"]
    ids = {end: {s.prompt.id for s, e in zip(samples, ends) if e == end} for end in ends}
    assert all(len(each) == 1 for each in ids.values())
    assert len(set.union(*ids.values())) == 3  # so no tokens are shared


def failing_environment():
    raise OSError("no port")


class Bare:
    def reset(self, **row): ...


class Wrong(Counter):
    def reset(self, **row):
        return 5


class Strict(Counter):
    def reset(self): ...


class Stuck(Counter):
    def reset(self, **row):
        time.sleep(10)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (lambda: 5, "int needs a method `reset(self, **row)`, which is called before each"),
        (failing_environment, "--environment-factory: the class raised OSError: no port; fix it"),
        (Bare, "Bare needs a method `reset(self, **row)`, which is called before each completion"),
        (Wrong, "Wrong.reset (prompt 0) returned a int: return a string"),
        (Strict, "Strict.reset (prompt 0) raised TypeError: Strict.reset() got an unexpected"),
        (Stuck, "Stuck.reset (prompt 0) raised TimeoutError: no answer within 0.1 s"),
    ],
)
def test_an_environment_with_a_mistake_is_an_error(tokenizer, environment, sentence):
    seconds = 0.1 if environment is Stuck else 60.0
    with refused(re.escape(sentence)):
        converse(calls_of(tokenizer, environment=environment, timeout=seconds), STEPS)


# --- in a run ---


def test_metrics_are_those_of_trl(tokenizer):
    """The calls per completion, and the fraction of the calls that failed."""
    feature = Tools(Config(tools=("given",)), [add])
    feature.model(None, SimpleNamespace(tokenizer=tokenizer))
    conversations = [
        ["No." + END],
        [f"{call('add', a=1)}\n{call('no')}{END}", "So." + END],
        [call("add") + END, "1 " + call("add", a=3) + END, "So so." + END],
    ]
    samples = converse(feature.calls, conversations)
    assert feature.metrics(SimpleNamespace(world=SOLO), samples) == {
        "tools/call_frequency": 4 / 3,
        "tools/failure_frequency": 2 / 4,
    }


def test_a_time_limit_needs_the_main_thread():
    found = []

    def work():
        try:
            Tools(Config(tools=("given",)), [add])
        except UserError as e:
            found.append(str(e))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [
        "--tool-timeout 30 needs a signal, which only the main thread receives: train in the "
        "main thread, or use --tool-timeout 0."
    ]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The folder of examples/tools.py, with a base that has learned for a shorter time."""
    folder = tmp_path_factory.mktemp("example")
    plugin.load(f"{EXAMPLE}:make_base", "")(folder / "base", steps=100)
    plugin.load(f"{EXAMPLE}:write_data", "")(folder)
    return folder


def test_the_example_learns_to_call_its_tool(example, tmp_path):
    options = f"--model {example}/base --data {example}/train.jsonl --output-dir {tmp_path}"
    options += f" --reward-funcs accuracy --tools {EXAMPLE}:multiply --max-completion-length 32"
    options += " --max-steps 8 --learning-rate 5e-4 --device cpu --log-completions --eval-steps 8"
    options += f" --eval-data {example}/test.jsonl --eval-samples 32"
    assert train.main(options.split()) == 0
    first, last = (row for row in lines(tmp_path) if "eval/reward" in row)
    assert first["eval/reward"] < 0.5 < 0.9 < last["eval/reward"]
    assert last["eval/tools/call_frequency"] >= 0.9 > first["eval/tools/call_frequency"]
    rows = steps(tmp_path)
    assert rows[-1]["tools/call_frequency"] > 1.5 * rows[0]["tools/call_frequency"] > 0
    # of the model's tokens, given what it has read
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    file = tmp_path / "completions" / "completions_00008.jsonl"
    texts = [row["completion"] for row in read_rows(file)]
    assert any("</tool_call>" in text and text.endswith("</answer>") for text in texts)


def test_an_environment_is_given_from_python(example, tmp_path):
    """A class that no file could name."""

    class Local(plugin.load(f"{EXAMPLE}:Calculator", "")):
        pass

    cfg = Config(
        model=str(example / "base"),
        data=(str(example / "train.jsonl"),),
        output_dir=str(tmp_path),
        max_completion_length=32,
        generation_batch_size=16,
        max_steps=1,
        device="cpu",
    )
    (row,) = nanogrpo.train(cfg, reward_funcs="environment", environment_factory=Local)
    assert row["rewards/Local/mean"] == row["reward"]
    assert row["tools/call_frequency"] > 0
    assert lines(tmp_path)[0]["run"]["environment_factory"] == "Local"
