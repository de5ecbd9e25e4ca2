"""Tool calls: the model calls Python functions in the middle of a completion and reads the results.

    def multiply(a: int, b: int) -> int: …                         # --tools file.py:multiply

    model   <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><|im_end|>
    tool    <|im_start|>user <tool_response>42</tool_response><|im_end|><|im_start|>assistant
    model   The product is 42.<|im_end|>

In: samples without tokens. Out: the same samples with all turns (turns.py), and the conversation as
messages for the reward functions (`Sample.conversation`). Only tokens that the model sampled are
trained on, and these tokens are never decoded and encoded again. The text between two turns has the
format of the model's chat template, and is tokenized separately.

If a call fails (malformed JSON, an unknown name, wrong arguments, an exception, --tool-timeout),
the error becomes the tool's answer. The model reads this answer, and can learn from it. Read
before: turns.py. Read next: environments.py, feature.py.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from nanogrpo.engine.base import stream
from nanogrpo.errors import UserError
from nanogrpo.extras.options import Config
from nanogrpo.extras.tools.environments import Environments, methods
from nanogrpo.extras.tools.timelimit import limited
from nanogrpo.extras.tools.turns import Turns
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.call import start_loop
from nanogrpo.types import Conversation, Prompt, Sample

BLOCK = re.compile(r"<think>(.*?)(?:</think>|\Z)|<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FORM = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>, in valid JSON'
# How transformers parses the text of one call. The anchor is required, but not used here.
TEMPLATE = {
    "start_anchor": "<tool_call>",
    "fields": {"call": {"content": "json", "transform": {"function": "{content}"}}},
}
# These words mark places in a rendered template. They do not occur in any template.
QUESTION, ARGUMENT, ANSWER = "Qquestion7x", "Qargument7x", "Qanswer7x"


class Call(NamedTuple):
    """A tool call that the model wrote. If the call cannot be read, `name` is ""."""

    name: str
    arguments: dict[str, Any]


class Answer(NamedTuple):
    """What a tool answered."""

    content: str
    failed: bool = False


@dataclasses.dataclass
class ToolConversation(Conversation):
    """A completion with tool calls, as messages."""

    calls: int = 0
    failures: int = 0  # the number of failed calls


class ToolCalls:
    """A rollout function (turns.py) that lets the model call tools, as TRL's `tools` and
    `environment_factory` do.
    """

    def __init__(
        self,
        cfg: Config,
        tokenizer: Tokenizer,
        functions: Sequence[Callable] = (),
        environments: Environments | None = None,
    ):
        """Make the schemas of the tools. Raises UserError if a tool cannot be described, or if the
        chat template cannot render tool calls.
        """
        self.tokenizer, self.functions, self.environments = tokenizer, functions, environments
        self.max_iterations, self.timeout = cfg.max_tool_calling_iterations, cfg.tool_timeout
        self.variables = cfg.chat_variables
        # the maximum length of a prompt with an environment's observation, or None
        self.max_prompt_length: int | None = None
        # Async tools share one event loop, because an HTTP client works only on one event loop.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stops = [
            tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.stop_token_ids
        ]
        self.option = "--tools" if functions else "--environment-factory"
        # the largest number of characters in a token
        self.longest = max(map(len, tokenizer._tokenizer.get_vocab()))
        self.schemas = schemas(functions, environments)
        self.names = [each["function"]["name"] for each in self.schemas]
        self._check()
        # Some templates end with "<think>". The model then starts inside its reasoning.
        opens = self._render([{"role": "user", "content": QUESTION}]).rstrip().endswith("<think>")
        self.opening = "<think>" if opens else ""

    def __call__(self, samples: list[Sample], turns: Turns) -> None:
        for s in samples:
            s.conversation = ToolConversation([])
        if self.environments:
            self._reset(self.environments, samples)
        active = samples
        for iteration in itertools.count(1):
            starts = [len(s.token_ids) for s in active]
            turns.generate(active)
            found = [(s, self._read(s, start)) for s, start in zip(active, starts)]
            if 0 < self.max_iterations < iteration:
                return
            # a truncated turn has reached the length limit, so no answer fits
            asking = [(s, calls) for s, calls in found if calls and s.stopped]
            answers = iter(self._awaited([self._call(s, c) for s, calls in asking for c in calls]))
            active = []
            for s, calls in asking:
                if self._insert(s, calls, [next(answers) for _ in calls], turns):
                    active.append(s)
            if not active:
                return

    # --- environments ---

    def _reset(self, environments: Environments, samples: list[Sample]) -> None:
        """Reset an environment for each sample. As in TRL, append the environment's observation to
        the last message of the prompt.
        """
        shown: dict[tuple[int, str], Prompt] = {}
        for i, s in enumerate(samples):
            observation = environments.reset(i, s.prompt)
            s.arguments["environments"] = environments.get(i)
            # Samples with the same observation get the same prompt, which is computed only once.
            key = s.prompt.id, observation
            if key not in shown:
                others = sum(id == s.prompt.id for id, _ in shown)
                shown[key] = self._observed(s.prompt, observation, others)
            s.prompt = shown[key]

    def _observed(self, prompt: Prompt, observation: str, others: int) -> Prompt:
        """Return a prompt with an observation. `others` is the number of observations in the prompt
        so far.
        """
        if not (observation or others):
            return prompt
        last: Any = prompt.text[-1]  # a dict, see `Tools.encode`
        if not isinstance(last["content"], str):
            raise UserError(
                "--environment-factory only works with text, but the messages of prompt "
                f"{prompt.id} contain pictures or lists of parts: write each content as a string."
            )
        text = [*prompt.text[:-1], {**last, "content": last["content"] + observation}]
        ids = self.tokenizer.encode(self._render(text))
        if self.max_prompt_length is not None and len(ids) > self.max_prompt_length:
            raise UserError(
                f"--environment-factory: with the observation of reset, prompt {prompt.id} has "
                f"{len(ids)} tokens, but the limit is {self.max_prompt_length}; shorten the "
                "observation, or raise --max-prompt-length."
            )
        id = stream(prompt.id, others, 0, 0) if others else prompt.id
        return dataclasses.replace(prompt, id=id, text=text, token_ids=ids)

    # --- a round of calls ---

    def _read(self, s: Sample, start: int) -> list[Call]:
        """Add the turn that starts at token `start` to the conversation. Return its tool calls."""
        ids = s.token_ids[start:]
        text = self.tokenizer.decode(ids[:-1] if s.stopped else ids, skip_special_tokens=False)
        message, calls = parse(self.opening + text, self.schemas)
        conversation: Any = s.conversation  # set by `__call__`
        conversation.messages.append(message)
        return calls

    def _call(self, s: Sample, call: Call) -> Answer | Coroutine:
        """Call a tool and return its answer, or the coroutine of an async tool."""
        own = methods(s.arguments.get("environments"))
        functions = {f.__name__: f for f in [*self.functions, *own]}
        if not call.name:
            return failed(f"The tool call cannot be read: write {FORM}.")
        if call.name not in functions:
            return failed(f"Tool {call.name} not found.")
        try:
            result = limited(lambda: functions[call.name](**call.arguments), self.timeout)
            return result if inspect.iscoroutine(result) else Answer(readable(result))
        except (Exception, SystemExit) as e:  # the tool may raise anything
            return failed(e)

    def _awaited(self, calls: list[Answer | Coroutine]) -> list[Answer]:
        """Run the coroutines on the event loop, and return all answers."""

        async def attempt(call: Answer | Coroutine) -> Answer:
            if isinstance(call, Answer):
                return call
            try:
                return Answer(readable(await asyncio.wait_for(call, self.timeout or None)))
            except (Exception, SystemExit) as e:  # the tool may raise anything
                return failed(e)

        async def together() -> list[Answer]:
            return await asyncio.gather(*map(attempt, calls))

        self.loop = self.loop or start_loop()
        future = asyncio.run_coroutine_threadsafe(together(), self.loop)
        try:
            return future.result(self.timeout + 1.0 if self.timeout else None)
        except concurrent.futures.TimeoutError as e:  # a tool has blocked the event loop
            loop, self.loop = self.loop, None
            # When the tool returns, the event loop ends. Later calls use a new event loop.
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            return [call if isinstance(call, Answer) else failed(e) for call in calls]

    def _insert(self, s: Sample, calls: list[Call], answers: list[Answer], turns: Turns) -> bool:
        """Append the answers to the sample. Return whether the sample continues.

        If the answers do not fit into the completion, none is appended, as in TRL.
        """
        conversation: Any = s.conversation
        conversation.calls += len(answers)
        conversation.failures += sum(answer.failed for answer in answers)
        messages = [
            {"role": "tool", "name": call.name or "unknown", "content": answer.content}
            for call, answer in zip(calls, answers)
        ]
        # an answer of this length cannot fit, and encoding it would take minutes
        long = sum(len(answer.content) for answer in answers) > self.longest * turns.room(s)
        if long or len(ids := self._between(messages)) >= turns.room(s):
            s.stopped = False  # the sample ends at the length limit: the model did not end it
            return False
        turns.observe(s, ids)
        conversation.messages += messages
        return True

    # --- the chat template ---

    def _render(self, messages: list[dict]) -> str:
        return self.tokenizer.render(messages, tools=self.schemas, **self.variables)

    def _between(self, answers: list[dict]) -> list[int]:
        """Return the ids that follow the end of the model's turn. They are the answers in the
        template's format, and the beginning of the model's next turn.
        """
        encode, contents = self.tokenizer.encode, [each["content"] for each in answers]
        if all(encode(text) == encode(text, special=False) for text in contents):
            return encode(self._after_turn(answers))
        # Answers are encoded without special tokens: "<|im_end|>" in an answer must not end a turn.
        marked = [{**each, "content": f"{ANSWER}{i}x"} for i, each in enumerate(answers)]
        ids = []
        for i, part in enumerate(re.split(rf"{ANSWER}(\d+)x", self._after_turn(marked))):
            ids += encode(contents[int(part)], special=False) if i % 2 else encode(part)
        return ids

    def _after_turn(self, answers: list[dict]) -> str:
        """Return what the template writes after the end token of a turn with tool calls.

        This text does not depend on the conversation before the end token, so a short conversation
        is enough to find it. Raises ValueError if the template does not end a turn with a stop
        token.
        """
        text = self._example(answers).partition(ARGUMENT)[2]
        _, end = min((text.index(stop), stop) for stop in self.stops if stop in text)
        return text.partition(end)[2]

    def _example(self, answers: list[dict]) -> str:
        """Return a short conversation in which one tool call gets these answers."""
        function = {"name": answers[0]["name"], "arguments": {"x": ARGUMENT}}
        calls = [{"type": "function", "function": function}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._render([{"role": "user", "content": QUESTION}, turn, *answers])

    def _check(self) -> None:
        option, name = self.option, self.names[0]
        if len({*self.names}) < len(self.names):
            twice = max(self.names, key=self.names.count)
            raise UserError(f"{option}: two tools have the name {twice}: rename one of them.")
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
                f"{option}: the model's chat template does not support tools with calls in the "
                "form <tool_call>{…}</tool_call>: use a Qwen or Hermes model, whose template does."
            )


def schemas(functions: Sequence[Callable], environments: Environments | None) -> list[dict]:
    """Return the JSON schemas of the tools, made from their type hints and docstrings."""
    try:
        # This import takes a second, and only a run with tools needs it.
        # `read_call` uses the parser.
        from transformers.utils import chat_parsing, get_json_schema  # noqa: F401
    except ImportError as e:
        raise UserError(
            "--tools and --environment-factory need transformers, which describes tools to the "
            "model: pip install 'nanogrpo[tools]'."
        ) from e
    out = []
    for function in [*functions, *(methods(environments.get(0)) if environments else ())]:
        try:
            out.append(get_json_schema(function))
            # parameters such as *x, or x before /, cannot be given by name
            inspect.signature(function).bind(**out[-1]["function"]["parameters"]["properties"])
        except Exception as e:  # evaluating a type hint in quotes may raise anything
            raise UserError(
                f"--tools or --environment-factory: {function!r} cannot be described to the model "
                f"({e}): give it type hints, and a docstring with a section `Args:`."
            ) from e
    return out


# --- the model's text ---


def parse(text: str, tools: Sequence[dict] = ()) -> tuple[dict, list[Call]]:
    """Parse a text into an assistant message and its tool calls. `tools` are the tools' schemas.

    Ignore calls inside a thought. A call that cannot be read stays in the content of the message.
    """
    content, thoughts, calls, end = [], [], [], 0
    for block in BLOCK.finditer(text):
        content.append(text[end : block.start()])
        end = block.end()
        thought, written, closed = block.groups()
        if written is None:
            thoughts.append(thought)
            continue
        calls.append(read_call(written if closed else "", tools))
        if not calls[-1].name:
            content.append(block[0])
    content.append(text[end:])
    message: dict[str, Any] = {"role": "assistant", "content": _joined(content)}
    if thought := _joined(thoughts):
        message["reasoning_content"] = thought
    if made := [call._asdict() for call in calls if call.name]:
        message["tool_calls"] = [{"type": "function", "function": each} for each in made]
    return message, calls


def _joined(texts: list[str]) -> str:
    return "\n".join(filter(None, map(str.strip, texts)))


def read_call(text: str, tools: Sequence[dict]) -> Call:
    """Parse the JSON text of a call. The model may have written an argument as text, such as "7"
    for 7. As in TRL, transformers then converts the argument to its type in the schema of the tool.
    """
    from transformers.utils.chat_parsing import parse_response

    # RecursionError: too many brackets
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        call = parse_response(text, TEMPLATE, prefix="", tools=[*tools])["call"]["function"]
        name, arguments = call["name"], call.get("arguments") or {}
        if isinstance(name, str) and isinstance(arguments, dict):
            return Call(name, arguments)
    return Call("", {})


def failed(error: Any) -> Answer:
    """`error` is a string or an exception."""
    return Answer(readable({"error": str(error) or type(error).__name__}), failed=True)


def readable(result: object) -> str:
    """Return a result as text. Lone surrogates, which cannot be encoded, are replaced."""
    return str(result).encode("utf-8", "replace").decode()
