"""An accumulator's state as tensors and plain numbers: a file needs no pickle to hold it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradfit.accumulate.loss_arguments import read_weight
from gradfit.accumulate.window_state import OpenMicroBatch, Phase, Total, WindowState
from gradfit.arguments import read_count
from gradfit.errors import StateError

if TYPE_CHECKING:
    from gradfit.accumulate.accumulator import GradientAccumulator

VERSION = 2
_READABLE = (1, 2)  # the first one has fields that nobody needs any more
_COUNTS = ("closed", "open", "open_plain", "skipped")
_FLAGS = ("delimited", "rescaled", "final")


def save(accumulator: GradientAccumulator) -> dict[str, Any]:
    """Copy the window out: `tensors` has the gradients, `window` everything else."""
    window = accumulator.window
    window.require_outside_micro_batch("state_dict()")
    window.require_intact()
    window.notice_use()
    if window.state.phase is Phase.FILLING and not window.state.is_empty:
        window.require_untouched()
    tensors: dict[str, Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for position, source in enumerate(window.tensors if window.is_final else window.sources):
        if source.grad is not None and window.accumulation_steps:
            _put(tensors, sparse, f"grad.{position}", source.grad)
    for name, term in window.state.terms.items():
        for position, gradient in term.gradients.items():
            _put(tensors, sparse, f"term.{name}.{position}", gradient)
    return {"tensors": tensors, "window": {**numbers_of(accumulator), "sparse": sparse}}


def numbers_of(accumulator: GradientAccumulator) -> dict[str, Any]:
    """The window without its gradients."""
    window, state = accumulator.window, accumulator.window.state
    return {
        "version": VERSION,
        "shapes": [list(tensor.shape) for tensor in window.tensors],
        "windows": state.updates,
        "closed": state.micro_batches,
        "open": sum(one.passes for one in state.open.values()),
        "open_plain": sum(one.plain for one in state.open.values()),
        "skipped": state.skipped,
        "delimited": window.step_ends_micro_batch,
        "rescaled": state.rescaled,
        "had_pass": state.had_pass,
        "final": window.is_final,
        "scale": state.loss_scale,
        "weight": state.main.weight,
        "divisor": state.main.divisor,
        "terms": {name: [term.weight, term.divisor] for name, term in window.state.terms.items()},
        "strategy": window.strategy.state_dict(),
    }


def load(accumulator: GradientAccumulator, state: Mapping[str, Any]) -> None:
    """Put a saved window in place of the one there is, after everything about it was found
    right.
    """
    window = accumulator.window
    try:
        numbers, tensors = state["window"], dict(state["tensors"])
        if numbers["version"] not in _READABLE:
            raise StateError(
                f"The state has version {numbers['version']!r}, this gradfit reads up to {VERSION}."
            )
        shapes = [list(tensor.shape) for tensor in window.tensors]
        if numbers["shapes"] != shapes:
            raise StateError(
                f"The state is that of another model: {_difference(numbers['shapes'], shapes)}."
                " Load it into an accumulator of the same parameters in the same order."
            )
        gradients = {name: _take(tensors, numbers["sparse"], name) for name in _names(tensors)}
        counts = {name: read_count(numbers[name], name, minimum=0) for name in _COUNTS}
        flags, scale = (
            {name: bool(numbers[name]) for name in _FLAGS},
            _positive(numbers["scale"], "scale"),
        )
        terms = {name: _total(*pair) for name, pair in numbers["terms"].items()}
        main, strategy = _total(numbers["weight"], numbers["divisor"]), numbers["strategy"]
        windows = read_count(numbers["windows"], "windows", minimum=0)
        placed: dict[int, Tensor] = {}
        for name, gradient in gradients.items():
            kind, _, rest = name.partition(".")
            term, _, number = rest.rpartition(".")
            position = int(number)
            tensor = window.tensors[read_count(position, name, minimum=0)]
            if gradient.shape != tensor.shape:
                raise StateError(
                    f"The state's {name!r} has shape {tuple(gradient.shape)}, not"
                    f" {tuple(tensor.shape)}."
                )
            gradient = gradient.to(
                device=tensor.device, dtype=tensor.grad_dtype or gradient.dtype, copy=True
            )
            (terms[term].gradients if kind == "term" else placed)[position] = gradient
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"The state is damaged or not an accumulator's: {error!r}. Pass what state_dict() gave."
        ) from error
    window.strategy.load_state_dict(strategy)  # raises before it changes anything
    window.drop()
    window.strategy.load_state_dict(strategy)  # dropping a window has told it that one was over
    slots = window.tensors if flags["final"] else window.sources
    if counts["closed"] + counts["open"]:
        window.start()
    for position, gradient in placed.items():
        slots[position].grad = gradient
    window.step_ends_micro_batch = flags["delimited"]
    window.state = WindowState(
        updates=windows,
        micro_batches=counts["closed"],
        open=(
            {}
            if not counts["open"]
            else {threading.get_ident(): OpenMicroBatch(counts["open"], counts["open_plain"])}
        ),
        skipped=counts["skipped"],
        main=main,
        terms=terms,
        loss_scale=scale,
        rescaled=flags["rescaled"],
        had_pass=bool(numbers.get("had_pass", True)),
    )
    if flags["final"]:
        window.state.phase, window.state.asked = Phase.FINAL, True
        window.take_marks_of_tensors()
    else:
        window.take_marks()


def _total(weight: Any, divisor: Any) -> Total:
    return Total(read_weight(weight), None if divisor is None else _positive(divisor, "divisor"))


def _positive(value: Any, name: str) -> float:
    number = float(read_weight(value, name))
    if not number:
        raise StateError(f"The state's {name} is 0. Pass what state_dict() gave.")
    return number


def _put(
    tensors: dict[str, Tensor], sparse: dict[str, list[int]], name: str, gradient: Tensor
) -> None:
    gradient = gradient.detach()
    if gradient.is_sparse:  # safetensors has no sparse layout
        sparse[name] = [*gradient.shape, int(gradient.is_coalesced())]
        tensors[f"{name}/indices"], tensors[f"{name}/values"] = (
            gradient._indices().clone(),
            gradient._values().clone(),
        )
    else:
        tensors[name] = gradient.clone(memory_format=torch.contiguous_format)


def _take(tensors: dict[str, Tensor], sparse: Mapping[str, list[int]], name: str) -> Tensor:
    if name not in sparse:
        return tensors[name]
    *shape, coalesced = sparse[name]
    return torch.sparse_coo_tensor(
        tensors[f"{name}/indices"],
        tensors[f"{name}/values"],
        shape,
        is_coalesced=bool(coalesced),
        check_invariants=True,
    )


def _names(tensors: dict[str, Tensor]) -> list[str]:
    return list(
        dict.fromkeys(name.removesuffix("/indices").removesuffix("/values") for name in tensors)
    )


def _difference(saved: list[list[int]], here: list[list[int]]) -> str:
    if len(saved) != len(here):
        return f"it has {len(saved)} parameters, this one {len(here)}"
    at = next(position for position, (a, b) in enumerate(zip(saved, here, strict=True)) if a != b)
    return f"parameter {at} has shape {tuple(saved[at])} there and {tuple(here[at])} here"
