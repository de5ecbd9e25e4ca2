"""The configurations on which the laws that cross all features are tested: one row per feature.

    a resumed run is the uninterrupted one    tests/run/test_resume.py
    two ranks are one                         tests/distributed/test_same_run.py

A row has the options of train.py that turn the feature on; they are added to those of
`conftest.arguments`: a tiny model with random weights, 12 prompts, 4 steps of 4 x 4 completions.
Choose options with which something happens in each step, and which take a second. Read next:
tests/test_mistakes.py (the table of the third such law).
"""

import atexit
import functools
import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.window import FULL, SLIDING, Windows
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt
from tests import ranks
from tests.conftest import arguments, completion, steps, write_base, write_files, write_rows
from tests.engine.chat import write_calling_base

STEPS = 4


@dataclass(frozen=True)
class Row:
    options: str = ""
    # changes of the tiny model, as for conftest.write_base
    base: dict = field(default_factory=dict)
    # the program: train.py, or a file in examples/recipes
    recipe: str = ""
    # writes what the feature reads into a folder, and returns further options
    prepare: Callable[[Path], list[str]] = lambda folder: []
    # whether the laws hold for it
    resumes: bool = True
    ranks: bool = True
    # largest difference of two ranks from one, relative to the larger of 1 and the value
    tolerance: float = 1e-5
    # a package that must be installed
    needs: str = ""


def with_pictures(folder: Path) -> list[str]:
    """Some of the records have no picture."""
    from tests.vision import base  # it imports PIL

    model, data = base.write_base(folder / "vision"), base.write_data(folder / "data.jsonl")
    return ["--model", str(model), "--data", str(data)]


def _reference(folder: Path, **changes) -> list[str]:
    return ["--ref-model", str(write_base(folder / "reference", seed=1, **changes))]


def _teachers(folder: Path) -> list[str]:
    """Two of three prompts have a number in the column t."""
    small = write_base(folder / "small", seed=2, hidden_size=32, num_hidden_layers=1)
    rows = [{"prompt": f"{i}+{i}=", "t": (0, 1, None)[i % 3]} for i in range(12)]
    data = write_rows(folder / "data.jsonl", rows)
    teachers = str(write_base(folder / "teacher", seed=1)), str(small)
    return ["--teacher", *teachers, "--data", str(data)]


def _asks(folder: Path) -> list[str]:
    """A model that usually asks for a sum."""
    base, data = write_base(folder / "asks"), folder / "asks.jsonl"
    data.write_text('{"prompt": "?"}\n' * 12)
    model, tokenizer = checkpoint.load_model(base), checkpoint.Tokenizer(base)
    prompt, ids = Prompt(0, "", tokenizer.encode_prompt("?")), tokenizer.encode("1+2=<|end|>")
    sample = completion(prompt, ids, advantage=1.0)
    warmup.imitate(model, lambda step: [sample], 10, rise=1)
    checkpoint.export(model, base, tokenizer)
    return ["--model", str(base), "--data", str(data)]


def _doubler(folder: Path) -> list[str]:
    *model, _, _ = write_calling_base(folder / "base", folder / "calling")
    file = folder / "calling" / "double.py"
    factory = ["--environment-factory", f"{file}:Doubler"]
    return [*model, *factory, "--reward-funcs", "environment", f"{file}:used"]


# rewards of some tokens, which depend on their log-probs and entropies
BY_TOKEN = "--reward-funcs format FILES/reward.py:from_log_probs"
ROWS = {
    "the default": Row(),
    "strips of 60 tokens": Row("--token-budget 60", base={"tie_word_embeddings": True}),
    "four updates per step": Row("--steps-per-generation 2 --num-iterations 2"),
    "KL penalty": Row("--beta 0.05"),
    "truncated sampling": Row(
        "--top-k 60 --top-p 0.9 --min-p 0.1 --steps-per-generation 2 --num-iterations 2 --beta 0.05"
        " --token-budget 60 --vllm-importance-sampling-mode token_truncate"
    ),
    "dynamic sampling, and MaxRL": Row(
        "--max-resample-times 2 --advantage-estimator maxrl"
        " --reward-funcs FILES/reward.py:differs_for_some_prompts",
    ),
    "importance weights, and uncertain tokens": Row(
        "--vllm-importance-sampling-mode token_truncate --steps-per-generation 2"
        " --top-entropy-quantile 0.5 --entropy-coef 0.01 --loss-type cispo --epsilon-high 5",
        tolerance=1e-4,  # AdamW divides small gradients by their own size
    ),
    "cosine schedule": Row("--lr-scheduler-type cosine --warmup-steps 2 --weight-decay 0.1"),
    "evaluation of averaged weights": Row(
        "--ema-decay 0.5 --eval-steps 1 --eval-data FILES/uneven.jsonl", recipe="ema"
    ),
    "the same bits in engine and trainer": Row("--bitwise --steps-per-generation 2 --beta 0.1"),
    "evaluation": Row("--eval-steps 2 --eval-data FILES/uneven.jsonl"),
    "recomputation": Row("--gradient-checkpointing full"),
    "another reference": Row(
        "--beta 0.5 --num-iterations 2",
        prepare=lambda folder: _reference(folder, num_hidden_layers=1),
    ),
    "adapters, and another reference": Row(
        "--beta 0.5 --lora-r 4",
        prepare=_reference,
    ),
    "layers with a sliding window": Row(
        "--beta 0.05 --num-iterations 2 --token-budget 60",
        base={"layers": Windows(4, (FULL, SLIDING))},
    ),
    "reference follows the policy": Row(
        "--beta 0.05 --ref-model-sync-steps 1 --ref-model-mixup-alpha 0.3"
    ),
    "environments": Row(
        # a user's function receives copies of the environments, in a process of its own
        "--max-resample-times 1 --max-completion-length 24 --max-prompt-length 24",
        prepare=_doubler,
    ),
    "pictures": Row(
        "--token-budget 60 --num-iterations 2 --steps-per-generation 2 --beta 0.1",
        prepare=with_pictures,
        tolerance=1e-3,
    ),
    "adapters": Row(
        "--lora-r 4 --beta 0.05 --num-iterations 2 --gradient-checkpointing full --token-budget 60",
        base={"tie_word_embeddings": True},
    ),
    "float16": Row("--dtype float16 --num-iterations 2 --entropy-coef 300", ranks=False),
    "four bits in float16": Row(
        "--lora-r 4 --load-in-4bit --dtype float16 --head-dtype float32", ranks=False
    ),
    "adapters on a base in bfloat16": Row("--lora-r 4 --dtype bfloat16", ranks=False),
    "float32 logits of a base in bfloat16": Row(
        "--lora-r 4 --dtype bfloat16 --head-dtype float32 --beta 0.05",
        base={"tie_word_embeddings": True},
        ranks=False,
    ),
    "adapters on a base in four bits": Row("--lora-r 4 --load-in-4bit --beta 0.05"),
    "adapters of a vision encoder": Row(
        "--lora-r 2 --lora-target-modules q_proj attn.qkv linear_fc2",
        prepare=with_pictures,
        tolerance=1e-3,
    ),
    "completions and tokens": Row("--log-completions --log-tokens"),
    "critic": Row(
        "--lam 0.9 --num-iterations 2 --token-budget 60 --beta 0.05 --reward-funcs"
        " FILES/reward.py:even FILES/reward.py:nothing_applies",
        recipe="critic",
        base={"tie_word_embeddings": True},
        tolerance=1e-6,
    ),
    "two teachers": Row(
        "--teacher-column t --reward-coef 0.5 --num-iterations 2",
        recipe="distill",
        prepare=_teachers,
        tolerance=1e-6,
    ),
    "two teachers, over the full vocabulary": Row(
        "--jsd-beta 0.5 --reward-coef 0.5 --token-budget 60",
        base={"tie_word_embeddings": True},
        recipe="distill",
        prepare=_teachers,
        tolerance=1e-6,
    ),
    "hints": Row(
        # with a larger learning rate, rounding grows until another token is sampled
        "--hint-column t --reward-coef 0.5 --num-iterations 2 --token-budget 60"
        " --learning-rate 3e-4",
        recipe="self_distill",
        prepare=lambda folder: _teachers(folder)[-2:],
        tolerance=1e-6,
    ),
    "evolution": Row(
        "--sigma 0.1 --learning-rate 0.03 --beta 0.05",
        recipe="evolution",
        tolerance=1e-4,  # the ratio of the policy to the weights that sampled is far from 1
    ),
    "branches": Row("--branches 2 --max-resample-times 1 --token-budget 60", recipe="branch"),
    "curriculum": Row("--replay-share 0.75", recipe="curriculum"),
    "self-play": Row(
        "--solutions 1 --num-iterations 2 --reward-funcs FILES/reward.py:even",
        recipe="self_play",
        prepare=_asks,
    ),
    "ScaleRL": Row("--max-pass-rate 0.5 --token-budget 60", recipe="scale_rl", tolerance=1e-6),
    "rejection": Row(
        "--rejection worst --rejection-bound 1.1 --num-iterations 2 --entropy-coef 0.01",
        recipe="rejection",
    ),
    "process rewards": Row(
        f"--num-iterations 2 --token-budget 60 --max-resample-times 1 {BY_TOKEN}",
        recipe="process",
        tolerance=1e-6,
    ),
    **{
        f"the recipe {recipe}, and text that the model reads": Row(
            f"--rollout {ranks.ROOT}/examples/calculator.py:rollout --max-completion-length 24"
            f" {BY_TOKEN}",
            recipe=recipe,
            tolerance=1e-6,
        )
        for recipe in ("process", "turns")
    },
    "8-bit optimizer": Row(
        # each rank has its own blocks, so the rounding differs
        "--optim adamw_torch_8bit",
        base={"hidden_size": 128},
        ranks=False,
        needs="torchao",
    ),
}


def names(law: str) -> list:
    """Return the rows for which a law holds, for `pytest.mark.parametrize`."""
    missing = "its package is not installed"
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                bool(row.needs) and importlib.util.find_spec(row.needs) is None, reason=missing
            ),
        )
        for name, row in ROWS.items()
        if getattr(row, law)
    ]


@functools.cache
def _files() -> Path:
    """Return a folder with a reward file and the data that rows may name as FILES/…"""
    folder = Path(tempfile.mkdtemp(prefix="configurations-"))
    atexit.register(shutil.rmtree, folder)
    write_files(folder)
    return folder


@functools.cache
def _command(name: str) -> tuple[Path, tuple[str, ...]]:
    """Return the base model of a row, and its options."""
    row = ROWS[name]
    folder = Path(tempfile.mkdtemp(dir=_files()))
    base = write_base(folder / "base", **row.base)
    own = row.options.replace("FILES", str(_files())).split()
    return base, (*own, *row.prepare(folder))


def command(name: str, output: Path, *more: str) -> list[str]:
    """Return the command line of a row's run into the folder `output`."""
    base, own = _command(name)
    return arguments(base, _files(), output, *own, "--max-steps", str(STEPS), *more)


def run(name: str, argv: list[str]) -> int:
    """Run the program of a row."""
    if not (recipe := ROWS[name].recipe):
        return train.main(argv)
    program = importlib.import_module(f"examples.recipes.{recipe}")
    return program.main(program.Options, program.features, argv)


@functools.cache
def uninterrupted(name: str) -> Path:
    """Train in one process and return the output folder, which no test may change. It has the
    checkpoints after the second step and at the end.
    """
    output = Path(tempfile.mkdtemp(dir=_files())) / "run"
    assert run(name, command(name, output, "--save-steps", "2")) == 0
    assert len({row["loss"] for row in steps(output)}) > 1  # something happens
    return output


def on_ranks(size: int, name: str, output: Path, *more: str) -> Path:
    """Train on several ranks and return the output folder."""
    ended = ranks.run(size, run, name, command(name, output, *more))
    assert ended == [0] * size
    return output


def saved(output: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint: the model, and adapters if there are any."""
    folder = checkpoints(str(output))[-1]
    return {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
