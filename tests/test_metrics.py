"""Metrics by hand: TRL's names and definitions, sums over the whole step, and a log that survives being killed.

test_trl_parity.py compares the same names with TRL's own numbers. Read next: test_train.py.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import SOLO

from nanogrpo import metrics
from nanogrpo.batch import Prompt, Sample
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.ops import STATS, PolicyOut


def sample(n: int, stopped: bool = True, prompt: int = 3, **rewards: float | None) -> Sample:
    given = [r for r in rewards.values() if r is not None]
    fields = {"text": "text", "rewards": rewards, "reward": sum(given) if given else None}
    return Sample(Prompt(0, "?", [1] * prompt), 0, [2] * n, [0.0] * n, stopped, [0] * n, **fields)


# ---- of the samples ------------------------------------------------------------------------------------------------------------


def test_metrics_of_a_generation():
    samples = [sample(4, True, a=1.0, b=0.5), sample(10, False, a=0.0, b=None), sample(7, True, a=None, b=None)]
    row = metrics.of_samples(metrics.facts(samples, SOLO), torch.tensor([[0.0], [0.3]]))
    assert row == pytest.approx(
        {
            "completions/min_length": 4,
            "completions/max_length": 10,
            "completions/mean_length": 7,
            "completions/min_terminated_length": 4,
            "completions/max_terminated_length": 7,
            "completions/mean_terminated_length": 5.5,
            "completions/clipped_ratio": 1 / 3,
            "rewards/a/mean": 0.5,  # of the two that have one
            "rewards/a/std": math.sqrt(0.5),
            "rewards/b/mean": 0.5,
            "rewards/b/std": 0.0,
            "reward": 0.75,  # (1.5 + 0) / 2
            "reward_std": 1.5 / math.sqrt(2),
            "frac_reward_zero_std": 0.5,
        }
    )


def test_metrics_of_a_generation_in_which_nothing_ended_and_nothing_was_judged():
    row = metrics.of_samples(
        metrics.facts([sample(3, False, a=None), sample(3, False, a=None)], SOLO), torch.tensor([[torch.nan]])
    )
    assert row["completions/max_terminated_length"] == row["completions/mean_terminated_length"] == 0
    assert row["completions/clipped_ratio"] == 1
    assert row["frac_reward_zero_std"] == 0  # nobody knows that they are equal
    assert not {"reward", "reward_std", "rewards/a/mean"} & set(row)
    assert all(math.isfinite(x) for x in row.values())


# ---- of the updates ------------------------------------------------------------------------------------------------------------


def add(meter: metrics.Meter, sample: list, clip: list, loss: float, **values: list) -> None:
    """One micro-batch, as the loss would have given it."""
    vectors = {k: torch.tensor(v) for k, v in {"logp": [-1.0] * len(sample), **values}.items()}
    taken = {"importance": None, "entropy_weight": None, "sampling_logp": vectors.pop("sampling", vectors["logp"])}
    batch = SimpleNamespace(sample=torch.tensor(sample), **taken)
    clip = torch.tensor(clip, dtype=torch.int8)
    results = (vectors["logp"], vectors["entropy"], clip, vectors.get("kl"))
    meter.add(batch, PolicyOut(torch.tensor(loss), *results, torch.zeros(len(STATS))))


def test_means_are_over_the_tokens_of_the_step_and_extremes_over_completions():
    meter = metrics.Meter()
    add(meter, [0, 0, 1], [-1, 0, -1], 0.5, entropy=[1.0, 2.0, 3.0], kl=[0.0, 1.0, 2.0], sampling=[-1.5, -1.0, -0.75])
    add(meter, [2, 2, 2, 2], [-1, -1, 1, 1], 0.25, entropy=[4.0, 4.0, 4.0, 4.0], kl=[3.0] * 4)
    meter.end_update(1.0)
    add(meter, [0, 0, 0], [-1, 1, 1], 0.125, entropy=[0.0, 0.0, 0.0], kl=[0.0] * 3, sampling=[-9.0] * 3)
    meter.end_update(3.0)
    assert meter.summary(SOLO) == pytest.approx(
        {
            "loss": 0.4375,  # (0.75 + 0.125) / 2: micro-batches add up, updates are averaged
            "grad_norm": 2.0,
            "entropy": 22 / 10,  # a mean of the three batches' means would be 2
            "kl": 15 / 10,
            "clip_ratio/low_mean": 5 / 10,
            "clip_ratio/low_min": 1 / 3,  # completion 0 in the second update; with the first update's it would be 2 / 5
            "clip_ratio/high_mean": 4 / 10,
            "clip_ratio/high_max": 2 / 3,
            "clip_ratio/region_mean": 9 / 10,
            # of the first update only: afterwards the weights are no longer those that sampled
            "sampling/sampling_logp_difference/mean": 0.75 / 7,
            "sampling/sampling_logp_difference/max": 0.5,
            "sampling/k3": (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 7,
            "sampling/ratio": (math.exp(0.5) + math.exp(0.25) + 5) / 7,
        }
    )


def test_no_kl_without_a_reference_and_nothing_at_all_without_tokens():
    meter = metrics.Meter()
    add(meter, [0], [0], 0.5, entropy=[1.0])
    meter.end_update(1.0)
    assert "kl" not in meter.summary(SOLO)
    empty = metrics.Meter()
    empty.end_update(0.0)  # every completion was masked
    assert empty.summary(SOLO) == {"loss": 0.0, "grad_norm": 0.0}


def test_the_gap_is_taken_at_the_first_update_that_has_tokens():
    meter = metrics.Meter()
    meter.end_update(0.0)  # a minibatch in which every completion was cut and masked: the weights did not move
    add(meter, [0, 1], [0, 0], 0.0, entropy=[1.0, 1.0], sampling=[-1.5, -1.0])
    meter.end_update(1.0)
    add(meter, [0, 1], [0, 0], 0.0, entropy=[1.0, 1.0], sampling=[-9.0, -9.0])
    meter.end_update(1.0)
    assert meter.summary(SOLO)["sampling/sampling_logp_difference/max"] == 0.5


# ---- the log -------------------------------------------------------------------------------------------------------------------


def config(folder, **options) -> Config:
    return Config(model="-", data="-", output_dir=str(folder), max_steps=9, **options)


def write(log: metrics.Log, steps: range) -> None:
    for step in steps:
        clock = metrics.Clock()
        with clock("sample"):
            pass
        log.step(step, metrics.facts([sample(4), sample(2, prompt=5)], SOLO), {"reward": float(step)}, clock)


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_head_says_what_made_the_numbers(tmp_path):
    write(metrics.Log(config(tmp_path, beta=0.25), world=SOLO, start=0), range(1))
    head, step = rows(tmp_path)
    assert head["run"]["beta"] == 0.25
    assert head["run"]["max_steps"] == 9
    assert head["versions"]["torch"] == torch.__version__
    assert len(head["commit"]) == 40 or head["commit"] == "unknown"
    assert head["device"]
    assert step["step"] == 0
    assert step["num_tokens"] == 4 + 3 + 2 + 5
    assert step["step_time"] == pytest.approx(step["time/sample"])
    assert step["tokens_per_second"] == pytest.approx(6 / step["step_time"])


def test_a_machine_without_git_has_an_unknown_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metrics.provenance(config(tmp_path), SOLO)["commit"] == "unknown"


def test_a_resumed_log_keeps_each_step_once_and_drops_a_half_written_line(tmp_path):
    log = metrics.Log(config(tmp_path), world=SOLO, start=0)
    log.evaluation(0, metrics.facts([sample(3, a=1.0)], SOLO))
    write(log, range(2))
    log.evaluation(2, metrics.facts([sample(3, a=1.0)], SOLO))
    write(log, range(2, 5))
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "rew')  # killed here
    log = metrics.Log(config(tmp_path), world=SOLO, start=3)  # its last checkpoint was after three steps
    write(log, range(3, 9))
    found = rows(tmp_path)
    steps = [row for row in found if "reward" in row]
    assert [row["step"] for row in steps] == list(range(9))
    assert [row["num_tokens"] for row in steps] == [14 * (i + 1) for i in range(9)]  # goes on counting where it was
    assert [row["eval/after"] for row in found if "eval/after" in row] == [0, 2]
    assert sum("run" in row for row in found) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_killed_before_its_first_checkpoint_starts_a_new_log_and_keeps_the_old_one(tmp_path, caplog):
    old = []
    for number in range(3):
        log = metrics.Log(config(tmp_path), world=SOLO, start=0)
        log.evaluation(0, metrics.facts([sample(3, a=1.0)], SOLO))
        write(log, range(number + 1))
        found = [row for row in rows(tmp_path) if "run" not in row]
        assert [row.get("eval/after", row["step"]) for row in found] == [0, *range(number + 1)]
        assert found[-1]["num_tokens"] == 14 * (number + 1)
        if number == 1:  # also one that cannot be read is only set aside
            with (tmp_path / "metrics.jsonl").open("ab") as f:
                f.write(b'\xff\n{"step": 7}\n{"st')
        old.append((tmp_path / "metrics.jsonl").read_bytes())
    assert [(tmp_path / f"metrics-{i}.jsonl").read_bytes() for i in (1, 2)] == old[:2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl"]
    assert [r.message for r in caplog.records] == [
        f"nothing to resume in {tmp_path}: starting over, the old log is {tmp_path}/metrics-{i}.jsonl" for i in (1, 2)
    ]


def test_a_log_without_a_step_is_gone_on_with(tmp_path, caplog):
    metrics.Log(config(tmp_path), world=SOLO, start=0)  # and then the run was refused
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"run": {"model')
    write(metrics.Log(config(tmp_path), world=SOLO, start=0), range(1))
    assert ["run" in row for row in rows(tmp_path)] == [True, True, False]
    assert not caplog.records


@pytest.mark.parametrize("line", [b'{"step": 1, "rew', b'{"step": 1, "a": "\xff"}', b"[1]", b"7", b'{"reward": 1}', b"[" * 10**5])
def test_a_damaged_line_is_named_and_nothing_behind_it_is_lost(tmp_path, line):
    write(metrics.Log(config(tmp_path), world=SOLO, start=0), range(4))
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes().splitlines()
    good[2] = line  # in the middle, so no half-written end
    path.write_bytes(b"\n".join(good) + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:3 is no line of a log: mend or remove it") as caught:
        metrics.Log(config(tmp_path), world=SOLO, start=4)
    assert "\n" not in str(caught.value)
    assert path.read_bytes().splitlines() == good


def test_an_evaluation_leaves_out_what_was_not_judged(tmp_path):
    log = metrics.Log(config(tmp_path), world=SOLO, start=0)
    log.evaluation(4, metrics.facts([sample(3, a=1.0, b=None), sample(5, a=None, b=None), sample(4, a=0.0, b=None)], SOLO))
    row = rows(tmp_path)[-1]
    assert row == {"step": 3, "eval/after": 4, "eval/rewards/a": 0.5, "eval/mean_length": 4}


def test_a_full_disk_is_told_in_one_sentence(tmp_path):
    log = metrics.Log(config(tmp_path), world=SOLO, start=0)
    log.path = log.path.parent / "gone" / "metrics.jsonl"
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written .*: make room"):
        write(log, range(1))
    write(metrics.Log(config(tmp_path), world=SOLO, start=0), range(2))
    (tmp_path / "metrics.tmp").mkdir()  # where the lines that stay are written first
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written .*: make room"):
        metrics.Log(config(tmp_path), world=SOLO, start=1)
    assert [row["step"] for row in rows(tmp_path) if "step" in row] == [0, 1]


def test_completions_are_shown_on_request(capsys):
    chat = sample(2, a=1.0)
    chat.prompt.text = [{"role": "user", "content": "what is 3+4?"}]
    metrics.print_completions([chat, sample(1), sample(1)], 2)
    shown = capsys.readouterr().err
    assert "3+4" in shown
    assert shown.count("text") == 2


def test_what_a_model_or_a_user_wrote_is_shown_as_it_is_and_commands_nothing(tmp_path, capsys):
    odd = sample(2, a=1.0)
    odd.prompt.text, odd.text = "[INST] hi [/INST]", "[/bold] :smile: \x1b[2J[red]x[/red]"
    metrics.print_completions([odd], 1)
    shown = capsys.readouterr().err
    for words in ("[INST] hi [/INST]", "[/bold] :smile:", "\N{REPLACEMENT CHARACTER}[2J[red]x[/red]"):
        assert words in shown
    log = metrics.Log(config(tmp_path), world=SOLO, start=0)
    log.evaluation(4, metrics.facts([sample(3, **{"a/b": 1.0, "[/x]": 0.5})], SOLO))
    assert "a/b 1.000  [/x] 0.500  mean_length 3.000" in capsys.readouterr().err
