"""The accumulator's arguments: every mistake named before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.identities import identities
from gradfit.accumulate.loss_arguments import check_loss, read_weight
from gradfit.accumulate.optimizer_access import check_optimizer, parameters_of, require_methods
from gradfit.accumulate.strategy import Strategy
from gradfit.arguments import Number, read_choice, read_count, read_flag, read_number
from gradfit.errors import MisuseError

_SCALER_METHODS = ("scale", "unscale_", "step", "update", "get_scale", "is_enabled")


def check(
    optimizer: Any,
    steps: Any,
    strategy: Any,
    dtype: Any,
    scaler: Any,
    clip: Any,
    on_nonfinite: Any,
    isolate: Any,
) -> None:
    """Check every option of `GradientAccumulator` but its parameters."""
    if optimizer is not None:
        check_optimizer(optimizer)
    read_count(steps, "steps")
    if strategy is not None:
        _check_strategy(strategy, steps, isolate)
    if dtype is not None:
        _check_dtype(dtype)
    check_scaler(scaler, optimizer)
    if clip is not None:
        _check_clip(clip)
    read_flag(isolate, "isolate")
    read_choice(on_nonfinite, "on_nonfinite", ("raise", "skip"))


def _check_dtype(dtype: Any) -> None:
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise MisuseError(
            f"dtype={dtype!r} is not a floating point type. Pass dtype=torch.float32."
        )


def _check_clip(clip: Any) -> None:
    if not callable(getattr(clip, "clip_grads", None)):
        read_number(clip, "clip", above=0)


def _check_strategy(strategy: Any, steps: int, isolate: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise MisuseError(
            f"strategy is a {type(strategy).__name__}. Pass FixedTargetBatch(n) or another"
            " gradfit strategy."
        )
    if steps != 1:
        raise MisuseError(
            f"steps={steps} and strategy={strategy!r} both say when a window is full. Pass one."
        )
    if strategy.needs_norms and not isolate:
        raise MisuseError(
            f"strategy={strategy!r} measures each micro-batch's gradient. Pass isolate=True."
        )


def check_scaler(scaler: Any, optimizer: Any) -> None:
    """A scaler, with the optimizer that it steps; or none."""
    if scaler is not None:
        require_methods(scaler, "scaler", _SCALER_METHODS, "torch.amp.GradScaler()")
        if optimizer is None:
            raise MisuseError(
                "scaler steps the optimizer itself, and there is none. Pass optimizer= with it."
            )


def read_optimizer_or_steps(optimizer: Any, steps: Any) -> tuple[Any, Any]:
    """`GradientAccumulator(4)` has the steps in the first place, and no optimizer."""
    if isinstance(optimizer, bool) or not isinstance(optimizer, int):
        return optimizer, steps
    if steps != 1:
        raise MisuseError(
            f"optimizer={optimizer!r} is a number, and steps={steps!r} says how many micro-batches"
            " there are already. Pass GradientAccumulator(optimizer, steps=4) or"
            " GradientAccumulator(4)."
        )
    return None, optimizer


def choose_parameters(optimizer: Any, parameters: Any) -> list[Tensor] | None:
    """The parameters to accumulate into; None if nobody has named any yet."""
    if parameters is not None:
        tensors = read_parameters(parameters)
        if optimizer is not None:
            require_members(optimizer, tensors)
        return tensors
    return None if optimizer is None else _parameters_to_follow(optimizer)


def _parameters_to_follow(optimizer: Any) -> list[Tensor]:
    own = parameters_of(optimizer)
    if own is None:
        raise MisuseError(
            f"optimizer: a {type(optimizer).__name__} has no param_groups, so its parameters are"
            " unknown. Pass parameters=model.parameters() with it."
        )
    if not own:
        raise MisuseError("optimizer has no parameters. Pass parameters=model.parameters().")
    return own


def read_parameters(parameters: Any) -> list[Tensor]:
    """A list of tensors from what the user passed."""
    if isinstance(parameters, Tensor | torch.nn.Module | Mapping) or not isinstance(
        parameters, Iterable
    ):
        raise MisuseError(
            f"parameters is a {type(parameters).__name__}. Pass model.parameters() or a list of"
            " tensors."
        )
    tensors = list(parameters)
    if not tensors:
        raise MisuseError("parameters is empty: there are no parameters. Pass model.parameters().")
    return tensors


def read_members(tensors: Iterable[Any], present: Set[int], name: str) -> list[Tensor]:
    """Tensors that gradients can add up in, none of them present already, by identity, and none
    twice.
    """
    new: dict[int, Tensor] = {}
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise MisuseError(
                f"{name} holds a {type(tensor).__name__}, not a tensor. Pass model.parameters()."
            )
        if id(tensor) in present or id(tensor) in new:
            raise MisuseError(
                f"{name}: the tensor at {position}, of shape {tuple(tensor.shape)}, is there twice."
                " Pass it once."
            )
        _require_differentiable(tensor, f"{name}: the tensor at {position}")
        new[id(tensor)] = tensor
    return list(new.values())


def _require_differentiable(tensor: Tensor, what: str) -> None:
    """Only leaves of real or complex numbers have a `.grad` that adds up."""
    if not tensor.is_leaf:
        raise MisuseError(f"{what} is not a leaf. Pass model.parameters().")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise MisuseError(f"{what} is of type {tensor.dtype}. Pass model.parameters().")


def require_members(optimizer: Any, tensors: list[Tensor]) -> None:
    """Every parameter must be one that the optimizer updates."""
    own = parameters_of(optimizer)
    if own is None:
        return  # it does not say which ones it has
    members = identities(own)
    for position, tensor in enumerate(tensors):
        if id(tensor) not in members:
            shape = tuple(getattr(tensor, "shape", ()))
            raise MisuseError(
                f"parameters: the one at {position}, of shape {shape}, is not in the optimizer,"
                " which would never update it. Pass the optimizer's parameters, or add it with"
                " optimizer.add_param_group."
            )


def read_terms(
    terms: Any, loss: Any, weight: Any, reduction: str
) -> dict[str, tuple[Tensor, Number]]:
    """Loss terms as `{name: (sum, number of items)}`."""
    _require_terms_alone(loss, weight, reduction)
    if not isinstance(terms, Mapping) or not terms:
        raise MisuseError(
            f"terms={terms!r} holds no terms. Pass terms={{'name': (loss_sum, count)}}."
        )
    return {name: _read_term(name, pair) for name, pair in terms.items()}


def _require_terms_alone(loss: Any, weight: Any, reduction: str) -> None:
    if loss is not None or not (isinstance(weight, int) and weight == 1) or reduction != "mean":
        raise MisuseError(
            "terms= says all there is to say. Pass it alone, without loss, weight or reduction."
        )


def _read_term(name: Any, pair: Any) -> tuple[Tensor, Number]:
    """One loss term; a loss without weight is not looked at, it may be NaN."""
    if not isinstance(name, str) or not name:
        raise MisuseError(f"terms: {name!r} is no name. Pass terms={{'name': (loss_sum, count)}}.")
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise MisuseError(f"terms[{name!r}] is not a pair. Pass (loss_sum, count).")
    loss, weight = pair
    number = read_weight(weight, f"terms[{name!r}][1]")
    return (check_loss(loss, f"terms[{name!r}][0]") if number else loss), number
