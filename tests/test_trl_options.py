"""Tests of docs/trl.md against TRL: its tables list every option that differs, and no other.

Read next: docs/trl.md.
"""

import dataclasses
import re
from pathlib import Path

import transformers
from trl import GRPOConfig

from nanogrpo.config import Config

TEXT = (Path(__file__).parents[1] / "docs" / "trl.md").read_text()
OURS = {f.name: f.default for f in dataclasses.fields(Config)}
ALL = {f.name for f in dataclasses.fields(GRPOConfig)}
THEIRS = ALL - {f.name for f in dataclasses.fields(transformers.TrainingArguments)}


def listed(heading: str, column: int = 1) -> set[str]:
    """Return the names in backticks in one column of the table under a heading."""
    table = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[column] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_every_option_of_trl_is_an_option_here_or_in_the_tables():
    elsewhere = listed("Same option, different name") | listed("Not supported")
    assert THEIRS - OURS.keys() - elsewhere == set()
    assert not elsewhere & OURS.keys(), "the tables list an option that exists"


def test_the_options_in_the_tables_exist():
    assert listed("Same option, different default") <= OURS.keys() & ALL
    names = listed("Same option, different name", column=2) - {"serve", "fork"}
    assert names <= OURS.keys()
    assert names >= {"engine", "server", "rollout", "token_budget"}


def test_defaults_are_those_of_trl_unless_the_table_says_otherwise():
    theirs = GRPOConfig(output_dir="-", use_cpu=True, bf16=False, report_to="none")
    optimizer = {"learning_rate", "max_grad_norm", "weight_decay"}
    optimizer |= {"adam_beta1", "adam_beta2", "adam_epsilon"}
    shared = (THEIRS | optimizer) & OURS.keys() - listed("Same option, different default")
    assert len(shared) > 30
    for name in sorted(shared):
        ours = OURS[name]
        if isinstance(ours, tuple):
            ours = list(ours) or None
        assert ours == getattr(theirs, name), name
