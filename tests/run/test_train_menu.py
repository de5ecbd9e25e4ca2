"""Runs of train.py with every objective and every way to compute advantages: what each trains and
logs.

Read next: bench/objectives.py, which measures what each learns.
"""

import dataclasses
import math
from pathlib import Path

import pytest

from nanogrpo import Config
from nanogrpo.config import dashed

# the second update has ratios other than 1, over several micro-batches
OFF_POLICY = "--steps-per-generation 2 --token-budget 60"
CLIP = {
    f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}
# Options, and the metrics they add. A plain clipped loss is in tests/logs/test_metrics.py, and
# entropies and weights of tokens are in tests/configurations.py.
RUNS = {
    "dapo": ("--delta 4", CLIP),
    "luspo": ("--importance-sampling-level sequence", CLIP),
    "cispo": ("--epsilon-high 5", {"cispo_clip_ratio"}),
    "sapo": ('--loss-kwargs {"sapo_temperature_neg":2}', set()),
    "vespo": (
        '--loss-kwargs {"vespo_k_pos":1} --vllm-importance-sampling-mode token_mask',
        {"vespo/phi_seq_mean"},
    ),
    "dppo_tv": ('--loss-kwargs {"dppo_penalty":1e-3}', CLIP),
    "dppo_kl": ("--epsilon 0.05", CLIP),
    "off-policy mask": ("--loss-type dapo --off-policy-mask-threshold 0.001", CLIP),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_objective_trains(rows_of, name):
    options, expected = RUNS[name]
    options = options if "--loss-type" in options else f"--loss-type {name} {options}"
    (row,) = rows_of(f"{OFF_POLICY} --max-steps 1 {options}")
    assert all(math.isfinite(v) for v in row.values())
    assert row["grad_norm"] > 0
    own = ("clip_ratio", "cispo_clip_ratio", "vespo/phi_seq_mean")
    assert {k for k in row if k.startswith(own)} == {k for k in expected if k.startswith(own)}
    assert expected <= set(row)


def test_options_that_no_other_run_uses(rows_of):
    rows = rows_of(
        "--top-k 20 --no-enable-thinking --no-share-prompts "
        "--reshard-after-forward never --cpu-offload --adam-beta1 0.8 --adam-beta2 0.9 --beta 0.1 "
        "--no-use-bias-correction-kl "
        '--lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs {"min_lr_rate":0.1}'
    )
    assert all(row["grad_norm"] > 0 for row in rows)


def test_some_run_uses_every_option():
    """Search the text of the tests, except for the two files that only parse options."""
    folder = Path(__file__).parent
    text = "".join(
        p.read_text()
        for p in folder.parent.rglob("*.py")
        if p.name not in ("test_config.py", "test_cli.py")
    )
    options = [dashed(f.name) for f in dataclasses.fields(Config)]
    assert [
        name
        for name in options
        if not any(
            words in text
            for words in (f"--{name}", f"--no-{name}", f"{name.replace('-', '_')}=", f'"{name}"')
        )
    ] == []
