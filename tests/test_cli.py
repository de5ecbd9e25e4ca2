"""Profiles, --config and --print-config: what goes before what, and what is refused.

test_config.py has the options themselves. Read next: test_train.py.
"""

import dataclasses
import json

import pytest

from nanogrpo.cli import documentation, parse
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.profiles import PROFILES


def printed(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as done:
        parse([*argv, "--print-config"])
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_made_of_valid_options(profile):
    assert PROFILES[profile].keys() <= {field.name for field in dataclasses.fields(Config)}
    cfg = parse(["--model", "m", "--data", "d", "--profile", profile])
    cfg.validate()
    defaults = Config()
    same = {name for name, value in PROFILES[profile].items() if value == getattr(defaults, name)}
    assert same <= {
        "num_generations",
        "learning_rate",
        "max_grad_norm",
    }  # stated because they matter, whatever the defaults become


def test_the_command_line_goes_before_the_file_before_the_profile_before_the_defaults(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"max_steps": 7, "seed": 7, "data": ["a", "b"], "beta": 1}))
    cfg = parse(["--profile", "debug", "--config", str(file), "--seed", "9"])
    assert (cfg.seed, cfg.max_steps, cfg.eval_steps, cfg.max_grad_norm) == (
        9,
        7,
        2,
        Config().max_grad_norm,
    )
    assert cfg.data == ("a", "b")
    assert (cfg.beta, type(cfg.beta)) == (1.0, float)


def test_what_is_printed_can_be_read_back(capsys, tmp_path):
    argv = [
        "--profile",
        "full",
        "--model",
        "m",
        "--data",
        "a b",
        "c\u00b7d",
        "--epsilon-high",
        "0.3",
        "--reward-weights",
        "1",
        "0.5",
    ]
    text = printed(capsys, *argv)
    (tmp_path / "c.json").write_text(text)
    cfg = parse(["--config", str(tmp_path / "c.json")])
    assert cfg == parse(argv)
    assert list(json.loads(text)) == [field.name for field in dataclasses.fields(Config)]
    assert text.isascii()
    assert printed(capsys, "--config", str(tmp_path / "c.json")) == text


def test_nothing_invalid_is_printed(capsys):
    with pytest.raises(UserError, match="--model is missing"):
        parse(["--print-config"])
    with pytest.raises(UserError, match="--beta is -1"):
        parse(["--profile", "debug", "--beta", "-1", "--print-config"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds no JSON object"),
        (b'{"learning-rate": 1}', "there is no option 'learning-rate'; see --help"),
        (b'{"seed": "7"}', 'seed is "7" but must be a whole number'),
        (b'{"seed": 7.0}', "seed is 7.0 but must be a whole number"),
        (b'{"seed": true}', "seed is true but must be a whole number"),
        (b'{"resume": 1}', "resume is 1 but must be true or false"),
        (b'{"model": null}', "model is null but must be a text"),
        (b'{"beta": null}', "beta is null but must be a number"),
        (b'{"beta": false}', "beta is false but must be a number"),
        (b'{"beta": 1' + b"0" * 400 + b"}", "but must be a number"),
        (b'{"delta": "2"}', 'delta is "2" but must be a number or null'),
        (b'{"data": "a.jsonl"}', 'data is "a.jsonl" but must be a list of texts'),
        (b'{"data": ["a", 1]}', 'data is ["a", 1] but must be a list of texts'),
        (
            b'{"reward_weights": [1, null]}',
            "reward_weights is [1, null] but must be a list of numbers",
        ),
    ],
)
def test_a_file_that_does_not_serve_is_named_with_what_is_wrong(tmp_path, content, sentence):
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(UserError) as told:
        parse(["--config", str(tmp_path / "c.json")])
    assert str(told.value).startswith(f"--config {tmp_path / 'c.json'}")
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_or_profile_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="gone cannot be read"):
        parse(["--config", str(tmp_path / "gone")])
    with pytest.raises(UserError, match="--profile is 'fast': choose one of debug, full"):
        parse(["--profile", "fast"])


@pytest.mark.parametrize("columns", [40, 80, 130, 300])
def test_help_fits_the_terminal_and_any_encoding(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert text.isascii()  # a terminal in the C locale would end in a UnicodeEncodeError
    assert max(map(len, text.splitlines())) <= max(min(columns, 130), 80)
    for heading in {heading for heading, _ in documentation().values()}:
        assert f"\n{heading}:\n" in text


def test_comments_of_options_are_plain_ascii():
    """They are printed by --help, on whatever terminal."""
    assert not [name for name, texts in documentation().items() if not "".join(texts).isascii()]
