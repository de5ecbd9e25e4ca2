"""The local engine for frozen weights in four bits.

In: a model whose matrices are in four bits (lora.py). Out: an engine that copies only the adapters.
It shares the trainer's frozen weights, which no step changes. The engine does not merge the
adapters into the weights. If the trainer's weights are sharded, the shards are gathered once, in
four bits. Read before: engine/local.py.
"""

from typing import Any

from torch import nn

from nanogrpo.distributed import fsdp
from nanogrpo.engine.local import LocalEngine
from nanogrpo.extras.lora import lora
from nanogrpo.extras.options import Config
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.weights import gathered


class SharingEngine(LocalEngine):
    def __init__(self, *args: Any, options: Config, **kwargs: Any):
        self.options = options
        super().__init__(*args, **kwargs)

    def prepare(self, model: Decoder) -> None:
        lora.attach(model, self.options)
        model.to(self.dtype).requires_grad_(False)

    def copy(self, model: nn.Module) -> None:
        """The first call takes the frozen weights from the trainer. Every call copies the
        adapters."""
        mine, first = dict(self.model.named_parameters()), self.version < 0
        fsdp.reshard(model)  # FSDP would free a gathered parameter later
        taken = {}
        for name, p in model.named_parameters():
            if first or lora.is_adapter(name):
                where = self.device, mine[name].dtype
                taken[name] = gathered(p).to(*where, copy=lora.is_adapter(name))
        self.model.load_state_dict(taken, strict=False, assign=first)  # `taken` has no tied head
        self.model.tie()
