"""`nanogrpo chat`: the answer is what the engine samples, and thinking is split off.

Read next: nanogrpo/chat.py.
"""

import io
import itertools
import os

import pytest

from nanogrpo import chat
from nanogrpo.chat import Chat, split
from nanogrpo.config import Config
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt


def config(base, **options) -> Config:
    return Config(model=str(base), max_completion_length=12, device="cpu", **options)


@pytest.mark.parametrize(
    ("text", "thinks", "answer", "thinking"),
    [
        ("It is 7.", False, "It is 7.", ""),
        ("<think>3+4=7</think>\n\nIt is 7.", False, "It is 7.", "3+4=7"),
        ("3+4=7</think>It is 7.", True, "It is 7.", "3+4=7"),
        ("<think>3+4", False, "", "3+4"),
        ("3+4", True, "", "3+4"),
        ("a < b", False, "a < b", ""),
        ("\n  <think>a</think>Hello", False, "Hello", "a"),
    ],
)
def test_thinking_is_split_from_the_answer(text, thinks, answer, thinking):
    assert split(text, thinks) == (answer, thinking)
    # while the text grows, both parts only grow
    parts = [split(chat._complete(text[:n]), thinks) for n in range(len(text) + 1)]
    for (a, t), (later_a, later_t) in itertools.pairwise(parts):
        assert later_a.startswith(a)
        assert later_t.startswith(t)


def test_the_pieces_are_what_the_engine_samples(tiny_base):
    talk = Chat(config(tiny_base, seed=3))
    pieces = list(talk.answer("3+4="))
    ids = talk.tokenizer.encode_prompt(talk.messages[:1], enable_thinking=True)
    model = checkpoint.load_model(tiny_base)
    engine = LocalEngine(model.cfg, max_len=100, slots=1, device="cpu")
    engine.load(model, version=0)
    stops = talk.tokenizer.stop_token_ids
    params = SamplingParams(max_tokens=12, stop_token_ids=stops, seed=3)
    (sample,) = engine.sample([Prompt(1, "", ids)], 1, params, step=0)
    text = "".join(piece for piece, _ in pieces)
    assert text == "".join(reversed(split(talk.tokenizer.decode(sample.token_ids), False)))
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    talk.clear()
    assert talk.messages == []


def test_a_conversation_ends_with_the_input(tiny_base, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("3+4=\n\n/clear\n5+6=\n/exit\nignored\n"))
    argv = [str(tiny_base), "--temperature", "0", "--max-completion-length", "6"]
    assert chat.main([*argv, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""


def test_a_reader_that_ends_first_is_no_error(tiny_base, monkeypatch):
    """As in `nanogrpo chat MODEL | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        monkeypatch.setattr("sys.stdin", io.StringIO("3+4=\n" * 3))
        assert chat.main([str(tiny_base), "--device", "cpu", "--max-completion-length", "6"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nope"], "there is no such folder"),
        ([], "--model is missing"),
        (["--model", "x", "--learning-rate", "1"], "--learning-rate is not an option"),
        (["--model", "x", "--temperature", "-1"], "it must be > 0"),
        (["--model", "x", "--device", "cuda"], "torch sees no GPU"),
        (["--model", "x", "--system-prompt", "gone.txt"], "gone.txt"),
    ],
)
def test_a_mistake_is_one_sentence(tiny_base, capsys, argv, message):
    argv = [str(tiny_base) if word == "x" else word for word in argv]
    assert chat.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_conversation_that_is_too_long_asks_to_start_a_new_one(tiny_base, monkeypatch, capsys):
    monkeypatch.setattr(chat, "MAX_CONTEXT", 20)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+" * 40 + "\n/clear\n1+\n"))
    argv = ["--model", str(tiny_base), "--device", "cpu", "--max-completion-length", "2"]
    assert chat.main(argv) == 0
    assert capsys.readouterr().err.count("start a new one with /clear") == 1
