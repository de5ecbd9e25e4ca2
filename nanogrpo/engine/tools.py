"""Tool calls: the model calls Python functions in the middle of a completion and reads the results.

    def multiply(a: int, b: int) -> int: …                         # --tools file.py:multiply

    model   <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><|im_end|>
    tool    <|im_start|>user <tool_response>42</tool_response><|im_end|><|im_start|>assistant
    model   The product is 42.<|im_end|>

In: samples without tokens. Out: the same samples with all turns (turns.py), and the conversation as
messages for the reward functions (`Sample.conversation`). Only the model's tokens are trained on,
and they are never decoded and encoded again: the text between two turns is encoded on its own, as
the model's chat template writes it.

With --environment-factory, each sample has its own object, whose public methods are tools, such as
`step`. It is reset before the first turn, and reward functions receive it.

If a call fails (malformed JSON, an unknown name, wrong arguments, an exception, --tool-timeout),
the error is the tool's answer, from which the model can learn. Read before: turns.py. Read next:
schema.py (how the model learns which tools there are).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import inspect
import itertools
import json
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from nanogrpo import timelimit
from nanogrpo.distributed import failure
from nanogrpo.engine import schema
from nanogrpo.engine.base import stream
from nanogrpo.engine.turns import Turns
from nanogrpo.errors import UserError, text_of
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.call import start_loop
from nanogrpo.types import Conversation, Prompt, Sample

BLOCK = re.compile(r"<think>(.*?)(?:</think>|\Z)|<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# Words that occur in no template: they mark places in a text that a template has rendered.
QUESTION, ARGUMENT, ANSWER = "Qquestion7x", "Qargument7x", "Qanswer7x"


class Call(NamedTuple):
    """A tool call that the model wrote."""

    name: str
    arguments: Any
    error: str = ""  # why it cannot be made


class Answer(NamedTuple):
    """What a tool answered."""

    content: str
    failed: bool = False


class Tools:
    """A rollout function (turns.py) that lets the model call tools, as TRL's `tools` and
    `environment_factory` do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        functions: Sequence[Callable] = (),
        environment: Callable[[], Any] | None = None,  # makes the environment of one sample
        *,
        max_iterations: int = 0,  # how often a completion may continue after tool calls; 0: always
        timeout: float = 0.0,  # seconds for one call; 0: no limit
        template: dict | None = None,  # further variables of the chat template
    ):
        """Describe the tools. Raises UserError if that is impossible, or if the chat template
        cannot render tool calls.
        """
        self.tokenizer, self.functions, self.environment = tokenizer, list(functions), environment
        self.max_iterations, self.timeout = max_iterations, timeout
        self.template = template or {}
        # The limit for a prompt together with the observation of an environment (None: no limit).
        self.max_prompt_length: int | None = None
        # Async tools share one event loop, because an HTTP client can only be used in one.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stops = [
            tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.stop_token_ids
        ]
        if self.timeout and threading.current_thread() is not threading.main_thread():
            raise UserError(
                f"--tool-timeout {self.timeout:g} needs a signal, which only the main thread "
                "receives: train there, or use 0."
            )
        # The environments are made once and reset for each sample.
        self.pool = [self._make_environment()] if environment else []
        self.schemas = [schema.of_function(f, "--tools") for f in self.functions]
        for environment in self.pool:
            methods = public_methods(environment)
            self.schemas += [schema.of_function(f, "--environment-factory") for f in methods]
        described = [each["function"] for each in self.schemas]
        self.names = [each["name"] for each in described]
        self.arguments = {each["name"]: each["parameters"]["properties"] for each in described}
        self._check()
        # Some templates end with "<think>", so the model starts inside a thought.
        opens = self._render([{"role": "user", "content": QUESTION}]).rstrip().endswith("<think>")
        self.opening = "<think>" if opens else ""

    def __call__(self, samples: list[Sample], turns: Turns) -> None:
        self._begin(samples)
        active = samples
        for iteration in itertools.count(1):
            starts = [len(s.token_ids) for s in active]
            turns.generate(active)
            asking = []
            for s, start in zip(active, starts):
                calls = self._read(s, start)
                # a truncated turn leaves no room for an answer
                if calls and s.stopped and not 0 < self.max_iterations < iteration:
                    asking.append((s, calls))
            answers = self._answer(asking)
            active = [
                s
                for (s, calls), each in zip(asking, answers)
                if self._insert(s, calls, each, turns)
            ]
            if not active:
                return

    def reward(self) -> Callable | None:
        """Return the reward function that calls `get_reward` of the environments, named after their
        class; None if they have no such method.
        """
        kind = type(self.pool[0]) if self.pool else None
        if kind is None or not hasattr(kind, "get_reward"):
            return None

        def get_reward(environments: list, **kwargs) -> list[float | None]:
            return [environment.get_reward() for environment in environments]

        async def get_reward_async(environments: list, **kwargs) -> list[float | None]:
            return [await environment.get_reward() for environment in environments]

        is_async = inspect.iscoroutinefunction(kind.get_reward)
        function = get_reward_async if is_async else get_reward
        function.__name__ = kind.__name__
        return function

    # --- environments ---

    def _make_environment(self) -> Any:
        assert self.environment is not None
        environment = self._guarded(self.environment, "", "; fix the class")
        if not callable(getattr(environment, "reset", None)):
            raise UserError(
                f"--environment-factory: {type(environment).__name__} has no method reset: add "
                "`def reset(self, **row)`, which is called before each completion."
            )
        return environment

    def _begin(self, samples: list[Sample]) -> None:
        """Reset an environment for each sample, and show the model what it observes."""
        for i, s in enumerate(samples):
            s.conversation = Conversation([])
            if self.environment:
                if i == len(self.pool):
                    self.pool.append(self._make_environment())
                s.conversation.environment = self.pool[i]
        if not self.environment:
            return
        for _, members in itertools.groupby(samples, lambda s: id(s.prompt)):
            group = list(members)
            seen = [self._reset(s) for s in group]
            # a prompt that all of them share is computed once
            prompts = {o: self._observed(group[0].prompt, o, len({*seen})) for o in seen}
            for s, observation in zip(group, seen):
                s.prompt = prompts[observation]

    def _reset(self, s: Sample) -> str | None:
        environment = _conversation(s).environment
        row = {"prompt": s.prompt.text, **s.prompt.columns}
        name = f": {type(environment).__name__}.reset"
        advice = f" (prompt {s.prompt.id}); fix the method"
        observation = self._guarded(lambda: environment.reset(**row), name, advice)
        if not isinstance(observation, str | None):
            raise UserError(
                f"--environment-factory{name} returned a {type(observation).__name__}: return a "
                "text, which is added to the prompt, or None."
            )
        return observation

    def _guarded(self, function: Callable[[], Any], name: str, advice: str) -> Any:
        """Return what a function of the user's class returns, or raise UserError."""
        try:
            return limited(function, self.timeout)
        except BaseException as e:  # the user's code may raise anything
            raise UserError(
                f"--environment-factory{name} raised {type(e).__name__}: {text_of(e)}{advice}."
            ) from e

    def _observed(self, prompt: Prompt, observation: str | None, kinds: int) -> Prompt:
        """Return a prompt with an observation at the end of its last message, as in TRL.

        kinds: the number of different observations in the group. If there are several, each gets an
        id of its own, because samples with equal ids share the computation of their prompt.
        """
        if observation is None:
            return prompt
        last = dict(prompt.text[-1])  # type: ignore[arg-type]  # messages: see `check_prompts`
        last["content"] += observation
        text = [*prompt.text[:-1], last]
        ids = self.tokenizer.encode(self._render(text))
        if self.max_prompt_length is not None and len(ids) > self.max_prompt_length:
            raise UserError(
                f"--environment-factory: with the observation of reset, prompt {prompt.id} has "
                f"{len(ids)} tokens, but the limit is {self.max_prompt_length}; shorten the "
                "observation, or raise --max-prompt-length."
            )
        digest = hashlib.blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=7)
        own = stream(prompt.id, int.from_bytes(digest.digest(), "little"), 0, 0)
        return Prompt(
            prompt.id if kinds == 1 else own, text, ids, prompt.columns, prompt.max_tokens
        )

    # --- a round of calls ---

    def _read(self, s: Sample, start: int) -> list[Call]:
        """Add the turn that starts at token `start` to the conversation. Return its tool calls."""
        ids = s.token_ids[start:]
        text = self.tokenizer.decode(ids[:-1] if s.stopped else ids, skip_special_tokens=False)
        message, calls = parse(self.opening + text)
        for call in calls:
            self._convert(call)
        _conversation(s).messages.append(message)
        return calls

    def _convert(self, call: Call) -> None:
        """Convert arguments that the model has written as text, such as "7" for 7."""
        expected = self.arguments.get(call.name, {})
        given = call.arguments if isinstance(call.arguments, dict) else {}
        for name in given.keys() & expected.keys():
            if isinstance(given[name], str) and not schema.takes_text(expected[name]):
                # what is no JSON remains a text, which the tool may refuse
                with contextlib.suppress(ValueError, RecursionError):
                    given[name] = json.loads(given[name])

    def _answer(self, asking: list[tuple[Sample, list[Call]]]) -> list[list[Answer]]:
        """Make the calls of each sample, in order. Async calls follow, all of them together."""
        answers: list[list[Answer]] = []
        waiting: list[tuple[list[Answer], int, Callable, dict]] = []
        for s, calls in asking:
            environment = _conversation(s).environment
            methods = [] if environment is None else public_methods(environment)
            tools = {f.__name__: f for f in [*self.functions, *methods]}
            answers.append([])
            for call in calls:
                function = tools.get(call.name)
                if call.error or function is None:
                    answer = failed(call.error or f"Tool {call.name} not found.")
                elif inspect.iscoroutinefunction(function):
                    waiting.append((answers[-1], len(answers[-1]), function, call.arguments))
                    answer = failed(too_late(self.timeout))  # replaced if it ends in time
                else:
                    answer = self._call(function, call.arguments)
                answers[-1].append(answer)
        if waiting:
            self._call_together(waiting)
        return answers

    def _call(self, function: Callable, arguments: dict) -> Answer:
        try:
            return Answer(limited(lambda: readable(function(**arguments)), self.timeout))
        except BaseException as e:  # the tool may raise anything; Ctrl-C raises nothing in a run
            return failed(e)

    def _call_together(self, waiting: list[tuple[list[Answer], int, Callable, dict]]) -> None:
        """Make async calls on the event loop."""

        async def attempt(answers: list[Answer], i: int, function: Callable, arguments: dict):
            try:
                result = await asyncio.wait_for(function(**arguments), self.timeout or None)
                answers[i] = Answer(readable(result))
            except BaseException as e:  # the tool may raise anything
                late = isinstance(e, asyncio.TimeoutError) and not text_of(e)
                answers[i] = failed(too_late(self.timeout) if late else e)

        async def together() -> None:
            await asyncio.gather(*(attempt(*call) for call in waiting))

        self.loop = self.loop or start_loop()
        future = asyncio.run_coroutine_threadsafe(together(), self.loop)
        try:
            future.result(self.timeout + 1.0 if self.timeout else None)
        except concurrent.futures.TimeoutError:  # a tool blocks the loop, or refuses to be canceled
            self.loop = None

    def _insert(self, s: Sample, calls: list[Call], answers: list[Answer], turns: Turns) -> bool:
        """Let the sample read its answers. Return whether it continues.

        As in TRL, answers that do not fit into the completion are left out as a whole.
        """
        conversation = _conversation(s)
        conversation.calls += len(answers)
        conversation.failures += sum(answer.failed for answer in answers)
        messages = [
            {"role": "tool", "name": call.name or "unknown", "content": answer.content}
            for call, answer in zip(calls, answers)
        ]
        ids = self._between(messages)
        if len(ids) >= turns.room(s):
            s.stopped = False  # the length limit ends it, not the model
            return False
        turns.observe(s, ids)
        conversation.messages += messages
        return True

    # --- the chat template ---

    def _render(self, messages: list[dict]) -> str:
        return self.tokenizer.render(messages, tools=self.schemas, **self.template)

    def _between(self, answers: list[dict]) -> list[int]:
        """Return the ids that follow the end of the model's turn: the answers, in the form of the
        template, and the beginning of the model's next turn.
        """
        encode, contents = self.tokenizer.encode, [each["content"] for each in answers]
        if all(encode(text) == encode(text, special=False) for text in contents):
            return encode(self._after_turn(answers))
        # An answer that contains "<|im_end|>" must not end a turn, so its text is encoded on its
        # own, without special tokens.
        marked = [{**each, "content": f"{ANSWER}{i}x"} for i, each in enumerate(answers)]
        parts = re.split(rf"{ANSWER}(\d+)x", self._after_turn(marked))
        ids = [encode(text) for text in parts[::2]]
        ids[1:] = [
            encode(contents[int(i)], special=False) + more for i, more in zip(parts[1::2], ids[1:])
        ]
        return list(itertools.chain(*ids))

    def _after_turn(self, answers: list[dict]) -> str:
        """Return what the template writes after the end token of a turn with tool calls.

        The conversation before it does not matter, so a short one is rendered. Raises ValueError if
        the template does not end a turn with a stop token.
        """
        text = self._example(answers).partition(ARGUMENT)[2]
        _, end = min((text.index(stop), stop) for stop in self.stops if stop in text)
        return text.partition(end)[2]

    def _example(self, answers: list[dict]) -> str:
        """Return a short conversation with these answers to one call."""
        function = {"name": answers[0]["name"], "arguments": {"x": ARGUMENT}}
        calls = [{"type": "function", "function": function}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._render([{"role": "user", "content": QUESTION}, turn, *answers])

    def _check(self) -> None:
        option = "--tools" if self.functions else "--environment-factory"
        if not self.names:
            raise UserError(
                f"{option}: {type(self.pool[0]).__name__} has no public method besides reset and "
                "get_reward: add one, such as step, for the model to call."
            )
        if twice := {name for name in self.names if self.names.count(name) > 1}:
            raise UserError(f"{option}: two tools have the name {min(twice)}: rename one of them.")
        name = self.names[0]
        answer = {"role": "tool", "name": name, "content": ANSWER}
        try:
            before, _, after = self._example([answer]).partition(QUESTION)
            works = parse(after.partition(ANSWER)[0])[1] == [Call(name, {"x": ARGUMENT})]
            works = works and ANSWER in after and all(each in before for each in self.names)
            self._between([answer])
        except (UserError, ValueError):
            works = False
        if not works:
            raise UserError(
                f"{option}: the model's chat template cannot show tools and calls in the form "
                "<tool_call>{…}</tool_call>, which Qwen and Hermes models use: take such a model."
            )


def _conversation(s: Sample) -> Conversation:
    assert s.conversation is not None  # set by `_begin`
    return s.conversation


def public_methods(environment: Any) -> list[Callable]:
    """Return the methods of an environment that are tools."""
    # found on the class, because getmembers of the instance would evaluate its properties
    found = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in found if name not in ("reset", "get_reward") and name[0] != "_"]
    return [getattr(environment, name) for name in names]


# --- the model's text ---


def parse(text: str) -> tuple[dict, list[Call]]:
    """Return the assistant message that a text means, and the tool calls in it.

    Calls inside a thought are not made. A call that cannot be read stays in the content.
    """
    content, thoughts, calls, end = [], [], [], 0
    for block in BLOCK.finditer(text):
        content.append(text[end : block.start()])
        end = block.end()
        thought, written, closed = block.groups()
        if written is None:
            thoughts.append(thought)
            continue
        calls.append(read_call(written) if closed else Call("", {}, "</tool_call> is missing."))
        if calls[-1].error:
            content.append(block[0])
    content.append(text[end:])
    message: dict[str, Any] = {"role": "assistant", "content": _joined(content)}
    if thought := _joined(thoughts):
        message["reasoning_content"] = thought
    if made := [{"name": c.name, "arguments": c.arguments} for c in calls if not c.error]:
        message["tool_calls"] = [{"type": "function", "function": each} for each in made]
    return message, calls


def _joined(texts: list[str]) -> str:
    return "\n".join(filter(None, map(str.strip, texts)))


def read_call(text: str) -> Call:
    """Return the call that a text of JSON describes."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as e:  # RecursionError: thousands of brackets
        return Call("", {}, f"The tool call is not valid JSON: {e}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call("", {}, 'A tool call must have the form {"name": "...", "arguments": {...}}.')
    arguments = call.get("arguments")
    return Call(call["name"], {} if arguments is None else arguments)


def failed(error: str | BaseException) -> Answer:
    text = error if isinstance(error, str) else text_of(error) or type(error).__name__
    return Answer(readable({"error": text}), failed=True)


def readable(result: object) -> str:
    """Return a result as text that can be encoded: half of a surrogate pair cannot."""
    return str(result).encode("utf-8", "replace").decode()


# --- a limit on the time of a call ---


def too_late(seconds: float) -> str:
    return f"no answer within {seconds:g} s"


def limited(function: Callable[[], Any], seconds: float) -> Any:
    """Call a function with a limit on its time (timelimit.py). A function that continues after
    several interrupts ends this process.
    """
    return timelimit.limited(function, seconds, give_up)


def give_up(seconds: float, frame: FrameType | None) -> None:
    """End this process, because the function that runs in this frame catches every exception."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    place = frame and f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    failure.end_with(
        UserError(
            f"--tool-timeout {seconds:g}: a tool does not end (it is at {place}), because it "
            "catches every exception: replace its `except:` by `except Exception:`."
        )
    )
