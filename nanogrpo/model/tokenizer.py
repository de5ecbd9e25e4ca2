"""Convert text to token ids and back, and messages to text, with the `tokenizers` package and the
model's own chat template.

In: a model folder in Hugging Face's layout. Out: a `Tokenizer`, whose `encode_prompt` returns the
`token_ids` of a `Prompt`. The engines use only `decode` and `stop_token_ids`. Read next:
data/prompts.py, which calls `encode_prompt` once per prompt.

A worked example, with a Qwen3 folder:
    messages                  [{"role": "user", "content": "3+4="}]
    render(messages)          "<|im_start|>user\\n3+4=<|im_end|>\\n<|im_start|>assistant\\n"
    encode_prompt(messages)   [151644, 872, 198, 18, 10, 19, 28, 151645, 198, 151644, 77091, 198]
"""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanogrpo.errors import UserError, read_json, reading, without_nulls

# The files that are read when the tokenizer is loaded, and that `save` writes unchanged.
# The tokenizer itself uses only the first five files and chat_template.json.
# The other files in this list are for the slow tokenizers and the processors of transformers.
FILES = """
    tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json
    special_tokens_map.json added_tokens.json vocab.json merges.txt
    chat_template.json preprocessor_config.json processor_config.json
    video_preprocessor_config.json
"""
VARIABLES = ("tools", "documents")  # transformers always passes these variables to chat templates
COPY = "copy it again from the model"


class Tokenizer:
    """Encode, decode and render text with the tokenizer of one model, without batching or padding.

    All token ids are below `vocab_size`. The model's vocabulary may be padded to a larger size,
    with ids that stand for no text. `stop_token_ids` holds all ids that end a completion, starting
    with the tokenizer's own end token. Chat models list several end tokens in
    generation_config.json (Qwen3: <|im_end|> and <|endoftext|>), or in config.json if
    generation_config.json has none. If an end token were missing in `stop_token_ids`, completions
    that should end with this token would continue to the length limit. `template_variables` holds
    the names of the variables that the chat template reads besides the messages, such as
    `enable_thinking`.
    """

    def __init__(self, folder: str | Path):
        """Load the files of a local folder. Raises UserError if a file is missing or damaged."""
        self._folder = folder = Path(folder)
        self._files: dict[str, bytes] = {}
        for path in (folder / name for name in FILES.split() if os.path.lexists(folder / name)):
            with reading(path):
                self._files[path.name] = path.read_bytes()
        with reading(folder / "tokenizer.json", COPY):
            self._tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            # Some tokenizer.json files turn on truncation or padding.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

        config = {**self._json("special_tokens_map.json"), **self._json("tokenizer_config.json")}
        # A special token is written as "text" or as {"content": "text", …}, or is null.
        # Templates receive only the strings, for example {"eos_token": "<|im_end|>"}.
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items()}
        self._special = {
            k: v for k, v in tokens.items() if k.endswith("_token") and isinstance(v, str)
        }
        self.stop_token_ids = self._stops()
        own = self._json("chat_template.json").get("chat_template")
        self._templates = self._compile(config.get("chat_template") or own)

    def save(self, folder: Path) -> None:
        """Write the loaded files byte for byte, so a checkpoint tokenizes exactly like its base
        model.
        """
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    def encode(self, text: str, special: bool = True, surround: bool = False) -> list[int]:
        """Return the token ids of a text. With `surround`, the tokenizer adds its tokens for the
        start or end of a text, such as BOS in Llama.

        A special token in the text becomes one id, as chat templates require. If `special` is
        False, special tokens are encoded as ordinary text, which is useful for text from untrusted
        sources.
        """
        self._tokenizer.encode_special_tokens = not special  # True: as ordinary text
        # a lone surrogate, such as "\\ud800" in JSON, cannot be encoded
        problem = f"cannot encode the text {text[:60]!a}"
        advice = f"write valid characters, or {COPY}"
        with reading(f"{self._folder}/tokenizer.json", advice, problem):
            return self._tokenizer.encode(text, add_special_tokens=surround).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. The tags <think> and </think> are always kept,
        because Qwen3 defines them as ordinary tokens.
        """
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: list[dict],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text that the chat template makes from the messages.

        The function is like transformers' `apply_chat_template`, but templates cannot read the
        date.

        A variable that is None stays undefined, so the template uses its own default. Qwen3's
        default is to think. Raises UserError if there is no template, or if the template rejects
        the messages.
        """
        fields = {**dict.fromkeys(VARIABLES), **self._special, **without_nulls(variables)}
        named = fields[VARIABLES[0]] and self._templates.get("tool_use")
        template = named or self._templates.get("default")
        if template is None:
            raise UserError(
                f"{self._folder} has no chat template: use text prompts or add chat_template.jinja."
            )
        # As in transformers, null fields are left out; otherwise, the text could contain "None".
        messages = [*map(without_nulls, messages)]
        # a template is a program, so any exception is possible
        name = f"the chat template of {self._folder}"
        with reading(name, "change them", "rejects the messages or columns"):
            # as a column of the data, such a variable may be JSON text
            fields |= {n: json.loads(x) for n in VARIABLES if isinstance(x := fields[n], str)}
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **fields
            )

    def encode_prompt(self, prompt: str | list[dict], /, **variables: Any) -> list[int]:
        """Return the ids of a prompt, as TRL does. The tokenizer may add BOS to plain text;
        messages are rendered with the chat template. `variables` are the other arguments of
        `render`.
        """
        if isinstance(prompt, str):
            return self.encode(prompt, surround=True)
        return self.encode(self.render(prompt, **variables))  # templates write BOS themselves

    def _json(self, name: str) -> dict:
        path = self._folder / name
        return read_json(path) if os.path.lexists(path) else {}

    def _stops(self) -> list[int]:
        """Return the ids of the end tokens. The tokenizer's own end token is the first. Further end
        tokens are listed in generation_config.json, or else in config.json.
        """
        own = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        more = self._json("generation_config.json").get("eos_token_id")
        if more is None:
            more = self._json("config.json").get("eos_token_id")
        found: list[Any] = [own, *(more if isinstance(more, list) else [more])]
        stops = [stop for stop in found if stop is not None]
        if not stops or any(s not in range(self.vocab_size) for s in stops):
            raise UserError(
                f"{self._folder} has no end token, or one that is not in tokenizer.json, so "
                "completions would never stop: correct eos_token in tokenizer_config.json, or "
                "eos_token_id in generation_config.json or config.json."
            )
        return [*dict.fromkeys(stops)]

    def _compile(self, source: str | list[dict] | None) -> dict[str, jinja2.Template]:
        """Compile the chat template, and further templates that the model has for special cases.

        The template is read from chat_template.jinja if that file exists, or else from the config,
        where it is a string or a list of {"name", "template"}. Some models have the template in
        chat_template.json.
        """
        # A template is code from a checkpoint, so it runs in a sandbox and cannot change messages.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        # Jinja's own filter escapes <, > and & for HTML, but models were not trained on such text.
        env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        env.globals["raise_exception"] = _raise_exception
        # `strftime_now` is missing on purpose: a prompt must not depend on the date of the run.
        # Jinja compiles to Python, so Python's limits apply, such as the depth of nested loops.
        with reading(f"the chat template of {self._folder}", "repair it", "cannot be compiled"):
            if "chat_template.jinja" in self._files:
                source = self._files["chat_template.jinja"].decode()
            only = [{"name": "default", "template": source}]
            named = source if isinstance(source, list) else only
            # if two templates have the same name, the first one is used
            texts = {e["name"]: e["template"] for e in reversed(named) if e["template"]}
            # `generation` is only for supervised training, so the neutral block `with` replaces it
            tag = r"({%[-+]?\s*(?:end)?)generation\b"
            texts = {name: re.sub(tag, r"\1with", text) for name, text in texts.items()}
            self.template_variables: set[str] = {
                name
                for text in texts.values()
                for name in find_undeclared_variables(env.parse(text))
                if name not in ("messages", "add_generation_prompt", *env.globals)
            }
            return {name: env.from_string(text) for name, text in texts.items()}


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
