"""Layers with a sliding window: a token attends only to the newest tokens, itself included.

In: the fields of a config.json that describe the layers. Out: `Windows`, which contains the window
of each layer for the decoder. Raises UserError if a kind of layer is not supported. Importing this
file adds `read` to `READERS` of model/hf_config.py, and the model type of Ministral. These models
have windows, with the same rules as in transformers:

* mistral: all layers, unless `sliding_window` is null. The default is 4096.
* ministral: the layers that `layer_types` lists as "sliding_attention"; without `layer_types`, all.
* qwen2, qwen3: if `use_sliding_window` is true, the layers that `layer_types` lists; without
  `layer_types`, all layers from number `max_window_layers` on.

The window is a mask. The caches keep all tokens, but on a GPU, a decode step reads only the pages
in the window. Read before: model/attention.py.
"""

from dataclasses import dataclass

from nanogrpo.errors import check
from nanogrpo.model.hf_config import ARCHITECTURES, READERS

FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURES["ministral"] = "MinistralForCausalLM"


@dataclass(frozen=True)
class Windows:
    """The fields of config.json, with the same names."""

    sliding_window: int
    layer_types: tuple[str, ...] = ()  # if empty, all layers have the window

    def window(self, layer: int) -> int:
        """Return the number of tokens to which a token attends, or 0 for all tokens."""
        return 0 if self.layer_types and self.layer_types[layer] == FULL else self.sliding_window

    def to_dict(self) -> dict:
        """Return the fields of config.json."""
        types = {"use_sliding_window": True, "layer_types": [*self.layer_types]}
        return {"sliding_window": self.sliding_window, **(types if self.layer_types else {})}


def read(raw: dict, where: str) -> dict:
    """Return the dict of a config.json. If the model has windows, `layers` replaces their fields.

    `raw` is the original dict, and `where` is the file's name. The core refuses the fields of a
    window that this function does not understand.
    """
    kind, window = raw.get("model_type"), raw.get("sliding_window", 4096)
    qwen = kind in ("qwen2", "qwen3") and raw.get("use_sliding_window")
    has_windows = qwen or kind in ("mistral", "ministral")
    if not has_windows or type(window) is not int or window < 1:
        return raw
    if kind == "mistral":  # transformers does not read layer_types of this model
        return {**raw, "sliding_window": None, "layers": Windows(window)}
    types, first = raw.get("layer_types"), raw.get("max_window_layers", 28) if qwen else 0
    if not types:
        check(where, "the type of max_window_layers", type(first).__name__, ["int"])
        types = [FULL if i < first else SLIDING for i in range(raw["num_hidden_layers"])]
    for each in types:
        check(where, "layer_types", each, [FULL, SLIDING])
    check(where, "the length of layer_types", len(types), [raw["num_hidden_layers"]])
    layers = Windows(window, tuple(types))
    return {**raw, "use_sliding_window": None, "layer_types": None, "layers": layers}


READERS.append(read)
