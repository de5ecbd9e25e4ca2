"""Pictures of dice, questions about them, and a tiny vision-language model that mostly guesses.

    pip install -e .[vision]
    python examples/pictures.py runs/pictures        # 1-2 minutes: the pictures and a base model
    python train.py --config examples/pictures.json  # GRPO teaches the model to look

In: the name of a folder. Out: train.jsonl, held_out.jsonl, their pictures as PNG files, and the
model `base`, all in this folder. A picture shows four dice of different colours. A question names
one to three colours, and the answer is the sum of the numbers on these dice. A record looks like
this:

    {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text":
     "red+blue="}]}], "image": "train/0.png", "answer": "9"}

Without seeing the picture, a model can only guess. For every question and every picture size, all
possible sums are equally likely. A hash of the dice determines the split, so no held-out picture
occurs in training or in the warm-up. With --noise, random pixels replace every picture.

The base model is a Qwen3-VL with 0.6 M parameters. The base model first learns to look at the dice
one by one. Then the base model briefly imitates a lazy student. The lazy student mostly looks at
the picture if a question names one colour, and mostly guesses if it names more. With GRPO, the
model learns that answers based on the picture get more reward. Read next:
nanogrpo/extras/arithmetic/warmup.py (the same without pictures), docs/vision.md.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from PIL import Image

from nanogrpo import Config
from nanogrpo.data import prompts as data
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.vision.feature import Vision
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.model import checkpoint, weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt, Sample

COLOURS = {
    "red": (205, 60, 50),
    "green": (50, 140, 70),
    "blue": (50, 90, 205),
    "orange": (225, 140, 20),
}
SIZE = {"train": 2048, "held_out": 256}
SIDE = 16  # pixels of a die
FACES = ("000010000", "100000001", "100010001", "101000101", "101010101", "101101101")
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """
{%- for message in messages %}
    {{- '<|user|>' if message.role == 'user' else '<|assistant|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' }}
            {{- part.text if part.type == 'text' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' if message.role == 'assistant' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""

# --- the task ---


class Problem(NamedTuple):
    """Example: Problem(("red", "blue"), (3, 2), {"red": (6, 4), "blue": (3, 0), …})"""

    asked: tuple[str, ...]  # colours
    size: tuple[int, int]  # rows and columns of the grid of dice
    dice: dict[str, tuple[int, int]]  # colour → (number of dots, place in the grid)

    @property
    def question(self) -> str:
        return "+".join(self.asked) + "="

    @property
    def numbers(self) -> list[int]:
        return [self.dice[colour][0] for colour in self.asked]


def with_sum(count: int, total: int, rng: random.Random) -> tuple[int, ...]:
    """Return `count` random numbers from 1 to 6 that add up to `total`."""
    choices = itertools.product(range(1, 7), repeat=count)
    return rng.choice([numbers for numbers in choices if sum(numbers) == total])


def problem(rng: random.Random) -> Problem:
    """Return a random problem. For n colours, every sum from n to 6n is equally likely."""
    asked = tuple(rng.sample(list(COLOURS), rng.randint(1, 3)))
    n = len(asked)
    shown = {colour: rng.randint(1, 6) for colour in COLOURS}
    shown |= zip(asked, with_sum(n, rng.randint(n, 6 * n), rng))
    size = rng.randint(2, 4), rng.randint(2, 4)
    places = rng.sample(range(size[0] * size[1]), len(COLOURS))
    return Problem(asked, size, {c: (shown[c], place) for c, place in zip(COLOURS, places)})


def is_held_out(p: Problem) -> bool:
    """Return whether a picture is held out. One in eight is."""
    seen = json.dumps([p.size, p.dice])
    return hashlib.blake2b(seen.encode()).digest()[0] % 8 == 0


def problems(split: str, count: int, seed: int) -> list[Problem]:
    """Return problems of the split "train" or "held_out"."""
    rng = random.Random(f"pictures,{split},{seed}")
    endless = (problem(rng) for _ in itertools.count())
    mine = (p for p in endless if is_held_out(p) == (split == "held_out"))
    return list(itertools.islice(mine, count))


def picture(p: Problem, rng: random.Random) -> Image.Image:
    """Draw a problem. The background and the rotation of each die are random."""
    rows, columns = p.size
    shade = rng.randint(215, 255)
    pixels = np.full((rows * SIDE, columns * SIDE, 3), shade, np.uint8)
    for colour, (number, place) in p.dice.items():
        y, x = (SIDE * i for i in divmod(place, columns))
        pixels[y + 1 : y + SIDE - 1, x + 1 : x + SIDE - 1] = COLOURS[colour]
        face = np.rot90(np.array([*FACES[number - 1]]).reshape(3, 3) == "1", rng.randint(0, 1))
        dots = np.kron(face, np.pad(np.ones((3, 3), bool), (0, 1)))  # [12, 12], dots of 3 × 3
        y, x = y + rng.randint(2, 3), x + rng.randint(2, 3)
        pixels[y : y + 12, x : x + 12][dots] = 255
    return Image.fromarray(pixels)


def noise(p: Problem, rng: random.Random) -> Image.Image:
    """Return a picture of random pixels, of the same size as the problem's picture."""
    rows, columns = p.size
    raw = rng.randbytes(3 * rows * columns * SIDE**2)
    return Image.frombytes("RGB", (columns * SIDE, rows * SIDE), raw)


def record(p: Problem, image: Image.Image | str) -> dict:
    content = [{"type": "image"}, {"type": "text", "text": p.question}]
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "image": image, "answer": str(sum(p.numbers))}


def write_data(folder: Path, noisy: bool = False) -> None:
    """Write both splits, which are the same in every run."""
    for split, count in SIZE.items():
        rng = random.Random(f"pixels,{split}")
        (folder / split).mkdir(parents=True, exist_ok=True)
        lines = []
        for i, p in enumerate(problems(split, count, seed=0)):
            name = f"{split}/{i}.png"
            (noise if noisy else picture)(p, rng).save(folder / name)
            lines.append(json.dumps(record(p, name)) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))


# --- the base model ---


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer of warmup.py, with additional tokens for pictures and the names of
    colours.
    """
    warmup.write_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.add_tokens(list(COLOURS))
    tokenizer.save(str(file))
    config = read_json(folder / "tokenizer_config.json")
    del config["chat_template"]
    checkpoint.write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def write_config(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the files that describe the model and its image preprocessing."""
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    # Each die becomes one image token, from 2 × 2 patches.
    vision = {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": SIDE // 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 96,
        "deepstack_visual_indexes": [0],
    }
    start, end, image, video = (tokenizer.encode(mark)[0] for mark in MARKS)
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": True,
    }
    preparation = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": SIDE // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        # bounds on the number of pixels; no picture exceeds them, so none is resized
        "size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 64 * SIDE**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    checkpoint.write_json(folder / "config.json", config)
    checkpoint.write_json(folder / "preprocessor_config.json", preparation)
    del preparation["image_processor_type"]
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", **preparation}  # for vLLM
    checkpoint.write_json(folder / "video_preprocessor_config.json", videos)


def write_base(folder: Path, seed: int = 0, steps: int = 400) -> None:
    """Train a base model from scratch on `steps` batches of 64 questions with answers, and write
    it.
    """
    with checkpoint.atomic_folder(folder) as aside:
        model, tokenizer = new_model(aside, seed)
        teach(model, tokenizer, aside, seed, steps)
        config = read_json(aside / "config.json")
        checkpoint.write_model(weights.host_weights(model), config, aside, tokenizer)


def new_model(folder: Path, seed: int) -> tuple[Decoder, Tokenizer]:
    """Return a random model and its tokenizer, and write their configuration to the folder."""
    torch.manual_seed(seed)
    tokenizer = write_tokenizer(folder)
    write_config(folder, tokenizer)
    model = checkpoint.empty_model(folder, kind=VisionDecoder).to_empty(device="cpu")
    model.tie()
    model.reset_parameters()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4)  # a deviation of 0.08, about 1 / sqrt(inputs); 0.02 is for wider layers
    return model, tokenizer


def solution(p: Problem, rng: random.Random, lazy: bool) -> str:
    """Return a completion for the warm-up. It is written by a student who looks at the dice, or by
    the lazy student.
    """
    n = len(p.asked)
    if lazy and (rng.random() < 0.8) != (n == 1):
        return f"<think></think><answer>{rng.randint(n, 6 * n)}</answer>"
    first, *rest = p.numbers
    total, steps = first, [] if rest else [str(first)]
    for number in rest:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return f"<think>{','.join(steps)}</think><answer>{total}</answer>"


def teach(model: Decoder, tokenizer: Tokenizer, folder: Path, seed: int, steps: int) -> None:
    """Train the model whose files are in the folder. In the last quarter of the steps, the model
    learns from the lazy student's answers.
    """
    rng = random.Random(f"warm-up,{seed}")

    def answered(step: int) -> list[Sample]:
        lazy = step >= steps * 3 // 4
        batch = problems("train", 64, seed=rng.getrandbits(32))
        records = [record(p, picture(p, rng)) for p in batch]
        prompts = data.load(Config(), tokenizer, [records], [Vision(folder)])
        texts = [solution(p, rng, lazy) for p in batch]
        return [sample(*pair, tokenizer) for pair in zip(prompts, texts)]

    warmup.imitate(model, answered, steps)


def sample(prompt: Prompt, text: str, tokenizer: Tokenizer) -> Sample:
    """Return a text as a sampled completion with advantage 1."""
    ids = tokenizer.encode(text + "<|end|>")
    n = len(ids)
    return Sample(prompt, 0, ids, [0.0] * n, stopped=True, versions=[0] * n, advantage=1.0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the pictures and the model")
    parser.add_argument("--seed", type=int, default=0, help="of the model (default 0)")
    parser.add_argument("--noise", action="store_true", help="random pixels instead of pictures")
    args = parser.parse_args(argv)
    try:
        write_data(args.folder, args.noise)
        write_base(args.folder / "base", args.seed)
    except OSError as e:
        parser.error(f"{args.folder} cannot be written ({e.strerror}): name another folder.")
    except UserError as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
