"""Which tensors a window accumulates into: those it was given, or what its optimizer has by now.

Functions on a window, not an object of it: one that holds the window would be a reference cycle,
and gradients would live until the garbage collector comes by. The same goes for the other files
that work on a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradfit._torch import version_of
from gradfit.accumulate.accumulator_options import read_members
from gradfit.accumulate.identities import identities, without
from gradfit.accumulate.marks import claim, mark, unmark
from gradfit.accumulate.optimizer_access import parameters_of
from gradfit.accumulate.processes import SINGLE_PROCESS, ranks_of
from gradfit.accumulate.window_state import Total

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window


def register_all(window: Window, tensors: Iterable[Tensor], name: str) -> None:
    """Take tensors in, all or none."""
    new = read_members(tensors, window.ids, name)
    window.is_noted = False
    if not window.bare:
        claim(window, [*window.tensors, *new])
    window.tensors += new
    window.ids.update(map(id, new))
    mark(window, new)
    for tensor in new:
        window.plain.watch(tensor)
        _widen(tensor, window.dtype)
    _find_ranks(window)


def _widen(tensor: Tensor, dtype: torch.dtype | None) -> None:
    wide = tensor.dtype if dtype is None else torch.promote_types(tensor.dtype, dtype)
    if wide != tensor.dtype:
        gradient, tensor.grad = tensor.grad, None
        tensor.grad_dtype = wide  # autograd itself adds up in this precision from now on
        tensor.grad = None if gradient is None else gradient.to(wide)


def _find_ranks(window: Window) -> None:
    window.last_marks = window.settled = window.next_way = None  # of other tensors
    window.ranks.close()
    window.ranks = ranks_of(window.tensors, window) if window.tensors else SINGLE_PROCESS
    window.sources = window.ranks.sources(window.tensors)
    window.may_be_wrapped_later = window.ranks is SINGLE_PROCESS
    note_parameters(window)


def note_parameters(window: Window) -> None:
    """From here on it can be told whether anybody has written to a parameter."""
    window.written = [*map(version_of, window.tensors)] if window.watches_parameters else None


def _forget_all(window: Window, tensors: Iterable[Tensor]) -> None:
    """Take tensors out again."""
    gone = {id(tensor): tensor for tensor in tensors}
    for tensor in gone.values():
        window.plain.forget(tensor)
    unmark(window, gone.values())
    window.tensors = without(window.tensors, gone)
    window.ids -= gone.keys()
    _find_ranks(window)


def follow_optimizer(window: Window) -> list[Tensor]:
    """Take up parameters that were added to the optimizer, let go those that were removed; gives
    the new ones.
    """
    now = parameters_of(window.optimizer) if window.follows_optimizer else None
    if now is None or _are_same(now, window.tensors):
        return []
    return _exchange_members(window, now)


def look_for_others(window: Window) -> None:
    """Before the optimizer steps: it must not have gradients of parameters that are not the
    window's, which nobody has weighed. Those of a single micro-batch are what they are.
    """
    if window.bare or window.follows_optimizer or window.optimizer is None:
        return
    all_of_it = parameters_of(window.optimizer) or []
    others = [one for one in all_of_it if one.grad is not None and id(one) not in window.ids]
    if others and window.accumulation_steps > 1:
        window.break_off(
            f"{len(others)} of the optimizer's {len(all_of_it)} parameters have gradients and are"
            f" not among the {len(window.tensors)} of this accumulator: it would update them with"
            " what nobody has counted or divided. Leave `parameters` out, which takes all of the"
            " optimizer's, or freeze the others by requires_grad_(False)."
        )


def _are_same(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _exchange_members(window: Window, now: Sequence[Tensor]) -> list[Tensor]:
    """Have these members and no others; gives the new ones."""
    was = {id(tensor): position for position, tensor in enumerate(window.tensors)}
    ids = identities(now)
    _forget_all(window, without(window.tensors, ids))
    new = without(now, was)
    register_all(window, new, "optimizer")
    _arrange(window, now, was)
    if window.transaction is not None:
        window.transaction.extend(window.sources)
    if window.marks is not None:
        window.marks.change(ids, new)
    return new


def _arrange(window: Window, order: Sequence[Tensor], was: dict[int, int]) -> None:
    """Keep the optimizer's order, as whoever loads the window's state will find it."""
    window.tensors = list(order)
    _find_ranks(window)
    now = {was[id(tensor)]: at for at, tensor in enumerate(order) if id(tensor) in was}
    for term in _all_terms(window):
        term.renumber(now)


def _all_terms(window: Window) -> Iterator[Total]:
    """The loss terms of the window, and of the micro-batch that is not in it yet."""
    yield from window.state.terms.values()
    if window.transaction is not None:
        yield from window.transaction.terms.values()


def let_go_all(window: Window) -> None:
    """Have no members any more; they and their `.grad` are left as they are."""
    window.plain.close()
    unmark(window, window.tensors)
    if window.dtype is not None:
        for tensor in window.tensors:
            _narrow(tensor)
    window.tensors, window.ids = [], set()
    window.is_first = True
    _find_ranks(window)


def _narrow(tensor: Tensor) -> None:
    """Take back what `_widen` has done, as far as the gradient that is there allows."""
    if tensor.grad_dtype is not None:
        tensor.grad_dtype = tensor.dtype if tensor.grad is None else tensor.grad.dtype
