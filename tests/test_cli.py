"""Tests of --profile, --config and --print-config: their precedence and their error messages.

test_config.py covers the options themselves. Read next: test_train.py.
"""

import dataclasses
import json

import pytest

from nanogrpo.cli import PROFILES, parse
from nanogrpo.config import Config
from nanogrpo.errors import UserError


def printed(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as done:
        parse([*argv, "--print-config"])
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_valid_options(profile):
    cfg = parse(["--model", "m", "--data", "d", "--profile", profile])
    cfg.validate()
    defaults = Config()
    same = {name for name, value in PROFILES[profile].items() if value == getattr(defaults, name)}
    # these are stated because they matter, even if the defaults change
    assert same <= {"num_generations", "learning_rate", "max_grad_norm"}


def test_the_command_line_overrides_the_file_which_overrides_the_profile(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"max_steps": 7, "seed": 7, "data": ["a", "b"], "beta": 1}))
    cfg = parse(["--profile", "debug", "--config", str(file), "--seed", "9"])
    assert (cfg.seed, cfg.max_steps, cfg.eval_steps) == (9, 7, 2)
    assert cfg.max_grad_norm == Config().max_grad_norm
    assert cfg.data == ("a", "b")
    assert (cfg.beta, type(cfg.beta)) == (1.0, float)


def test_printed_options_can_be_loaded_again(capsys, tmp_path):
    argv = ["--profile", "full", "--model", "m", "--epsilon-high", "0.3"]
    argv += ["--reward-weights", "1", "0.5", "--data", "a b", "c\u00b7d"]
    text = printed(capsys, *argv)
    (tmp_path / "c.json").write_text(text)
    cfg = parse(["--config", str(tmp_path / "c.json")])
    assert cfg == parse(argv)
    assert list(json.loads(text)) == [field.name for field in dataclasses.fields(Config)]
    assert text.isascii()
    assert printed(capsys, "--config", str(tmp_path / "c.json")) == text


def test_invalid_options_are_not_printed(capsys):
    with pytest.raises(UserError, match="--model is missing"):
        parse(["--print-config"])
    with pytest.raises(UserError, match="--beta is -1"):
        parse(["--profile", "debug", "--beta", "-1", "--print-config"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "holds no JSON object"),
        (b'{"learning-rate": 1}', "learning-rate is not an option: use learning_rate, or see"),
        (b'{"seed": "7"}', 'seed is "7" but must be a whole number'),
        (b'{"seed": 7.0}', "seed is 7.0 but must be a whole number"),
        (b'{"seed": true}', "seed is true but must be a whole number"),
        (b'{"resume": 1}', "resume is 1 but must be true or false"),
        (b'{"model": 1}', "model is 1 but must be a string"),
        (b'{"beta": false}', "beta is false but must be a number"),
        (b'{"beta": 1' + b"0" * 400 + b"}", "but must be a number"),
        (b'{"delta": "2"}', 'delta is "2" but must be a number or null'),
        (b'{"data": "a.jsonl"}', 'data is "a.jsonl" but must be a list of strings'),
        (b'{"data": ["a", 1]}', 'data is ["a", 1] but must be a list of strings'),
        (b'{"reward_weights": [1, null]}', "is [1, null] but must be a list of numbers"),
    ],
)
def test_a_bad_config_file_is_named_with_its_problem(tmp_path, content, sentence):
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        parse(["--config", str(tmp_path / "c.json")])
    assert str(error.value).startswith(f"--config {tmp_path / 'c.json'}")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_config_file_or_profile(tmp_path):
    with pytest.raises(UserError, match=r"--config .*gone is missing"):
        parse(["--config", str(tmp_path / "gone")])
    with pytest.raises(UserError, match=r"--config \. is not a file"):
        parse(["--config", ""])  # an unset variable of a shell
    with pytest.raises(UserError, match="--profile is 'fast': choose one of debug, full"):
        parse(["--profile", "fast"])
