"""Print the tables of docs/memory.md. The tables show the settings that a run chooses for each
model and GPU.

    python -m bench.fits

In: nothing. The models have shapes but no weights, so this command needs no GPU. Out: one Markdown
table for each training command. `memory.choose` chooses the settings, and `memory.table` predicts
the memory in bytes. The tables assume that a GPU has its nominal memory free, except for 1 GiB for
CUDA. Read next: nanogrpo/extras/memory.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import common, predict
from nanogrpo import Config
from nanogrpo.extras import memory
from nanogrpo.extras.lora import lora
from nanogrpo.extras.profiles import PROFILES
from nanogrpo.model.decoder import Decoder

SHAPES = ("0.6B", "1.7B", "4B", "8B")  # sizes of Qwen3
CARDS = (24, 40, 80, 141)  # GB
SIZES = (1, 8)  # GPUs
PROMPT = 256  # tokens of the longest prompt
COMMANDS = {
    "train.py": Config(),
    "train.py --profile full": Config(**PROFILES["full"]),
    "train.py --lora-r 16": Config(lora_r=16),
    "train.py --lora-r 16 --load-in-4bit": Config(lora_r=16, load_in_4bit=True),
}


def model(name: str, cfg: Config) -> Decoder:
    """Return a Qwen3 of this size on the meta device, with the dtypes and adapters of a run on a
    GPU.
    """
    out = predict.shape_of(name)
    lora.attach(out, cfg, "cuda")
    return out


def free(card: int) -> int:
    """Return the bytes of free memory on a GPU with `card` GB."""
    return (card - 1) << 30


def cell(shape: Decoder, cfg: Config, size: int, card: int) -> str:
    """Return the chosen settings and the predicted memory, or how much memory is missing."""
    run = predict.inputs(shape, predict.gpus(size), PROMPT)
    chosen = memory.choose(run, cfg, free(card))
    needed = memory.on_device(memory.table(run, chosen))
    if needed > free(card):
        return f"{(needed - free(card)) / 2**30:.1f} GiB missing"
    each = ", reduced each" if size > 1 and chosen.reduce_gradients == "micro_batch" else ""
    kind, budget = chosen.checkpointing, chosen.strip_tokens // 1024
    cached = (chosen.cache_tokens or 0) / 1024
    return f"{needed / 2**30:.1f} GiB: {cached:,.0f}k cached, {budget}k, {kind}{each}"


def tables() -> str:
    """Return the tables."""
    sections = []
    for command, cfg in COMMANDS.items():
        lines = []
        for name in SHAPES:
            shape = model(name, cfg)
            for size in SIZES:
                lines.append((name, size, *(cell(shape, cfg, size, card) for card in CARDS)))
        table = common.markdown(("model", "GPUs", *(f"{card} GB" for card in CARDS)), lines)
        sections.append(f"### `{command}`\n\n{table}\n")
    return "\n".join(sections)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fits", description=__doc__.split("\n\n")[0]
    )
    parser.parse_args(argv)
    print(tables())


if __name__ == "__main__":
    main(sys.argv[1:])
