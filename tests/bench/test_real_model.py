"""Tests of the bench of a real model, on a tiny one. Read next: bench/real_model.py."""

import json

import pytest

from bench import common, real_model, tables
from nanogrpo.run import warmup

# TRL uses deprecated parts of transformers
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "base"
    warmup.make_base(folder, steps=2)
    return folder


@pytest.fixture
def argv(base, tmp_path, monkeypatch):
    """The options of a quick run, with problems written to a temporary folder."""
    options = json.loads(real_model.OPTIONS.read_text())
    options |= {
        "data": [f"{tmp_path}/problems/train.jsonl"],
        "eval_data": [f"{tmp_path}/problems/held_out.jsonl"],
        "reward_timeout": 0.0,
    }
    (tmp_path / "options.json").write_text(json.dumps(options))
    monkeypatch.setattr(real_model, "OPTIONS", tmp_path / "options.json")
    where = f"--base {base} --out {tmp_path} --picture {tmp_path}/x.png"
    return [*where.split(), "--quick", "--threads", "1"]


def test_both_sides_run_on_the_same_prompts(argv, tmp_path, in_this_process):
    records = real_model.main([*argv, "--seeds", "2"])
    sides = [(record["seed"], record["side"]) for record in records]
    assert sides == [(0, "nanogrpo"), (0, "TRL"), (1, "nanogrpo")]
    assert (tmp_path / "x.png").stat().st_size > 10_000
    for record in records:
        assert list(record["held_out"]) == ["0", "1", "2"]
        assert len(record["seconds"]) == len(record["reward"]) == 2
        assert record["settings"]["reward_funcs"] == ["examples/word_problems.py:last_number"]
    assert len({record["held_out"]["0"] for record in records}) == 1  # same base, same evaluation
    assert len(in_this_process) == 3
    assert (
        real_model.main([*argv, "--seeds", "2"]) == records
    )  # a run with a record is not repeated
    assert real_model.main([*argv, "--redraw"]) == records
    assert len(in_this_process) == 3
    lines = tables.lines_of("real_model", records)
    assert [line[0] for line in lines] == ["nanogrpo", "TRL"]
    assert {len(line) for line in lines} == {len(tables.BENCHES["real_model"].columns)}
    # only the times of seeds that both sides ran count
    slow = [{**r, "seconds": [100 * s for s in r["seconds"]]} if r["seed"] else r for r in records]
    assert tables.lines_of("real_model", slow) == lines


def test_a_profile_is_kept_next_to_the_runs(argv, tmp_path, in_this_process):
    runs = real_model.main(argv)
    *kept, profile = real_model.main([*argv, "--profile"])
    assert kept == runs
    for phase in ("train", "sample"):
        assert len(profile[phase]["flops"]) == len(profile[phase]["seconds"]) == 2
        assert 0 < profile[phase]["share_of_peak"] < 1
    assert "of the fastest matrix product" in tables.BENCHES["real_model"].notes([profile])[1]
    assert real_model.main(argv) == [*runs, profile]


def test_the_flop_of_sampling_are_those_of_a_forward_pass(base):
    """Completions of one token need the prompt's forward pass, and one row of the head."""
    from bench.step_large import needed_flops
    from nanogrpo.config import Config
    from nanogrpo.grpo import packing
    from nanogrpo.model import checkpoint
    from nanogrpo.types import Prompt, Sample

    shape = checkpoint.empty_model(base).cfg
    sample = Sample(Prompt(0, "", [1] * 9), 0, [2, 3, 4], [0.0] * 3, True, [0] * 3, advantage=1.0)
    cfg = Config(num_generations=2, generation_batch_size=2)
    batches = packing.pack(packing.one_update([sample], cfg), [sample], cfg)
    training = needed_flops(shape, batches)  # forward and backward: three times the forward
    assert real_model.sampling_flops(shape, [sample]) == pytest.approx(training / 3)


def test_a_quick_run_does_not_replace_results(capsys):
    with pytest.raises(SystemExit):
        real_model.main(["--quick"])
    assert "--out" in capsys.readouterr().err
    assert common.RESULTS.exists()
