"""How much do our advantages, losses, gradients, importance weights and metrics differ from the
results of TRL 1.16.0's own code?

In: nothing. Log-probs and rewards are random numbers in float64. The cases come from the tables in
trl_peer.py and config.py, so a new objective is compared automatically. Out:
results/parity_trl.json with the largest difference in each quantity for each case, relative to the
quantity's largest value. In tests/grpo/test_trl_parity.py, differences must be at most 1e-6 (1e-5
for metrics, which are logged in float32).

The gradients are with respect to the log-probs. The tests also compare the gradients of the full
model. Read next: trl_peer.py.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress

from bench import common, tables, trl_peer
from bench.trl_peer import (
    LENGTHS,
    OBJECTIVES,
    REWARDS,
    SEVERAL,
    NoModel,
    Peer,
    advantages_of_both,
    config,
    losses_of_both,
    make_samples,
    pairs,
    settings,
)
from nanogrpo.extras import importance
from nanogrpo.extras.options import CHOICES
from nanogrpo.grpo import mismatch

MODES = [m for m in CHOICES["vllm_importance_sampling_mode"] if m != "ratio"]  # TRL's modes
BOUNDS = ((3.0, None), (1.5, 0.7))  # (clip_max, clip_min) of the importance weights


def importance_of_both(
    mode: str, bounds: tuple[float, float | None], seed: int
) -> tuple[dict, dict]:
    """Return our results and TRL's: importance weights [tokens], and metrics of the mismatch
    between trainer and engine.

    Importance weights correct for sampling from a policy that differs from the trained policy.
    """
    samples, logp, (clip_max, clip_min) = make_samples(), trl_peer.tables(seed), bounds
    for i, s in enumerate(samples):
        # the engine's log-probs differ from the trainer's
        s.logp = logp["ref"][i, : len(s.token_ids)].float().tolist()
    peer = Peer(settings(config()), samples, REWARDS["plain"], NoModel(), logp=logp)
    peer.use_vllm = peer.vllm_importance_sampling_correction = True
    peer.vllm_importance_sampling_mode = mode
    peer.vllm_importance_sampling_clip_max = clip_max
    peer.vllm_importance_sampling_clip_min = clip_min
    batch = peer.batch()
    own = batch["completion_mask"].bool()  # [8, 12]
    names = [f"sampling/sampling_logp_difference/{how}" for how in ("mean", "max")]
    figures = {name: peer._metrics["train"][name][0] for name in names}
    theirs = {"weight": batch["importance_sampling_ratio"].expand(own.shape)[own], **figures}

    trainer = logp["old"][own]  # [tokens]
    engine = torch.tensor([x for s in samples for x in s.logp])  # [tokens]
    sample = torch.arange(len(samples)).repeat_interleave(torch.tensor(LENGTHS))  # [tokens]
    weight = importance.correction(trainer, engine, sample, mode, clip_max, clip_min)
    found = mismatch.vectors((trainer - engine).float())
    ours = {name: getattr(found[name], name.rpartition("/")[2])().item() for name in figures}
    return {"weight": weight, **ours}, theirs


def difference(ours: torch.Tensor | float, theirs: torch.Tensor | float) -> float:
    """Return max |ours - theirs| / max |theirs|, or max |ours| if TRL has only zeros."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    return ((a - b).abs().max() / (b.abs().max() if b.any() else 1.0)).item()


# returns two dicts of quantities by name: ours and TRL's
Comparison = Callable[[], tuple[dict, dict]]


def cases(seeds: int) -> Iterator[tuple[str, str, list[Comparison]]]:
    """Yield (what, case, its comparisons)."""
    for scale in CHOICES["scale_rewards"]:
        cfg = config(scale_rewards=scale)
        comparisons = [partial(advantages_of_both, cfg, r) for r in REWARDS.values()]
        yield "advantages", f"scale_rewards={scale}", comparisons
    for aggregation in CHOICES["multi_objective_aggregation"]:
        weighted = [
            config(multi_objective_aggregation=aggregation, reward_weights=w)
            for w in ((), (1.0, 0.25), (0.0, -2.0))
        ]
        comparisons = [
            partial(advantages_of_both, cfg, rewards)
            for cfg, rewards in itertools.product(weighted, SEVERAL.values())
        ]
        yield "advantages", f"multi_objective_aggregation={aggregation}", comparisons
    for loss_type, name in pairs():
        comparisons = [
            partial(
                losses_of_both,
                config(loss_type=loss_type, mask_truncated_completions=masked, **OBJECTIVES[name]),
                off_policy,
                seed,
            )
            for masked, off_policy, seed in itertools.product(
                (False, True), (False, True), range(seeds)
            )
        ]
        yield "loss", f"{loss_type}: {name}", comparisons
    for mode in MODES[1:]:
        comparisons = [
            partial(importance_of_both, mode, bounds, seed)
            for bounds, seed in itertools.product(BOUNDS, range(seeds))
        ]
        yield "importance", mode, comparisons


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "parity_trl", __doc__, threads=False, seeds=(5, "random inputs per loss and weight")
    )
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", FutureWarning)  # TRL uses deprecated parts of transformers

    records = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for what, case, comparisons in progress.track(
            list(cases(args.seeds)), description="parity"
        ):
            worst: dict[str, float] = {}
            for compare in comparisons:
                ours, theirs = compare()
                for name, expected in theirs.items():
                    worst[name] = max(worst.get(name, 0.0), difference(ours[name], expected))
            values = [d for name, d in worst.items() if name in tables.QUANTITIES]
            metrics = [d for name, d in worst.items() if name not in tables.QUANTITIES]
            records.append(
                common.record(
                    "parity_trl",
                    case,
                    "nanogrpo against TRL",
                    argv,
                    what=what,
                    inputs=len(comparisons),
                    differences=worst,
                    largest_value=max(values, default=0.0),
                    largest_metric=max(metrics, default=0.0),
                )
            )
    common.write("parity_trl", records, args.out)
    return tables.report("parity_trl", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
