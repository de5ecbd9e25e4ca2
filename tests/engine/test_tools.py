"""Tool calls: what a model may write, what it reads, and what reward functions receive. Most of it
is compared with TRL in test_trl_tools.py.

Read next: nanogrpo/engine/tools.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import re
import signal
import threading
import time
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

import nanogrpo
import train
from nanogrpo.data.prompts import from_record
from nanogrpo.engine import schema
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.tools import Tools, limited, parse
from nanogrpo.engine.turns import TurnsEngine
from nanogrpo.errors import UserError
from nanogrpo.logs import metrics
from nanogrpo.model.checkpoint import load_model
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards import plugin
from nanogrpo.rewards.runner import Runner
from tests.conftest import SOLO, arguments, lines, steps
from tests.engine.chat import TEMPLATE, Rendezvous, call, converse, write_chat_tokenizer

EXAMPLE = Path(train.__file__).parent / "examples" / "tools.py"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_chat_tokenizer(tmp_path_factory.mktemp("chat"))


# --- schemas ---


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def nothing():
    "Nothing."


def everything(
    a: int,
    b: float = 1.0,
    *,
    c: str | None = None,
    d: list[int],
    e: dict[str, int],
    f: tuple[int, str],
    g: Literal["x", "y"] = "x",
    h: int | str,
    i: list[int] | int,
    j: Any = None,
    k: bool = False,
    l: list[str] | None = None,
    m: Colour = Colour.RED,
    n: list = (),
    o: dict | None = None,
    p: Literal[1, "a", None] = 1,
) -> dict[str, list[int]]:
    """
    Do a thing
    over two lines.

    Another paragraph: with a colon.

    Args:
        a: First
            and more: on
            the next lines.
        b:
          On the next line.
        c: One of two (choices: ["tea", "coffee"])
        d: D.

        e: E
        f: F (not choices)
        g: G
        h: H
        i: I
        j: J
        k: K
        l: L
        m: M
        n: N
        o: O
        p: P

    Returns:
        A dictionary
            of lists.

    Raises:
        ValueError: never
    """


def bare(a: typing.List, b: typing.Dict, c: typing.Tuple):  # noqa: UP006
    """Take types without arguments.

    Args:
        a: A.
        b: B.
        c: C.
    """


class Env:
    def step(self, move: str) -> object:
        """Make a move.

        Args:
            move: The move.

        Returns:
            The result.
        """


@pytest.mark.parametrize("function", [nothing, everything, bare, Env().step])
def test_the_schema_of_a_function_is_that_of_transformers(function):
    # compared as text, because templates print it in this order
    ours = json.dumps(schema.of_function(function, "--tools"))
    assert ours == json.dumps(get_json_schema(function))


def undocumented(a: int): ...
def untyped(a):
    """Do it.

    Args:
        a: A.
    """


def undescribed(a: int):
    """Do it."""


def unsupported(a: set[int]):
    """Do it.

    Args:
        a: A.
    """


def misnamed(a: Missing):  # noqa: F821
    """Do it.

    Args:
        a: A.
    """


def unchosen(a: str):
    """Do it.

    Args:
        a: A (choices: tea, coffee)
    """


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (undocumented, "the tool undocumented has no docstring: add one"),
        (untyped, "the tool untyped has no type hint for a: add one"),
        (undescribed, "the tool undescribed does not describe a: add `a: …` under `Args:`"),
        (unsupported, "the tool unsupported has the hint set[int] for a, which JSON cannot"),
        (misnamed, "a type hint of the tool misnamed cannot be read (name 'Missing' is not"),
        (unchosen, 'the tool unchosen has choices for a that are not JSON: write ["a", "b"]'),
        (json.JSONDecoder(), "has no name: give a function made with def"),
        (Colour, "Colour is a class: give a function, or the class with --environment-factory"),
    ],
)
def test_a_function_without_a_schema_is_an_error(function, sentence):
    with pytest.raises(UserError) as error:
        schema.of_function(function, "--tools")
    assert sentence in str(error.value)
    assert str(error.value).startswith("--tools: ")


# --- the model's text ---


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add"}', "</tool_call> is missing"),
        ("<tool_call>[1, 2]</tool_call>", "must have the form"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "must have the form"),
        ('<tool_call>{"arguments": {}}</tool_call>', "must have the form"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
        (f'<tool_call>{{"name": "add", "arguments": {"9" * 5000}}}</tool_call>', "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_as_text_and_explained(text, problem):
    message, calls = parse(f"I call: {text}")
    assert [problem in c.error for c in calls] == [True]
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


def interrupt() -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


async def interrupt_later() -> None:
    """Raise what Ctrl-C raises, on the event loop."""
    raise KeyboardInterrupt


class Unprintable:
    def __str__(self):
        raise KeyError("no text")


def unprintable() -> str:
    """Return an object."""
    return Unprintable()


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


ERRORS = {
    "unknown name": (call("no_such"), "Tool no_such not found."),
    "unknown argument": (call("add", c=1), "unexpected keyword argument 'c'"),
    "missing argument": (call("add"), "missing 1 required positional argument: 'a'"),
    "no object": ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a mapping"),
    "private": (call("__init__"), "Tool __init__ not found."),
    "malformed": ("<tool_call>{</tool_call>", "The tool call is not valid JSON"),
    "not closed": ('<tool_call>{"name": "leave"}', "</tool_call> is missing."),
    "exit": (call("leave"), "0"),
    "no text": (call("unprintable"), "no text"),
    "interrupt": (call("interrupt"), "KeyboardInterrupt"),
    "async interrupt": (call("interrupt_later"), "KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_call_that_fails_is_answered_with_the_error(tokenizer, name):
    text, problem = ERRORS[name]
    tools = Tools(tokenizer, [add, leave, unprintable, interrupt, interrupt_later])
    (s,) = converse(tools, [[text + END, "Sorry." + END]])
    *_, answer, last = s.conversation.messages
    assert answer["role"] == "tool"
    assert answer["content"].startswith("{'error': ")
    assert problem in answer["content"]
    assert last == {"role": "assistant", "content": "Sorry."}
    assert (s.conversation.calls, s.conversation.failures, s.stopped) == (1, 1, True)


def test_answers_have_the_order_of_the_calls(tokenizer):
    calls = [call("wait", seconds=0.02), call("add", a="7", b="x"), call("wait", seconds="0")]
    tools = Tools(tokenizer, [add, wait])
    (s,) = converse(tools, [["\n".join(calls) + END, "So." + END]])
    # "7" is converted, because `a` is a number, and "x" is not one
    assert [m["content"] for m in s.conversation.messages[1:4]] == [
        "waited 0.02",
        "7+'x'",
        "waited 0",
    ]


def test_async_calls_of_all_samples_wait_together(tokenizer):
    arrived = []

    async def meet() -> str:
        """Wait for the others."""
        arrived.append(None)
        while len(arrived) < 20:
            await asyncio.sleep(0.01)
        return "met"

    conversations = [[f"{i} {call('meet')}{END}", "So." + END] for i in range(20)]
    samples = converse(Tools(tokenizer, [meet], timeout=60.0), conversations)
    assert [s.conversation.messages[1]["content"] for s in samples] == ["met"] * 20


def test_a_call_that_takes_too_long_is_ended(tokenizer):
    """In pure Python, in a coroutine that waits, and in one that blocks the event loop."""
    turns = [call("spin"), call("wait", seconds=600), call("block")]
    tools = Tools(tokenizer, [spin, wait, block], timeout=0.2)
    (s,) = converse(tools, [[f"{turn}{END}" for turn in turns] + ["So." + END]])
    answers = [m["content"] for m in s.conversation.messages[1::2]]
    assert answers == ["{'error': 'no answer within 0.2 s'}"] * 3
    assert (s.conversation.calls, s.conversation.failures) == (3, 3)
    tools.timeout = 60.0
    (s,) = converse(tools, [[call("wait", seconds=0) + END, "So." + END]])
    assert s.conversation.messages[1]["content"] == "waited 0"


def test_a_time_limit_leaves_the_timer_and_the_handler_that_it_found(request):
    handler, others = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    request.addfinalizer(lambda: signal.setitimer(signal.ITIMER_REAL, *others))
    assert limited(lambda: 7, 60.0) == 7
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        limited(lambda: time.sleep(600), 0.05)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 500.0, 3.0)
    assert limited(lambda: 7, 60.0) == 7
    left, every = signal.getitimer(signal.ITIMER_REAL)
    assert 400.0 < left <= 500.0
    assert every == 3.0
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_tool_that_catches_every_exception_ends_the_run(monkeypatch, capfd):
    left: list[int] = []
    monkeypatch.setattr("nanogrpo.timelimit.TRIES", 2)
    monkeypatch.setattr("nanogrpo.timelimit.PAUSE", 0.02)
    monkeypatch.setattr("nanogrpo.distributed.failure.leave", left.append)

    def stubborn():
        while not left:
            try:
                while not left:
                    pass
            except BaseException:
                pass

    with contextlib.suppress(TimeoutError):
        limited(stubborn, 0.02)
    assert left == [2]
    place = r"it is at test_tools\.py:\d+"
    message = (
        rf"error: --tool-timeout 0\.02: a tool does not end \({place}\), because it catches every "
        r"exception: replace its `except:` by `except Exception:`\.\n"
    )
    assert re.fullmatch(message, capfd.readouterr().err)


def test_a_time_limit_needs_the_main_thread(tokenizer):
    found = []

    def work(*tools):
        try:
            Tools(tokenizer, *tools, timeout=1.0)
        except UserError as e:
            found.append(str(e))

    for tools in ([[add]], [[], Counter]):
        thread = threading.Thread(target=work, args=tools)
        thread.start()
        thread.join()
    assert len(found) == 2
    assert all("--tool-timeout 1 needs a signal" in message for message in found)


# --- what the model reads ---


SPECIAL = f"a{END}<|im_start|>b"


def special() -> str:
    """Return special tokens."""
    return SPECIAL


def test_special_tokens_in_an_answer_do_not_end_a_turn(tokenizer):
    calls = call("special") + call("say", text="x")
    (s,) = converse(Tools(tokenizer, [special, say]), [[calls + END, "So." + END]])
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
    (s,) = converse(Tools(tokenizer, [say]), [[text + END, "So." + END]])
    assert s.conversation.messages[1]["content"] == "?"


def test_an_answer_that_does_not_fit_is_left_out_and_the_completion_counts_as_truncated(tokenizer):
    turns = [call("say", text="x" * 40) + END, "So." + END]
    tools = Tools(tokenizer, [say])
    (whole,) = converse(tools, [turns])
    room = next(i for i in range(len(whole.token_ids)) if not whole.is_model_token[i])
    room += whole.is_model_token[room:].index(True)  # where the answer ends
    for limit in (room - 1, room):
        (s,) = converse(tools, [turns], max_tokens=limit)
        assert (s.stopped, len(s.conversation.messages), all(s.is_model_token)) == (False, 1, True)
    (s,) = converse(tools, [turns], max_tokens=room + 1)
    assert (s.stopped, len(s.conversation.messages)) == (False, 3)


def test_the_model_starts_inside_a_thought_if_the_template_opens_it(tmp_path):
    template = TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    tools = Tools(write_chat_tokenizer(tmp_path, template), [add])
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
        TEMPLATE.replace("{%- if m.role == 'tool' %}", "{%- if m.role == 'tool' %}{{ 1/0 }}"),
    ],
)
def test_a_template_without_tool_calls_is_an_error(tmp_path, template):
    tokenizer = write_chat_tokenizer(tmp_path, template)
    with pytest.raises(UserError, match="--tools: the model's chat template cannot show tools"):
        Tools(tokenizer, [add])


def test_two_tools_of_one_name_are_an_error(tokenizer):
    with pytest.raises(UserError, match="two tools have the name add: rename one"):
        Tools(tokenizer, [add, add])


# --- environments ---


ENVIRONMENTS = Path(__file__).with_name("environments.py")
Counter = plugin.load(f"{ENVIRONMENTS}:Counter", "")
STEPS = [
    [f"{i} {call('step', by=i)}{END}", f"{i} {call('step', by=i)}{END}", f"{i}.{END}"]
    for i in range(3)
]


def test_each_sample_has_an_environment_of_its_own_that_is_reset(tokenizer):
    tools = Tools(tokenizer, [add], Counter)
    assert tools.names == ["add", "step"]
    made = []
    for _ in range(2):
        samples = converse(tools, STEPS, columns=[{"goal": 2}, {"goal": 4}])
        used = [s.conversation.environment for s in samples]
        assert [e.total for e in used] == [0, 2, 4] * 2
        assert [e.goal for e in used] == [2] * 3 + [4] * 3
        assert used[0].row == {"prompt": [{"role": "user", "content": "6 times 7?"}]}
        made.append([*map(id, used)])
    assert made[0] == made[1]  # as in TRL, they are made once
    assert len(set(made[0])) == 6


def rewards_of(samples, specs, **options):
    runner = Runner(specs, environment=f"{ENVIRONMENTS}:Counter", **options)
    runner.score(samples)
    assert all(s.conversation.environment is None for s in samples)
    return [s.rewards for s in samples]


def test_rewards_receive_messages_and_environments(tokenizer):
    tools = Tools(tokenizer, environment=Counter)
    for timeout in (0.0, 60.0):  # in this process, and in the process of the reward functions
        samples = converse(tools, STEPS, columns=[{"goal": 2}])
        specs = [f"{ENVIRONMENTS}:messages_and_state", tools.reward()]
        assert rewards_of(samples, specs, timeout=timeout) == [
            {"messages_and_state": total / 10, "Counter": float(total == 2)} for total in (0, 2, 4)
        ]


def test_built_in_rewards_judge_the_last_message_with_its_thought(tokenizer):
    turns = [
        "<think>?</think>" + call("add", a=1) + END,
        "<think>.</think><answer>1</answer>" + END,
    ]
    samples = converse(Tools(tokenizer, [add]), [turns], columns=[{"answer": "1"}])
    Runner(["accuracy", "format"]).score(samples)
    assert samples[0].rewards == {"accuracy_reward": 1.0, "format_reward": 1.0}


def test_an_environment_that_cannot_be_copied_needs_rewards_in_this_process(tokenizer):
    tools = Tools(tokenizer, environment=plugin.load(f"{ENVIRONMENTS}:Locked", ""))
    specs = [f"{ENVIRONMENTS}:messages_and_state", tools.reward()]
    samples = converse(tools, STEPS, columns=[{"goal": 2}])
    with pytest.raises(UserError, match="cannot be copied to the process of the reward functions"):
        rewards_of(samples, specs, timeout=60.0)
    samples = converse(tools, STEPS, columns=[{"goal": 2}])
    assert [r["Locked"] for r in rewards_of(samples, specs, timeout=0.0)] == [0.5] * 3


def test_an_observation_becomes_part_of_the_prompt(tokenizer):
    tools = Tools(tokenizer, environment=Counter)
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
    with pytest.raises(UserError, match=r"prompt 0 has \d+ tokens, but the limit is"):
        converse(tools, STEPS, columns=columns)


class Different(Counter):
    made = 0

    def reset(self, **row):
        self.total = 0
        Different.made += 1
        return [" x", None, " y", " x"][Different.made % 4]


def test_different_observations_in_a_group_are_different_prompts(tokenizer):
    samples = converse(Tools(tokenizer, environment=Different), [*STEPS, STEPS[0]])
    ends = [s.prompt.text[0]["content"][-1] for s in samples]
    assert sorted(ends) == ["?", "x", "x", "y"]
    ids = {end: {s.prompt.id for s, e in zip(samples, ends) if e == end} for end in ends}
    assert all(len(each) == 1 for each in ids.values())
    assert len(set.union(*ids.values())) == 3  # so no tokens are shared


def no_environment():
    return 5


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
        (no_environment, "int has no method reset: add `def reset(self, **row)`"),
        (failing_environment, "--environment-factory raised OSError: no port; fix the class"),
        (Bare, "Bare has no public method besides reset and get_reward: add one, such as step"),
        (Wrong, "Wrong.reset returned a int: return a text"),
        (Strict, "Strict.reset raised TypeError: Strict.reset() got an unexpected keyword"),
        (Stuck, "Stuck.reset raised TimeoutError: no answer within 0.1 s (prompt 0)"),
    ],
)
def test_an_environment_with_a_mistake_is_an_error(tokenizer, environment, sentence):
    seconds = 0.1 if environment is Stuck else 60.0
    with pytest.raises(UserError) as error:
        converse(Tools(tokenizer, environment=environment, timeout=seconds), STEPS)
    assert sentence in str(error.value)


def test_metrics_are_those_of_trl(tokenizer):
    """The calls per completion, and the fraction of the calls that failed."""
    conversations = [
        ["No." + END],
        [f"{call('add', a=1)}\n{call('no')}{END}", "So." + END],
        [call("add") + END, "1 " + call("add", a=3) + END, "So so." + END],
    ]
    samples = converse(Tools(tokenizer, [add]), conversations)
    facts = metrics.facts(samples, SOLO)
    row = metrics.of_evaluation(facts, 1)
    assert row["eval/tools/call_frequency"] == 4 / 3
    assert row["eval/tools/failure_frequency"] == 2 / 4
    # of the model's tokens only
    written = sum(len(tokenizer.encode(turn)) for turns in conversations for turn in turns)
    assert sum(f.length for f in facts) == written


# --- runs ---


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The folder of examples/tools.py, with a base that has learned for a shorter time."""
    folder = tmp_path_factory.mktemp("example")
    module = plugin.load(f"{EXAMPLE}:make_base", "")
    module(folder / "base", steps=100)
    plugin.load(f"{EXAMPLE}:write_data", "")(folder)
    return folder


def options(example, output, *more: str) -> list[str]:
    return [
        *("--model", str(example / "base"), "--data", str(example / "train.jsonl")),
        *("--max-completion-length", "32", "--device", "cpu", "--output-dir", str(output), *more),
    ]


def test_the_example_learns_to_call_its_tool(example, tmp_path):
    more = ["--reward-funcs", "accuracy", "--tools", f"{EXAMPLE}:multiply", "--max-steps", "8"]
    more += ["--learning-rate", "5e-4", "--log-completions", "--eval-steps", "8"]
    more += ["--eval-data", str(example / "test.jsonl"), "--eval-samples", "32"]
    assert train.main(options(example, tmp_path, *more)) == 0
    first, last = (row for row in lines(tmp_path) if "eval/reward" in row)
    assert first["eval/reward"] < 0.5 < 0.9 < last["eval/reward"]
    assert last["eval/tools/call_frequency"] >= 0.9 > first["eval/tools/call_frequency"]
    rows = steps(tmp_path)
    assert rows[-1]["tools/call_frequency"] > 1.5 * rows[0]["tools/call_frequency"] > 0
    # of the model's tokens, given what it has read
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    file = tmp_path / "completions" / "completions_00008.jsonl"
    texts = [json.loads(line)["completion"] for line in file.read_text().splitlines()]
    assert any("</tool_call>" in text and text.endswith("</answer>") for text in texts)


def test_a_resumed_run_with_an_environment_repeats_the_interrupted_one(example, tmp_path):
    """With dynamic sampling: the environments are reset for the replaced groups, too."""
    more = ["--environment-factory", f"{EXAMPLE}:Calculator", "--reward-funcs", "environment"]
    more += ["--generation-batch-size", "32", "--max-resample-times", "1", "--save-steps", "2"]
    assert train.main(options(example, tmp_path / "whole", *more, "--max-steps", "4")) == 0
    assert train.main(options(example, tmp_path / "part", *more, "--max-steps", "2")) == 0
    more += ["--resume", "--max-steps", "4"]
    assert train.main(options(example, tmp_path / "part", *more)) == 0
    whole, part = steps(tmp_path / "whole"), steps(tmp_path / "part")
    assert whole == part
    assert all(row["rewards/Calculator/mean"] == row["reward"] for row in whole)
    assert all(row["tools/call_frequency"] > 0 for row in whole)


def test_an_environment_is_given_from_python(example, tmp_path):
    """A class that no file could name."""

    class Local(plugin.load(f"{EXAMPLE}:Calculator", "")):
        pass

    cfg = nanogrpo.Config(
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


def test_ranks_that_call_different_tools_end_together(example):
    """Two ranks, here threads, sample what a single process samples."""
    model, tokenizer = load_model(example / "base"), Tokenizer(example / "base")
    multiply = plugin.load(f"{EXAMPLE}:multiply", "")
    records = [json.loads(line) for line in (example / "train.jsonl").read_text().splitlines()]
    params = SamplingParams(max_tokens=32, stop_token_ids=tokenizer.stop_token_ids)
    tools = Tools(tokenizer, [multiply])
    prompts = [
        from_record(record, tokenizer, i, tools=tools.schemas)
        for i, record in enumerate(records[:4])
    ]

    def engine(gather):
        local = LocalEngine(model.cfg, max_len=64, device="cpu")
        local.load(model, 0)
        own = Tools(Tokenizer(example / "base"), [multiply])
        return TurnsEngine(local, own, own.tokenizer, own.tokenizer.vocab_size, gather)

    meeting, found = Rendezvous(2), [[], []]

    def work(rank):
        part = prompts[2 * rank : 2 * rank + 2]
        found[rank] = engine(meeting.of(rank)).sample(part, 4, params, step=3)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = engine(SOLO.gather).sample(prompts, 4, params, step=3)
    assert [s.token_ids for s in alone] == [s.token_ids for s in found[0] + found[1]]
    assert 0 < sum(s.conversation.calls for s in alone) < 16


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--tools nowhere", "--tools: 'nowhere' is neither package.module:name nor path/file.py"),
        ("--tools {example}:no", "has no function 'no'"),
        ("--tools json:loads --rollout a:b", "--rollout cannot be used with --tools, because"),
        ("--environment-factory a:b --rollout a:b", "--rollout cannot be used with --environment-"),
        (
            "--tools a:b --engine vllm --max-staleness 1",
            "--tools cannot be used with --max-staleness, because its turns are sampled with the",
        ),
        ("--tool-timeout 3", "--tool-timeout is 3.0, which has no effect without --tools or"),
        (
            "--max-tool-calling-iterations 3",
            "--max-tool-calling-iterations is 3, which has no effect without --tools or",
        ),
        ("--tools {example}:multiply", "--tools: the model's chat template cannot show tools"),
        ("--environment-factory {example}:Calculator", "--environment-factory: the model's chat"),
    ],
)
def test_options_that_cannot_work_are_errors(tiny_base, files, tmp_path, capsys, more, sentence):
    argv = arguments(tiny_base, files, tmp_path, *more.format(example=EXAMPLE).split())
    assert train.main(argv) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--environment-factory {example}:Calculator --reward-funcs accuracy",
            "Calculator has a method get_reward, but --reward-funcs does not name environment",
        ),
        (
            "--tools {example}:multiply --reward-funcs environment",
            "--reward-funcs environment calls get_reward of --environment-factory, which is not",
        ),
    ],
)
def test_the_reward_of_an_environment_is_named(example, tmp_path, capsys, more, sentence):
    assert train.main(options(example, tmp_path, *more.format(example=EXAMPLE).split())) == 2
    assert sentence in capsys.readouterr().err
