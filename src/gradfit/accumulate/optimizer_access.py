"""What the accumulator needs to know about optimizers, torch's own and any other with `step` and
`zero_grad`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from gradfit._torch import is_torchs_own_step
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
    require_methods(optimizer, "optimizer", ("step", "zero_grad"), "a torch optimizer")
    own = getattr(type(optimizer), "step", None)  # the class's: a scheduler wraps the instance's
    parameters = list(inspect.signature(own).parameters.values())[1:] if own is not None else []
    for parameter in filter(_must_be_passed, parameters):
        raise MisuseError(
            f"optimizer: {type(optimizer).__name__}.step needs {parameter.name!r}, to compute"
            " the loss again and again in one step. Accumulate inside the closure: pass"
            " parameters=model.parameters() and no optimizer, and let the closure reset(), run"
            " every micro-batch and return the loss."
        )


def require_methods(value: Any, name: str, methods: Iterable[str], instead: str) -> None:
    """Refuse an argument of that name which lacks one of these methods."""
    for method in methods:
        if not callable(getattr(value, method, None)):
            raise MisuseError(
                f"{name} is a {type(value).__name__} without {method}(). Pass {instead}."
            )


def _must_be_passed(parameter: inspect.Parameter) -> bool:
    positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return positional and parameter.default is parameter.empty


def parameters_of(optimizer: Any) -> list[Tensor] | None:
    """An optimizer's parameters in its own order; None for one that does not say."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return None
    return (
        groups[0]["params"]
        if len(groups) == 1
        else [tensor for group in groups for tensor in group["params"]]
    )


def stepper_of(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer whose hooks will tell of a step: this one, or the one that it wraps; None
    if there is none.

    Wrappers (accelerate's, Lightning Fabric's, a Lookahead) are torch optimizers by name, but only
    the inner one runs hooks, and some of them leave steps out.
    """
    while optimizer is not None:
        if isinstance(optimizer, torch.optim.Optimizer) and getattr(
            type(optimizer).step, "hooked", False
        ):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


@contextlib.contextmanager
def full_precision(optimizer: Any, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let the optimizer work in the gradients' precision where it is wider than the parameters'.

    For the time of the step, parameters and their optimizer state are widened; afterwards each is
    rounded once. The state goes back to the parameters' precision because that is where
    `Optimizer.load_state_dict` would put it: a resumed run is then the same as one never stopped.
    It costs wide copies of both during the step.
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
                # which cannot be given other data: a wide one stands in for it
                if is_dtensor(tensor):
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
            for tensor, data, _ in narrow:  # all of them first: a copy may fail
                tensor.data = data
            for _, data, wide in narrow:
                data.copy_(wide)
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
    """Let an optimizer hold the second tensor of each pair in the place of the first, with its
    state.
    """
    if not pairs:
        return
    now = {id(old): new for old, new in pairs}
    for group in getattr(optimizer, "param_groups", ()):
        group["params"][:] = [now.get(id(tensor), tensor) for tensor in group["params"]]
    state = getattr(optimizer, "state", None)
    if isinstance(state, dict):
        _move_state(state, pairs)


def _move_state(state: dict[Any, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        if old in state:
            state[new] = state.pop(old)


def _convert_state(state: Any, tensor: Tensor, dtype: torch.dtype) -> None:
    mine = state.get(tensor, {}) if isinstance(state, dict) else {}
    for name, value in mine.items():
        if _is_about_elements(value):
            mine[name] = value.to(dtype)


def _is_about_elements(value: Any) -> bool:
    """Numbers that count (step, mu_product) stay as they are: they are not about the parameter's
    elements.
    """
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def can_be_taken_back(optimizer: Any) -> bool:
    """Whether a step changes the parameters and the optimizer's own state alone, so that copies of
    these undo it: not an average of weights that somebody's hook keeps, say.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    own_hooks = (f"{__name__}.{_before_step.__qualname__}", f"{__name__}.{_tell.__qualname__}")
    return is_torchs_own_step(optimizer, own_hooks)


class StepWatcher(Protocol):
    """Whoever wants to know that its optimizer steps."""

    def before_step(self) -> None:
        """The optimizer is about to step."""

    def after_closure(self) -> None:
        """The closure of the step has been run, once of perhaps several times."""

    def after_step(self) -> None:
        """It has stepped."""

    def after_add_param_group(self) -> None:
        """It has new parameters."""


_Watchers = list[weakref.ref[StepWatcher]]
_watchers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watchers] = weakref.WeakKeyDictionary()


def watch_steps(optimizer: torch.optim.Optimizer, watcher: StepWatcher) -> None:
    """Tell a watcher about this optimizer's steps, as long as both live.

    An optimizer gets one pair of hooks, which stays: torch goes through its hooks while they run,
    so that none may be taken away when the garbage collector happens to come by.
    """
    watchers = _watchers.get(optimizer)
    if watchers is None:
        watchers = _watchers[optimizer] = []
        optimizer.register_step_pre_hook(functools.partial(_before_step, watchers))
        optimizer.register_step_post_hook(functools.partial(_tell, watchers, "after_step"))
        _watch_groups(optimizer, watchers)
    watchers[:] = [one for one in watchers if one() is not None] + [weakref.ref(watcher)]


def _watch_groups(optimizer: torch.optim.Optimizer, watchers: _Watchers) -> None:
    """Stand in for `add_param_group`, for which torch has no hook, on this object, as torch's
    schedulers do for `step`.

    A plain backward pass may reach new parameters before any old one, and must be noticed there.
    """
    reference = weakref.ref(optimizer)
    original = type(optimizer).add_param_group

    @functools.wraps(original)
    def add_param_group(param_group: dict[str, Any]) -> None:
        alive = reference()
        assert alive is not None
        original(alive, param_group)
        _tell(watchers, "after_add_param_group")

    if "add_param_group" not in vars(optimizer):
        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _before_step(
    watchers: _Watchers, _: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell of a step, and of its closure, whose passes come when it has begun: gives the step's
    arguments with one that does, None if there is no closure.
    """
    _tell(watchers, "before_step")
    if options.get("closure") is not None:
        return arguments, {**options, "closure": _told(watchers, options["closure"])}
    if len(arguments) > 1 and callable(arguments[1]):  # the first is the optimizer
        return (arguments[0], _told(watchers, arguments[1]), *arguments[2:]), options
    return None


def _told(watchers: _Watchers, closure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def told(*arguments: Any, **options: Any) -> Any:
        loss = closure(*arguments, **options)
        _tell(watchers, "after_closure")
        return loss

    return told


def _tell(watchers: _Watchers, what: str, *_: Any) -> None:
    for one in list(watchers):
        alive = one()
        if alive is not None:
            getattr(alive, what)()
