"""Text ↔ token ids, and messages → text: the `tokenizers` package plus the model's own chat
template, without transformers.

In: a model folder in Hugging Face's layout. Out: `Tokenizer`, whose `encode_prompt` makes the
`token_ids` of a `Prompt`. Read next: data.py, which calls it once per prompt; the engines call only
`decode` and `stop_token_ids`.

A worked example, with a Qwen3 folder:
    messages                  [{"role": "user", "content": "3+4="}]
    render(messages)          "<|im_start|>user\\n3+4=<|im_end|>\\n<|im_start|>assistant\\n"
    encode_prompt(messages)   [151644, 872, 198, 18, 10, 19, 28, 151645, 198, 151644, 77091, 198]
"""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanogrpo.errors import UserError

# Read at load and written back unchanged by `save`. vocab.json and the like repeat tokenizer.json
# for transformers' slow path.
FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
]
FILES += ["added_tokens.json", "vocab.json", "merges.txt"]


class Tokenizer:
    """What the project asks of a tokenizer. Ids are Python ints, texts are str; nothing here is
    batched or padded.

    `vocab_size`: ids are below it. The model's own vocabulary may be padded beyond it, and then
    holds ids with no text. `eos_token_id`: the tokenizer's end token. `stop_token_ids`: every id
    that ends a completion, eos first; chat models name several in generation_config.json (Qwen3:
    <|im_end|> and <|endoftext|>), and missing one means sampling to the limit. `pad_token_id`: only
    for those who export; the training path has no padding.
    """

    def __init__(self, files: dict[str, bytes], folder: str | Path = "tokenizer"):
        """`files`: content of each of FILES that exists, by name; `folder` only names them in
        errors.
        """
        self._files, self._folder = files, Path(folder)
        if "tokenizer.json" not in files:
            raise UserError(
                f"{self._folder} has no tokenizer.json: name a folder that save_pretrained has written"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the Rust side raises plain Exception, whatever is wrong
            raise UserError(
                f"{self._folder / 'tokenizer.json'} cannot be read ({error}): copy it again from the model"
            ) from error
        # A tokenizer.json may remember the truncation and padding of whoever saved it: prompts must
        # be cut by neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = {**self._json("special_tokens_map.json"), **self._json("tokenizer_config.json")}
        # A special token is written as "text" or as {"content": "text", ...}; templates see the
        # text, and never a null.
        tokens = {
            k: v.get("content") if isinstance(v, dict) else v
            for k, v in config.items()
            if k.endswith("_token")
        }
        # e.g. {"eos_token": "<|im_end|>"}
        self._special = {k: v for k, v in tokens.items() if isinstance(v, str)}

        self.vocab_size: int = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.pad_token_id: int | None = self._id("pad_token")
        eos = self._id("eos_token")
        stops = ([] if eos is None else [eos]) + self._more_stops()
        if not stops:
            raise UserError(
                f"{self._folder / 'tokenizer_config.json'} names no eos_token: add it, or no completion ever stops"
            )
        self.stop_token_ids: list[int] = list(dict.fromkeys(stops))
        self.eos_token_id: int = stops[0]
        self._template = self._compile(config.get("chat_template"))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Load from a local folder. UserError when it is missing, or its files are not what their
        names say.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder: name a local model folder that holds tokenizer.json"
            )
        return cls(
            {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()},
            folder,
        )

    def save(self, folder: str | Path) -> None:
        """Write the files this was loaded from, byte for byte, so that a checkpoint tokenizes
        exactly as its base did.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (Path(folder) / name).write_bytes(content)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Text → ids. None is added at the ends; special tokens *written in* the text become their
        one id, as templates need.

        special: False for text that is nobody's template, such as a tool's answer: what is written
        in it is ordinary text.
        """
        # the library's word for "as any other text"
        self._tokenizer.encode_special_tokens = not special
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # half a surrogate pair, which JSON's "\\ud800" can bring into a str
        except TypeError as error:
            raise UserError(
                f"the text {ascii(text)[:60]} cannot be encoded as UTF-8: write whole characters"
            ) from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Ids → text. <think> and </think> survive `skip_special_tokens`: Qwen3 adds them as
        ordinary tokens.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **kwargs,
    ) -> str:
        """Messages → the text the model was taught to continue, as transformers'
        `apply_chat_template`, but without today's date.

        `enable_thinking`: Qwen3's switch; None leaves it undefined, so that the template's own
        default holds (for Qwen3: think). `kwargs` reach the template as variables. UserError when
        there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise UserError(
                f"{self._folder} has no chat template: give text prompts, or add a chat_template.jinja"
            )
        # templates ask `enable_thinking is defined`, so None must not be passed on
        if enable_thinking is not None:
            kwargs["enable_thinking"] = enable_thinking
        # A null field counts as absent (transformers does the same): `content: null` would be
        # printed as "None".
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        fields = {"tools": None, "documents": None, **self._special, **kwargs}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **fields
            )
        # a template is somebody's program: it may divide by zero, or add a message to a string
        except Exception as error:
            raise UserError(
                f"the chat template of {self._folder} refuses the messages ({error}): change the prompt"
            ) from error

    def encode_prompt(
        self, prompt: str | list[dict], *, enable_thinking: bool | None = None
    ) -> list[int]:
        """A prompt as in the data → ids. Text is encoded as is (`enable_thinking` has no say);
        messages are rendered first.
        """
        return self.encode(
            prompt
            if isinstance(prompt, str)
            else self.render(prompt, enable_thinking=enable_thinking)
        )

    def _json(self, name: str) -> dict:
        try:
            value = json.loads(self._files.get(name, b"{}"))
        # not JSON, or not UTF-8, or brackets without end
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{self._folder / name} is not JSON ({error}): copy it again from the model"
            ) from error
        if not isinstance(value, dict):
            raise UserError(
                f"{self._folder / name} holds a {type(value).__name__}, not an object: copy it again from the model"
            )
        return value

    def _id(self, name: str) -> int | None:
        if name not in self._special:
            return None
        if (found := self._tokenizer.token_to_id(self._special[name])) is None:
            raise UserError(
                f"{self._folder}: {name} {self._special[name]!r} is not in tokenizer.json; make the two files agree"
            )
        return found

    def _more_stops(self) -> list[int]:
        """The ids in generation_config.json that end a completion beside eos_token: none, one, or a
        list.
        """
        stops = self._json("generation_config.json").get("eos_token_id")
        stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
        for stop in stops:
            if type(stop) is not int or not 0 <= stop < self.vocab_size:  # a bool is no id
                raise UserError(
                    f"{self._folder / 'generation_config.json'}: eos_token_id holds {stop!r}, which is no id of tokenizer.json: "
                    f"give whole numbers from 0 to {self.vocab_size - 1}"
                )
        return stops

    def _compile(self, template: str | list[dict] | None) -> jinja2.Template | None:
        """The template of chat_template.jinja, else of the config: a string, or a list of {"name",
        "template"}.
        """
        if "chat_template.jinja" in self._files:
            try:
                template = self._files["chat_template.jinja"].decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self._folder / 'chat_template.jinja'} is not UTF-8 ({error}): copy it again from the model"
                ) from error
        if isinstance(template, list) and all(
            isinstance(e, dict) and {"name", "template"} <= e.keys() for e in template
        ):
            template = next(
                (entry["template"] for entry in template if entry["name"] == "default"), None
            )
        if template is None:
            return None
        if not isinstance(template, str):
            raise UserError(
                f"{self._folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of "
                '{"name": text, "template": text}; mend it or remove it'
            )
        # A template comes from whoever made the model: sandboxed, and unable to change the messages
        # it is shown.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        env.filters["tojson"] = _tojson
        # No `strftime_now`: a prompt with today's date in it would not repeat tomorrow, when the
        # run is resumed.
        env.globals["raise_exception"] = _raise_exception
        try:
            return env.from_string(template)
        # jinja makes Python of it, which has limits of its own, such as loops nested too deep
        except Exception as error:
            raise UserError(
                f"the chat template of {self._folder} cannot be compiled ({error}): repair it"
            ) from error


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks what supervised training should learn:
    here, just its body.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON: jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
