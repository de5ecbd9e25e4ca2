"""docs/trl.md, read against TRL's own options: none is missing, and what is said to have the same
default has it.
"""

import dataclasses
import re
from pathlib import Path

import transformers
from trl import GRPOConfig

from nanogrpo.config import Config

TEXT = (Path(__file__).parents[1] / "docs" / "trl.md").read_text()
OURS = {f.name: f.default for f in dataclasses.fields(Config)}
ALL = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
THEIRS = ALL.keys() - {f.name for f in dataclasses.fields(transformers.TrainingArguments)}


def named(heading: str, column: int = 1) -> set[str]:
    """What stands in backticks in a column of the table under a heading."""
    table = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[column] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_every_option_of_trl_is_here_or_in_the_tables():
    told = named("The same, under another name") | named("Not here")
    assert THEIRS - OURS.keys() - told == set()
    assert not told & OURS.keys()  # nothing is said to be missing that is here


def test_what_the_tables_name_exists():
    assert named("The same, under another default") <= OURS.keys() & ALL.keys()
    ours = named("The same, under another name", column=2) - {"serve", "fork"}
    assert {name for name in ours if name in OURS} >= {
        "engine",
        "server",
        "rollout",
        "token_budget",
        "enable_thinking",
    }


def test_defaults_are_trls_where_nothing_else_is_said():
    shared = (
        THEIRS
        | {
            "learning_rate",
            "max_grad_norm",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "weight_decay",
        }
    ) & OURS.keys()
    for name in sorted(shared - named("The same, under another default")):
        theirs = GRPOConfig(
            output_dir="-", use_cpu=True, bf16=False, report_to="none"
        ).__getattribute__(name)
        ours = OURS[name]
        assert (list(ours) or None if isinstance(ours, tuple) else ours) == theirs, name
