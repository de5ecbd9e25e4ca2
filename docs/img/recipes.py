"""Train with the recipes of examples/recipes, and draw the curves of docs/recipes.md.

    python docs/img/recipes.py [NAME …]        # by default all; about five minutes for each

In: nothing. Out: a folder in runs/recipes for each run, and a picture recipe_NAME.svg for each
recipe of RECIPES. A run whose folder exists is not repeated. All runs use the task `arithmetic` and
five seeds. Some start from the model of the debug profile, and some from one that can do more
(`make_models`). Read next: ../recipes.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from draw import FONT, GRID, HEALTHY, SICK, WIDTH, save
from matplotlib import rc_context
from matplotlib.figure import Figure

from nanogrpo.extras.api import loop
from nanogrpo.extras.arithmetic import task, warmup
from nanogrpo.logs.files import read_records
from nanogrpo.model import checkpoint
from nanogrpo.types import Sample

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "runs/recipes"
SEEDS = range(5)
METRIC = "eval/rewards/accuracy_reward"
OPTIONS = f"""
    --model {ROOT}/nanogrpo/data/sums/base --data arithmetic --device cpu --max-steps 30
    --generation-batch-size 64 --max-completion-length 48 --learning-rate 1e-4 --eval-steps 3
    --eval-samples 128 --save-steps 0
"""
# recipe → its options, and those of plain GRPO next to it
STEPS = f"--reward-funcs accuracy {ROOT}/examples/recipes/process.py:steps"
SEVERAL = "--num-iterations 4"
TURNS = f"{STEPS} --rollout {ROOT}/examples/calculator.py:rollout"
POPULATION = """
    --num-generations 32 --generation-batch-size 2048 --learning-rate 1.5e-4 --max-steps 24
    --eval-steps 4
"""
ABLE = f"""
    --model {FOLDER}/able --reward-funcs accuracy --learning-rate 5e-5 --max-steps 16 --eval-steps 4
    --eval-samples 64
"""
RECIPES = {
    "process": (STEPS, STEPS),
    **{name: ("", "") for name in ("critic", "branch", "scale_rl", "curriculum")},
    "turns": (TURNS, TURNS),
    "evolution": (POPULATION, ""),
    "rejection": (f"{SEVERAL} --rejection worst", SEVERAL),
    "distill": (f"{ABLE} --teacher {FOLDER}/teacher", ABLE),
    "distill_full": (f"{ABLE} --teacher {FOLDER}/teacher --jsd-beta 1", ABLE),
    "self_distill": (f"{ABLE} --hint-column answer", ABLE),
    "self_play": (f"{ABLE} --data {FOLDER}/asks.jsonl --eval-data arithmetic", ABLE),
}


def make_models() -> None:
    """Write a model that answers as that of `nanogrpo warmup`, solves a sum if it gets a hint, and
    writes sums if it is asked for one. Write a teacher that always works out a sum.
    """
    rng = random.Random(1)

    def sums() -> list[str]:
        return task.problems("train", 64, seed=rng.getrandbits(32))

    def mixed(step: int) -> list[Sample]:
        out = []
        for i, text in enumerate(sums()):
            if i % 4 < 2:
                pair = f"{text}=", warmup.solution(text, rng, lazy=True)
            elif i % 4 == 2:
                hint = f"{text}=\n\nHint: {task.value(text)}"
                pair = hint, warmup.solution(text, rng, lazy=False)
            else:
                pair = "?", f"{text}="
            out.append(warmup.sample(i, *pair, tokenizer))
        return out

    def good(step: int) -> list[Sample]:
        return [
            warmup.sample(i, f"{text}=", warmup.solution(text, rng, lazy=False), tokenizer)
            for i, text in enumerate(sums())
        ]

    warmup.make_base(FOLDER / "warm-up", steps=400)
    tokenizer = warmup.Tokenizer(FOLDER / "warm-up")
    able, teacher = checkpoint.load_model(FOLDER / "warm-up"), warmup.new_model(tokenizer)
    warmup.imitate(able, mixed, 150)
    warmup.imitate(teacher, good, 500)
    ask = {"prompt": [{"role": "user", "content": "?"}], "answer": "0"}
    (FOLDER / "asks.jsonl").write_text((json.dumps(ask) + "\n") * 64)
    for name, model in (("teacher", teacher), ("able", able)):
        with checkpoint.atomic_folder(FOLDER / name) as folder:
            checkpoint.export(model, folder, warmup.write_tokenizer(folder))


def curve(name: str, recipe: str, options: str, seed: int) -> dict[int, float]:
    """Train unless the run exists. Return the held-out accuracy after each number of steps."""
    start = "able" if "/able" in options else name if options else "default"
    folder = FOLDER / f"{start}-{recipe or 'grpo'}-{seed}"
    if not folder.exists():
        if start == "able" and not (FOLDER / start).exists():
            make_models()
        argv = [*OPTIONS.split(), *options.split(), "--seed", str(seed), "--output-dir", folder]
        words = list(map(str, argv))
        if recipe:
            path = ROOT / f"examples/recipes/{recipe.removesuffix('_full')}.py"
            spec = importlib.util.spec_from_file_location(recipe, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[recipe] = module
            spec.loader.exec_module(module)
            status = module.main(module.Options, module.features, words)
        else:
            status = loop()["main"](words)
        if status:
            raise SystemExit(status)
    records = read_records(folder / "metrics.jsonl")
    return {r["eval/after"]: r[METRIC] for r in records if METRIC in r}


def draw(name: str) -> None:
    own, plain = RECIPES[name]
    with rc_context(FONT):
        figure = Figure((WIDTH / 10, 2.4), layout="constrained")
        axes = figure.subplots()
        for recipe, options, color in ((name, own, SICK), ("", plain, HEALTHY)):
            curves = [curve(name, recipe, options, seed) for seed in SEEDS]
            steps = sorted(curves[0])
            for each in curves:
                axes.plot(steps, [each[s] for s in steps], color=color, alpha=0.25, lw=1)
            means = [fmean(each[s] for each in curves) for s in steps]
            axes.plot(steps, means, color=color, lw=2, label=recipe or "GRPO")
            print(f"{name}, {recipe or 'GRPO'}:", *(f"{s}: {m:.3f}" for s, m in zip(steps, means)))
        axes.set(xlabel="steps", ylabel="accuracy, held-out", ylim=(0, 1))
        axes.grid(color=GRID, lw=0.5)
        axes.legend(frameon=False, loc="lower right")
        save(figure, HERE / f"recipe_{name}.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    if unknown := sorted({*names} - RECIPES.keys()):
        parser.error(f"there is no curve for {unknown[0]}: choose from {', '.join(RECIPES)}")
    for name in names or RECIPES:
        draw(name)
