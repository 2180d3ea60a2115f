"""Noticing plain `loss.backward()` calls: each counts once, whatever it touches.

1. A hook on every watched tensor runs after autograd has added to its `.grad`; the first one in a pass counts the pass.
2. A pass inside another pass (reentrant checkpointing) belongs to the outer one.
3. A pass that keeps its graph (`retain_graph=True`) shares its micro-batch with the next pass, if that starts from
   another tensor: two losses of one forward are one micro-batch, one loss differentiated twice is two.
4. Passes that any window starts itself (`OWN_PASSES`) are its own business, and no other's.
5. The hooks hold the counter weakly: tensors do not keep accumulators alive.

Only public accumulators count plain passes. A window without it (`NoPlainBackwards`) is out of reach of every pass that
it does not run itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gradfit import _torch

_Handles = dict[int, torch.utils.hooks.RemovableHandle]

OWN_PASSES: set[int] = set()
"""Threads that run a backward pass which a window has started; it puts them here itself."""


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """What this thread does inside is the business of whoever starts it: no plain pass (rule 4)."""
    thread = threading.get_ident()
    outermost = thread not in OWN_PASSES
    OWN_PASSES.add(thread)
    try:
        yield
    finally:
        if outermost:
            OWN_PASSES.discard(thread)


class NoPlainBackwards:
    """Counts nothing: for a window that no outside pass can reach."""

    passes: Mapping[int, int] = {}
    found_dead = False

    def watch(self, tensor: Tensor) -> None:
        """Begin to watch a tensor; a frozen one too, for the day it is not."""

    def forget(self, tensor: Tensor) -> None:
        """Stop watching a tensor."""

    def close(self) -> None:
        """Stop watching all tensors."""

    def end_micro_batch(self) -> None:
        """The next pass is a new micro-batch in any case."""

    def abandon(self) -> None:
        """Forget passes of this thread that have died half-way."""


class PlainBackwards(NoPlainBackwards):
    """Calls `on_backward(joins, tensor)` for each plain backward pass that reaches a watched tensor, the first such.

    `joins` says that the pass belongs to the same micro-batch as the one before it. `on_failure()` is called when a
    pass is found to have died half-way.

    >>> seen = []
    >>> counter = PlainBackwards(lambda joins, tensor: seen.append(joins), lambda: None)
    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> counter.watch(a); counter.watch(b)
    >>> (a * b).sum().backward(); a.sum().backward(); seen
    [False, False]
    """

    def __init__(self, on_backward: Callable[[bool, Tensor], None], on_failure: Callable[[], None]) -> None:
        self._on_backward, self._on_failure = on_backward, on_failure
        self.passes: dict[int, int] = {}  # pass → thread, for plain passes that have begun and not ended
        self._lock = threading.Lock()
        self._retained: weakref.ref[object] | None = None  # rule 3: where the last pass, which kept its graph, started
        self._nested: weakref.ref[object] | None = None  # rule 2: an outer pass known only from the ones inside it
        self._handles: _Handles = {}
        self._hook = _make_hook(weakref.ref(self), self.passes)
        weakref.finalize(self, _remove_all, self._handles)

    def watch(self, tensor: Tensor) -> None:
        """Begin to watch a tensor; a frozen one too, for the day it is not."""
        if id(tensor) not in self._handles:
            frozen = not tensor.requires_grad
            tensor.requires_grad_()  # torch takes hooks only now, and keeps them
            self._handles[id(tensor)] = _torch.after_accumulation(tensor, self._hook)
            tensor.requires_grad_(not frozen)

    def forget(self, tensor: Tensor) -> None:
        """Stop watching a tensor."""
        handle = self._handles.pop(id(tensor), None)
        if handle is not None:
            handle.remove()

    def close(self) -> None:
        """Stop watching all tensors."""
        _remove_all(self._handles)

    def end_micro_batch(self) -> None:
        """The next pass is a new micro-batch in any case."""
        self._retained = None

    @property
    def found_dead(self) -> bool:  # type: ignore[override]
        """Whether a pass of this thread has begun and not ended, though none is running."""
        return bool(self.passes) and _torch.graph_task_id() == -1 and threading.get_ident() in self.passes.values()

    def abandon(self) -> None:
        """Forget passes of this thread that have died half-way."""
        thread = threading.get_ident()
        for task in [task for task, where in list(self.passes.items()) if where == thread]:
            self.passes.pop(task, None)

    def _begin(self, task: int, tensor: Tensor) -> None:
        if task == -1:  # no backward: another accumulator of the same FSDP2 module has reduced, which runs hooks, too
            return
        thread = threading.get_ident()
        running = _torch.running_backward()
        with self._lock:
            if task in self.passes:
                return
            failed = False
            if running is None or not running.nested:
                stale = [one for one, where in self.passes.items() if where == thread]
                failed = bool(stale) and running is not None
                for one in stale:
                    del self.passes[one]
            inside = running is not None and running.nested and thread in self.passes.values()
            self.passes[task] = thread
        _torch.after_backward(functools.partial(self.passes.pop, task, None))
        if failed:
            self._on_failure()
        if inside:
            return
        root = None if running is None else running.root
        if root is not None and self._nested is not None and self._nested() is root:
            if running is not None and not running.nested:
                self._nested = None  # the outer pass itself: it was counted when the first inner one came
            return
        self._nested = _reference(root) if running is not None and running.nested else None
        joins = self._retained is not None and (root is None or self._retained() is not root)
        self._retained = _reference(root) if running is not None and running.retains_graph else None
        self._on_backward(joins, tensor)


def _make_hook(counter: weakref.ref[PlainBackwards], open_passes: dict[int, int]) -> Callable[[Tensor], None]:
    """The hook on every tensor; it runs for each tensor of each pass, so the two usual cases come first."""
    thread_id, task_id, own = threading.get_ident, _torch.graph_task_id, OWN_PASSES

    def hook(tensor: Tensor) -> None:
        if thread_id() in own or (own and not tensor.is_cpu):
            return
        task = task_id()
        if task not in open_passes:
            alive = counter()
            if alive is not None:
                alive._begin(task, tensor)

    return hook


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _remove_all(handles: _Handles) -> None:
    while handles:
        handles.popitem()[1].remove()


def _reference(root: object) -> weakref.ref[object] | None:
    try:
        return None if root is None else weakref.ref(root)
    except TypeError:  # a GradientEdge, which is a tuple
        return None
