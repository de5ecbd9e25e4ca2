"""Gives the folder `kernels/` the name `nanogrpo.kernels`.

Hugging Face publishes a package called `kernels` that transformers (and so vLLM) looks for. If our
folder were importable as a top-level package it would be taken for that one, and `import
transformers` would fail. So `kernels/` has no `__init__.py`, and this module, by setting
`__path__`, becomes the package through which its files are reached: `nanogrpo.kernels.head` is
`kernels/head.py`. In a checkout the folder lies beside the package `nanogrpo`; in an installed
wheel it lies inside it.
"""

from pathlib import Path

_here = Path(__file__).resolve().parent
_inside, _beside = _here / "kernels", _here.parent / "kernels"  # a wheel; a checkout
# Never both: beside an installed package lies site-packages/kernels, which may be Hugging Face's.
__path__ = [str(_inside if _inside.is_dir() else _beside)]
