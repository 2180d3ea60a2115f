"""Online eviction: a budget with no profile and no plan.

Everything autograd saves is held, with the operations that could make it again. Before an operation
would take live bytes past the limit, values are dropped, the cheapest first: least seconds to
rebuild, per byte, per second since they were last used, where the seconds include those of the
dropped values it would be rebuilt from. That is the heuristic of Kirisame et al., Dynamic Tensor
Rematerialization, ICLR 2021 (https://arxiv.org/abs/2006.09616). The backward pass and its replays
are held to the same limit.

Weaknesses: what is cheapest now may be what the next operation needs; near the smallest possible
budget the same operations are replayed many times. A plan is better where one can be made.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradfit._torch import (
    is_operator,
    is_ragged,
    output_bytes,
    sizes_of,
    storage_key,
    storage_owners,
)
from gradfit._torch_one_operation import OneOperation
from gradfit.choices import HOLD
from gradfit.errors import BudgetInfeasible
from gradfit.interrupts import uninterrupted
from gradfit.profiling.meter import PLAIN, Meter
from gradfit.recompute.most_bytes import most_bytes
from gradfit.tape.decisions import Policy, TapeDecision
from gradfit.tape.operators import info_of
from gradfit.tape.recorder import Recorder
from gradfit.tape.replay import replaying
from gradfit.tape.storage import written_tensors
from gradfit.tape.storage_table import StorageTable
from gradfit.tape.values import Segment, Tape, TapeOperation, TapeValue
from gradfit.units import format_bytes

_MANY = 10_000  # operations of which something is remembered, before it is looked who needs it
_WITHOUT_TENSORS = {int, float, bool, type(None), torch.dtype}
_CHAIN = 32  # how many dropped ancestors are looked at to see what rebuilding costs


class Evictor(Meter):
    """Counts live bytes and keeps them below `limit_bytes` by dropping what can be rebuilt.

    `threshold` is where dropping starts, as a fraction of the limit; above the limit itself nothing
    may go. `advice` ends the error that is raised there.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        threshold: float = 1.0,
        device: torch.device | None = None,
        advice: str = "Use a smaller batch or raise the limit.",
    ) -> None:
        super().__init__(device=device)
        self.evictions = self.evicted_bytes = 0
        self.rebuilt_seconds = 0.0
        self.refused: BudgetInfeasible | None = None  # what was raised, if nothing has run since
        self._threshold, self._advice = threshold, advice
        self.limit_bytes, self._start = limit_bytes, int(limit_bytes * threshold)
        # values that are there and can be made again
        self._held: dict[int, weakref.ref[TapeValue]] = {}
        self._awaited: dict[int, weakref.ref[TapeValue]] = {}  # those of the sweep that runs
        # some of them, a heap by what dropping costs
        self._queue: list[tuple[float, int, weakref.ref[TapeValue]]] = []
        self._before_scan = 0  # how many may be dropped before all are looked at again
        # all tapes': replays run in threads of the autograd engine
        self._lock = threading.RLock()
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        # what recordings that are over have read, as long as their tapes live
        self._ended: list[tuple[weakref.ref[Tape], StorageTable]] = []
        self._has_recorded = False
        self._before_forgetting = _MANY
        self._seconds: dict[int, float] = {}  # by operation
        self._used: dict[int, float] = {}  # by storage: when it was last an argument
        self._sizes: dict[Any, int] = {}
        self.last_seconds = 0.0  # of the last operation

    def set_limit(self, limit_bytes: int) -> None:
        """Hold another limit: what is there above it is dropped as far as it can be."""
        self.limit_bytes = limit_bytes
        self._start = int(limit_bytes * self._threshold)
        if self.current_bytes > self._start:
            self._evict(self.current_bytes - self._start, ())

    def recorder(self, policy: Policy | None = None) -> Recorder:
        """A recorder whose values this evictor may drop; enter the evictor first, then it. There
        may be several, one after the other.

        Args:
            policy: what is held, and what is let go of at once; None: all is held.
        """
        tape = Tape(self._lock)
        tape.on_held = self._hold
        self._tapes.add(tape)
        self._has_recorded = True
        reference = weakref.ref(tape)
        return Recorder(
            Segment(Segment(None)),
            policy or _HoldAll(),
            tape=tape,
            recorded=self._note,
            ended=lambda table: self._remember_reads(reference, table),
        )

    def _remember_reads(self, tape: weakref.ref[Tape], table: StorageTable) -> None:
        """A recording is over, and its graph may live on."""
        reads = StorageTable(Segment(None))
        reads.inherit(table)
        self._ended = [one for one in self._ended if one[0]() is not None]
        self._ended.append((tape, reads))

    def _copy_what_was_read(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation may write to what was read in a recording that is over, as a forward does
        to a queue that the one before it has read: whoever read it gets a copy.
        """
        info = info_of(func)
        if not info.writes or replaying():
            return
        written = written_tensors(info, args, kwargs)
        for target in written:
            for tape, reads in self._ended:
                if tape() is not None and reads.is_inherited(target):
                    self._make_room_for(target.untyped_storage().nbytes(), func, args)
                    for copy in reads.copy_inherited([target], int(info.counts_first)):
                        self._see(copy)

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make room for an operation, run it, and count what it returns."""
        self.refused = None
        if not self._has_recorded:  # nothing can be dropped: it does not matter what is used when
            self._count_read(args)
            if self._surely_has_room(func, args, kwargs):
                return self._observe_with_room(func, args, kwargs)
        self._note_use(args)
        if self._ended:
            self._copy_what_was_read(func, args, kwargs)
        key, need = self._make_room(func, args, kwargs)
        before = self.current_bytes
        started = time.perf_counter()
        out = super()._observe(func, args, kwargs)
        self.last_seconds = time.perf_counter() - started
        if replaying():
            self.rebuilt_seconds += self.last_seconds
        larger = self.current_bytes - before > need and not info_of(func).view
        if key is not None or larger:  # now we know
            self._correct(key, func, args, kwargs, self.current_bytes - before)
        return out

    def _count_read(self, args: Any) -> None:
        """Count what an operation reads, if nobody has seen it yet. Hot, as the two below."""
        live = self._live
        try:
            for argument in args:
                kind = type(argument)
                if kind in PLAIN:
                    if storage_key(argument) not in live:
                        self._see(argument)
                elif kind not in _WITHOUT_TENSORS:
                    for tensor in _tensors_in((argument,)):
                        self._see(tensor)
        except (RuntimeError, NotImplementedError):  # one has no storage of its own
            for tensor in _tensors_in(args):
                self._see(tensor)

    def _surely_has_room(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the most that an operation can take is there, so that nobody need know more."""
        if info_of(func).view:
            return True
        most = most_bytes(func, args, kwargs)
        return most is not None and self.current_bytes + most <= self._start

    def _observe_with_room(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As a meter. Hot: of a step in which nothing can be dropped, these are nearly all."""
        out = Meter._observe(self, func, args, kwargs)
        if self.current_bytes > self.limit_bytes:  # it took more than it can
            raise self._infeasible(func, 0, self.current_bytes)
        return out

    def _begins_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Make room for what runs inside of an operation, whose own need is a guess."""
        self._make_room(func, args, kwargs)

    def _make_room(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """For what an operation is about to allocate: as `_need` says.

        Raises:
            BudgetInfeasible: there is not enough that can be dropped.
        """
        info = info_of(func)
        if info.view or not info.recordable:
            return None, 0
        key, need = self._need(func, args, kwargs)
        self._make_room_for(need, func, args, is_guess=key is not None)
        return key, need

    def _make_room_for(self, need: int, func: Any, args: Any, *, is_guess: bool = False) -> None:
        if self.current_bytes + need > self._start:
            self._evict(self.current_bytes + need - self._start, args)
            if self.current_bytes + need > self.limit_bytes and not is_guess:
                raise self._infeasible(func, need, self.current_bytes)

    def _correct(self, key: Any, func: Any, args: Any, kwargs: Any, nbytes: int) -> None:
        """An operation took another number of bytes than was foreseen: remember it, and refuse
        what is above the limit.
        """
        if key is None:
            _remember_larger(_key_of(func, args, kwargs), nbytes)
        else:
            self._sizes[key] = max(0, nbytes)
        if self.current_bytes > self.limit_bytes:
            raise self._infeasible(func, nbytes, self.current_bytes - nbytes)

    def _note_use(self, args: Any) -> None:
        """Count what an operation reads, and remember when it was read."""
        now = time.perf_counter()
        for argument in _tensors_in(args):
            self._see(argument)
            if not self._has_recorded:  # nothing can be dropped, so it does not matter when
                continue
            with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no storage
                self._used[storage_key(argument)] = now

    def _note(self, op: TapeOperation) -> None:
        self._seconds[op.index] = self.last_seconds
        if len(self._seconds) > self._before_forgetting:
            self._forget_dead()

    def _hold(self, values: Iterable[TapeValue]) -> None:
        """These are there now, or will be in the sweep that begins."""
        held = {id(value): weakref.ref(value) for value in values}
        self._held.update(held)
        self._awaited = held

    def _forget_dead(self) -> None:
        """What is remembered of operations whose values are gone: a loop makes new ones for
        ever.
        """
        with self._lock:
            values = [value for ref in self._held.values() if (value := ref()) is not None]
            newest = next(reversed(self._seconds))
            oldest = min((value.op.index for value in values if value.op), default=newest)
            self._held = {id(value): weakref.ref(value) for value in values}
            self._seconds = {n: seconds for n, seconds in self._seconds.items() if n >= oldest}
            self._used = {key: used for key, used in self._used.items() if key in self._live}
        if len(self._sizes) > _MANY:
            self._sizes.clear()
        self._before_forgetting = 2 * len(self._seconds) + _MANY

    def _need(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """Bytes that an operation is about to allocate, or less than there is room for; with a key
        if that is a guess, to be corrected under it.
        """
        most = most_bytes(func, args, kwargs)
        if most is not None and self.current_bytes + most <= self._start:
            return None, most
        key = _key_of(func, args, kwargs)
        try:
            known = self._sizes.get(key)  # 0 where all results lie in memory that is there
            nbytes = known or _seen_larger.get(key, known)
        except TypeError:  # an argument that cannot be part of a key
            nbytes = _output_bytes(func, args, kwargs)
            return None, _bound(args) if nbytes is None else nbytes
        if nbytes is None:
            nbytes = _output_bytes(func, args, kwargs)
            if nbytes is None:
                return key, max(_bound(args), most or 0)
            self._sizes[key] = nbytes
        return None, nbytes

    def _evict(self, need_bytes: int, args: Any) -> None:
        """Drop the cheapest first. What they cost is looked at again when half of those in the
        queue are gone.
        """
        busy = _storages_of(args)
        now = time.perf_counter()
        with self._lock:
            need_bytes -= self._drop(need_bytes, busy, now, self._before_scan)
            if need_bytes > 0:
                self._scan(now)
                self._before_scan = len(self._queue) // 2
                self._drop(need_bytes, busy, now, len(self._queue))

    def _scan(self, now: float) -> None:
        """Make the queue of all values that are there."""
        self._queue, there = [], {}
        for identity, reference in self._held.items():
            value = reference()
            if value is None or value.op is None:
                continue
            if value.tensor is not None or identity in self._awaited:
                there[identity] = reference
            if value.tensor is not None:
                self._queue.append((self._price(value, now), identity, reference))
        self._held = there
        heapq.heapify(self._queue)

    def _drop(self, need_bytes: int, busy: set[int], now: float, most: int) -> int:
        """Drop at most so many from the queue, until enough bytes are free; returns how many
        are.
        """
        freed = 0
        while freed < need_bytes and self._queue and most > 0:
            price, identity, reference = heapq.heappop(self._queue)
            value = reference()
            if value is None or not _is_droppable(value, busy):
                continue
            present = self._price(value, now)
            # It was used since, or is dearer now.
            if self._queue and present > max(price, self._queue[0][0]):
                heapq.heappush(self._queue, (present, identity, reference))
                continue
            nbytes = _drop_tensor(value)
            if not nbytes:
                continue
            freed += nbytes
            self.evicted_bytes += nbytes
            self.evictions += 1
            self._before_scan -= 1
            most -= 1
        if freed:
            self._begin_epoch()
        return freed

    def _begin_epoch(self) -> None:
        """What was dropped may have to be made again, from what nobody wanted so far."""
        for tape in self._tapes:
            tape.begin_epoch()

    def _price(self, value: TapeValue, now: float) -> float:
        """Seconds to rebuild a value that is there, for each byte and each second that it was not
        used.
        """
        tensor = value.tensor
        if tensor is None or value.op is None:
            return 0.0
        age = now - self._used.get(storage_key(tensor), 0.0) + 1e-6
        return self._cost(value) / (max(tensor.untyped_storage().nbytes(), 1) * age)

    def _cost(self, value: TapeValue) -> float:
        """Seconds to rebuild a value, with the dropped values on the way to it."""
        if value.op is None:
            return 0.0
        total = self._seconds.get(value.op.index, 0.0)
        stack = list(value.op.inputs)
        visited: set[int] = set()
        while stack and len(visited) < _CHAIN:
            source = stack.pop()
            if source.tensor is not None or source.op is None or source.op.index in visited:
                continue
            visited.add(source.op.index)
            total += self._seconds.get(source.op.index, 0.0)
            stack.extend(source.op.inputs)
        return total

    def _infeasible(self, func: Any, need: int, in_use: int) -> BaseException:
        total = in_use + need
        self.refused = BudgetInfeasible(
            f"{func} needs {format_bytes(need)} beside {format_bytes(in_use)} that are"
            f" in use and cannot be dropped: {format_bytes(total)} together, the limit is"
            f" {format_bytes(self.limit_bytes)}. {self._advice}",
            min_bytes=total,
            breakdown={"in use": in_use, "next operation": need},
        )
        return self.refused


class LimitRefusal(BaseException):
    """An operation was not begun, or had passed the limit unforeseen, inside of a `LimitGuard`.

    No `Exception`: what is tried out, by the user's code or by ours, must not take it for an answer
    of the model.

    Args:
        needed_bytes: what there would have been at that operation.
    """

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


class LimitGuard(Evictor):
    """A meter inside of which no operation is begun that would pass the limit. Nothing is recorded,
    so nothing is dropped.
    """

    def _count_read(self, args: Any) -> None:
        """What was there before, and was not to be watched, is no part of what is measured."""

    def _infeasible(self, func: Any, need: int, in_use: int) -> BaseException:
        return LimitRefusal(in_use + need)


class Online:
    """Recording and evicting, as one context manager around forward and backward."""

    def __init__(self, limit_bytes: int, *, device: torch.device | None = None) -> None:
        self.evictor = Evictor(limit_bytes, device=device)
        self._recorder = self.evictor.recorder()
        self._counted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def __enter__(self) -> Online:
        self.evictor.__enter__()
        try:
            self._recorder.__enter__()
        except BaseException as error:
            self.evictor.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._recorder.__exit__(kind, error, trace)
        finally:
            self.evictor.__exit__(kind, error, trace)
        refused, self.evictor.refused = self.evictor.refused, None
        if refused is not None and _is_from_torchscript(error):
            raise refused from error

    def count_module(self, module: torch.nn.Module, _: Any) -> None:
        """Count all of a module; for a hook before its forward."""
        if module not in self._counted:
            self._counted.update(module.modules())
            self.evictor.watch(module)


def _is_from_torchscript(error: Any) -> bool:
    """TorchScript's interpreter makes an error of its own, without a text, from whatever is raised
    inside.
    """
    return type(error) is RuntimeError and "TorchScript interpreter" in str(error)


_HOLD_ONE = TapeDecision((HOLD,))  # made once: it is what nearly all operations get


class _HoldAll:
    """Keep everything, for as long as there is room."""

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        count = len(results)
        return _HOLD_ONE if count == 1 else TapeDecision((HOLD,) * count)


def _storages_of(args: Any) -> set[int]:
    return {
        storage_key(one)
        for one in args
        if isinstance(one, torch.Tensor) and one.layout is torch.strided
    }


def _is_droppable(value: TapeValue, busy: set[int]) -> bool:
    """Whether dropping a value frees memory now, and nobody needs it for what runs next."""
    tensor = value.tensor
    if tensor is None or value.op is None or storage_key(tensor) in busy:
        return False
    return storage_owners(tensor) <= 1  # else somebody else holds it: nothing would be freed


def _drop_tensor(value: TapeValue) -> int:
    """Drop what a value holds; returns how many bytes that is. A tensor that a sweep has still to
    read stays: it would be lost to the value, and no memory be free.
    """
    if value.tensor is None:
        return 0
    nbytes, there = value.tensor.untyped_storage().nbytes(), weakref.ref(value.tensor)
    value.tensor = None
    value.tensor = there()
    return nbytes if value.tensor is None else 0


def _output_bytes(func: Any, args: Any, kwargs: Any) -> int | None:
    """`output_bytes`, which enters and leaves many contexts of torch's, none of them safe from
    Ctrl-C.
    """
    if isinstance(func, OneOperation):  # generated code takes the addresses of what it is given
        return None
    if _is_sized_by_data(func) and kwargs.get("output_size") is None:
        return None  # as fake tensors would say, a millisecond later
    with uninterrupted():
        return output_bytes(func, args, kwargs)


def _is_sized_by_data(func: Any) -> bool:
    return is_operator(func) and torch.Tag.dynamic_output_shape in func.tags


def _tensors_in(args: Any) -> Iterator[torch.Tensor]:
    """Of an operator's arguments, those in lists (`cat`, `index`) too."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from (item for item in argument if isinstance(item, torch.Tensor))


def _bound(args: Any) -> int:
    """More than any sensible operation on these arguments returns: each row of one against each
    column of another.
    """
    tensors = [one for one in _tensors_in(args) if one.dim() and one.numel()]
    if not tensors:
        return 0
    columns = [1 if is_ragged(one) else one.shape[-1] for one in tensors]
    rows = max(one.numel() // last for one, last in zip(tensors, columns, strict=True))
    size = max(one.element_size() for one in tensors)
    return max(rows * max(columns) * size, 2 * max(map(_bytes_of_elements, tensors)))


# Operations that took more than torch's shapes tell, in this process: a budget that was refused for
# one of them may hold at the next try.
_seen_larger: dict[Any, int] = {}
_MOST_REMEMBERED = 1024


def _remember_larger(key: Any, nbytes: int) -> None:
    if len(_seen_larger) >= _MOST_REMEMBERED:
        _seen_larger.clear()
    with contextlib.suppress(TypeError):  # an argument that cannot be part of a key
        _seen_larger[key] = nbytes


def _key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """What operations that take the same number of bytes have in common."""
    return (func, _shape(args), _shape(tuple(kwargs.values())))


def _bytes_of_elements(tensor: torch.Tensor) -> int:
    """Not `nbytes`, which sparse tensors do not have."""
    return tensor.numel() * tensor.element_size()


def _shape(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (sizes_of(argument), argument.dtype)
    if isinstance(argument, list | tuple):
        return tuple(_shape(item) for item in argument)
    return argument
