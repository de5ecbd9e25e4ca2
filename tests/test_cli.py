"""Tests of --profile, --config and --print-config: their precedence and their error messages.

test_config.py covers the options themselves. Read next: test_train.py.
"""

import dataclasses
import json
import re

import pytest

from nanogrpo import Config
from nanogrpo.extras.commandline import parse
from nanogrpo.extras.profiles import PROFILES
from tests.conftest import refused


def printed(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as done:
        parse([*argv, "--print-config"])
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_valid_options(profile):
    cfg = parse(f"--model m --data d --profile {profile}".split())
    cfg.validate()
    defaults = Config()
    same = {name for name, value in PROFILES[profile].items() if value == getattr(defaults, name)}
    # these are stated because they matter, even if the defaults change
    assert same <= {"num_generations", "learning_rate", "max_grad_norm"}


def test_the_command_line_overrides_the_file_which_overrides_the_profile(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"max_steps": 7, "seed": 7, "data": ["a", "b"], "beta": 1}))
    cfg = parse(f"--profile debug --config {file} --seed 9".split())
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


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("c.json", b"", "is not valid JSON"),
        ("c.json", b"\xff", "is not valid JSON"),
        ("c.json", b"[1]", "must contain a JSON object"),
        ("c.json", b'{"seed": 1, "seed": 2}', "is not valid JSON (seed is given twice)"),
        ("c.yaml", b"seed: 1\nseed: 2", "cannot be read (seed is given twice): correct it."),
        (
            "c.json",
            b'{"learning-rate": 1}',
            "learning-rate is not an option: use learning_rate, or",
        ),
        ("c.json", b'{"seed": "7"}', "--seed is '7' but must be a whole number"),
        ("c.json", b'{"seed": true}', "--seed is True but must be a whole number"),
        ("c.json", b'{"beta": 1' + b"0" * 400 + b"}", "but must be a number"),
        ("c.json", b'{"data": ["a", 1]}', "--data is ['a', 1] but must be a list of strings"),
        ("c.yaml", b"", "holds no options: write one `name: value` per line."),
        ("c.yaml", b"- a", "holds no options"),
        ("c.yaml", b"a: [", "cannot be read ("),
        ("c.yaml", b"!!python/object:os.system {}", "cannot be read ("),
        ("c.yaml", b"learning_rte: 1", "learning_rte is not an option: use learning_rate, or see"),
        ("c.yaml", b"seed: 2026-01-01", "--seed is datetime.date(2026, 1, 1) but must be a whole"),
        ("c.yaml", b"learning_rate: 1e-4x", "--learning-rate is '1e-4x' but must be a number."),
        ("c.yaml", b"data: a.jsonl", "--data is 'a.jsonl' but must be a list of strings."),
    ],
)
def test_a_bad_config_file_is_named_with_its_problem(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with refused(f"^--config {tmp_path / name}.*{re.escape(sentence)}"):
        parse(["--config", str(tmp_path / name)])
