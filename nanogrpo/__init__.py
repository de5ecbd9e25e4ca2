"""nanogrpo: GRPO for language models in plain PyTorch and Triton. Start reading at train.py.

>>> from nanogrpo import Config, train  # see api.py
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanogrpo.api import train as train
    from nanogrpo.config import Config as Config

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is used. A vLLM server imports this package without."""
    if name == "Config":
        from nanogrpo.config import Config

        return Config
    if name == "train":
        from nanogrpo.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
