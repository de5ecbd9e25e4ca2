"""A GPU that runs out of memory ends the run with one sentence, and loses no checkpoint.

The errors are raised at random operations of a run on the CPU. Read next: test_resume.py.
"""

import dataclasses
import random
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanogrpo import Config
from nanogrpo.extras import memory
from nanogrpo.logs.files import checkpoints
from tests.conftest import arguments, refused, steps

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
    tiny_base, files, tmp_path, capsys, monkeypatch
):
    attach = train.attach  # on a CPU what a GPU with much memory attaches
    monkeypatch.setattr(memory, "capacity", lambda world: (2**40, 2**40))
    monkeypatch.setattr(train, "attach", lambda *given: [*attach(*given), memory.Memory()])
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
        assert re.fullmatch(
            r"error: the GPU ran out of memory \(2.00 GiB needed, 1.10 GiB free\): continue with"
            r" --resume and --max-concurrent \d+ --cache-tokens \d+ --gradient-checkpointing none"
            r" --token-budget 32768 --reduce-gradients step --reshard-after-forward never\.",
            error[-1],
        )
        assert not any("Traceback" in line for line in error)
        done, saved = len(steps(folder)), checkpoints(folder)
        assert [p.name for p in saved][-1] in (f"checkpoint-{done}", f"checkpoint-{done - 1}")
        ends.append((done, folder))
    assert len({done for done, _ in ends}) > 1
    assert train.main([*options, "--resume"]) == 0
    assert steps(ends[-1][1]) == steps(tmp_path / "whole")


def sentence(error: Exception, cfg: Config) -> str:
    with refused("^the GPU ran out of memory ") as raised, memory.explained(cfg):
        raise error
    return str(raised.value)


def test_the_sentence_names_every_setting_or_others_would_be_chosen(tmp_path):
    settings = {"token_budget": 2048, "max_concurrent": 64, "gradient_checkpointing": "full"}
    chosen = Config(output_dir=str(tmp_path), cache_tokens=9000, **settings)
    full = torch.cuda.OutOfMemoryError(FULL)
    assert (
        " start again with --max-concurrent 32 --cache-tokens 9000 --gradient-checkpointing full"
        " --token-budget 1024 --reduce-gradients auto"
    ) in sentence(full, chosen)
    served = dataclasses.replace(chosen, engine="vllm")
    assert "--max-concurrent" not in sentence(full, served)
    for text in ("CUDA error: out of memory\nCompile with", "CUBLAS_STATUS_ALLOC_FAILED when"):
        assert sentence(RuntimeError(text), chosen).startswith("the GPU ran out of memory (CU")


def test_other_errors_are_not_explained():
    with pytest.raises(RuntimeError, match="shapes"), memory.explained(Config()):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
