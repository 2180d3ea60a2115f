"""Noticing plain `loss.backward()` calls before they add anything: each counts once, whatever it
touches.

1. A hook on every watched tensor runs before autograd adds to its `.grad`. The first one in a pass
   asks the window whether the pass may come in, and what its gradients are multiplied by; a refusal
   leaves the window as it was.
2. A pass inside another pass (reentrant checkpointing) belongs to the outer one.
3. A pass that keeps its graph (`retain_graph=True`) shares its micro-batch with the next pass of
   the same thread, if that starts from another tensor and comes to a node that was there when the
   first one's loss was made: two losses of one forward are one micro-batch; one loss differentiated
   twice is two, and so are two forwards.
4. Passes that any window starts itself (`OWN_PASSES`) are its own business, and no other's; that
   they have reached another's tensors is remembered there.
5. A pass that has begun and not ended, though its thread is in no backward pass, has died half-way.
6. The hooks hold the counter weakly: tensors do not keep accumulators alive.
7. A pass that is like the last one comes in by `Window.settled`, which asks the same questions in
   few calls.

Only public accumulators count plain passes. A window without it (`NoPlainBackwards`) is out of
reach of every pass that it does not run itself.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from gradfit import _torch
from gradfit.own_passes import NOBODY, OWN_PASSES, owner_of

_Handles = dict[int, torch.utils.hooks.RemovableHandle]
_Hook = Callable[[Tensor | None], Tensor | None]


class PlainPass(NamedTuple):
    """A plain backward pass that is about to add its first gradient."""

    thread: int
    """Who has called it."""
    first: int
    """The identity of the first tensor it reaches."""
    joins: bool
    """It belongs to the same micro-batch as the pass before it (rule 3)."""
    roots: tuple[object, ...]
    """What is differentiated; () if that cannot be told."""
    task: int
    """Its number, as autograd counts passes."""

    @property
    def root(self) -> object | None:
        """The first of them."""
        return self.roots[0] if self.roots else None


class Counts(Protocol):
    """Who wants to know about plain passes."""

    lock: Any
    """Held for a moment, when counters change."""
    settled: Any
    """The short way for a pass like the last one, None if there is none (rule 7)."""
    next_way: Any
    """The same for the first pass of a window like the last one."""

    def admit_plain(self, one: PlainPass) -> float | None:
        """Count a pass, and say what to multiply its gradients by; None if it is not counted. May
        refuse it.
        """

    def plain_factor(self) -> float:
        """What the gradients of a pass that was counted are multiplied by."""

    def end_plain(self, *, complete: bool) -> None:
        """A pass has ended; `complete` if nothing more of its micro-batch is to be expected."""

    def break_off(self, fault: str = "") -> None:
        """A pass has died half-way."""


class NoPlainBackwards:
    """Counts nothing: for a window that no outside pass can reach."""

    passes: Mapping[int, int] = {}
    reached_by_others: Collection[int] = ()
    """Tensors, by identity, that another window's own passes have added to (rule 4)."""

    @property
    def token(self) -> object:
        """What tells this window's own passes from another's."""
        return self

    def end_window(self) -> None:
        """The window is over: the next pass is a new micro-batch, and what other windows' passes
        have added is not there any more.
        """

    def forget_others(self) -> None:
        """What another window's passes have added is not there any more."""

    def watch(self, tensor: Tensor) -> None:
        """Begin to watch a tensor; a frozen one too, for the day it is not."""

    def forget(self, tensor: Tensor) -> None:
        """Stop watching a tensor."""

    def close(self) -> None:
        """Stop watching all tensors."""

    def end_micro_batch(self, thread: int | None = None) -> None:
        """The next pass, of this thread or of any, is a new micro-batch in any case."""

    def expects_more(self, thread: int) -> bool:
        """Whether the next pass of this thread may belong to its last one (rules 2 and 3)."""
        return False

    def any_died(self) -> bool:
        """Whether a pass has begun and not ended, though nobody runs it any more."""
        return False

    def abandon(self) -> None:
        """Forget all passes that have not ended."""


class PlainBackwards(NoPlainBackwards):
    """Tells a window about each plain backward pass that reaches a watched tensor."""

    def __init__(self, window: Counts) -> None:
        self._window = weakref.ref(window)
        # graph task → thread, for counted passes that have begun and not ended
        self.passes: dict[int, int] = {}
        # graph task → factor, for every pass there is, ours or not
        self._factors: dict[int, float] = {}
        self._lock = threading.Lock()
        # rule 3: thread → where its last pass started, and when that was made
        self._retained: dict[int, tuple[weakref.ref[object], int]] = {}
        # rule 2: thread → an outer pass that was counted
        self._nested: dict[int, weakref.ref[object] | None] = {}
        self.reached_by_others: set[int] = set()
        self._handles: _Handles = {}
        self._reference = weakref.ref(self)
        self._hook_for = _make_hooks(self._reference, self._factors, self.reached_by_others)
        weakref.finalize(self, _remove_all, self._handles)

    @property
    def token(self) -> object:
        return self._factors  # which the hooks hold, too

    def end_window(self) -> None:
        self._retained.clear()
        self.reached_by_others.clear()

    def forget_others(self) -> None:
        self.reached_by_others.clear()

    def watch(self, tensor: Tensor) -> None:
        if id(tensor) not in self._handles:
            frozen = not tensor.requires_grad
            tensor.requires_grad_()  # torch takes hooks only now, and keeps them
            self._handles[id(tensor)] = _torch.before_accumulation(
                tensor, self._hook_for(id(tensor))
            )
            tensor.requires_grad_(not frozen)

    def forget(self, tensor: Tensor) -> None:
        handle = self._handles.pop(id(tensor), None)
        if handle is not None:
            handle.remove()

    def close(self) -> None:
        _remove_all(self._handles)

    def end_micro_batch(self, thread: int | None = None) -> None:
        if thread is None:
            self._retained.clear()
        else:
            self._retained.pop(thread, None)

    def any_died(self) -> bool:
        if not self.passes:
            return False
        running = _torch.threads_in_backward()
        return any(_is_over(thread, running) for thread in list(self.passes.values()))

    def abandon(self) -> None:
        self.passes.clear()
        self._factors.clear()

    def _begin(self, task: int, first: int) -> float:
        """The first gradient of a pass arrives: gives what the pass is multiplied by."""
        window = self._window()
        if window is None:
            return 1.0
        usual = window.settled or window.next_way
        if usual is not None and self._begin_usual(window, task, first):
            return 1.0
        return self._begin_unusual(window, task, first)

    def _begin_unusual(self, window: Counts, task: int, first: int) -> float:
        running = _torch.running_backward() or _UNTOLD
        if task == -1:
            return 1.0
        if self._is_not_for_windows(running, first):
            return self._follow(task, 1.0)
        with self._lock:
            if task in self._factors:
                return self._factors[task]
            return self._begin_plain(window, task, first, running)

    def _is_not_for_windows(self, running: _torch.RunningBackward, first: int) -> bool:
        """Whether a pass adds to no `.grad`, or is somebody's own business (rule 4)."""
        owner = owner_of(running.thread)
        if owner is None:
            return not running.accumulates
        if owner is not NOBODY and owner is not self._factors:
            self.reached_by_others.add(first)
        return True

    def _begin_usual(self, window: Counts, task: int, first: int) -> bool:
        """Bring a pass in by the short way; False, and nothing done, if it is no usual one."""
        thread = threading.get_ident()
        with window.lock:
            usual, begins = window.settled, False
            if usual is None:
                usual, begins = window.next_way, True
            window.settled = window.next_way = None
            if usual is None or self.passes or not usual.admits_plain(window, thread, begins):
                return False
            # from here on, an interrupt leaves a pass that has died (rule 5)
            self.passes[task] = thread
            usual.book(window, first, task)
            self._factors[task] = 1.0
            _torch.after_backward(functools.partial(_end_pass, self._reference, task, True, usual))
        return True

    def _begin_plain(
        self, window: Counts, task: int, first: int, running: _torch.RunningBackward
    ) -> float:
        """A pass that no window has started."""
        one = PlainPass(running.thread, first, False, running.roots, task)
        nested = running.nested
        if not nested:
            self._end_dead(window, one.thread)
        if self._is_part(one, nested):
            self.passes[task] = one.thread
            return self._follow(task, window.plain_factor(), complete=not nested)
        factor = self._admit(window, task, one._replace(joins=self._joins_last(one)))
        if factor is None:
            return self._follow(task, 1.0)
        retains = running.retains_graph
        self._nested[one.thread] = _reference(one.root) if nested else None
        self._retained.pop(one.thread, None)
        root = _reference(one.root)
        if retains and root is not None:
            self._retained[one.thread] = root, _torch.made_at(one.roots)
        return self._follow(task, factor, complete=not (nested or retains))

    def _joins_last(self, one: PlainPass) -> bool:
        """Whether a pass shares its micro-batch with the one before it in its thread (rule 3)."""
        if one.thread not in self._retained:
            return False
        root, made = self._retained[one.thread]
        return root() is not one.root and _torch.comes_to_node_until(made, one.roots)

    def _admit(self, window: Counts, task: int, one: PlainPass) -> float | None:
        """Ask the window; the pass counts as running from here on, unless it is refused."""
        self.passes[task] = one.thread
        factor = None
        try:
            factor = window.admit_plain(one)
        finally:
            if factor is None:
                del self.passes[task]
        return factor

    def _follow(self, task: int, factor: float, *, complete: bool = False) -> float:
        """Remember a pass's factor until it ends; one that dies is never heard of again."""
        if len(self._factors) > _MOST_REMEMBERED:
            self._forget_uncounted()
        self._factors[task] = factor
        _torch.after_backward(functools.partial(_end_pass, self._reference, task, complete))
        return factor

    def _forget_uncounted(self) -> None:
        for old in [one for one in self._factors if one not in self.passes]:
            self._factors.pop(old, None)

    def _end(self, task: int, complete: bool, usual: Any = None) -> None:
        self._factors.pop(task, None)
        counted = self.passes.pop(task, None) is not None
        window = self._window()
        if not counted or window is None:
            return
        with window.lock:
            if usual is None or not usual.end(window):
                window.end_plain(complete=complete)

    def expects_more(self, thread: int) -> bool:
        retained, nested = self._retained.get(thread), self._nested.get(thread)
        return retained is not None or nested is not None

    def _end_dead(self, window: Counts, thread: int) -> None:
        """A new pass begins in this thread, so an older one that has not ended never will (rule
        5).
        """
        if thread == _UNKNOWN:
            return
        dead = [task for task, where in self.passes.items() if where == thread]
        for task in dead:
            del self.passes[task]
        if dead:
            window.break_off()

    def _is_part(self, one: PlainPass, nested: bool) -> bool:
        """Whether a pass belongs to one that was counted before (rule 2)."""
        if nested and one.thread in self.passes.values():
            return True
        outer = self._nested.get(one.thread)
        if one.root is None or outer is None or outer() is not one.root:
            return False
        if not nested:
            # the outer pass itself: it was counted when the first inner one came
            self._nested[one.thread] = None
        return True


_MOST_REMEMBERED = 64
# The thread of a pass where several wait for the engine, which runs all of it in threads of its own
# (on an accelerator): each task is a pass for itself, and none ends another.
_UNKNOWN = -1
_UNTOLD = _torch.RunningBackward(_UNKNOWN, (), retains_graph=False, accumulates=True, nested=False)


def _is_over(thread: int, running: Collection[int]) -> bool:
    """Whether the pass of a thread is not among those that run."""
    return not running if thread == _UNKNOWN else thread not in running


def _make_hooks(
    counter: weakref.ref[PlainBackwards], factors: dict[int, float], reached_by_others: set[int]
) -> Callable[[int], _Hook]:
    """The hooks for tensors; they run for each tensor of each pass, so the usual cases come first,
    and what they need are names of their own, not attributes.
    """
    thread_id, task_id = threading.get_ident, _torch.graph_task_id
    own_passes, noted_owner = OWN_PASSES, OWN_PASSES.get

    def hook_for(identity: int) -> _Hook:
        def hook(gradient: Tensor | None) -> Tensor | None:
            if own_passes:
                owner = noted_owner(thread_id())
                if owner is factors:
                    return None
                if owner is not None and _is_of_another(thread_id(), identity, reached_by_others):
                    return None
            if gradient is None:
                return None
            task = task_id()
            factor = factors.get(task)
            if factor is None:
                alive = counter()
                if alive is None:
                    return None
                factor = alive._begin(task, identity)
            return None if factor == 1.0 else gradient * factor

        return unserializable_hook(hook)  # type: ignore[no-untyped-call, no-any-return]

    return hook_for


def _is_of_another(thread: int, reached: int, reached_by_others: set[int]) -> bool:
    """Whether a thread's pass is a trial, or of another window, which has reached this tensor."""
    owner = owner_of(thread)  # a trial may be over
    if owner is not None and owner is not NOBODY:
        reached_by_others.add(reached)
    return owner is not None


def _end_pass(
    counter: weakref.ref[PlainBackwards], task: int, complete: bool, usual: Any = None
) -> None:
    alive = counter()
    if alive is not None:
        alive._end(task, complete, usual)


def _remove_all(handles: _Handles) -> None:
    while handles:
        handles.popitem()[1].remove()


def _reference(root: object) -> weakref.ref[object] | None:
    try:
        return None if root is None else weakref.ref(root)
    except TypeError:  # a GradientEdge, which is a tuple
        return None
