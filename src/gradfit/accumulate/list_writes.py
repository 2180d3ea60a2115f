"""What an optimizer's step writes to lists of tensors, where torch does not count it.

Torch counts what is written to a tensor, but not what its fused kernels write (`_fused_adamw_`;
torch 2.10 to 2.15): a step that failed after them would look as if it had not begun.
"""

from __future__ import annotations

from typing import Any

from gradfit._torch import is_operator
from gradfit._torch_listen import DispatchMode


def is_fused(optimizer: Any) -> bool:
    """Whether a step of one of torch's optimizers calls fused kernels."""
    return any(group.get("fused") for group in getattr(optimizer, "param_groups", ()))


class ListWrites(DispatchMode):
    """Enter it around a step; `reached` are the ids of what operators were given to write to, as
    the first list of their arguments, whether they failed or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if args and isinstance(args[0], list) and is_operator(func) and func._schema.is_mutable:
            self.reached.update(map(id, args[0]))
        return func(*args, **(kwargs or {}))
