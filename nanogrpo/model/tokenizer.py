"""Convert text to token ids and back, and messages to text, with the `tokenizers` package and the
model's own chat template instead of transformers.

In: a model folder in Hugging Face's layout. Out: `Tokenizer`, whose `encode_prompt` returns the
`token_ids` of a `Prompt`. Read next: data/prompts.py, which calls it once per prompt. The engines
only use `decode` and `stop_token_ids`.

A worked example, with a Qwen3 folder:
    messages                  [{"role": "user", "content": "3+4="}]
    render(messages)          "<|im_start|>user\\n3+4=<|im_end|>\\n<|im_start|>assistant\\n"
    encode_prompt(messages)   [151644, 872, 198, 18, 10, 19, 28, 151645, 198, 151644, 77091, 198]
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanogrpo.errors import UserError, read_json, reading

# These files are read when the tokenizer is loaded and written unchanged by `save`. After the first
# four come parts of tokenizer.json for the slow tokenizers of transformers, then the template and
# settings of vision-language models (vision/processor.py).
FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
]
# Longer texts, in characters, are encoded in a thread, because that can take many seconds.
LONG = 200_000
COPY = "copy it again from the model"


class Tokenizer:
    """Encode, decode and render text with the tokenizer of one model, without batching or padding.

    `vocab_size`: all ids are below this number. The model's vocabulary may be padded to a larger
    size, with ids that have no text.
    `stop_token_ids`: all ids that end a completion, starting with the tokenizer's own end token.
    Chat models list several in generation_config.json (Qwen3: <|im_end|> and <|endoftext|>), or in
    config.json if that file has none. If one were missing here, completions that end with it would
    continue to the length limit.
    """

    def __init__(self, folder: str | Path):
        """Load the files of a local folder. Raises UserError if one is missing or damaged."""
        self._folder = folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise UserError(
                f"{folder} has no tokenizer.json: name a folder written by save_pretrained."
            )
        self._files: dict[str, bytes] = {}
        for path in (folder / name for name in FILES if (folder / name).is_file()):
            with reading(path):
                self._files[path.name] = path.read_bytes()
        with reading(f"{folder}/tokenizer.json", COPY):
            self._tokenizer = tokenizers.Tokenizer.from_str(self._files["tokenizer.json"].decode())
            # Some tokenizer.json files have settings for truncation and padding, which must not
            # change a prompt.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

        config = {**self._json("special_tokens_map.json"), **self._json("tokenizer_config.json")}
        # A special token is written as "text" or as {"content": "text", …}. Templates receive the
        # text: {"eos_token": "<|im_end|>"}. They never receive null values.
        tokens = {k: v for k, v in config.items() if k.endswith("_token")}
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
        self._special = {k: v for k, v in tokens.items() if isinstance(v, str)}
        self.stop_token_ids = self._stops()
        own = self._json("chat_template.json").get("chat_template")
        self._templates = self._compile(config.get("chat_template") or own)

    def save(self, folder: Path) -> None:
        """Write the loaded files byte for byte, so a checkpoint tokenizes exactly like its base."""
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template prints the tools that it receives."""
        template = self._template(with_tools=True)
        return template is not None and "tools" in template.reads

    @property
    def template_variables(self) -> set[str]:
        """Return the variables that the chat template reads, such as `enable_thinking`."""
        found: set[str] = set()
        return found.union(*(template.reads for template in self._templates.values()))

    def encode(self, text: str, special: bool = True, surround: bool = False) -> list[int]:
        """Return the ids of a text. With `surround`, the tokenizer adds the tokens that it puts at
        the start or end of every text, such as BOS in Llama; otherwise nothing is added.

        A special token that is written in the text becomes one id, which templates rely on. With
        `special` off, it is encoded as ordinary text: use this for text from untrusted sources,
        such as a tool's answer.
        """
        self._tokenizer.encode_special_tokens = not special  # True encodes them as ordinary text
        encode = self._encode_long if len(text) > LONG else self._tokenizer.encode
        with reading(f"{self._folder}/tokenizer.json", COPY, "cannot encode a text"):
            try:
                return encode(text, add_special_tokens=surround).ids
            # half of a surrogate pair, which can come from "\\ud800" in JSON
            except TypeError as e:
                raise UserError(
                    f"the text {ascii(text)[:60]} cannot be encoded as UTF-8: write valid "
                    "characters."
                ) from e

    def _encode_long(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode a text in a thread, so that a signal can end the waiting: the library does not
        return before it has finished. Unlike `encode`, `encode_batch` releases Python's lock.
        """
        done: Future = Future()

        def work() -> None:
            try:
                found = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
                done.set_result(found[0])
            except BaseException as e:  # raised again below
                done.set_exception(e)

        threading.Thread(target=work, daemon=True).start()
        return done.result()

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. <think> and </think> are never skipped, because Qwen3
        defines them as ordinary tokens.
        """
        with reading(f"{self._folder}/tokenizer.json", COPY, "cannot decode a completion"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: list[dict],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict] | None = None,
        enable_thinking: bool | None = None,
        **kwargs,
    ) -> str:
        """Return the text that the chat template produces for the messages, like
        `apply_chat_template` of transformers, except that templates cannot read the current date.

        `tools` are JSON schemas of functions that the model may call. `enable_thinking` is Qwen3's
        switch; None leaves it undefined, so the template uses its own default (Qwen3: think).
        `kwargs` become variables of the template. Raises UserError if there is no template or it
        rejects the messages.
        """
        template = self._template(bool(tools))
        if template is None:
            raise UserError(
                f"{self._folder} has no chat template: use text prompts or add chat_template.jinja."
            )
        # templates test `enable_thinking is defined`, so None must not be passed
        if enable_thinking is not None:
            kwargs["enable_thinking"] = enable_thinking
        # As in transformers, a null field counts as absent. Otherwise `content: null` would be
        # printed as "None".
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        # an empty list is no tools: some templates would print a heading for it
        fields = {"tools": tools or None, "documents": None, **self._special, **kwargs}
        # a template is a program, so any exception is possible
        name = f"the chat template of {self._folder}"
        with reading(name, "change them", "rejects the messages"):
            return template.program.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **fields
            )

    def encode_prompt(
        self,
        prompt: str | list[dict],
        /,
        tools: Sequence[dict] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the ids of a prompt, as TRL does: plain text, to which the tokenizer may add BOS,
        or messages and tools for the chat template.

        `template_kwargs` are the other arguments of `render`.
        """
        if isinstance(prompt, str):
            return self.encode(prompt, surround=True)
        # templates write BOS themselves
        return self.encode(self.render(prompt, tools=tools, **template_kwargs))

    def _template(self, with_tools: bool) -> _Template | None:
        template = self._templates.get("tool_use") if with_tools else None
        return template or self._templates.get("default")

    def _json(self, name: str) -> dict:
        return read_json(self._folder / name) if name in self._files else {}

    def _id(self, name: str) -> int | None:
        """Return the id of a special token, or None if the config does not define it."""
        if (token := self._special.get(name)) is None:
            return None
        if (found := self._tokenizer.token_to_id(token)) is None:
            raise UserError(
                f"{self._folder}: {name} {token!r} is not in tokenizer.json; make the two files "
                "agree."
            )
        return found

    def _stops(self) -> list[int]:
        """Return the id of the end token, followed by the ids (an int or a list) that
        generation_config.json adds, or else config.json.
        """
        self._id("pad_token")  # only a check: we never pad, but users of our checkpoints might
        eos = self._id("eos_token")
        stops = [] if eos is None else [eos]
        source = "generation_config.json"
        more = self._json(source).get("eos_token_id")
        if more is None and (self._folder / "config.json").is_file():
            source = "config.json"
            more = read_json(self._folder / source).get("eos_token_id")
        stops += more if isinstance(more, list) else [] if more is None else [more]
        for stop in stops:
            if type(stop) is not int or not 0 <= stop < self.vocab_size:  # True is not an id
                raise UserError(
                    f"{self._folder}/{source}: eos_token_id holds {stop!r}, which is "
                    f"not an id of tokenizer.json; use whole numbers from 0 to "
                    f"{self.vocab_size - 1}."
                )
        if not stops:
            raise UserError(
                f"{self._folder}/tokenizer_config.json names no eos_token: add it, or "
                "completions never stop."
            )
        return list(dict.fromkeys(stops))

    def _compile(self, source: str | list[dict] | None) -> dict[str, _Template]:
        """Compile the chat template, and the one for messages with tools if there is one.

        It is read from chat_template.jinja if that file exists, or else from the config, where it
        is a string or a list of {"name", "template"} with the names "default" and "tool_use". A
        vision-language model may have it in chat_template.json.
        """
        if "chat_template.jinja" in self._files:
            with reading(f"{self._folder}/chat_template.jinja", COPY, "is not UTF-8"):
                source = self._files["chat_template.jinja"].decode()
        named = [{"name": "default", "template": source}]
        if isinstance(source, list) and all(
            isinstance(e, dict) and {"name", "template"} <= e.keys() for e in source
        ):
            named = source
        # of two templates with the same name, the first counts
        texts = {
            name: e["template"]
            for name in ("default", "tool_use")
            for e in reversed(named)
            if e["name"] == name and e["template"] is not None
        }
        if not all(isinstance(text, str) for text in texts.values()):
            raise UserError(
                f"{self._folder}/tokenizer_config.json: chat_template must be a text, or a list of "
                '{"name": text, "template": text}; correct it or remove it.'
            )
        # The template comes with the model, so it runs in a sandbox and cannot change the messages.
        # Nothing is computed here: no time limit holds yet (see data/prompts.py), and Jinja would
        # compute constants when it optimizes, or when it compiles their output.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=_as_it_is,
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        # `strftime_now` is omitted on purpose: with the current date in a prompt, a run that is
        # resumed the next day would get a different prompt.
        # jinja compiles to Python, which has its own limits, such as the depth of nested loops
        with reading(f"the chat template of {self._folder}", "repair it", "cannot be compiled"):
            return {
                name: _Template(env.from_string(text), _reads(env, text))
                for name, text in texts.items()
            }


def _reads(env: jinja2.Environment, text: str) -> set[str]:
    # as jinja2.meta.find_undeclared_variables, which would compute constants
    generator = jinja2.meta.TrackingCodeGenerator(env)
    generator.optimizer = None
    generator.visit(env.parse(text))
    return generator.undeclared_identifiers - env.globals.keys()


@jinja2.pass_context  # so it is called when the template runs, not when it is compiled
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    return value


class _Template(NamedTuple):
    program: jinja2.Template
    reads: set[str]  # the variables that it reads, such as "messages" and "tools"


class _Generation(Extension):
    """Render `{% generation %} … {% endgeneration %}` as its body. The tag marks the text that
    supervised training should learn.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(value, ensure_ascii=False, **options) -> str:
    """Return plain JSON. Jinja's own filter escapes <, > and & for HTML, but models were not
    trained on escaped text.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
