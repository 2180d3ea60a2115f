"""`meter`: bytes of live tensors, now and at the peak, on any device, each storage counted once.

It counts what operations return, from the moment they return it until the storage dies. Memory that
a kernel takes and gives back inside one operation is not a tensor and is not seen; an accelerator's
own counters can be put beside it. The tensors that a compiled graph makes inside are seen.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from gradfit import _torch_distributed as distributed
from gradfit import _torch_fsdp as fsdp
from gradfit._torch import FakeTensor, inside_fake_mode, storage_key
from gradfit._torch_storage import StorageWatch, watch_storage
from gradfit.arguments import read_device, read_flag
from gradfit.errors import MisuseError
from gradfit.tape.listener import OperationListener
from gradfit.tape.storage import sparse_parts
from gradfit.units import format_bytes

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # in one piece, in memory of their own


class _CountedStorage(StorageWatch):
    __slots__ = ("nbytes",)
    nbytes: int


class Meter(OperationListener):
    """Counts live tensor bytes while it is entered. See `meter`.

    Args:
        timeline: also write down bytes after each operation.
        device: count tensors of this device only; None: of all.
    """

    _looks_inside = True
    events: list[tuple[int, int, int]] | None = None
    """A list that gets what is allocated and freed, in order: (a storage's number, its bytes, its
    device's index), and (number, -1, -1) when it is freed. Of what was watched it is only that.
    """

    def __init__(self, *, timeline: bool = False, device: str | torch.device | None = None) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self.timeline: list[tuple[float, int]] | None = (
            [] if read_flag(timeline, "timeline") else None
        )
        self.device = read_device(device, "device") if device is not None else None
        self._live: dict[int, _CountedStorage] = {}
        self._started = time.perf_counter()
        self._stop_observing: list[Callable[[], None]] = []
        this = weakref.ref(self)

        # Holds neither the meter, which every live storage would hold then, nor its table, whose
        # watches hold this: they would stay at the storages until the next collection, and each
        # new meter would pass them all.
        def dead(storage: _CountedStorage) -> None:
            meter = this()
            if meter is not None and meter._live.get(storage.key) is storage:
                del meter._live[storage.key]
                meter._change(-storage.nbytes)
                if meter.events is not None:
                    meter.events.append((storage.key, -1, -1))

        self._dead = dead

    def __enter__(self) -> Any:
        self.about_fakes |= inside_fake_mode()
        self._stop_observing.append(fsdp.observe_resizes(self._see))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stop_observing.pop()()

    def __repr__(self) -> str:
        return (
            f"<meter: {format_bytes(self.current_bytes)} live, peak"
            f" {format_bytes(self.peak_bytes)}>"
        )

    def watch(self, *tensors: Any) -> None:
        """Count tensors that were there before: a tensor, a module, an optimizer, or any nest of
        them.

        Args:
            tensors: what to count from now on, each storage once.
        """
        events, self.events = self.events, None
        try:
            for tensor in tensors_in(tensors):
                self.about_fakes |= isinstance(tensor, FakeTensor)
                self._see(tensor)
        finally:
            self.events = events

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak_bytes = self.current_bytes

    def accelerator_peak_bytes(self) -> int | None:
        """What the accelerator's own allocator reports as its peak; None on a machine without
        one.
        """
        if not torch.accelerator.is_available():
            return None
        return int(torch.accelerator.max_memory_allocated())

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and count what it returns."""
        out = func(*args, **kwargs)
        self._see_all(out)
        return out

    def _see_all(self, out: Any) -> None:
        """Count what an operation returned: a tensor, or lists of them."""
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, list | tuple):
            for item in out:
                self._see_all(item)

    def _made_inside(self, tensor: torch.Tensor) -> None:
        """Count it."""
        self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in PLAIN:
            if is_lazy(tensor):
                return  # a lazy module's, before its first forward
            tensor = distributed.local_part(tensor)
            if isinstance(tensor, FakeTensor) and not self.about_fakes:
                return
        try:
            key = storage_key(tensor)
        except (RuntimeError, NotImplementedError):
            self._see_all(sparse_parts(tensor))
            return
        counted = self._live.get(key)
        if counted is not None:
            self._resize(counted, tensor)
        elif self.device is None or tensor.device.type == self.device.type:
            self._count(key, tensor)

    def _resize(self, counted: _CountedStorage, tensor: torch.Tensor) -> None:
        """Count a storage that was resized in place with its new size."""
        nbytes = tensor.untyped_storage().nbytes()
        if counted.nbytes != nbytes:
            self._change(nbytes - counted.nbytes)
            counted.nbytes = nbytes
            if self.events is not None:
                key = counted.key
                self.events += [(key, -1, -1), (key, nbytes, tensor.get_device())]

    def _count(self, key: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        entry = watch_storage(storage, self._dead, _CountedStorage)
        entry.key = key
        entry.nbytes = storage.nbytes()
        self._live[key] = entry
        self._change(entry.nbytes)
        if self.events is not None:
            self.events.append((key, entry.nbytes, tensor.get_device()))

    def _change(self, nbytes: int) -> None:
        self.current_bytes += nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
        if self.timeline is not None:
            self.timeline.append((time.perf_counter() - self._started, self.current_bytes))


def meter(*watch: Any, timeline: bool = False, device: str | torch.device | None = None) -> Meter:
    """Measure the peak and current bytes of live tensors, in forward and backward, on any device.

    Pass what exists already (a model, an optimizer, a batch) to have it counted too.

    Args:
        watch: tensors, modules, optimizers or nests of them that exist already.
        timeline: also write down the bytes after each operation, in `.timeline`.
        device: count tensors of this device only; None: of all.

    >>> import torch
    >>> with meter() as m:
    ...     x = torch.zeros(1024)
    ...     y = x.view(2, 512) + 1
    ...     del x
    >>> m.current_bytes, m.peak_bytes
    (4096, 8192)
    """
    _check_device(device)
    live = Meter(timeline=timeline, device=device)
    live.watch(*watch)
    return live


def _check_device(device: str | torch.device | None) -> None:
    """Refuse a device that is not here: nothing could live on it, and 0 bytes would look like a
    result.
    """
    kind = "cpu" if device is None else read_device(device, "device").type
    if kind in ("cpu", "meta") or inside_fake_mode():
        return
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind:
        there = "the CPU alone" if here is None else f"the CPU and {here.type}"
        raise MisuseError(
            f"device={device!r} is not on this machine, which has {there}. Leave device out, or"
            " pass one."
        )


def tensors_in(nest: Any) -> Iterable[torch.Tensor]:
    """Every tensor of a nest of modules, optimizers, mappings, sequences and tensors, gradients
    included.

    Of a tensor that is sharded over ranks it is the part on this one; of a `fully_shard` module
    also what it has gathered, and gradients that are not reduced yet.
    """
    # Without recursion: a nest may be deeper than Python's stack.
    open_nests: list[tuple[int, Iterator[Any]]] = [(0, iter((nest,)))]
    around: set[int] = set()
    while open_nests:
        address, items = open_nests[-1]
        for item in items:
            if isinstance(item, torch.Tensor):
                yield from _with_gradient(item)
            elif type(item) not in _WITHOUT_TENSORS:
                if isinstance(item, torch.nn.Module):
                    yield from item.buffers()
                    yield from fsdp.gathered_tensors(fsdp.units_of(item))
                _check_for_circle(item, around)
                around.add(id(item))
                open_nests.append((id(item), iter(_items_of(item))))
                break
        else:
            open_nests.pop()
            around.discard(address)


_WITHOUT_TENSORS = frozenset({str, bytes, int, float, complex, bool, type(None)})


def _check_for_circle(nest: Any, around: Container[int]) -> None:
    if id(nest) in around:
        raise MisuseError(
            f"watch: meter() was given a {type(nest).__name__} that holds itself. Pass its tensors."
        )


def _with_gradient(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    yield distributed.local_part(tensor)
    if tensor.is_leaf and tensor.grad is not None:
        yield distributed.local_part(tensor.grad)


def _items_of(nest: Any) -> Iterable[Any]:
    """What a collection holds, or the fields of any other object that may hold tensors."""
    if isinstance(nest, str | bytes | int | float | complex):
        return ()
    if isinstance(nest, torch.nn.Module):
        return list(nest.parameters())
    if isinstance(nest, torch.optim.Optimizer):
        return [*[group["params"] for group in nest.param_groups], *nest.state.values()]
    if _is_mapping(nest):
        return list(nest.values())
    if isinstance(nest, list | tuple | set | frozenset):
        return nest
    fields = getattr(nest, "__dict__", None)
    if fields is None:
        return _items_without_fields(nest)
    return _that_may_hold_tensors(fields.values())


def _that_may_hold_tensors(values: Iterable[Any]) -> list[Any]:
    return [v for v in values if isinstance(v, torch.Tensor | list | tuple | dict)]


def _items_without_fields(nest: Any) -> Iterable[Any]:
    """Of arrays, of what lives in slots, and of what can be gone through more than once."""
    if isinstance(nest, np.ndarray):
        return list(nest.flat) if nest.dtype.hasobject else ()
    if isinstance(nest, range):
        return ()
    if isinstance(nest, Sequence | Set):
        return list(nest)
    if isinstance(nest, Iterable):
        raise MisuseError(
            f"watch: meter() cannot look for tensors in {type(nest).__name__}. Pass its tensors."
        )
    names = [name for one in type(nest).__mro__ for name in _slots_of(one)]
    return _that_may_hold_tensors(getattr(nest, name, None) for name in names)


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _is_mapping(nest: Any) -> bool:
    return isinstance(nest, dict) or (hasattr(nest, "values") and hasattr(nest, "keys"))
