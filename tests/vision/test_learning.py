"""GRPO learns what only the pictures show. From noise instead of pictures, it learns nothing.

This is the short form of bench/vision.py: a picture shows one die, the answer is its colour, and
the model starts with guesses. Read next: test_pictures.py.
"""

import random
from pathlib import Path

import pytest

import train
from examples import pictures
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.model import checkpoint
from tests.conftest import lines, write_rows
from tests.vision.base import prompts_of

ANSWERS = ("red", "blue")
REWARD = """
def right(completions, answer, **kwargs):
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]
"""


def problem(rng: random.Random) -> pictures.Problem:
    size = rng.randint(1, 3), rng.randint(2, 3)
    die = rng.randint(1, 6), rng.randrange(size[0] * size[1])
    return pictures.Problem((), size, {rng.choice(ANSWERS): die})


def record(p: pictures.Problem, image) -> dict:
    (colour,) = p.dice
    return {**pictures.record(p, image), "answer": colour}


def write_data(folder: Path, draw) -> None:
    """Write 256 records for training and 200 others for evaluation."""
    folder.mkdir()
    rng = random.Random("colours")
    for split, count in (("train", 256), ("held_out", 200)):
        rows = []
        while len(rows) < count:
            if pictures.is_held_out(p := problem(rng)) == (split == "held_out"):
                draw(p, rng).save(folder / f"{split}{len(rows)}.png")
                rows.append(record(p, f"{split}{len(rows)}.png"))
        write_rows(folder / f"{split}.jsonl", rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model that answers with either colour."""
    folder = tmp_path_factory.mktemp("vision")
    model, tokenizer = pictures.new_model(folder, seed=0)
    rng = random.Random(0)

    def guesses(step: int) -> list:
        problems = [problem(rng) for _ in range(16)]
        records = [record(p, pictures.picture(p, rng)) for p in problems]
        prompts = prompts_of(records, tokenizer, folder)
        return [pictures.sample(p, rng.choice(ANSWERS), tokenizer) for p in prompts]

    warmup.imitate(model, guesses, steps=20, rise=5)
    checkpoint.export(model, folder, tokenizer)
    (folder / "reward.py").write_text(REWARD)
    return folder


def accuracy(base: Path, draw) -> tuple[float, float]:
    """Return the held-out accuracy before and after GRPO."""
    folder = base / draw.__name__
    write_data(folder, draw)
    argv = f"""
        --model {base} --output-dir {folder}/run --device cpu
        --data {folder}/train.jsonl --eval-data {folder}/held_out.jsonl --eval-steps 20
        --reward-funcs {base}/reward.py:right --max-steps 20 --max-completion-length 3
        --generation-batch-size 128 --max-concurrent 128 --learning-rate 1e-3 --eval-samples 0
    """
    assert train.main(argv.split()) == 0
    found = [row["eval/rewards/right"] for row in lines(folder / "run") if "eval/after" in row]
    return found[0], found[-1]


def test_grpo_learns_to_look(base):
    before, after = accuracy(base, pictures.picture)
    assert before < 0.6
    assert after > before + 0.3


def test_grpo_learns_nothing_from_noise(base):
    before, after = accuracy(base, pictures.noise)
    # Of 200 guesses between two colours, more than 0.6 are right with a probability of 0.002.
    assert before < 0.6
    assert after < 0.6
