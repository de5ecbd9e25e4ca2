"""Tests that the bench of objectives has valid rows, continues when interrupted, and writes its
page from its records.
"""

import shlex

from bench import common, objectives
from bench.learning import fingerprint
from nanogrpo.cli import parse
from nanogrpo.config import CHOICES
from nanogrpo.run import warmup


def test_every_row_is_valid_and_every_loss_type_has_one():
    used = set()
    for name, experiment in objectives.EXPERIMENTS.items():
        for case in experiment.cases:
            cfg = parse(shlex.split(f"{objectives.command(name, case)} --model base"))
            cfg.validate()
            used.add(cfg.loss_type)
    assert used == set(CHOICES["loss_type"]) - {"bnpo"}  # the same as dapo here


def test_the_rows_of_an_experiment_differ_only_in_what_it_varies():
    """All runs on word problems sample as many completions; without repeats, they make as many
    updates, except for those on policy.
    """
    for name, experiment in objectives.EXPERIMENTS.items():
        if name == "tiny":
            continue
        for case in experiment.cases:
            cfg = parse(shlex.split(f"{objectives.command(name, case)} --model base"))
            assert cfg.max_steps * cfg.generation_batch_size == 3072, (name, case)
            updates = 24 if experiment.options == objectives.ON_POLICY else 96
            assert cfg.max_steps * cfg.steps_per_generation == updates, (name, case)


def test_an_interrupted_bench_continues(tmp_path, monkeypatch):
    warmup.make_base(tmp_path / "base", steps=2)
    options = f"{objectives.TINY} --max-steps 1"
    short = objectives.Experiment("Does it learn?", options, {"dapo": ""}, "It does.")
    monkeypatch.setattr(objectives, "EXPERIMENTS", {"tiny": short})
    done = {
        "base": fingerprint(tmp_path / "base/model.safetensors"),
        "options": options,
        "seed": 0,
        "held_out": [0.25, 0.5],
        "rewards": [0.5],
        "entropies": [0.125],
        "clip_ratio": 0.0,
        "machine": common.machine(),
    }
    common.write("objectives", [done], tmp_path)
    out = f"--out {tmp_path} --page {tmp_path}/page.md --picture {tmp_path}/picture.png"
    argv = f"--tiny-base {tmp_path}/base {out} --workers 1 --seeds 2"
    first, second = objectives.main(argv.split())
    assert first == done
    assert second["seed"] == 1
    assert len(second["held_out"]) == 2
    assert len(second["rewards"]) == 1
    assert "| dapo | – | 2 | " in (tmp_path / "page.md").read_text()


def test_differences_are_paired_by_seed():
    def row(*ends):
        return [{"seed": seed, "held_out": [0.0, end]} for seed, end in enumerate(ends)]

    def difference(mine, first):
        return objectives.difference(objectives.end, mine, first)

    # the differences are 0.1, 0.2 and 0.3: standard deviation 0.1, divided by the root of 3
    assert difference(row(0.3, 0.5, 0.9), row(0.2, 0.3, 0.6)) == "+0.200 ± 0.058"
    assert difference(row(0.3), row(0.2, 0.3)) == "–"  # one pair has no spread


def test_the_page_is_made_from_the_records():
    page = (common.ROOT / "docs/objectives.md").read_text()
    assert page == objectives.page(common.read("objectives")), (
        "run python -m bench.objectives --redraw"
    )
