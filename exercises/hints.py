"""Tools of the checkers: they compare an answer with the right one, and raise a `Hint` if it
differs.

In: what an answer returns, what is right, and what known mistakes would give. Out: nothing, or a
`Hint`. A checker computes the result of each plausible mistake, so its hint names the mistake that
was made. Read next: checks/01_advantage.py, check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Hint(Exception):
    """One or two sentences: what is wrong with an answer, and what to try."""


class NotYet(Hint):
    """The answer still has a `...` in place of code, or returns nothing."""


def expect(right: Any, hint: str) -> None:
    if not right:
        raise Hint(hint)


def given(value: Any, name: str, later: str = "") -> Any:
    """Return a value of the answer, or raise NotYet if there is none. later: the hint for a part
    after the first, which the checker's START does not help with.
    """
    if value is None or value is ...:
        missing = f"`{name}` has no value yet: replace its `...`"
        raise Hint(f"{missing}. {later}") if later else NotYet(missing)
    return value


def by_hand(function: Callable, *args: Any) -> Any:
    """Call a function without autograd, and raise a hint if it needs it."""
    try:
        with torch.no_grad():
            return function(*args)
    except RuntimeError as e:
        expect("does not require grad" not in str(e), "Write the derivative without autograd.")
        raise


class Counted(TorchDispatchMode):
    """The most numbers that a computation holds in tensors at a time, and its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.products = 0
        self._held: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            self._held = {ref: n for ref, n in self._held.items() if not ref.expired()}
            self._held[StorageWeakRef(storage)] = storage.nbytes() // out.element_size()
            self.most = max(self.most, sum(self._held.values()))
        return out


def tensor(value: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a value of the answer as a float64 tensor of this shape."""
    given(value, name)
    if isinstance(value, (int, float)) and not shape:
        value = torch.tensor(value)
    expect(
        isinstance(value, Tensor),
        f"`{name}` returns a {type(value).__name__}; return a tensor of shape {list(shape)}.",
    )
    expect(
        value.shape == shape,
        f"`{name}` returns a tensor of shape {list(value.shape)}; its shape must be {list(shape)}.",
    )
    return value.detach().double()


def matches(
    name: str,
    found: Any,
    wanted: Tensor,
    mistakes: Mapping[str, Tensor] | None = None,
    otherwise: str = "Compare each step with the formula in the file.",
    tolerance: float = 1e-6,
) -> None:
    """Raise a hint unless `found` equals `wanted`.

    mistakes: hint → what that mistake would give. If none of them fits, the hint is `otherwise`,
    with the first number that differs.
    """
    found, wanted = tensor(found, name, tuple(wanted.shape)), wanted.detach().double()
    if torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
        return
    for hint, value in (mistakes or {}).items():
        value = value.detach().double().expand_as(found)
        if torch.allclose(found, value, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise Hint(hint)
    apart = (found - wanted).abs() / (1 + wanted.abs())
    place = int(apart.nan_to_num(torch.inf).flatten().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), wanted.shape)]
    numbers = f"{found.flatten()[place]:.5g} instead of {wanted.flatten()[place]:.5g}"
    where = f" at {index}" if index else ""
    raise Hint(f"`{name}` gives {numbers}{where}. {otherwise}")
