"""Forwards whose random numbers do not depend on how many rows there are, so that parts can be
compared with the whole.

Dropout is left out, in training mode, too, since some losses exist only there. What a loss draws
itself (the noise of a diffusion model or an autoencoder, its time steps) is drawn for one row and
given to every row: the n-th draw is the same in each run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# They use `training` for dropout alone, and run it where a function mode does not look.
_DROPPING = (nn.RNNBase, nn.MultiheadAttention)
_DROPOUTS = {
    getattr(space, name) for space in (F, torch) for base in ("dropout", "dropout1d", "dropout2d",
    "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout") for name in (base,
    f"{base}_") if hasattr(space, name)
}  # fmt: skip


def _normal(drawn: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    standard = torch.erfinv((2 * drawn - 1).clamp(-0.9999, 0.9999)) * 2**0.5  # infinite at ±1
    return torch.as_tensor(mean + std * standard)


def _uniform(drawn: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * drawn


def _integers(drawn: Tensor, low: int, high: int | None = None) -> Tensor:
    low, high = (0, low) if high is None else (low, high)
    return (low + (high - low) * drawn).floor()


def _bernoulli(drawn: Tensor, probability: Any = 0.5) -> Tensor:
    return torch.as_tensor(drawn < probability)


def _exponential(drawn: Tensor, rate: float = 1.0) -> Tensor:
    return -torch.log1p(-drawn) / rate


def _no_parameters(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda drawn, *_: function(drawn)


_Shaped = Callable[..., Tensor]
# From numbers in [0, 1) and a function's arguments, which begin at that place, to what it draws.
_DRAWS: dict[Any, tuple[_Shaped, int]] = {
    torch.randn: (_no_parameters(_normal), 0),
    torch.randn_like: (_no_parameters(_normal), 1),
    torch.normal: (_normal, 0),
    Tensor.normal_: (_normal, 1),
    torch.rand: (_no_parameters(_uniform), 0),
    torch.rand_like: (_no_parameters(_uniform), 1),
    Tensor.uniform_: (_uniform, 1),
    torch.randint: (_integers, 0),
    torch.randint_like: (_integers, 1),
    torch.bernoulli: (_bernoulli, 0),
    Tensor.bernoulli: (_bernoulli, 0),
    Tensor.bernoulli_: (_bernoulli, 1),
    Tensor.exponential_: (_exponential, 1),
}
_CHANGED = {Tensor.register_hook, F.scaled_dot_product_attention, *_DROPOUTS, *_DRAWS}
"""Functions of which more is to be said than what numbers they return."""
_NAMES = {"mean", "std", "low", "high", "p", "lambd", "from", "to"}


_ROUNDING = {
    dtype: torch.finfo(dtype).eps
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


class QuietRandomness(TorchFunctionMode):
    """Inside, dropout drops nothing and each random draw has equal rows.

    Args:
        evaluates: the model is in evaluation mode, though it is trained in training mode.
    """

    def __init__(self, *, evaluates: bool = False) -> None:
        super().__init__()
        self._evaluates = evaluates
        self.draws = 0
        self.changes = evaluates
        """Whether something else was run than in training."""
        self.sets_hooks = False
        """Whether a hook was set on a tensor."""
        self.rounding = 0.0
        """Machine epsilon of the narrowest numbers that a function returned, autocast's
        included.
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CHANGED:  # all but a few of thousands
            result = func(*args, **kwargs)
            if isinstance(result, Tensor | tuple):
                self._note(result)
            return result
        if func is Tensor.register_hook:
            self.sets_hooks = True
        if func in _DROPOUTS:
            result = _drop_nothing(func, args, kwargs, always=self._evaluates)
            self.changes |= result is not (args or [kwargs.get("input")])[0]
            return result
        if func is F.scaled_dot_product_attention:
            self.changes |= bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
            args, kwargs = _without_dropout_p(args, kwargs)
        if func in _DRAWS:
            return self._draw(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(result)
        return result

    def _note(self, result: Any) -> None:
        if isinstance(result, tuple) and result:
            result = result[0]
        if isinstance(result, Tensor) and result.dtype in _ROUNDING:
            self.rounding = max(self.rounding, _ROUNDING[result.dtype])

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        shaped, first = _DRAWS[func]
        # Called all the same: for its shape, type and device, and for the errors that it raises.
        result = func(*args, **kwargs)
        self.draws += 1
        self.changes = True
        generator = torch.Generator("cpu").manual_seed(self.draws)
        drawn = torch.rand(result.shape[1:], generator=generator, device="cpu").to(result.device)
        parameters = _parameters(args[first:], kwargs)
        with torch.no_grad():
            result.copy_(shaped(drawn.expand(result.shape), *parameters[:2]).to(result.dtype))
        return result


def _drop_nothing(func: Any, args: Any, kwargs: Any, *, always: bool) -> Any:
    """What a dropout gives that drops nothing: a tensor of its own, as in training, since the model
    may write to it (`x = dropout(tanh(x)); x += y`). The argument itself would be written over
    there, which a backward pass refuses.

    Args:
        func: a dropout, of `torch` (with `train`) or of `torch.nn.functional` (with `training`).
        args: its positional arguments.
        kwargs: its named arguments.
        always: whatever `training` says.
    """
    given = {**dict(zip(("input", "p", "train"), args, strict=False)), **kwargs}
    tensor = given["input"]
    if not given["p"] or not (always or given.get("training", given.get("train"))):
        return tensor
    return tensor.mul_(1) if given.get("inplace") or func.__name__[-1] == "_" else tensor * 1


def _parameters(args: Any, kwargs: Any) -> list[Any]:
    """Of a distribution, from the arguments of a function that draws from it; and no sizes."""
    given = [*args, *(value for name, value in kwargs.items() if name in _NAMES)]
    return [value for value in given if isinstance(value, int | float | Tensor)]


def _without_dropout_p(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an attention, whose fifth is the share that it drops."""
    if len(args) > 4:
        return (*args[:4], 0.0, *args[5:]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _drops_now(module: nn.Module) -> bool:
    return isinstance(module, _DROPPING) and module.training


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[bool]:
    """Switch off the modules that draw masks themselves, and leave the mode of all others; gives
    whether there are any.
    """
    changed = [*filter(_drops_now, model.modules())]
    for module in changed:
        module.training = False
    try:
        yield bool(changed)
    finally:
        for module in changed:
            module.training = True


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
