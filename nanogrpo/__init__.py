"""nanogrpo: GRPO for language models in plain PyTorch and Triton. Start reading at train.py.

>>> from nanogrpo import Config, train  # see extras/api.py
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanogrpo.extras.api import Config, Result, evaluate, generate, train

__all__ = ["Config", "Result", "evaluate", "generate", "train"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the Python interface on first use, because this import loads the options of all
    extras."""
    if name in __all__:
        from nanogrpo.extras import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
