"""What both passes of a few rows run in, and what it is to be told on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


def _nothing(*_: object) -> None:
    pass


class BetweenPasses(NamedTuple):
    """To be called when the forward is over, and then, with the loss, before the backward: what is
    asked of the loss in between is neither.
    """

    end_forward: Callable[[], object] = _nothing
    begin_backward: Callable[[Tensor], object] = _nothing


class FewRowsPasses:
    """With all kept that autograd saves."""

    begins_anew = False
    """Whether the whole's begin without gradients, with those of the parts set aside."""

    def of(
        self, content: Any, rows: int, *, is_as_trained: bool
    ) -> contextlib.AbstractContextManager[BetweenPasses]:
        """What both passes run in.

        Args:
            content: the rows.
            rows: how many these are.
            is_as_trained: the forward runs what it does in training.
        """
        return contextlib.nullcontext(BetweenPasses())
