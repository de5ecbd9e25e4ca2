"""How far are our advantages, losses, gradients, importance weights and metrics from those of TRL
1.16.0's own code?

In: nothing: random log-probs and rewards in float64, made here; the cases are the tables of
trl_peer.py and of config.py, so that an objective which is added there is compared here. Out: the
largest difference of every quantity in each case, relative to the largest value of the quantity, in
results/parity_trl.json. tests/grpo/test_trl_parity.py holds the same comparisons, case by case,
under 1e-6 (metrics under 1e-5: they are logged in float32).

Gradients are with respect to the log-probs; the whole model's are compared in the tests. Read next:
trl_peer.py.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench import common, tables, trl_peer
from bench.trl_peer import (
    LENGTHS,
    LOSSES,
    OBJECTIVES,
    REWARDS,
    SEVERAL,
    NoModel,
    Peer,
    advantages_of_both,
    config,
    losses_of_both,
    make_samples,
    settings,
)
from nanogrpo.config import CHOICES
from nanogrpo.grpo import mismatch
from nanogrpo.grpo.mismatch import MODES

BOUNDS = ((3.0, None), (1.5, 0.7))  # clip_max, clip_min of the importance weights


def importance_of_both(
    mode: str, bounds: tuple[float, float | None], seed: int
) -> tuple[dict, dict]:
    """(ours, TRL's): the weight of each token that makes up for sampling from another policy,
    [tokens], and the gap's figures.
    """
    samples, logp, (clip_max, clip_min) = make_samples(), trl_peer.tables(seed), bounds
    for i, s in enumerate(samples):
        # of an engine that is some way off
        s.logp = logp["ref"][i, : len(s.token_ids)].float().tolist()
    peer = Peer(settings(config()), samples, REWARDS["plain"], NoModel(), logp=logp)
    peer.use_vllm = peer.vllm_importance_sampling_correction = True
    peer.vllm_importance_sampling_mode = mode
    peer.vllm_importance_sampling_clip_max, peer.vllm_importance_sampling_clip_min = (
        clip_max,
        clip_min,
    )
    batch = peer.batch()
    own = batch["completion_mask"].bool()  # [8, 12]
    names = [f"sampling/sampling_logp_difference/{how}" for how in ("mean", "max")]
    figures = {name: peer._metrics["train"][name][0] for name in names}
    theirs = {"weight": batch["importance_sampling_ratio"].expand(own.shape)[own], **figures}

    # [tokens] each
    trainer, engine = logp["old"][own], torch.tensor([x for s in samples for x in s.logp])
    sample = torch.arange(len(samples)).repeat_interleave(torch.tensor(LENGTHS))
    weight = mismatch.correction(trainer, engine, sample, mode, clip_max, clip_min)
    found = mismatch.compare((trainer - engine).float())
    return {"weight": weight, **{name: found[name] for name in figures}}, theirs


def difference(ours: torch.Tensor | float, theirs: torch.Tensor | float) -> float:
    """The largest |ours - theirs|, relative to the largest |theirs|; absolute where TRL has only
    zeros.
    """
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    return ((a - b).abs().max() / (b.abs().max() if b.any() else 1.0)).item()


def cases(seeds: int) -> Iterator[tuple[str, str, list[Callable[[], tuple[dict, dict]]]]]:
    """(what, case, its comparisons): calling one gives (ours, TRL's), named quantities."""
    for scale in CHOICES["scale_rewards"]:
        cfg = config(scale_rewards=scale)
        yield (
            "advantages",
            f"scale_rewards={scale}",
            [partial(advantages_of_both, cfg, r) for r in REWARDS.values()],
        )
    for aggregation in CHOICES["multi_objective_aggregation"]:
        weighted = [
            config(multi_objective_aggregation=aggregation, reward_weights=w)
            for w in ((), (1.0, 0.25), (0.0, -2.0))
        ]
        inputs = itertools.product(weighted, SEVERAL.values())
        yield (
            "advantages",
            f"multi_objective_aggregation={aggregation}",
            [partial(advantages_of_both, *x) for x in inputs],
        )
    for loss_type, (name, options) in itertools.product(LOSSES, OBJECTIVES.items()):
        both = [
            config(loss_type=loss_type, mask_truncated_completions=masked, **options)
            for masked in (False, True)
        ]
        inputs = itertools.product(both, (False, True), range(seeds))  # off policy or on
        yield "loss", f"{loss_type}: {name}", [partial(losses_of_both, *x) for x in inputs]
    for mode in MODES[1:]:
        inputs = itertools.product([mode], BOUNDS, range(seeds))
        yield "importance", mode, [partial(importance_of_both, *x) for x in inputs]


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.parity_trl", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="random inputs of each loss and weight (default 5)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", FutureWarning)  # of TRL to transformers

    rows, every = [], list(cases(args.seeds))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for what, case, comparisons in progress.track(every, description="parity"):
            worst: dict[str, float] = {}
            for compare in comparisons:
                ours, theirs = compare()
                for name, expected in theirs.items():
                    worst[name] = max(worst.get(name, 0.0), difference(ours[name], expected))
            largest = lambda trained, worst=worst: max(  # noqa: E731
                (d for name, d in worst.items() if (name in tables.QUANTITIES) == trained),
                default=0.0,
            )
            figures = {"what": what, "inputs": len(comparisons), "differences": worst}
            figures |= {"largest_value": largest(True), "largest_metric": largest(False)}
            rows.append(
                common.facts(
                    "parity_trl",
                    case,
                    "nanogrpo against TRL",
                    [] if argv is None else argv,
                    **figures,
                )
            )
    path = common.write("parity_trl", rows, args.out)
    tables.show("parity_trl", rows)
    print(f"rows: {path}")
    return rows


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
