"""FSDP2."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def is_sharded(t: Tensor) -> bool:
    return isinstance(t, DTensor)


class Sharded:
    pass
