"""Attach adapters to a run (--lora-r). With --load-in-4bit, the frozen weights are stored in four
bits.

In: the model of a run, before it has weights. Out: the same model with adapters. Without the
adapters, the model is also the reference model. A checkpoint also contains the adapters in a
subfolder. Read next: lora.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanogrpo.engine.base import Engine
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras.lora import adapters, lora
from nanogrpo.extras.lora.engine import SharingEngine
from nanogrpo.extras.lora.nf4 import QuantizedDecoder
from nanogrpo.extras.options import Config
from nanogrpo.feature import Feature
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import setup
from nanogrpo.run.setup import Inputs, Run
from nanogrpo.run.state import Saver


@dataclass
class LoRA(Feature):
    cfg: Config

    def decoder(self, folder: Path) -> Decoder | None:
        if not read_json(folder / "config.json").get("quantization_config"):
            return None
        if not self.cfg.load_in_4bit:
            raise UserError(
                f"{folder}: the weights are stored in 4 bits: train with --load-in-4bit, or use "
                "the original model."
            )
        return checkpoint.empty_model(folder, QuantizedDecoder)

    def model(self, model: Decoder, inputs: Inputs) -> None:
        lora.attach(model, self.cfg, inputs.world.device.type)
        adapters.check_base(inputs.source, self.cfg)
        model.own_reference = functools.partial(lora.disabled, model)

    def loaded(self, model: Decoder) -> None:
        adapters.initialize(model, self.cfg)

    def engine(self, run: Run) -> Engine | None:
        if not self.cfg.load_in_4bit or self.cfg.engine != "local":
            return None
        return SharingEngine(**setup.of_engine(run), options=self.cfg)

    def files(self, saver: Saver) -> Callable[[Path], None] | None:
        found = adapters.host_adapters(saver.model, keep=saver.world.main)
        device = saver.world.device.type
        return lambda folder: adapters.write(found, folder / adapters.SUBFOLDER, self.cfg, device)
