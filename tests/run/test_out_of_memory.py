"""A GPU that runs out of memory ends the run with one sentence, and loses no checkpoint.

The errors are raised at random operations of a run on the CPU. Read next: test_resume.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.model.checkpoint import checkpoints
from nanogrpo.run import memory, verify
from tests.conftest import arguments, steps
from tests.ranks import argv, start

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of"
    " which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.1 GiB in use."
)


class FullAt(TorchDispatchMode):
    """Count the operations, and raise torch's error at one of them."""

    def __init__(self, at: int = -1):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise torch.cuda.OutOfMemoryError(FULL)
        return func(*args, **(kwargs or {}))


def test_a_full_gpu_ends_the_run_with_one_sentence_and_keeps_the_checkpoints(
    tiny_base, files, tmp_path, capsys
):
    options = arguments(tiny_base, files, tmp_path / "whole", "--save-steps", "1")
    with FullAt() as watched:
        assert train.main(options) == 0
    rng, ends = random.Random(0), []
    for i in range(4):
        folder = tmp_path / str(i)
        at = rng.randrange(watched.count // 2, watched.count)  # after the first checkpoint
        options[options.index("--output-dir") + 1] = str(folder)
        with FullAt(at):
            assert train.main(options) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert error[-1] == (
            "error: the GPU ran out of memory (2.00 GiB needed, 1.10 GiB free): continue with"
            " --resume and --max-concurrent 32 --gradient-checkpointing none --token-budget 8192"
            " --reduce-gradients step --reshard-after-forward always."
        )
        assert not any("Traceback" in line for line in error)
        done, saved = len(steps(folder)), checkpoints(folder)
        assert [p.name for p in saved][-1] in (f"checkpoint-{done}", f"checkpoint-{done - 1}")
        assert all(verify.is_sound(p) for p in saved)
        ends.append((done, folder))
    assert len({done for done, _ in ends}) > 1
    assert train.main([*options, "--resume"]) == 0
    assert steps(ends[-1][1]) == steps(tmp_path / "whole")


def full_in_the_third_update(argv: list[str]) -> int:
    """Run train.py; the GPU of rank 1 is full when its optimizer takes a third step."""
    step, calls = torch.optim.AdamW.step, itertools.count()

    def limited(self, *args):
        if os.environ["RANK"] == "1" and next(calls) == 2:
            raise torch.cuda.OutOfMemoryError(FULL)
        return step(self, *args)

    torch.optim.AdamW.step = limited
    return train.main(argv)


def test_a_full_gpu_of_one_rank_ends_all_ranks_with_one_sentence(tiny_base, tmp_path):
    ranks = start(2, full_in_the_third_update, argv(tiny_base, tmp_path, "--save-steps", "1"))
    assert ranks.ends() == [1, 2]
    reports = [
        [line for line in text.splitlines() if line.startswith(("error: ", "Traceback"))]
        for text in ranks.errors()
    ]
    assert reports[0] == []
    (sentence,) = reports[1]
    assert sentence.startswith("error: the GPU ran out of memory (2.00 GiB needed, 1.10 GiB free):")
    assert [p.name for p in checkpoints(str(tmp_path))] == ["checkpoint-1", "checkpoint-2"]
    assert all(verify.is_sound(p) for p in checkpoints(str(tmp_path)))


def sentence(error: Exception, cfg: Config) -> str:
    with pytest.raises(UserError) as raised, memory.explained(cfg):
        raise error
    return str(raised.value)


def test_the_sentence_names_every_setting_or_others_would_be_chosen(tmp_path):
    folder = str(tmp_path)
    full = torch.cuda.OutOfMemoryError(FULL)
    lower = "start again with a lower --token-budget or --max-concurrent, or --gradient-"
    assert lower in sentence(full, Config(output_dir=folder))  # before they are chosen
    settings = {"token_budget": 2048, "max_concurrent": 64, "gradient_checkpointing": "full"}
    chosen = Config(output_dir=folder, cache_tokens=9000, reduce_gradients="step", **settings)
    assert sentence(full, chosen).endswith(
        " start again with --max-concurrent 64 --cache-tokens 4500 --gradient-checkpointing full"
        " --token-budget 1024 --reduce-gradients step."
    )
    served = dataclasses.replace(chosen, engine="vllm")
    assert "--max-concurrent" not in sentence(full, served)
    for text in ("CUDA error: out of memory\nCompile with", "CUBLAS_STATUS_ALLOC_FAILED when"):
        assert sentence(RuntimeError(text), chosen).startswith("the GPU ran out of memory (CU")


def test_other_errors_are_not_explained(tmp_path):
    with pytest.raises(RuntimeError, match="shapes"), memory.explained(Config()):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
