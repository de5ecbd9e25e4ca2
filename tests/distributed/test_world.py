"""Runs that cannot start because their processes do not find each other, and exchanges of a world.

Read next: test_fsdp.py (what ranks compute together), test_failure.py (how they end).
"""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from nanogrpo import Config
from nanogrpo.distributed.world import Spread, join
from nanogrpo.errors import UserError
from nanogrpo.run import output
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, refused
from tests.ranks import PATIENCE, argv, free_port, run, start

# --- not even begun ---


@pytest.mark.parametrize("listens", [True, False])
def test_a_rank_without_its_peers_reports_it_within_the_timeout(tied_base, tmp_path, listens):
    options = argv(tied_base, tmp_path, "--ddp-timeout", "2")
    where = {} if listens else {"MASTER_PORT": str(free_port())}
    ranks = start(1, train.main, options, WORLD_SIZE="2", **where)
    assert (ranks.ends(PATIENCE), ranks.results()) == ([0], [2])
    (errors,) = ranks.errors()
    assert "Traceback" not in errors
    (message,) = ranks.reports()
    assert re.match(
        r"error: rank 0 could not join the 2 processes at 127\.0\.0\.1:\d+ within 2 s \(.+\): "
        r"check that all .* or choose another port \(torchrun --master-port\)\.",
        message,
    )


def test_a_step_that_the_ranks_cannot_share_evenly_is_refused(tied_base, tmp_path):
    ranks = start(3, train.main, argv(tied_base, tmp_path))
    assert ranks.ends(PATIENCE) == [2, 2, 2]
    (message,) = ranks.reports()
    assert (
        "the 4 prompts of a step (--generation-batch-size / --num-generations) cannot be shared "
        "evenly by 3 processes" in message
    )


def test_an_output_folder_that_is_not_shared_is_reported(tmp_path):
    """Two machines may have different folders with the same name."""
    found = run(2, elsewhere, tmp_path)
    assert found[0] == found[1]
    assert found[0].startswith("the folder run differs between rank 0 and rank 1: ")


def elsewhere(folder: Path) -> str:
    (own := folder / os.environ["RANK"]).mkdir()
    os.chdir(own)
    cfg = Config(device="cpu", output_dir="run")
    with join(cfg) as world:
        try:
            with output.claimed(cfg, world):
                pass
        except UserError as e:
            return str(e)
    return ""


def test_an_error_of_the_main_rank_is_raised_on_all():
    assert run(2, alone_and_in_vain) == ["not here.", "not here."]


def alone_and_in_vain() -> str:
    def work() -> None:
        raise UserError("not here.")

    with join(Config(device="cpu")) as world:
        assert world.once(lambda: world.rank) == 0
        assert world.any(flag=world.rank == 1)
        assert not world.any()
        try:
            world.once(work)
        except UserError as e:
            return str(e)
    return ""


def test_a_world_of_one_agrees_with_itself():
    assert SOLO.any(True)
    assert not SOLO.any()
    with refused("alas"):
        SOLO.any(error=UserError("alas"))


# --- spreads of vectors ---


def spread() -> dict[str, Spread]:
    with join(Config(device="cpu")) as world:
        values = torch.arange(-world.rank, 3.0 + world.rank)
        return world.spreads(
            {"a": values, "only here": torch.ones(world.rank), "nowhere": torch.ones(0)}
        )


def test_spreads_are_those_of_the_values_of_all_ranks():
    both = {"a": Spread(8, 8.0, -1.0, 3.0), "only here": Spread(1, 1.0, 1.0, 1.0)}
    assert run(2, spread) == [both, both]


def test_a_mean_of_many_float32_values_keeps_its_digits():
    values = torch.full((1_000_000,), 0.1)
    assert SOLO.spreads({"a": values})["a"].mean == pytest.approx(values[0].item(), rel=1e-12)


# --- samples that change rank ---


def exchanged() -> None:
    """Exchange six samples of three ranks. Some stay, some go to one or two other ranks, and nobody
    trains on one of them.
    """
    wanted, arrived, scatter = [{0, 2, 4}, {1, 4}, {0, 1, 2, 4, 5}], [], dist.scatter_object_list

    def watched(incoming, *args) -> None:
        scatter(incoming, *args)
        arrived.append(incoming[0])

    dist.scatter_object_list = watched
    with join(Config(device="cpu")) as world:
        prompts = [Prompt(i, "", [i] * 3) for i in range(2 * world.rank, 2 * world.rank + 2)]
        mine = [
            Sample(p, 0, [p.id, 7], [-0.5, -p.id / 3], True, [0, 0], advantage=p.id)
            for p in prompts
        ]
        got = world.exchange(mine, wanted)
        assert list(got) == sorted(got)
        assert set(got) == wanted[world.rank]
        assert all(
            s.prompt.id == i and s.logp == [-0.5, -i / 3] and s.advantage == i
            for i, s in got.items()
        )
        sent = {i for part in arrived for i in part}
        # nothing that others train, nothing of its own
        assert sent == wanted[world.rank] - {2 * world.rank, 2 * world.rank + 1}
        # and where nothing is trained nothing is sent
        assert world.exchange(mine, [set(), set(), set()]) == {}


def test_a_sample_is_sent_only_to_the_ranks_that_train_on_it():
    run(3, exchanged)
    sample = Sample(Prompt(0, "", [1]), 0, [2], [-0.5], True, [0])
    assert SOLO.exchange([sample, sample], [{0}]) == {0: sample}
