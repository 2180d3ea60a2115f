"""The same random numbers for a batch in one piece and for its parts, so that the two can be
compared.

Dropout's mask of a batch and those of its parts are other numbers of the generator, and gradients
would differ for that alone. So the whole batch runs first and its random results are kept; then
each part is given its own rows of them.
"""

from __future__ import annotations

from typing import Any

import torch

from gradfit._torch_listen import DispatchMode
from gradfit.tape.generators import draws
from gradfit.tape.operators import info_of

# Operators whose result is drawn, whatever their input holds: another draw can be written over it.
_DRAWN = {
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random_", "randperm", "uniform_",
}  # fmt: skip
_DROPOUT = "native_dropout"  # returns what it masked and the mask


class CannotShare(Exception):
    """A random operator whose draw cannot be given to the parts; the message says why."""


class WholeDraws(DispatchMode):
    """Keeps what random operators return while a batch runs in one piece; `for_part()` hands it out
    again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[torch.Tensor] = []
        # of each result, how far along its rows the parts before have come
        self._taken: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs or {}):
            self.results.append(_drawn(func, out).detach().clone())
            self._taken.append(0)
        return out

    def for_part(self) -> PartDraws:
        """What the next part of the batch runs in; parts come in their order."""
        return PartDraws(self)

    def rows_for(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """Of the whole batch's result at this position, the next rows that a part with such a
        result takes.
        """
        if position >= len(self.results):
            raise CannotShare("a part draws more often than the whole batch")
        whole = self.results[position]
        if whole.shape == like.shape:  # one draw for all rows, whatever their number
            return whole
        axis = _axis_of_rows(whole, like)
        start, size = self._taken[position], like.size(axis)
        if start + size > whole.size(axis):
            raise CannotShare(
                f"the parts draw more than the {whole.size(axis)} rows of the whole batch"
            )
        self._taken[position] = start + size
        return whole.narrow(axis, start, size)


class PartDraws(DispatchMode):
    """Gives random operators of one part the rows that the whole batch drew for it."""

    def __init__(self, whole: WholeDraws) -> None:
        super().__init__()
        self._whole, self._position = whole, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs or {}):
            drawn = _drawn(func, out)
            drawn.copy_(self._whole.rows_for(self._position, drawn))
            self._position += 1
            if _name(func) == _DROPOUT:
                out[0].copy_(_masked(args[0], drawn, args[1]))
        return out


def _masked(x: torch.Tensor, mask: torch.Tensor, chance: float) -> torch.Tensor:
    """What dropout makes of a tensor with this mask."""
    return x * mask / (1 - chance) if chance < 1 else torch.zeros_like(x)


def _axis_of_rows(whole: torch.Tensor, like: torch.Tensor) -> int:
    """Along which a part's draw is a piece of the whole batch's."""
    axes = []
    if whole.dim() == like.dim():
        axes = [axis for axis in range(like.dim()) if whole.size(axis) != like.size(axis)]
    if len(axes) != 1:
        raise CannotShare(
            f"the whole batch draws {tuple(whole.shape)} where a part draws {tuple(like.shape)}"
        )
    return axes[0]


def _name(func: Any) -> str:
    return str(func).split(".")[1]


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    info = info_of(func)
    if _name(func) == _DROPOUT and args[2] is False:  # not in training: it only copies
        return False
    return info.random and draws(info, args, kwargs)


def _drawn(func: Any, out: Any) -> torch.Tensor:
    """The tensor among an operator's results that the generator decided."""
    if _name(func) == _DROPOUT:
        mask: torch.Tensor = out[1]
        return mask
    if _name(func) not in _DRAWN or not isinstance(out, torch.Tensor):
        raise CannotShare(f"{func} draws inside of its own kernel")
    return out
