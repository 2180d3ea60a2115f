"""The window that a user holds: it counts plain backward passes by itself."""

from __future__ import annotations

from gradfit.accumulate.plain_backwards import PlainBackwards, weakly
from gradfit.accumulate.strategy import Strategy
from gradfit.accumulate.window import Window


class AccumulationContext(Window):
    """An explicit window over some tensors: `target_steps` micro-batches become one gradient, their mean.

    `GradientAccumulator` does everything with one of these; alone it serves a hand-written update. Backward passes
    count by themselves. `step()` ends a micro-batch: passes since the last `step()` are then one, and without any pass
    it counts what was put into `.grad` by hand. Reading `is_ready` when the window is full makes its gradients final.

    >>> import torch
    >>> w = torch.zeros(2, requires_grad=True)
    >>> with AccumulationContext(2) as window:
    ...     window.register_tensor(w)
    ...     for x in (1.0, 3.0):
    ...         (w * x).sum().backward()
    ...     print(window.is_ready, w.grad)
    True tensor([2., 2.])

    Args:
        target_steps: how many micro-batches fill the window.
        strategy: decides in its place when the window is full.
    """

    def __init__(self, target_steps: int, *, strategy: Strategy | None = None) -> None:
        super().__init__(target_steps, strategy=strategy)
        self.plain = PlainBackwards(weakly(self.count_plain), weakly(self.break_off))

    def __enter__(self) -> AccumulationContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dispose(self) -> None:
        """`close`, under the name that other languages have for it."""
        self.close()
