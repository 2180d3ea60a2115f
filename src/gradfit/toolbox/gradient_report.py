"""What the gradients of a model look like: which are bad, which are missing, how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradfit import records
from gradfit.norms import values_of
from gradfit.toolbox.gradient_map import GradientMap
from gradfit.toolbox.gradient_stats import GradientStats
from gradfit.toolbox.inputs import Inputs, named_tensors

# Powers of two: 2^-24 is the smallest float16 number, so the bins below it are what a loss scale
# has to lift.
_LOWEST, _HIGHEST, _STEP = -40, 20, 4


@dataclass(frozen=True)
class GradientHistogram:
    """How many elements have a magnitude within [2^exponents[i], 2^exponents[i + 1]); the outer
    bins are open.
    """

    exponents: tuple[int, ...]
    counts: tuple[int, ...]
    zero_count: int


@dataclass(frozen=True)
class GradientReport:
    """What `inspect_gradients` found; prints itself as a table, and round-trips through JSON.

    Attributes:
        parameters: what there is to say of each gradient, by name.
        norm: of all gradients together.
        nonfinite: names of those with a NaN or an infinity.
        missing: names of parameters without a gradient.
        histogram: of the elements' sizes.
    """

    parameters: dict[str, GradientStats]
    norm: float
    nonfinite: tuple[str, ...]
    missing: tuple[str, ...]
    histogram: GradientHistogram

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity in any gradient."""
        return not self.nonfinite

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> GradientReport:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        return records.from_json(GradientReport, text)

    def __str__(self) -> str:
        lines = [*self._table(), f"norm {self.norm:.6g} over {len(self.parameters)} gradients"]
        if self.nonfinite:
            lines.append(f"not finite: {', '.join(self.nonfinite)}")
        if self.missing:
            lines.append(f"no gradient: {', '.join(self.missing)}")
        return "\n".join([*lines, *_bars(self.histogram)])

    def _table(self) -> Iterator[str]:
        width = max([9, *map(len, self.parameters)])
        yield (
            f"{'parameter':<{width}}  {'norm':>9}  {'mean':>9}  {'std':>9}  {'zeros':>6} "
            f" {'NaN':>5}  {'Inf':>5}"
        )
        for name, s in self.parameters.items():
            zeros = s.zero_count / max(1, s.elements)
            yield (
                f"{name:<{width}}  {s.norm:>9.3g}  {s.mean:>9.2g}  {s.std:>9.2g}  {zeros:>6.1%}  "
                f"{s.nan_count:>5}  {s.inf_count:>5}"
            )


def _bars(histogram: GradientHistogram) -> Iterator[str]:
    """The bins that are not empty, a line each."""
    top = max([1, *histogram.counts])
    for low, count in zip(histogram.exponents, histogram.counts, strict=False):
        if count:
            yield f"|g| from 2^{low:<4} {'█' * max(1, round(40 * count / top))} {count}"
    if histogram.zero_count:
        yield f"|g| = 0: {histogram.zero_count}"


def inspect_gradients(source: GradientMap | Inputs) -> GradientReport:
    """Look at the gradients of a model, of parameters, or of a `GradientMap`: NaN and Inf by name,
    norms, histogram.

    Args:
        source: a model, parameters, or a `GradientMap`.

    >>> layer = torch.nn.Linear(2, 1)
    >>> layer(torch.tensor([[1.0, float("inf")]])).sum().backward()
    >>> report = inspect_gradients(layer)
    >>> report.nonfinite, report.parameters["weight"].inf_count
    (('weight',), 1)
    """
    missing: list[str] = []
    if isinstance(source, GradientMap):
        gradients = {_named(key, at): value for at, (key, value) in enumerate(source.items())}
    else:
        gradients, missing = _gradients_in(source)
    with torch.no_grad():
        stats = {name: GradientStats.of(gradient) for name, gradient in gradients.items()}
        return GradientReport(
            parameters=stats,
            norm=sum(s.norm**2 for s in stats.values()) ** 0.5,
            nonfinite=tuple(name for name, s in stats.items() if not s.is_finite),
            missing=tuple(missing),
            histogram=_histogram(gradients.values()),
        )


def _gradients_in(source: Inputs) -> tuple[dict[str, Tensor], list[str]]:
    """What is in `.grad`, by name, and the names of those that require a gradient without one."""
    gradients, missing = {}, []
    for at, (name, tensor) in enumerate(named_tensors(source, argument="source")):
        if tensor.grad is not None:
            gradients[_named(name, at)] = tensor.grad
        elif tensor.requires_grad:
            missing.append(_named(name, at))
    return gradients, missing


def _named(key: object, position: int) -> str:
    return key if isinstance(key, str) else str(position)


def _histogram(gradients: Iterable[Tensor]) -> GradientHistogram:
    exponents = tuple(range(_LOWEST, _HIGHEST + _STEP, _STEP))
    counts = torch.zeros(len(exponents) - 1, dtype=torch.int64, device="cpu")
    zeros = 0
    for gradient in gradients:
        values = values_of(gradient).abs().double().flatten()
        values = values[values.isfinite()]
        zeros += int((values == 0).sum()) + gradient.numel() - values_of(gradient).numel()
        # frexp is exact at the powers of two, where log2 may round to the wrong side.
        power = torch.frexp(values[values > 0])[1] - 1
        bins = ((power - _LOWEST) // _STEP).clamp(0, len(counts) - 1)
        counts += torch.bincount(bins.cpu().long(), minlength=len(counts))
    return GradientHistogram(exponents, tuple(counts.tolist()), zeros)
