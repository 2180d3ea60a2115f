"""`GradAccumulator`: an optimizer that steps once in so many micro-batches, in its plainest
form.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.accumulate.optimizer_access import AnyOptimizer
from gradfit.arguments import invalid, read_count
from gradfit.not_copied import NotCopied


class GradAccumulator(NotCopied):
    """Wraps an optimizer and delays its step until `accumulation_steps` micro-batches have been
    backpropagated.

    Call `step()` after each `loss.backward()`. It is a `GradientAccumulator` with nothing to
    choose; take that one for micro-batches of different sizes, clipping, loss scaling or a state
    that can be saved.

    >>> import torch
    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> accumulator = GradAccumulator(torch.optim.SGD([w], lr=0.5), [w], 2)
    >>> for x in (1.0, 3.0):
    ...     (w * x).sum().backward()
    ...     print(accumulator.step())
    False
    True
    >>> w.detach(), accumulator
    (tensor([0., 1.]), GradAccumulator(accumulation_steps=2, current_step=0, num_parameters=1))

    Args:
        optimizer: steps once a window; any object with `step()` and `zero_grad()`.
        parameters: the tensors whose gradients are accumulated, all of them the optimizer's.
        accumulation_steps: how many micro-batches make one update.

    Raises:
        InvalidParameter: `accumulation_steps` is not a whole number of at least 1.
        MisuseError: the other two are not what they should be.
    """

    _instead_of_copy = "Make one for the copied optimizer."

    def __init__(
        self, optimizer: AnyOptimizer, parameters: Iterable[Tensor], accumulation_steps: int
    ) -> None:
        steps = read_count(accumulation_steps, "accumulation_steps")
        if optimizer is None or isinstance(optimizer, int):
            raise invalid(
                "optimizer", optimizer, "is no optimizer", "torch.optim.SGD(parameters, lr=0.1)"
            )
        if parameters is None:
            raise invalid(
                "parameters", parameters, "is a NoneType", "model.parameters() or a list of tensors"
            )
        self._accumulator = GradientAccumulator(optimizer, steps, parameters=parameters)
        self._optimizer = optimizer

    def step(self) -> bool:
        """End a micro-batch, after its backward pass; True if that made the optimizer step."""
        return self._accumulator.step().stepped

    def flush(self) -> bool:
        """Step with the micro-batches there are, divided by their number; nothing happens if there
        are none.
        """
        return self._accumulator.flush().stepped

    def reset(self) -> None:
        """Drop the micro-batches so far and their gradients, without a step."""
        self._accumulator.reset()

    @property
    def inner(self) -> AnyOptimizer:
        """The optimizer, to look at and to change: its learning rate, say."""
        return self._optimizer

    @property
    def inner_mut(self) -> AnyOptimizer:
        """`inner`: Python has no other kind of reference."""
        return self._optimizer

    @property
    def accumulation_steps(self) -> int:
        """How many micro-batches make one update."""
        return self._accumulator.accumulation_count

    @property
    def current_step(self) -> int:
        """How many micro-batches there have been since the last update."""
        return self._accumulator.current_step

    def __repr__(self) -> str:
        return (
            f"GradAccumulator(accumulation_steps={self.accumulation_steps},"
            f" current_step={self.current_step},"
            f" num_parameters={len(self._accumulator.window.tensors)})"
        )
