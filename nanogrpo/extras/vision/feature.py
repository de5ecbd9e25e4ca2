"""Train a model with a vision encoder on prompts with pictures (docs/vision.md).

The feature attaches to a run if the model has a `vision_config` in its config.json. Read next:
data.py (the pictures of records), processor.py (pictures become patches), model.py (patches become
embeddings).
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanogrpo.config import Config
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.feature import Feature
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.run.setup import Inputs
from nanogrpo.types import Prompt


class Vision(Feature):
    """Read pictures for the model in this folder. With `freeze`, only the decoder is trained."""

    def __init__(self, folder: Path, freeze: bool = False):
        if "vision_config" not in read_json(folder / "config.json"):
            raise UserError(
                f"--freeze-vision-tower is for a vision encoder, which --model {folder} does not "
                "have: leave it out."
            )
        if importlib.util.find_spec("PIL") is None:
            raise UserError(
                f"{folder} has a vision encoder, which needs Pillow: "
                "pip install 'nanogrpo[vision]'."
            )
        from nanogrpo.extras.vision import data, processor  # which import Pillow

        self.freeze, self.reader, self.prepare = freeze, data.Reader(), processor.prepare
        self.processor = processor.Settings.read(folder)

    def decoder(self, folder: Path) -> Decoder:
        return checkpoint.empty_model(folder, VisionDecoder)

    def model(self, model: Decoder, inputs: Inputs) -> None:
        if self.freeze:
            visual: Any = model.model.visual
            visual.requires_grad_(False)

    def encode(
        self, prompt: Prompt, variables: dict, folder: Path, tokenize: Callable[[], list[int]]
    ) -> list[int]:
        """Read the prompt's pictures, and insert image tokens for them."""
        prompt.text, pictures = self.reader.insert(prompt.text, prompt.columns, folder)
        ids, images = self.prepare(tokenize(), [p.data for p in pictures], self.processor)
        prompt.inputs = images if pictures else None
        return ids

    def settings(self, cfg: Config, inputs: Inputs) -> None:
        """If a prompt has pictures, refuse reward models, which can read only texts."""
        judges = [name for name in cfg.reward_funcs if name.startswith("model:")]
        for p in (*inputs.prompts, *inputs.eval_prompts) if judges else ():
            if isinstance(p.text, list) and any(isinstance(m["content"], list) for m in p.text):
                raise UserError(
                    f"--reward-funcs {judges[0]} only works with text, but the messages of prompt "
                    f"{p.id} contain pictures or lists of parts: write each content as a string."
                )
