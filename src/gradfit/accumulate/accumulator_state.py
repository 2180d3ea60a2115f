"""An accumulator's state as tensors and plain numbers: a file needs no pickle to hold it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradfit.accumulate.loss_arguments import read_weight
from gradfit.accumulate.loss_scaling import CarriedScale
from gradfit.accumulate.window_begin import notice_use, start
from gradfit.accumulate.window_marks import require_usable, take_marks, take_marks_of_tensors
from gradfit.accumulate.window_state import OpenMicroBatch, Phase, Total, WindowState
from gradfit.arguments import read_count
from gradfit.errors import StateError

if TYPE_CHECKING:
    from gradfit.accumulate.accumulator import GradientAccumulator
    from gradfit.accumulate.window import Window

VERSION = 2
_READABLE = (1, 2)  # the first one has fields that nobody needs any more
_COUNTS = ("closed", "open", "open_plain", "skipped")
_FLAGS = ("delimited", "final")


def save(accumulator: GradientAccumulator) -> dict[str, Any]:
    """Copy the window out: `tensors` has the gradients, `window` everything else."""
    window = accumulator.window
    window.require_outside_micro_batch("state_dict()")
    window.require_intact()
    notice_use(window)
    if window.state.phase is Phase.FILLING and not window.state.is_empty:
        require_usable(window, may_be_cleared=False)
    tensors: dict[str, Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for name, gradient in _gradients_of(window):
        _put(tensors, sparse, name, gradient)
    return {"tensors": tensors, "window": {**numbers_of(accumulator), "sparse": sparse}}


def _gradients_of(window: Window) -> Iterator[tuple[str, Tensor]]:
    """Every gradient of the window, with the name it has in a state."""
    if window.accumulation_steps:
        yield from _main_gradients(window.tensors if window.is_final else window.sources)
    for name, term in window.state.terms.items():
        for position, gradient in term.gradients.items():
            yield f"term.{name}.{position}", gradient


def _main_gradients(sources: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for position, source in enumerate(sources):
        if source.grad is not None:
            yield f"grad.{position}", source.grad


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
        "had_pass": state.had_pass,
        "final": window.is_final,
        "scale": state.loss_scale,
        "weight": state.main.weight,
        "divisor": state.main.divisor,
        "terms": {name: [term.weight, term.divisor] for name, term in window.state.terms.items()},
        "strategy": window.strategy.state_dict(),
    }


@dataclass(frozen=True)
class _SavedWindow:
    """A window as it was read from a state, each field checked."""

    state: WindowState
    gradients: dict[int, Tensor]
    """The window's own sums (or means, if it is final), by the tensor's position."""
    strategy: dict[str, Any]
    step_ends_micro_batch: bool
    is_final: bool


def load(accumulator: GradientAccumulator, state: Mapping[str, Any]) -> None:
    """Put a saved window in place of the one there is, after everything about it was found
    right.
    """
    window = accumulator.window
    try:
        saved = _read(window.tensors, state["window"], dict(state["tensors"]))
    except StateError:
        raise
    except (
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RuntimeError,  # torch's, of tensors where there should be numbers, and of no sparse tensor
    ) as error:
        raise StateError(
            f"The state is damaged or not an accumulator's: {error!r}. Pass what state_dict() gave."
        ) from error
    window.strategy.load_state_dict(saved.strategy)  # raises before it changes anything
    window.drop()
    window.strategy.load_state_dict(saved.strategy)  # dropping has told it that one was over
    _put_in_place(window, saved)


def _put_in_place(window: Window, saved: _SavedWindow) -> None:
    """Fill a window that was dropped with a saved one."""
    slots = window.tensors if saved.is_final else window.sources
    if not saved.state.is_empty:
        start(window)
    for position, gradient in saved.gradients.items():
        slots[position].grad = gradient
    window.step_ends_micro_batch = saved.step_ends_micro_batch
    window.state = saved.state
    if saved.is_final:
        window.state.phase, window.state.asked = Phase.FINAL, True
        take_marks_of_tensors(window)
    else:
        take_marks(window)


def _read(
    members: list[Tensor], numbers: Mapping[str, Any], tensors: dict[str, Tensor]
) -> _SavedWindow:
    """Check every field of a saved window; nothing is changed."""
    _require_same_model(members, numbers)
    terms = {name: _total(*pair) for name, pair in numbers["terms"].items()}
    flags = {name: bool(numbers[name]) for name in _FLAGS}
    gradients = _read_gradients(members, tensors, numbers["sparse"], terms)
    return _SavedWindow(
        _read_counters(numbers, terms),
        gradients,
        numbers["strategy"],
        step_ends_micro_batch=flags["delimited"],
        is_final=flags["final"],
    )


def _require_same_model(members: list[Tensor], numbers: Mapping[str, Any]) -> None:
    if numbers["version"] not in _READABLE:
        raise StateError(
            f"The state has version {numbers['version']!r}, this gradfit reads up to {VERSION}."
        )
    shapes = [list(tensor.shape) for tensor in members]
    if numbers["shapes"] != shapes:
        raise StateError(
            f"The state is that of another model: {_difference(numbers['shapes'], shapes)}."
            " Load it into an accumulator of the same parameters in the same order."
        )


def _read_counters(numbers: Mapping[str, Any], terms: dict[str, Total]) -> WindowState:
    counts = {name: read_count(numbers[name], name, minimum=0) for name in _COUNTS}
    passes = OpenMicroBatch(counts["open"], counts["open_plain"])
    return WindowState(
        updates=read_count(numbers["windows"], "windows", minimum=0),
        micro_batches=counts["closed"],
        open={threading.get_ident(): passes} if counts["open"] else {},
        skipped=counts["skipped"],
        main=_total(numbers["weight"], numbers["divisor"]),
        terms=terms,
        carried=CarriedScale(_positive(numbers["scale"], "scale")),
        had_pass=bool(numbers.get("had_pass", True)),
    )


def _read_gradients(
    members: list[Tensor],
    tensors: dict[str, Tensor],
    sparse: Mapping[str, list[int]],
    terms: dict[str, Total],
) -> dict[int, Tensor]:
    """The window's own gradients by position; those of loss terms go to their totals. Names are
    `grad.<position>` and `term.<name>.<position>`.
    """
    main: dict[int, Tensor] = {}
    for name in _names(tensors):
        kind, _, rest = name.partition(".")
        term, _, number = rest.rpartition(".")
        position = read_count(int(number), name, minimum=0)
        sums = terms[term].gradients if kind == "term" else main
        sums[position] = _like(members[position], _take(tensors, sparse, name), name)
    return main


def _like(tensor: Tensor, gradient: Tensor, name: str) -> Tensor:
    """A copy of a saved gradient where its parameter is, in the type its gradients add up in."""
    if gradient.shape != tensor.shape:
        raise StateError(
            f"The state's {name!r} has shape {tuple(gradient.shape)}, not {tuple(tensor.shape)}."
        )
    return gradient.to(device=tensor.device, dtype=tensor.grad_dtype or gradient.dtype, copy=True)


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
