"""Is this backward the derivative of its forward? The comparison, element by element, and its
report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfit.arguments import invalid, read_callable, read_number
from gradfit.errors import GradientMismatch, MisuseError
from gradfit.toolbox.numeric_differences import Differences, Probe

_SAFETY = 10.0  # how many error bars apart is wrong


@dataclass(frozen=True)
class ElementCheck:
    """One element of one input: what the backward says, what finite differences say, and how sure
    they are.

    Both are derivatives of the output if that is one number, else of a sum of the outputs with
    weights from 0.5 to 1.5 of either sign: a plain sum would be blind to functions like softmax,
    whose outputs always have the same sum.
    """

    input: int
    index: tuple[int, ...]
    analytic: float
    numeric: float
    tolerance: float

    @property
    def error(self) -> float:
        """How far apart the two are."""
        return abs(self.analytic - self.numeric)

    @property
    def excess(self) -> float:
        """The error in units of what is tolerated; above 1 it is wrong."""
        if not math.isfinite(self.analytic):
            return math.inf
        if not math.isfinite(self.numeric) or self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0 else math.inf

    def __str__(self) -> str:
        largest = max(abs(self.analytic), abs(self.numeric))
        share = (
            f", {self.error / largest:.2g} of it"
            if largest > 0 and math.isfinite(self.error / largest)
            else ""
        )
        return (
            f"input {self.input}, element {self.index}: backward gives {self.analytic:.6g}, finite"
            f" differences {self.numeric:.6g} (off by {self.error:.3g}{share}, tolerated"
            f" {self.tolerance:.2g})"
        )


@dataclass(frozen=True)
class GradientCheck:
    """What `check_gradients` compared; true if all of it agrees.

    `unresolved` counts the elements next to a kink or a jump, where finite differences have no
    answer.

    Attributes:
        elements: compared.
        unresolved: elements without an answer.
        wrong: those that disagree.
        worst: the element that is furthest off; None if there was none to compare.
    """

    elements: int
    unresolved: int
    wrong: tuple[ElementCheck, ...]
    worst: ElementCheck | None

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        verdict = (
            f"{len(self.wrong)} of {self.elements} elements differ"
            if self.wrong
            else "all elements agree"
        )
        return f"{verdict}; {self.unresolved} unresolved. Worst: {self.worst}."


def check_gradients(
    fn: Callable[..., Any], *inputs: Any, eps: float | None = None
) -> GradientCheck:
    """Compare the backward of `fn` with finite differences, element by element; `GradientMismatch`
    if they disagree.

    The tensors among `inputs` that require a gradient are checked, or all floating ones if none
    does. `eps` sets the largest step; by default it comes from each element's size and precision.
    Random operations (dropout) draw the same numbers in every evaluation. Nothing that is passed in
    is changed.

    Args:
        fn: called with `inputs`; returns a tensor, or a nest of them.
        inputs: tensors and whatever else `fn` takes.
        eps: the largest step of a finite difference; None chooses one for each element.

    >>> check_gradients(torch.sigmoid, torch.randn(3)).worst.error < 1e-3
    True
    >>> from gradfit.toolbox.custom_operation import custom_op
    >>> factor = torch.tensor([2.0, 2.0, 2.1])
    >>> wrong = custom_op(lambda x: x * 2, lambda grad_output, x: grad_output * factor)
    >>> check_gradients(wrong, torch.ones(3))
    Traceback (most recent call last):
    gradfit.errors.GradientMismatch: custom_op: 1 of 3 elements differ; ... Worst: input 0, element
    (2,): backward ...
    """
    read_callable(fn, "fn", "the function to check", arguments=len(inputs))
    if eps is not None:
        eps = float(read_number(eps, "eps", above=0, like=1e-3))
    checked = _positions_to_check(inputs)
    probe = Probe(fn, inputs, checked)
    comparison = _Comparison(probe, eps)
    for at, gradient in zip(checked, probe.analytic(), strict=True):
        comparison.compare(at, inputs[at], gradient)
    report = comparison.report()
    if report.wrong:
        name = getattr(fn, "name", None) or getattr(fn, "__name__", type(fn).__name__)
        raise GradientMismatch(f"{name}: {report}", report=report)
    return report


def _positions_to_check(inputs: tuple[Any, ...]) -> list[int]:
    """The tensors that require a gradient, or all floating ones if none does."""
    tensors = {at: value for at, value in enumerate(inputs) if isinstance(value, Tensor)}
    trained = [at for at, tensor in tensors.items() if tensor.requires_grad]
    checked = trained or [at for at, tensor in tensors.items() if tensor.is_floating_point()]
    if not checked:
        raise MisuseError(
            "inputs holds no floating-point tensor. Pass the tensors to differentiate in."
        )
    for at in checked:
        _require_changeable(inputs[at], f"inputs[{at}]")
    return checked


def _require_changeable(tensor: Tensor, name: str) -> None:
    """Numeric differences change one element after another."""
    if not tensor.is_floating_point():
        raise MisuseError(f"{name} is {tensor.dtype}, expected a real floating-point tensor.")
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        problem = "has no elements that could be changed"
        raise invalid(name, tensor, problem, "a dense tensor")


class _Comparison:
    """Compares element by element, and remembers what differs."""

    def __init__(self, probe: Probe, eps: float | None) -> None:
        self._probe, self._eps = probe, eps
        self._wrong: list[ElementCheck] = []
        self._worst: ElementCheck | None = None
        self._unresolved = self._elements = 0

    def report(self) -> GradientCheck:
        return GradientCheck(self._elements, self._unresolved, tuple(self._wrong), self._worst)

    def compare(self, at: int, tensor: Tensor, gradient: Tensor) -> None:
        """All elements of one input, with the gradient that the backward gave."""
        finite = gradient[gradient.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        for flat, value in enumerate(gradient.flatten().tolist()):
            place = torch.unravel_index(torch.tensor(flat, device="cpu"), tensor.shape)
            index = tuple(int(one) for one in place)
            self._compare_element(at, flat, index, value, largest, torch.finfo(tensor.dtype).eps)

    def _compare_element(
        self,
        at: int,
        flat: int,
        index: tuple[int, ...],
        value: float,
        largest: float,
        precision: float,
    ) -> None:
        self._elements += 1
        differences = self._probe.at(at, flat, self._eps)
        # Beside the bar: the backward rounds too, in proportion to its own size and to its
        # neighbours'.
        relative = max(1e-6, 3 * precision**0.5)
        tolerance = _SAFETY * differences.bar + relative * abs(value) + 64 * precision * largest
        result = ElementCheck(at, index, value, differences.value, tolerance)
        # Where the function has no derivative, the backward may say any of its slopes.
        if result.excess > 1 and _is_kink(differences, result):
            self._unresolved += 1
            return
        if result.excess > 1:
            self._wrong.append(result)
        elif math.isnan(differences.value) or differences.bar > max(abs(value), largest):
            self._unresolved += 1
        self._remember_worst(result)

    def _remember_worst(self, result: ElementCheck) -> None:
        if self._worst is None or result.excess > self._worst.excess:
            self._worst = result


def _is_kink(differences: Differences, result: ElementCheck) -> bool:
    """Whether the function has no derivative here, and the backward's is one of its slopes."""
    is_number = math.isfinite(result.analytic)
    return is_number and differences.kink_allows(result.analytic, result.tolerance)
