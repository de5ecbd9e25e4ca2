"""A tiny random vision-language model with its tokenizer, and small pictures, for the tests here.

    folder = write_base(tmp_path)           # a checkpoint folder for --model
    write_data(tmp_path / "data.jsonl")     # records with pictures of several sizes

A picture has a token per square of 16 × 16 pixels. Read next: test_data.py.
"""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image

from nanogrpo import Config
from nanogrpo.data import prompts as data
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.data.sources import Sources
from nanogrpo.extras.vision.feature import Vision
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.extras.vision.processor import Settings
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.model.weights import host_weights
from nanogrpo.types import Prompt
from tests.conftest import edit_json, said, tiny_model, write_rows
from tests.vision import tiny

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = """
{%- for m in messages %}{{- '<|user|>' if m.role == 'user' else '<|assistant|>' }}
    {%- if m.content is string %}{{- m.content }}
    {%- else %}{%- for part in m.content %}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' if 'image' in part }}{{- part.text }}
    {%- endfor %}{% endif %}
    {{- '<|end|>' if m.role == 'assistant' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""
HALF = (0.5, 0.5, 0.5)
SETTINGS = Settings(8, 2, 2, 16**2, 64 * 16**2, image_mean=HALF, image_std=HALF, image_token_id=0)
ENCODER = dataclasses.replace(
    tiny.VISION,
    depth=2,
    intermediate_size=48,
    patch_size=8,
    num_position_embeddings=16,
    deepstack_visual_indexes=(0,),
    mrope_section=(6, 5, 5),
)


def write_base(folder: Path) -> Path:
    """Write a checkpoint of about 150,000 random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    warmup.write_tokenizer(folder)
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.add_special_tokens(MARKS)
    found.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    tokenizer = Tokenizer(folder)
    start, image, end, video = (tokenizer.encode(mark)[0] for mark in MARKS)
    cfg = tiny.vision_config(
        vocab_size=tokenizer.vocab_size,
        num_hidden_layers=2,
        head_dim=32,  # the smallest that vLLM's attention on a CPU supports
        max_position_embeddings=512,
        vision=dataclasses.replace(ENCODER, image_token_id=image),
    )
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "video_token_id": video}
    config = {**cfg.to_dict(), **ids}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny.to_dict(SETTINGS)))
    copies = host_weights(tiny_model(cfg))
    # a new object, which has read the last of these files
    checkpoint.write_model(copies, config, folder, Tokenizer(folder))
    return folder


def load(folder: Path) -> Decoder:
    return checkpoint.load_model(folder, kind=VisionDecoder)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return random pixels."""
    raw = random.Random(seed).randbytes(3 * width * height)
    return Image.frombytes("RGB", (width, height), raw)


# (width, height) of the pictures of each record
SIZES = [
    [(16, 16)],
    [(48, 32)],
    [(16, 64), (32, 32)],
    [],
    [(33, 47)],
    [(64, 16)],
]


def records(count: int = 12, sizes=SIZES) -> list[dict]:
    """Return records with PIL images: several sizes, several pictures, and none."""
    found = []
    for i in range(count):
        shown = [picture(w, h, seed=10 * i + j) for j, (w, h) in enumerate(sizes[i % len(sizes)])]
        content = [{"type": "image"} for _ in shown] + [{"type": "text", "text": f"{i}+{i}="}]
        prompt = said(content)
        found.append({"prompt": prompt, "images": shown, "answer": str(2 * i)})
    return found


def write_data(path: Path, count: int = 12) -> Path:
    """Write the records as JSONL, with their pictures next to it."""
    rows = []
    for i, record in enumerate(records(count)):
        names = [f"{path.stem}-{i}-{j}.png" for j in range(len(record["images"]))]
        for name, image in zip(names, record["images"]):
            image.save(path.parent / name)
        rows.append({**record, "images": names})
    return write_rows(path, rows)


def prompts(folder: Path, found: list[dict] | None = None) -> list[Prompt]:
    """Return the prompts of records, as a run has them."""
    return prompts_of(found or records(6), Tokenizer(folder), folder)


def prompts_of(source: Any, tokenizer: Tokenizer, folder: Path, **options: Any) -> list[Prompt]:
    """Return the prompts of a source for the model in a folder."""
    cfg = Config(**options)
    return data.load(cfg, tokenizer, [source], [Sources(cfg), Vision(folder)])
