"""Finite differences that know their own error.

A central difference has two errors: the function's curvature, which grows with the step, and the
rounding of the function's values, which grows as the step shrinks. Both are measured here, not
assumed: the rounding from a table of high differences along a line of neighbouring points (Hamming;
Moré and Wild 2011), the curvature from Richardson extrapolation over a ladder of steps. Each
element takes the step where their sum is least, and is judged by that sum; so float32 needs no
tolerance of its own, and a kink or a jump next to a point makes it *unresolved* instead of wrong.

What it cannot see: an error that is smaller than the error bar, which in float32 is around 1e-4 of
the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfit.errors import GraphError, MisuseError, NonFiniteGradient

_RATIO = 4.0  # between the steps of the ladder
_STEPS = 6


class Rung(NamedTuple):
    """The slopes to both sides at one step, and the rounding error of their mean."""

    left: float
    right: float
    rounding: float

    @property
    def central(self) -> float:
        return (self.left + self.right) / 2


class Differences:
    """One element's slopes, from wide steps to narrow; `value` is the derivative they give, `bar`
    its error.
    """

    def __init__(self, rungs: list[Rung]) -> None:
        self.rungs = rungs
        self.value, self.bar = math.nan, math.inf
        self._chosen = 0
        for at, (wide, narrow) in enumerate(pairwise(rungs), start=1):
            extrapolated = narrow.central + (narrow.central - wide.central) / (_RATIO**2 - 1)
            bar = abs(extrapolated - narrow.central) + 2 * narrow.rounding
            if bar < self.bar:
                self.value, self.bar, self._chosen = extrapolated, bar, at

    def kink_allows(self, slope: float, tolerance: float) -> bool:
        """Whether the function is not smooth here, in a way that `slope` is one of its slopes."""
        if not self.rungs:
            return False
        if self._is_kink_at_point():
            slopes = [side for rung in self.rungs for side in (rung.left, rung.right)]
            return min(slopes) - tolerance <= slope <= max(slopes) + tolerance
        return any(
            self._contradicts(rung) and abs(rung.central - slope) <= 10 * rung.rounding + tolerance
            for rung in self.rungs[self._chosen + 1 :]
        )

    def _is_kink_at_point(self) -> bool:
        """Whether the slopes to both sides stay apart: a smooth function's gap shrinks with the
        step.
        """
        gaps = [abs(rung.right - rung.left) for rung in self.rungs]
        return gaps[-1] - 20 * self.rungs[-1].rounding > 0.1 * max(gaps)

    def _contradicts(self, narrow: Rung) -> bool:
        """Whether a narrow step sees another slope than the wider one that was chosen: a kink lies
        within the wide steps only.
        """
        return abs(narrow.central - self.value) > 5 * narrow.rounding + self.bar


class Probe:
    """Evaluates the function around one point, and knows how noisy its values are there."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[Any, ...], checked: list[int]) -> None:
        self.fn = fn
        self.inputs = [_copied(v.detach() if isinstance(v, Tensor) else v) for v in inputs]
        self.checked = checked
        self.devices = _accelerators_of(self.inputs)
        with torch.no_grad():
            self.sizes = _typical_sizes(self.call(list(map(_copied, self.inputs))))
            self.center = self.values({})
        if not bool(self.center.isfinite().all()):
            raise NonFiniteGradient(
                "check_gradients: fn itself gives NaN or Inf at these inputs. Pass finite ones."
            )
        self.weights = _weights(self.center.numel())
        self.noise = self._noise()

    def call(self, arguments: list[Any]) -> list[Tensor]:
        """The floating-point outputs."""
        with _same_random_numbers(self.devices):
            result = self.fn(*arguments)
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        for output in outputs:
            _require_tensor(output)
        return [output for output in outputs if output.is_floating_point()]

    def values(self, replaced: dict[int, Tensor]) -> Tensor:
        """All outputs in one float64 vector, with some inputs replaced."""
        arguments = [replaced.get(at, _copied(v)) for at, v in enumerate(self.inputs)]
        return torch.cat(
            [output.detach().double().cpu().flatten() for output in self.call(arguments)]
        )

    def analytic(self) -> list[Tensor]:
        """The weighted outputs' gradient in each checked input, by the backward under test."""
        leaves = {at: self.inputs[at].clone().requires_grad_() for at in self.checked}
        with torch.enable_grad():
            # Copies of the leaves, so that a function which works in place on its argument can be
            # checked too.
            outputs = self.call([_copied(leaves.get(at, v)) for at, v in enumerate(self.inputs)])
        if not any(output.requires_grad for output in outputs):
            raise GraphError(
                "check_gradients: the output of fn has no graph. Remove .detach() and"
                " torch.no_grad()."
            )
        pairs = [pair for pair in self._with_cotangents(outputs) if pair[0].requires_grad]
        differentiable, cotangents = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(
            differentiable, list(leaves.values()), cotangents, allow_unused=True
        )
        return list(map(_in_double, leaves.values(), gradients))

    def _with_cotangents(self, outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each output with its part of the weights, in its own shape and type."""
        parts = torch.split(self.weights, [output.numel() for output in outputs])
        return [
            (output, part.view(output.shape).to(output))
            for output, part in zip(outputs, parts, strict=True)
        ]

    def at(self, position: int, flat: int, eps: float | None) -> Differences:
        """The differences around one element of one input."""
        sides = [
            side
            for side in self._ladder(position, flat, eps)
            if bool((side[0] - side[1]).isfinite().all())
        ]
        rounding = self._rounding_of_difference(sides)
        return Differences(
            [
                Rung(
                    left=2 * (self.weights @ (self.center - left)).item() / width,
                    right=2 * (self.weights @ (right - self.center)).item() / width,
                    rounding=rounding / width,
                )
                for right, left, width in sides
            ]
        )

    def _rounding_of_difference(self, sides: list[tuple[Tensor, Tensor, float]]) -> float:
        """Of the weighted outputs; those that do not depend on the element have none."""
        moved = torch.zeros_like(self.center, dtype=torch.bool)
        for right, left, _ in sides:
            moved |= right != left
        # constant as far as the precision shows: any output may be the one that rounds
        if not bool(moved.any()):
            moved = ~moved
        return math.sqrt(2 * (self.weights * self.noise)[moved].square().sum().item())

    def _ladder(
        self, at: int, flat: int, eps: float | None
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """The outputs to the right and to the left of the point, and how far apart these are, from
        wide to narrow.
        """
        point = self.inputs[at]
        here = point.flatten()[flat].item()
        # The extrapolation is off by h⁴, rounding by ε/h: both are alike at h = ε^(1/5). Steps go
        # down from there, since nobody knows how large the fifth derivative is.
        step = (
            eps
            if eps is not None
            else torch.finfo(point.dtype).eps ** 0.2 * max(abs(here), _typical(point))
        )
        for _ in range(_STEPS):
            right, left = (_with_element(point, flat, here + side) for side in (step, -step))
            # The width that the precision really allows, not the one that was asked for.
            width = right.view(-1)[flat].double().item() - left.view(-1)[flat].double().item()
            if width > 0:
                with torch.no_grad():
                    yield self.values({at: right}), self.values({at: left}), width
            step /= _RATIO

    def _noise(self) -> Tensor:
        """The rounding error of each output, from high differences along a line through
        neighbouring points.
        """
        estimate = _noise_along(self._line_of_neighbours())
        precision = max(torch.finfo(self.inputs[at].dtype).eps for at in self.checked)
        # Not below the rounding of a number as large as the tensor's usual ones: what comes out
        # small may have been the difference of large ones. And one line of points may miss an
        # output's noise by luck; the others tell the rest.
        floor = precision * self.center.abs().maximum(self.sizes)
        usual = (estimate / floor).nan_to_num(0.0, 0.0, 0.0).median() * floor
        return torch.where(estimate.isfinite(), estimate, floor).maximum(floor).maximum(usual)

    def _line_of_neighbours(self) -> Tensor:
        """The outputs at eight points a few roundings apart, one below the other."""
        generator = torch.Generator("cpu").manual_seed(1)
        directions = {at: _tiny_direction(self.inputs[at], generator) for at in self.checked}
        with torch.no_grad():
            return torch.stack(
                [
                    self.values({a: self.inputs[a] + k * d for a, d in directions.items()})
                    for k in range(8)
                ]
            )


def _noise_along(line: Tensor) -> Tensor:
    """What is left of the values in their third to fifth differences, where a smooth function has
    all but vanished; `gamma` is how much differencing has multiplied their noise (Hamming).
    """
    estimate = torch.zeros_like(line[0])
    table = line
    for order in range(1, 6):
        table = table.diff(dim=0)
        if order >= 3:
            gamma = math.factorial(order) ** 2 / math.factorial(2 * order)
            estimate = torch.maximum(estimate, (gamma * table.square().mean(dim=0)).sqrt())
    return estimate


def _tiny_direction(point: Tensor, generator: torch.Generator) -> Tensor:
    """Each element by 32 to 96 roundings of its size."""
    direction = torch.rand(point.shape, generator=generator, device="cpu").to(point) + 0.5
    return direction * point.abs().clamp_min(_typical(point)) * (64 * torch.finfo(point.dtype).eps)


def _weights(count: int) -> Tensor:
    """One for each output: the derivative of their weighted sum is what is compared.

    Bounded away from zero, so that no output is left out; irregular, so that no two errors cancel.
    Numbers of bfloat16, so that they are the same in every precision.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    signs = 1 - 2 * torch.randint(0, 2, (count,), generator=generator, device="cpu")
    sizes = torch.rand(count, generator=generator, device="cpu") + 0.5
    weights = (sizes * signs).bfloat16().double()
    # With one output the numbers in the report are then the derivative itself.
    return torch.ones_like(weights) if count == 1 else weights


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _accelerators_of(values: list[Any]) -> set[torch.device]:
    devices = {value.device for value in values if isinstance(value, Tensor)}
    return {device for device in devices if device.type != "cpu"}


def _require_tensor(output: Any) -> None:
    if not isinstance(output, Tensor):
        raise MisuseError(
            f"check_gradients: fn returned a {type(output).__name__}, expected tensors."
        )


def _in_double(leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """A leaf's gradient on the host; zeros where the outputs do not depend on it."""
    if gradient is None:
        return torch.zeros_like(leaf, dtype=torch.float64, device="cpu")
    return gradient.detach().double().cpu()


def _with_element(point: Tensor, flat: int, value: float) -> Tensor:
    """A copy of the point with one element changed."""
    moved = point.clone(memory_format=torch.contiguous_format)
    moved.view(-1)[flat] = value
    return moved


def _typical_sizes(outputs: list[Tensor]) -> Tensor:
    """For each element the size that those of its tensor usually have."""
    return torch.cat(
        [
            torch.full((output.numel(),), _typical(output), dtype=torch.float64, device="cpu")
            for output in outputs
        ]
    )


def _typical(point: Tensor) -> float:
    """The size an element of this tensor usually has; 1 if all are zero."""
    size = point.double().square().mean().sqrt().item() if point.numel() else 0.0
    return size if size > 0 and math.isfinite(size) else 1.0


@contextmanager
def _same_random_numbers(devices: set[torch.device]) -> Iterator[None]:
    """Draw the same numbers in every evaluation, and leave the generators as they were."""
    with torch.random.fork_rng(sorted(d.index or 0 for d in devices), device_type=_kind(devices)):
        if devices:
            torch.manual_seed(0)
        else:
            # not torch.manual_seed, which would reach accelerators that are not restored afterwards
            torch.default_generator.manual_seed(0)
        yield


def _kind(devices: set[torch.device]) -> str:
    return next(iter(devices)).type if devices else "cuda"
