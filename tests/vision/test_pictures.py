"""The task with pictures: the answer is in the picture, and held-out pictures stay held out.

Read next: examples/pictures.py, test_learning.py.
"""

import hashlib
import itertools
import json
import random

import numpy as np
import pytest
from PIL import Image

from examples import pictures
from examples.pictures import COLOURS, SIDE, picture, problems
from nanogrpo.rewards import builtin

SPLITS = {"train": problems("train", 2048, 0), "held_out": problems("held_out", 256, 0)}


def read(image: Image.Image) -> dict[str, int]:
    """Return what the die of each colour shows: its white pixels, of which a dot has nine."""
    pixels, found = np.asarray(image), {}
    for y, x in itertools.product(*(range(0, n, SIDE) for n in pixels.shape[:2])):
        die = pixels[y + 1 : y + SIDE - 1, x + 1 : x + SIDE - 1]
        for colour, rgb in COLOURS.items():
            if (die[0, 0] == rgb).all():
                found[colour] = (die == 255).all(-1).sum() / 9
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_is_in_the_picture(split):
    rng = random.Random(0)
    for p in SPLITS[split][:200]:
        image = picture(p, rng)
        assert image.size == (SIDE * p.size[1], SIDE * p.size[0])
        shown = read(image)
        assert set(shown) == set(COLOURS)
        row = pictures.record(p, image)
        asked = row["prompt"][0]["content"][1]["text"].removesuffix("=").split("+")
        assert row["answer"] == str(int(sum(shown[colour] for colour in asked)))


def test_no_held_out_picture_occurs_in_training_or_the_warm_up():
    assert not any(map(pictures.is_held_out, SPLITS["train"]))
    assert all(map(pictures.is_held_out, SPLITS["held_out"]))
    shown = {split: {str(p[1:]) for p in found} for split, found in SPLITS.items()}
    assert not shown["train"] & shown["held_out"]
    rng = random.Random("warm-up,0")  # what write_base draws from
    for _ in range(20):
        batch = problems("train", 64, seed=rng.getrandbits(32))
        assert not {str(p[1:]) for p in batch} & shown["held_out"]


def test_the_files_are_the_same_in_every_run(tmp_path, monkeypatch):
    # Written down: with another stream, the runs of today and tomorrow could not be compared.
    monkeypatch.setattr(pictures, "SIZE", {"train": 20, "held_out": 10})
    digests = []
    for name, noisy in (("a", False), ("b", False), ("noise", True)):
        pictures.write_data(tmp_path / name, noisy)
        text = (tmp_path / name / "train.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        images = [Image.open(tmp_path / name / row["image"]) for row in rows]
        raw = b"".join(image.tobytes() for image in images)
        digests.append((text, [i.size for i in images], hashlib.sha256(raw).hexdigest()[:16]))
    assert digests[0] == digests[1]
    assert digests[0][2] == "205f1921f3a096ce"
    # the same questions, answers and sizes, but not the same pixels
    assert digests[0][:2] == digests[2][:2]
    assert digests[0][2] != digests[2][2]


def test_solutions_are_right_and_the_rewards_agree():
    rng = random.Random(0)
    found = problems("train", 300, seed=7)
    looked = [pictures.solution(p, rng, lazy=False) for p in found]
    assert (
        pictures.solution(
            pictures.Problem(("red", "blue"), (2, 2), {"red": (6, 0), "blue": (3, 1)}),
            rng,
            lazy=False,
        )
        == "<think>6+3=9</think><answer>9</answer>"
    )
    answers = [str(sum(p.numbers)) for p in found]
    for reward in (builtin.accuracy_reward, builtin.format_reward):
        assert reward(looked, solution=answers) == [1.0] * len(found)
    lazy = [pictures.solution(p, rng, lazy=True) for p in found]
    assert builtin.format_reward(lazy) == [1.0] * len(found)
    right = builtin.accuracy_reward(lazy, solution=answers)
    share = {
        one: np.mean([r for r, p in zip(right, found) if (len(p.asked) == 1) == one])
        for one in (True, False)
    }
    assert share[True] > 0.7
    assert share[False] < 0.4
