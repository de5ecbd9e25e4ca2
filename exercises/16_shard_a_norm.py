"""Exercise 16: shard a norm.

With FSDP, the gradient of a model is divided over several ranks (processes): each has some shards
of it, and no rank has all. Before the update, the gradient is clipped by its norm, the root of the
sum of the squares of *all* its numbers. Compute it on every rank.

`gather(value)` sends a value to all ranks, and returns the list of the values of all ranks, in the
same order everywhere. It waits until every rank has called it. Gradients are large and the network
is slow: send one number. A rank may have no shards.

    python -m exercises.check 16
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def global_norm(shards: list[Tensor], gather: Callable[[Any], list]) -> float:
    """shards: the tensors of this rank. Returns the norm of the shards of all ranks."""
    ...
