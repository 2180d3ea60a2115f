"""What the accumulator needs to know about optimizers, torch's own and any other with `step` and `zero_grad`."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradfit._torch_distributed import is_dtensor
from gradfit.errors import MisuseError


class AnyOptimizer(Protocol):
    """All that is asked of an optimizer."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self) -> Any:
        """Clear the gradients."""


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer, and what cannot step without being given the loss again."""
    for method in ("step", "zero_grad"):
        if not callable(getattr(optimizer, method, None)):
            raise MisuseError(f"optimizer is a {type(optimizer).__name__} without {method}(). Pass a torch optimizer.")
    own = getattr(type(optimizer), "step", None)  # the class's: a scheduler wraps the instance's
    for parameter in list(inspect.signature(own).parameters.values())[1:] if own is not None else ():
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if positional and parameter.default is parameter.empty:
            raise MisuseError(
                f"optimizer: {type(optimizer).__name__}.step needs {parameter.name!r}, to compute the loss again and "
                "again in one step. Accumulate inside the closure: pass parameters=model.parameters() and no "
                "optimizer, and let the closure reset(), run every micro-batch and return the loss."
            )


def parameters_of(optimizer: Any) -> list[Tensor] | None:
    """An optimizer's parameters in its own order; None for one that does not say."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return None
    return groups[0]["params"] if len(groups) == 1 else [tensor for group in groups for tensor in group["params"]]


def stepper_of(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer whose hooks will tell of a step: this one, or the one that it wraps; None if there is none.

    Wrappers (accelerate's, Lightning Fabric's, a Lookahead) are torch optimizers by name, but only the inner one runs
    hooks, and some of them leave steps out.
    """
    while optimizer is not None:
        if isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


@contextlib.contextmanager
def full_precision(optimizer: Any, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let the optimizer work in the gradients' precision where it is wider than the parameters'.

    For the time of the step, parameters and their optimizer state are widened; afterwards each is rounded once. The
    state goes back to the parameters' precision because that is where `Optimizer.load_state_dict` would put it: a
    resumed run is then the same as one never stopped. It costs wide copies of both during the step.
    """
    narrow: list[tuple[Tensor, Tensor, Tensor]] = []
    sharded: list[tuple[Tensor, Tensor]] = []
    widened: list[Tensor] = []
    state = getattr(optimizer, "state", None)
    try:
        for tensor in tensors:
            if tensor.grad is not None and tensor.grad.dtype != tensor.dtype:
                widened.append(tensor)
                _convert_state(state, tensor, tensor.grad.dtype)
                if is_dtensor(tensor):  # which cannot be given other data: a wide one stands in for it
                    sharded.append((tensor, _wide_copy(tensor)))
                    continue
                data = tensor.data
                wide = data.to(tensor.grad.dtype)
                narrow.append((tensor, data, wide))
                tensor.data = wide
        _swap(optimizer, sharded)
        yield
    finally:
        _swap(optimizer, [(wide, tensor) for tensor, wide in sharded])
        with torch.no_grad():
            for tensor, data, wide in narrow:
                data.copy_(wide)
                tensor.data = data
            for tensor, wide in sharded:
                tensor.copy_(wide)
            narrow.clear()  # and with it the wide ones
            # Only this takes memory, and can fail: the parameters are themselves again by then.
            for tensor in widened:
                _convert_state(state, tensor, tensor.dtype)


def _wide_copy(tensor: Tensor) -> Tensor:
    wide = torch.nn.Parameter(tensor.detach().to(tensor.grad.dtype))  # type: ignore[union-attr]
    wide.grad = tensor.grad
    return wide


def _swap(optimizer: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Let an optimizer hold the second tensor of each pair in the place of the first, with its state."""
    now = {id(old): new for old, new in pairs}
    state = getattr(optimizer, "state", None)
    for group in getattr(optimizer, "param_groups", ()) if pairs else ():
        group["params"][:] = [now.get(id(tensor), tensor) for tensor in group["params"]]
    for old, new in pairs:
        if isinstance(state, dict) and old in state:
            state[new] = state.pop(old)


def _convert_state(state: Any, tensor: Tensor, dtype: torch.dtype) -> None:
    mine = state.get(tensor, {}) if isinstance(state, dict) else {}
    for name, value in mine.items():
        # Numbers that count (step, mu_product) stay as they are: they are not about the parameter's elements.
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
            mine[name] = value.to(dtype)


class StepWatcher(Protocol):
    """Whoever wants to know that an optimizer steps."""

    stepping: bool
    """It steps one itself, and asks only whether that was done."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A torch optimizer is about to step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""


def watch_steps(watcher: StepWatcher) -> None:
    """Tell a watcher about every torch optimizer's step, as long as it lives."""
    reference = weakref.ref(watcher)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is not None and not alive.stepping:
            alive.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.after_step(optimizer)

    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))

    def stop() -> None:
        for handle in handles:
            handle.remove()

    weakref.finalize(watcher, stop)
