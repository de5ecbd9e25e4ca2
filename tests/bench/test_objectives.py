"""Tests that the bench of objectives has valid cases, continues when interrupted, and writes its
page from its records.
"""

import shlex

from bench import common, objectives
from bench.learning import fingerprint
from nanogrpo.cli import parse
from nanogrpo.config import CHOICES
from nanogrpo.run import warmup


def test_every_case_is_valid_and_every_loss_type_has_one():
    used = set()
    for options in objectives.CASES.values():
        argv = f"{objectives.SETTINGS} {options} --model base --data arithmetic"
        cfg = parse(shlex.split(argv))
        cfg.validate()
        used.add(cfg.loss_type)
    assert used == set(CHOICES["loss_type"]) - {"bnpo"}  # the same as dapo here


def test_an_interrupted_bench_continues(tmp_path):
    warmup.make_base(tmp_path / "base", steps=2)
    done = {
        "base": fingerprint(tmp_path / "base/model.safetensors"),
        "settings": objectives.SETTINGS,
        "steps": 1,
        "case": "dapo",
        "options": "",
        "seed": 0,
        "held_out": [0.25, 0.5],
        "rewards": [0.5],
        "entropies": [0.125],
        "clip_ratio": 0.0,
    }
    common.write("objectives", [done], tmp_path)
    argv = f"--base {tmp_path}/base --out {tmp_path} --page {tmp_path}/page.md --workers 1"
    first, second = objectives.main(f"{argv} --steps 1 --seeds 2 --cases dapo".split())
    assert first == done
    assert second["seed"] == 1
    assert len(second["held_out"]) == 2
    assert len(second["rewards"]) == 1
    assert "| dapo | `the defaults` | 2 | " in (tmp_path / "page.md").read_text()


def test_the_page_is_made_from_the_records():
    page = (common.ROOT / "docs/objectives.md").read_text()
    assert page == objectives.page(common.read("objectives")), (
        "run python -m bench.objectives --redraw"
    )
