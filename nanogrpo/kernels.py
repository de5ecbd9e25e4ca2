"""Make the folder `kernels/` importable as `nanogrpo.kernels`.

Hugging Face publishes a package called `kernels`, and transformers tries to import it. If our
folder were a top-level package, transformers would mistake our folder for that package, and
importing transformers would fail. So `kernels/` has no `__init__.py`, and this module becomes the
package by setting `__path__`: `nanogrpo.kernels.head` is `kernels/head.py`. In a checkout, the
folder is next to the package `nanogrpo`; in an installed wheel, it is inside the package. The
folder typings/ tells type checkers where `nanogrpo.kernels` is.
"""

from pathlib import Path

_package = Path(__file__).resolve().parent
_inside = _package / "kernels"
# Only one of the two folders is searched. If nanogrpo is installed in site-packages,
# the folder `kernels` next to it may be Hugging Face's package of that name.
__path__ = [str(_inside if _inside.is_dir() else _package.parent / "kernels")]
