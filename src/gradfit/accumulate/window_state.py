"""All that a window knows, in one record; its gradients are in the parameters' `.grad`."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.loss_scaling import CarriedScale
from gradfit.arguments import Number


class Phase(enum.Enum):
    """What `.grad` holds, and with it what may happen next."""

    FILLING = "filling"
    """Sums over the micro-batches so far; more can come in."""
    REDUCED = "reduced"
    """The sums of all loss terms and of all processes; nothing more can come in."""
    FINAL = "final"
    """The mean, in the hands of whoever steps."""
    BROKEN = "broken"
    """Part of a micro-batch, or of an update: only `reset()` leads out."""


@dataclass(slots=True)
class Total:
    """One denominator: what was weighed so far, and what the gradients are divided by meanwhile."""

    weight: Number = 0
    divisor: float | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """A loss term's own sums, by the tensor's position; the window's main sums are in `.grad`."""

    @property
    def factor(self) -> float:
        """What turns the sums into a mean; 1 if there is nothing to divide."""
        return self.divisor / self.weight if self.weight and self.divisor is not None else 1.0

    def lacks_room(self, weight: Number, room: float = 1.0) -> bool:
        """Whether sums with that much more weight may leave the range of a mean, `room` times
        over.
        """
        return self.divisor is not None and self.weight + weight > self.divisor * room

    def make_room(self, weight: Number, sums: Iterable[Tensor]) -> None:
        """Divide the sums by a power of two, which rounds nothing, so that they stay in the range
        of a mean.
        """
        assert self.divisor is not None
        power = power_of_two_from((self.weight + weight) / self.divisor)
        with torch.no_grad():
            for one in sums:
                one.mul_(1 / power)
        self.divisor *= power

    def pour_into(self, sources: Sequence[Any]) -> None:
        """Add the mean to the sources' `.grad`, and give up the sums."""
        for position, gradient in self.gradients.items():
            source = sources[position]
            source.grad = add_scaled(source.grad, gradient, self.factor)
        self.gradients = {}

    def take(self, gradients: dict[int, Tensor], factor: float) -> None:
        """Add `factor` times gradients, which are given up, to the sums."""
        for position, gradient in gradients.items():
            self.gradients[position] = add_scaled(self.gradients.get(position), gradient, factor)

    def renumber(self, now: dict[int, int]) -> None:
        """The tensors have other positions, by those they had; some are gone."""
        self.gradients = {now[at]: gradient for at, gradient in self.gradients.items() if at in now}


@dataclass(slots=True)
class OpenMicroBatch:
    """What one thread has put in since its last `step()`."""

    passes: int = 0
    plain: int = 0
    reached: set[int] = field(default_factory=set)
    """The first tensor of each plain pass."""
    losses: set[str] = field(default_factory=set)
    """The loss terms among them; "" is the main loss."""
    last_plain: int = -1
    """The last plain pass, as autograd numbers them."""

    @property
    def is_of_parts(self) -> bool:
        """Whether all of it are plain passes that began at different tensors, as the losses of one
        forward do.
        """
        return self.passes == self.plain == len(self.reached) > 1

    def take_losses(self, names: set[str]) -> bool:
        """Whether losses of these names are of this micro-batch, which has each loss once; else
        they begin another one.
        """
        joins = bool(self.passes) and names.isdisjoint(self.losses or {""})
        self.losses = (self.losses or {""}) | names if joins else names
        return joins


@dataclass(slots=True)
class WindowState:
    """A window's counters and denominators."""

    updates: int = 0
    """Windows that are over, stepped or dropped."""
    micro_batches: int = 0
    """Micro-batches that were ended, skipped ones included."""
    open: dict[int, OpenMicroBatch] = field(default_factory=dict)
    """Those that were not ended yet, by thread."""
    skipped: int = 0
    main: Total = field(default_factory=Total)
    terms: dict[str, Total] = field(default_factory=dict)
    had_pass: bool = False
    """A backward pass has come in; else all of it was put into `.grad` by hand."""
    carried: CarriedScale = field(default_factory=CarriedScale)
    """The loss scale that the sums carry."""
    phase: Phase = Phase.FILLING
    fault: str = ""
    """Of a broken window: what has happened."""
    asked: bool = False
    """Of a final window: somebody has asked for its gradients and must use them before more can
    come in.
    """
    on_used_gradients: bool = False
    """Its passes have added to gradients of the last update, which must be cleared before the next
    one.
    """
    unscaled_before: int | None = None
    """How often its scaler had unscaled gradients when they were last as we left them."""
    applied: bool = False
    """Of a final window: `apply_gradients` has used them."""

    @property
    def loss_scale(self) -> float:
        """The loss scale that the sums carry, as a number, which may have to be read."""
        return self.carried.number

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come in."""
        return not (self.micro_batches or self.open)

    def totals(self) -> dict[str, Number]:
        """Every denominator by its term's name; that of the main loss is ""."""
        return {"": self.main.weight, **{name: term.weight for name, term in self.terms.items()}}

    def total_of(self, name: str) -> Total:
        """The denominator of that name, also one that was not there yet."""
        return self.terms.setdefault(name, Total()) if name else self.main

    def open_in(self, thread: int) -> OpenMicroBatch:
        """The micro-batch that a thread is filling; a new one if it has ended its last."""
        one = self.open.get(thread)
        if one is None:
            one = self.open[thread] = OpenMicroBatch()
        return one


def power_of_two_from(number: float) -> float:
    """The least power of two that is not below a number."""
    return 2.0 ** math.ceil(math.log2(number))


def add_scaled(total: Tensor | None, gradient: Tensor, factor: float) -> Tensor:
    """`total + factor · gradient` in place, in the total's precision; `gradient` is given up."""
    if total is None:
        return gradient if factor == 1.0 else gradient.mul_(factor)
    if total.is_sparse and not gradient.is_sparse:
        return gradient.mul_(factor).add_(total)
    return total.add_(gradient, alpha=factor)
