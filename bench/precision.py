"""How do the dtype and a correction with importance weights affect learning? How do they affect the
gap between the log-probs of engine and trainer? docs/precision.md shows the results.

In: nothing. Out: results/precision.json with one record per run, and the table in
docs/precision.md. docs/img/precision.py draws the curves. All runs train the model of the debug
profile on the arithmetic of `make demo`, on one thread of a CPU. Further runs measure the gap of a
wider model with random weights, because the gap grows with the size of the model. Each of these
runs has one sampling step.

The setting `float8 engine` is a control, which has the largest gap. In this setting, the trainer
computes in float32, and the weights of the engine are rounded to eight bits. A record is written
when its run ends, and a run that has a record is not repeated. Read next: docs/precision.md,
runs.py.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import torch
from torch import nn

from bench import common, objectives, runs
from nanogrpo.extras.api import Given, loop
from nanogrpo.extras.arithmetic import task, warmup
from nanogrpo.feature import Feature
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder

OPTIONS = (
    "--data arithmetic --device cpu --generation-batch-size 32 --max-completion-length 32"
    " --save-steps 0"
)
TRAIN = (
    f"--model {common.ROOT}/nanogrpo/data/sums/base --steps-per-generation 2 --learning-rate 2e-4"
)
GAP = "--generation-batch-size 16 --max-steps 1"
CORRECTED = " + weights"
FLOAT8 = "float8 engine"
SETTINGS = {
    "float32": "",
    "bfloat16": "--dtype bfloat16",
    "bfloat16, float32 head": "--dtype bfloat16 --head-dtype float32",
    "float16": "--dtype float16",
    "bfloat16, bit-exact": "--dtype bfloat16 --bitwise",
    FLOAT8: "",
}
TRUNCATED = "--vllm-importance-sampling-mode token_truncate"
SIDES = {
    name + suffix: f"{options} {more}"
    for name, options in SETTINGS.items()
    for suffix, more in (("", ""), (CORRECTED, TRUNCATED))
}
PAGE = "docs/precision.md"
WIDE = "wide model: "
WIDES = [WIDE + name for name in SETTINGS]
METRICS = {
    "k3": "sampling/k3",
    "difference": "sampling/sampling_logp_difference/mean",
    "clipped": "clip_ratio/region_mean",
    "ess": "sampling/ess",
    "rewards": "rewards/accuracy_reward/mean",
}
HEAD = (
    "| setting | seeds | k3, wide model | k3 | difference, wide model | difference | clipped | ESS"
    " | training | held-out | training, minus float32 | held-out, minus float32 |"
)


class RoundedEngine(Feature):
    """Round the matrices of the engine to eight bits, with one scale per row."""

    def wrap(self, engine, run) -> None:
        load = engine.load
        engine.load = lambda model, version: load(rounded(model), version)


@torch.no_grad()
def rounded(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for matrix in (p for p in model.parameters() if p.ndim == 2):
        scale = matrix.abs().amax(1, keepdim=True) / 448  # the largest number
        matrix.copy_((matrix / scale).to(torch.float8_e4m3fn).to(matrix.dtype) * scale)
    return model


def make_wide(folder: Path) -> None:
    """Write a model with random weights. Its logits have a standard deviation of about 4."""
    torch.manual_seed(0)
    shape = common.small_qwen3(512, 4, 32_000, 128)
    model = Decoder(dataclasses.replace(shape, tie_word_embeddings=False))
    model.model.norm.weight.data.fill_(9.0)
    with checkpoint.atomic_folder(folder) as place:
        checkpoint.export(model, place, warmup.write_tokenizer(place))


def run(side: str, options: str) -> dict:
    """Train once. Return the metrics in the log, one value per step."""
    features = [RoundedEngine()] if FLOAT8 in side else []
    with tempfile.TemporaryDirectory() as where:
        argv = f"{options} {SIDES[side.removeprefix(WIDE)]} --output-dir {where}".split()
        assert not loop()["main"](argv, Given(features=lambda cfg: features)), side
        steps, evaluations = runs.logged(Path(where))
    return {
        "held_out": [x["eval/rewards/accuracy_reward"] for x in evaluations],
        **{name: [x[at] for x in steps] for name, at in METRICS.items() if at in steps[0]},
    }


# --- the table ---


def lines_of(records: Sequence[dict]) -> list[list[str]]:
    """Return a line for each setting. The last columns are mean differences ± standard errors."""
    of = {side: [r for r in records if r["side"] == side] for side in (*WIDES, *SIDES)}

    def mean(side: str, name: str) -> str:
        found = [r[name] for r in of.get(side, ()) if r.get(name)]
        values = [x[-1] if name == "held_out" else fmean(x) for x in found]
        return f"{fmean(values):.3g}" if values else "–"

    return [
        [
            side,
            str(len(mine)),
            *(mean(where + side, name) for name in ("k3", "difference") for where in (WIDE, "")),
            *(mean(side, name) for name in ("clipped", "ess", "rewards", "held_out")),
            objectives.difference(objectives.training, mine, of["float32"]),
            objectives.difference(objectives.end, mine, of["float32"]),
        ]
        for side, mine in of.items()
        if WIDE not in side and (mine or of.get(WIDE + side))
    ]


def page(text: str, records: Sequence[dict]) -> str:
    """Return the text of docs/precision.md with the table of these records."""
    before, _, rest = text.partition(HEAD)
    rows = [f"| {' | '.join(line)} |" for line in lines_of(records)]
    table = "\n".join([HEAD, "|---" * 12 + "|", *rows])
    return before + table + rest[rest.index("\n\n") :]


def main(argv: Sequence[str]) -> list[dict]:
    parser = runs.parser(
        "precision",
        __doc__,
        common.ROOT / "runs/bench/wide",
        threads=False,
        seeds=(8, "runs of each setting, with seeds 0, 1, …"),
        steps=(6, "GRPO steps per run"),
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not args.redraw:
        if not args.base.exists():
            make_wide(args.base)

        def start(seed: int, side: str) -> dict:
            train = f"{TRAIN} --max-steps {args.steps} --eval-steps {args.steps}"
            more = f"{GAP} --model {args.base}" if WIDE in side else train
            return run(side, f"{OPTIONS} {more} --seed {seed}")

        wanted = [(0, side) for side in WIDES]
        wanted += [(seed, side) for seed in range(args.seeds) for side in SIDES]
        with patch.dict(task.SIZE, train=512, eval=64):  # makes a run start faster
            runs.complete("precision", wanted, start, args, argv)
    records = common.read("precision", args.out)
    text = page((common.ROOT / PAGE).read_text(), records)
    common.place_of(args.out, PAGE).write_text(text)
    print(text[text.index(HEAD) :])
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
