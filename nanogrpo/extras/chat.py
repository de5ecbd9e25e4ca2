"""Chat with a checkpoint in the terminal.

    nanogrpo chat runs/demo/checkpoint-60
    echo "34+5-7=" | nanogrpo chat runs/demo/checkpoint-60 --temperature 0

In: messages, one per line. Out: the model's answers, printed while they are sampled. The options
for the model and for sampling are the same as in train.py. For a checkpoint of a run, the options
in TAKEN have the values of the run, unless you set them. Read next: engine/local.py (sampling),
model/tokenizer.py (the chat template).
"""

import contextlib
import dataclasses
import sys
from collections.abc import Generator

import torch

from nanogrpo import cli
from nanogrpo.data.prompts import load, system_prompt
from nanogrpo.distributed.world import join
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError
from nanogrpo.extras import commandline, completions
from nanogrpo.extras.attach import attach
from nanogrpo.extras.options import Config
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run.setup import empty_model, sampling_params
from nanogrpo.types import Prompt

DESCRIPTION = """Chat with a checkpoint. Each line is a message. /clear starts a new conversation,
/exit or Ctrl-D ends the program, and Ctrl-C stops an answer. For a checkpoint of a run, options
that are not given are those of the run, except --max-completion-length."""
TAKEN = "system_prompt enable_thinking chat_template_kwargs temperature top_p top_k"
OPTIONS = f"{TAKEN} model max_completion_length seed device"
PROGRAM = cli.parser(Config, OPTIONS.split(), "nanogrpo chat MODEL [options]", DESCRIPTION)
MAX_CONTEXT = 16384  # maximum tokens of a conversation, and of the cache on a GPU


class Chat:
    """A conversation with a model.

    >>> for piece in Chat(cfg, "cpu").answer("What is 3+4?"): print(piece, end="")
    """

    def __init__(self, cfg: Config, device: torch.device | str):
        self.cfg, source = cfg, checkpoint.locate(cfg.model)
        self.tokenizer = Tokenizer(source)
        load(cfg, self.tokenizer, [])  # checks --chat-template-kwargs
        kind = type(empty_model(source, attach(cfg)))
        model = checkpoint.load_model(source, device=device, kind=kind)
        self.max_len = min(model.cfg.max_position_embeddings, MAX_CONTEXT)
        self.engine = LocalEngine(
            model.cfg, decoder=type(model), max_len=self.max_len, slots=1, device=device
        )
        self.engine.load(model, version=0)
        self.system = system_prompt(cfg.system_prompt)
        self.turns = 0  # part of the random key, so that a repeated question gets a new answer
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, message: str) -> Generator[str, None, None]:
        """Yield the pieces of the answer to a message.

        The answer without its thinking becomes part of the conversation. Without a chat template
        there is no conversation, and the model only continues the message. Raises UserError if the
        conversation is too long or the chat template rejects it.
        """
        cfg, tokenizer = self.cfg, self.tokenizer
        asked = [*self.messages, {"role": "user", "content": message}]
        prompt = asked if tokenizer.has_chat_template else message
        ids = tokenizer.encode_prompt(prompt, **cfg.chat_variables)
        room = min(cfg.max_completion_length, self.max_len - len(ids))
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, which leaves no room for an answer in a "
                f"context of {self.max_len}: start a new conversation."
            )
        self.turns += 1
        params = dataclasses.replace(sampling_params(cfg, tokenizer), max_tokens=room)
        text = ""
        try:
            for (sample,) in self.engine.sample_steps([Prompt(self.turns, "", ids)], 1, params, 0):
                # a character's bytes may be spread over several tokens
                so_far = tokenizer.decode(sample.token_ids).rstrip("\ufffd")
                yield so_far[len(text) :]
                text = so_far
        finally:  # runs even if the caller stops before the end
            reply = text.rpartition("</think>")[2].strip()
            self.messages = [*asked, {"role": "assistant", "content": reply}]


def main(argv: list[str]) -> None:
    cfg = commandline.parse(argv, PROGRAM, TAKEN)
    # unlike in training, the temperature may be 0 (greedy)
    dataclasses.replace(cfg, data=("none",), temperature=cfg.temperature or 1.0).validate()
    with join(cfg) as world, contextlib.suppress(EOFError):
        chat = Chat(cfg, world.device)
        while (message := input("> " if sys.stdin.isatty() else "").strip()) != "/exit":
            if message == "/clear":
                chat.clear()
            elif message:
                # Ctrl-C stops the answer
                with contextlib.suppress(KeyboardInterrupt):
                    for piece in chat.answer(message):
                        print(completions.plain(piece), end="", flush=True)
                print()
