"""A buffer of gradients, one slot per item, whose number of slots changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradfit.arguments import (
    invalid,
    read_count,
    read_device,
    read_dtype,
    read_gradient,
    read_index,
    read_list,
)
from gradfit.errors import MisuseError

Dimension = int | str | tuple[str, int, int]
_Bounds = tuple[str | None, int, int | None]  # name, smallest, largest; a number is both of them


class SymbolicShape:
    """A shape whose dimensions are numbers, or names with bounds: `("batch", 1, 64)`; a name alone
    has none.

    Args:
        dimensions: a number, a name, or `(name, smallest, largest)` each.

    >>> shape = SymbolicShape(("batch", 1, 64), 8)
    >>> shape, shape.matches((3, 8)), shape.matches((65, 8))
    (SymbolicShape(batch∈[1, 64], 8), True, False)
    """

    def __init__(self, *dimensions: Dimension | list[Dimension]) -> None:
        if len(dimensions) == 1 and isinstance(dimensions[0], list):
            dimensions = tuple(dimensions[0])
        self.dimensions = _read_dimensions(dimensions, "dimensions")

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a number."""
        return all(name is None for name, _, _ in self.dimensions)

    @property
    def names(self) -> list[str]:
        """The names of the dimensions that are not numbers."""
        return [name for name, _, _ in self.dimensions if name is not None]

    def bounds(self, dimension: int) -> tuple[int, int | None]:
        """The smallest and the largest size of a dimension; None is no bound.

        Args:
            dimension: its position, from 0.
        """
        _, low, high = self.dimensions[read_index(dimension, "dimension", len(self.dimensions))]
        return low, high

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a shape does not fit this one; None if it does. One name has one size throughout.

        Args:
            shape: sizes, one for each dimension.
        """
        shape = tuple(
            read_count(size, "shape", minimum=0)
            for size in read_list(shape, "shape", "tensor.shape")
        )
        if len(shape) != len(self.dimensions):
            return f"{len(shape)} dimensions, expected {len(self.dimensions)}"
        return next(self._problems_of_sizes(shape), None)

    def _problems_of_sizes(self, shape: tuple[int, ...]) -> Iterator[str]:
        sizes: dict[str, int] = {}
        for at, (size, dimension) in enumerate(zip(shape, self.dimensions, strict=True)):
            if not _is_within(size, dimension):
                yield f"dimension {at} is {size}, expected {_show(dimension)}"
            name = dimension[0]
            if name is not None and sizes.setdefault(name, size) != size:
                yield f"{name} is {sizes[name]} and {size}"

    def matches(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape fits.

        Args:
            shape: sizes, one for each dimension.
        """
        return self.problem(shape) is None

    def __len__(self) -> int:
        return len(self.dimensions)

    def __iter__(self) -> Iterator[int | str]:
        return iter(low if name is None else name for name, low, _ in self.dimensions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymbolicShape) and self.dimensions == other.dimensions

    def __hash__(self) -> int:
        return hash(self.dimensions)

    def __repr__(self) -> str:
        return f"SymbolicShape({', '.join(map(_show, self.dimensions))})"


def _read_shape(dimensions: list[Any], name: str) -> SymbolicShape:
    """The shape with these dimensions, read under the name of the parameter that they came in."""
    shape = SymbolicShape()
    shape.dimensions = _read_dimensions(dimensions, name)
    return shape


def _read_dimensions(dimensions: Iterable[Any], name: str) -> tuple[_Bounds, ...]:
    return tuple(_read_dimension(one, f"{name}[{at}]") for at, one in enumerate(dimensions))


def _read_dimension(value: Any, parameter: str) -> _Bounds:
    if _is_name(value):
        return value, 0, None
    if isinstance(value, tuple) and len(value) == 3 and _is_name(value[0]):
        return _read_bounds(*value, parameter)
    if isinstance(value, int) and not isinstance(value, bool):
        size = read_count(value, parameter, minimum=0)
        return None, size, size
    raise invalid(
        parameter,
        value,
        f"is a {type(value).__name__}",
        "a number, a name, or (name, smallest, largest)",
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _read_bounds(name: str, low: Any, high: Any, parameter: str) -> _Bounds:
    low = read_count(low, f"{parameter}: the lower bound of {name!r}", minimum=0)
    if high is not None:
        high = read_count(high, f"{parameter}: the upper bound of {name!r}", minimum=low)
    return name, low, high


def _is_within(size: int, dimension: _Bounds) -> bool:
    _, low, high = dimension
    return size >= low and (high is None or size <= high)


def _show(dimension: _Bounds) -> str:
    name, low, high = dimension
    if name is None:
        return str(low)
    return name if (low, high) == (0, None) else f"{name}∈[{low}, {'∞' if high is None else high}]"


class AccumulationBufferDynamic:
    """Sums of gradients in slots along the first dimension, which grows and shrinks up to
    `max_size`.

    Memory is taken in doubling steps and given back when three quarters of it lie idle, so a size
    that changes at each step does not move the content at each step. Slots that come into being are
    zero. A dimension with a name, other than the first, takes its size from the first gradient.

    Args:
        shape: the first dimension is that of the slots.
        max_size: slots at most.
        dtype: of the sums; float32 by default.
        device: of the sums; the CPU by default.

    >>> buffer = AccumulationBufferDynamic(SymbolicShape(("slots", 0, 8), 2), max_size=8)
    >>> buffer.accumulate(torch.ones(3, 2), 0, 3); buffer.accumulate(torch.ones(2, 2), 2, 2)
    >>> buffer.current_size, buffer.get_slice(2, 2)
    (4, tensor([[2., 2.],
            [1., 1.]]))
    """

    def __init__(
        self,
        shape: SymbolicShape | tuple[Dimension, ...] | list[Dimension],
        max_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.buffer_shape = _read_growing_shape(shape)
        self.max_size = read_count(max_size, "max_size")
        self._lower, self._upper = self._slots_at_least_and_most()
        self._size = self.buffer_shape.dimensions[0][1]
        self._options: dict[str, Any] = {
            "dtype": read_dtype(dtype, "dtype"),
            "device": read_device(device, "device"),
        }
        self._item = _numbers_only(self.buffer_shape.dimensions[1:])  # one slot's shape
        self._storage: Tensor | None = None
        self.reallocations = 0

    def _slots_at_least_and_most(self) -> tuple[int, int]:
        name, low, high = self.buffer_shape.dimensions[0]
        upper = self.max_size if name is None or high is None else min(self.max_size, high)
        if low > upper:
            raise MisuseError(
                f"shape begins with {low} slots, max_size is {self.max_size}. Pass max_size={low}"
                " or more."
            )
        # A number says how many slots there are at first, and no bound.
        return 0 if name is None else low, upper

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        device: torch.device = self._options["device"]
        return device

    @property
    def current_size(self) -> int:
        """How many slots there are."""
        return self._size

    @property
    def buffer(self) -> Tensor:
        """All slots, as a view: what is written there is in the buffer."""
        return self._reserve(self._size)[: self._size]

    def accumulate(self, gradient: Tensor, start_idx: int, count: int) -> None:
        """Add `count` slots' gradients from slot `start_idx` on; slots up to `max_size` come into
        being as needed.

        Args:
            gradient: with `count` slots along dim 0.
            start_idx: the first slot to add to, from 0.
            count: how many slots.
        """
        start, count = _read_range(start_idx, count)
        read_gradient(gradient, "gradient")
        if start + count > self._upper:
            raise MisuseError(
                f"start_idx={start} and count={count} reach slot {start + count}, there is room for"
                f" {self._upper}. Pass a larger max_size."
            )
        item = list(gradient.shape[1:]) if self._item is None else self._item
        self._check_shape(gradient, count, item, slots=max(self._size, start + count))
        self._check_place(gradient)
        self._item = item
        if start + count > self._size:
            self.resize(start + count)
        self.buffer[start : start + count] += gradient.detach()

    def _check_shape(self, gradient: Tensor, count: int, item: list[int], *, slots: int) -> None:
        """`count` slots of shape `item`, and with them `slots` in all, as the shape allows."""
        shape = tuple(gradient.shape)
        if shape != (count, *item):
            raise MisuseError(
                f"gradient has shape {shape}, expected {(count, *item)} for count={count}."
            )
        name, low, _ = self.buffer_shape.dimensions[0]
        problem = self.buffer_shape.problem((low if name is None else slots, *item))
        if problem:
            raise MisuseError(f"gradient does not fit {self.buffer_shape}: {problem}.")

    def _check_place(self, gradient: Tensor) -> None:
        if gradient.layout != torch.strided or gradient.device != self.device:
            raise invalid(
                "gradient",
                gradient,
                f"is {gradient.layout} on {gradient.device}",
                f"a dense one on {self.device}",
            )
        own: torch.dtype = self._options["dtype"]
        if gradient.is_complex() and not own.is_complex:
            raise invalid(
                "gradient",
                gradient,
                f"is {gradient.dtype}, and the buffer is {own}",
                f"dtype={gradient.dtype} to AccumulationBufferDynamic",
            )

    def resize(self, new_size: int) -> None:
        """Change the number of slots; the first ones keep their content.

        Args:
            new_size: slots from now on, at most `max_size`.
        """
        size = read_count(new_size, "new_size", minimum=0)
        if not self._lower <= size <= self._upper:
            raise MisuseError(
                f"new_size={size} is out of range. Pass {self._lower} to {self._upper}."
            )
        if self._storage is not None and size < self._size:
            self._storage[size : self._size].zero_()  # by filling: a NaN times zero stays a NaN
        self._size = size
        if self._item is not None:
            self._reserve(size)

    def get_slice(self, start_idx: int, count: int) -> Tensor:
        """Some slots, as a view.

        Args:
            start_idx: the first slot, from 0.
            count: how many.
        """
        start, count = _read_range(start_idx, count)
        if start + count > self._size:
            raise MisuseError(
                f"start_idx={start} and count={count} reach slot {start + count} of {self._size}."
                " Pass a range inside."
            )
        return self.buffer[start : start + count]

    def get_full(self) -> Tensor:
        """All slots, as a view."""
        return self.buffer

    def _reserve(self, size: int) -> Tensor:
        if self._item is None:
            raise MisuseError(
                f"The size of {self.buffer_shape.names} is not known yet. Call accumulate(…) first."
            )
        if self._storage is None:
            self._storage = torch.zeros(self._capacity_for(size), *self._item, **self._options)
        # It shrinks far below where it grew: a size that goes back and forth moves nothing.
        elif size > len(self._storage) or size * 4 <= len(self._storage):
            self._storage = self._moved(self._storage, self._capacity_for(size))
        return self._storage

    def _capacity_for(self, size: int) -> int:
        """The next power of two, as far as slots are allowed."""
        return min(self._upper, 1 << (size - 1).bit_length()) if size else 0

    def _moved(self, storage: Tensor, capacity: int) -> Tensor:
        """The slots in memory for `capacity` of them; where they are if that is what they have."""
        if capacity == len(storage):
            return storage
        moved = storage.new_zeros(capacity, *storage.shape[1:])
        kept = min(capacity, len(storage))
        moved[:kept] = storage[:kept]
        self.reallocations += 1
        return moved

    def __repr__(self) -> str:
        return (
            f"AccumulationBufferDynamic({self.buffer_shape}, current_size={self._size},"
            f" max_size={self.max_size})"
        )


def _read_growing_shape(shape: Any) -> SymbolicShape:
    """A shape, or its dimensions; it has at least one, along which slots are added."""
    if isinstance(shape, SymbolicShape):
        symbolic = shape
    else:
        symbolic = _read_shape(read_list(shape, "shape", "SymbolicShape('slots', 8)"), "shape")
    if not len(symbolic):
        raise MisuseError(
            "shape has no dimension to grow along. Pass for example SymbolicShape('slots', 8)."
        )
    return symbolic


def _numbers_only(dimensions: tuple[_Bounds, ...]) -> list[int] | None:
    """The sizes of dimensions; None if one has a name instead."""
    is_fixed = all(name is None for name, _, _ in dimensions)
    return [size for _, size, _ in dimensions] if is_fixed else None


def _read_range(start_idx: Any, count: Any) -> tuple[int, int]:
    start = read_count(start_idx, "start_idx", minimum=0)
    return start, read_count(count, "count", minimum=0)
