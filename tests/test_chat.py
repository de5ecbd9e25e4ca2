"""`nanogrpo chat`: the answer is what the engine samples.

Read next: nanogrpo/extras/chat.py.
"""

import io

import pytest

from nanogrpo import Config
from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras import chat, commands
from nanogrpo.extras.chat import Chat
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt
from tests.engine.small import make_engine


def test_the_pieces_are_what_the_engine_samples(tiny_base):
    talk = Chat(Config(model=str(tiny_base), max_completion_length=12, seed=3), "cpu")
    text = "".join(talk.answer("3+4="))
    ids = talk.tokenizer.encode_prompt(talk.messages[:1], enable_thinking=True)
    model = checkpoint.load_model(tiny_base)
    engine = make_engine(model)
    stops = talk.tokenizer.stop_token_ids
    params = SamplingParams(max_tokens=12, stop_token_ids=stops, seed=3)
    (sample,) = engine.sample([Prompt(1, "", ids)], 1, params, step=0)
    assert text == talk.tokenizer.decode(sample.token_ids)
    assert talk.messages == [
        {"role": "user", "content": "3+4="},
        {"role": "assistant", "content": text.strip()},
    ]
    talk.clear()
    assert talk.messages == []


def test_the_thinking_is_shown_but_does_not_stay_in_the_conversation(tiny_base):
    talk = Chat(Config(model=str(tiny_base)), "cpu")
    talk.tokenizer.decode = lambda ids: "<think>3+4=7</think>\n\nIt is 7."
    assert "".join(talk.answer("3+4=")) == "<think>3+4=7</think>\n\nIt is 7."
    assert talk.messages[-1]["content"] == "It is 7."


def test_a_conversation_ends_with_the_input(tiny_base, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("3+4=\n\n/clear\n5+6=\n/exit\nignored\n"))
    argv = f"chat {tiny_base} --temperature 0 --max-completion-length 6 --device cpu"
    assert commands.main(argv.split()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("nope", "there is no such folder"),
        ("BASE --learning-rate 1", "--learning-rate is not an option"),
        ("BASE --temperature -1", "it must be > 0"),
        ('BASE --chat-template-kwargs {"y":1}', "--chat-template-kwargs sets y, but"),
        ("BASE", "the conversation has"),
    ],
)
def test_a_mistake_is_one_sentence(tiny_base, monkeypatch, capsys, argv, message):
    monkeypatch.setattr(chat, "MAX_CONTEXT", 20)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+" * 40))
    argv = argv.replace("BASE", str(tiny_base))
    assert commands.main(f"chat {argv} --device cpu".split()) == 2
    assert message in capsys.readouterr().err
