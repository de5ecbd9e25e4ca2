"""Chat with a checkpoint in the terminal.

    nanogrpo chat runs/demo/checkpoint-60
    echo "34+5-7=" | nanogrpo chat runs/demo/checkpoint-60 --temperature 0

In: messages, one per line. Out: the model's answers, printed while they are sampled, with its
thinking in a fainter style. The options are those of train.py that concern the model and sampling.
Read next: engine/local.py (which samples), model/tokenizer.py (the chat template).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterator

import torch
from rich.console import Console

from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.data.prompts import system_prompt
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError
from nanogrpo.logs import completions, progress
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run.setup import sampling_params
from nanogrpo.types import Prompt

DESCRIPTION = """Chat with a checkpoint. Each line is a message. /clear starts a new conversation,
/exit or Ctrl-D ends the program, and Ctrl-C stops an answer."""
OPTIONS = """
    model system_prompt enable_thinking chat_template_kwargs max_completion_length
    temperature top_p top_k min_p seed device
"""
COMMAND = cli.Command("nanogrpo chat", DESCRIPTION, OPTIONS.split())
OPEN, CLOSE = "<think>", "</think>"
MAX_CONTEXT = 16384  # tokens of conversation, because a GPU allocates the cache for all of them


class Chat:
    """A conversation with a model.

    >>> for piece, is_thinking in Chat(cfg).answer("What is 3+4?"): print(piece, end="")
    """

    def __init__(self, cfg: Config):
        self.cfg, source = cfg, checkpoint.locate(cfg.model)
        self.tokenizer = Tokenizer(source)
        found = "cuda" if torch.cuda.is_available() else "cpu"
        device = found if cfg.device == "auto" else cfg.device
        if device == "cuda" and found == "cpu":
            raise UserError("--device cuda: torch sees no GPU on this machine; use --device cpu.")
        model = checkpoint.load_model(source, device=device)
        self.max_len = min(model.cfg.max_position_embeddings, MAX_CONTEXT)
        self.engine = LocalEngine(model.cfg, max_len=self.max_len, slots=1, device=device)
        self.engine.load(model, version=0)
        self.system = system_prompt(cfg.system_prompt)
        self.turns = 0  # part of the random key, so a repeated question gets a new answer
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, message: str) -> Generator[tuple[str, bool], None, None]:
        """Yield the pieces of the answer to a message, and whether they are thinking.

        The answer becomes part of the conversation, without its thinking. Without a chat template
        there is no conversation: the model continues the message as a text. Raises UserError if the
        conversation is too long or the chat template rejects it.
        """
        cfg, encode = self.cfg, self.tokenizer.encode_prompt
        asked = [*self.messages, {"role": "user", "content": message}]
        variables = {"enable_thinking": cfg.enable_thinking, **(cfg.chat_template_kwargs or {})}
        ids = encode(asked if self.tokenizer.has_chat_template else message, **variables)
        room = min(cfg.max_completion_length, self.max_len - len(ids))
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, which leaves no room for an answer in a "
                f"context of {self.max_len}: start a new one with /clear."
            )
        self.turns += 1
        params = dataclasses.replace(sampling_params(cfg, self.tokenizer), max_tokens=room)
        thinks = self.tokenizer.decode(ids).rstrip().endswith(OPEN)  # some templates open the tag
        shown = ["", ""]  # the answer and the thinking so far
        text = ""

        def new_pieces(text: str) -> Iterator[tuple[str, bool]]:
            """Yield what the text has and `shown` has not."""
            for is_thinking, part in enumerate(split(text, thinks)):
                if piece := part[len(shown[is_thinking]) :]:
                    shown[is_thinking] = part
                    yield piece, bool(is_thinking)

        try:
            for (sample,) in self.engine.sample_steps([Prompt(self.turns, "", ids)], 1, params, 0):
                text = self.tokenizer.decode(sample.token_ids)
                yield from new_pieces(_complete(text))
            yield from new_pieces(text)  # with what was held back
        finally:  # also if the caller stops in the middle
            reply = split(text, thinks)[0].strip()
            self.messages = [*asked, {"role": "assistant", "content": reply}]


def split(text: str, thinks: bool) -> tuple[str, str]:
    """Split a completion into (answer, thinking). `thinks`: the prompt has opened the tag.

    >>> split("<think>3+4=7</think>It is 7.", False)
    ('It is 7.', '3+4=7')
    """
    body = text.lstrip()
    if not (thinks or body.startswith(OPEN)):
        return text, ""
    thinking, _, answer = body.removeprefix(OPEN).partition(CLOSE)
    return answer.lstrip("\n"), thinking


def _complete(text: str) -> str:
    """Return a growing text without an end that may still change: half of a tag, or of a character
    whose bytes are spread over several tokens.
    """
    text = text.rstrip("\ufffd")
    halves = (tag[:n] for tag in (OPEN, CLOSE) for n in range(len(tag) - 1, 0, -1))
    text = text.removesuffix(next(filter(text.endswith, halves), ""))
    return text if text.strip() else ""  # after white space only, a tag may follow


def main(argv: list[str] | None = None) -> int:
    try:
        cfg = cli.parse(cli.with_model(argv), COMMAND)
        # here, unlike in training, the temperature may be 0 (greedy)
        dataclasses.replace(cfg, data=("none",), temperature=cfg.temperature or 1.0).validate()
        chat = Chat(cfg)
        with progress.output() as console, contextlib.suppress(EOFError):
            while (message := input("> " if sys.stdin.isatty() else "").strip()) != "/exit":
                if message == "/clear":
                    chat.clear()
                elif message:
                    try:
                        _show(console, chat, message)
                    except UserError as e:  # for example, the conversation is too long
                        print(f"error: {e}", file=sys.stderr)
    # FloatingPointError: the logits are not finite; UnicodeDecodeError: the input is not UTF-8
    except (UserError, FloatingPointError, UnicodeDecodeError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _show(console: Console, chat: Chat, message: str) -> None:
    """Print the answer to a message while it is sampled. Ctrl-C stops it."""
    pieces = chat.answer(message)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pieces):
        was_thinking = False
        for piece, is_thinking in pieces:
            if was_thinking and not is_thinking:
                console.print()
            was_thinking = is_thinking
            text = completions.plain(piece, "dim" if is_thinking else "")
            console.print(text, end="", soft_wrap=True)
    console.print()


if __name__ == "__main__":
    sys.exit(main())
