"""A budget in a loop that is not ours: `auto_checkpoint` for a model, `budget` for a block.

Each thread with a budget has one evictor (`recompute/evict.py`), which hears every operation of the
thread, in forward, backward and the optimizer's step, counts what is alive, and drops what can be
made again before an operation would pass the smallest of the thread's budgets. What can be made
again is what runs inside of a module's forward with gradients: around each such call, the outermost
alone, operations are recorded. What a forward leaves behind may be dropped at any time until its
backward pass, so it does not matter which loop it is, nor how many forwards come before a backward
pass. What is better dropped at once, and where replays begin, say plans (`forward_plans.py`), from
the second forward of a sequence of operations on.

Forwards are found by torch's hooks for all modules, so that nothing of ours is in a model: its
copies, pickles and states are what they would be without.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradfit._torch import graph_task_id, inside_fake_mode, inside_functorch, times_called
from gradfit._torch_listen import others_take_saves, untraced
from gradfit.arguments import read_instance
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.fitting.budget import live_tensors, read_budget_of_all
from gradfit.fitting.forward_plans import ForwardPlans, PlannedOrOnline
from gradfit.interrupts import uninterrupted
from gradfit.not_copied import NotCopied
from gradfit.planning.plan import Plan
from gradfit.recompute.evict import Evictor
from gradfit.recompute.scope import explain_unsupported
from gradfit.tape.recorder import Recorder, is_recording
from gradfit.tree import leaves
from gradfit.units import NO_BUDGET, format_bytes, format_seconds

_ADVICE = (
    "A batch is never cut here. Raise `memory`, or call gf.fit(model, optimizer, loss_fn, batch,"
    " memory=...), which plans, cuts the batch, and gives the same update."
)


class BudgetUse(NamedTuple):
    """What holding a budget took and cost, so far."""

    budget_bytes: int
    """That was to be held."""
    peak_bytes: int
    """The most bytes of tensors that were alive at once."""
    forwards: int
    """Of modules, in which operations were recorded."""
    evictions: int
    """Values that were dropped, each as often as it was."""
    rebuilt_seconds: float
    """Spent making them again, and what plans rebuild."""
    planned: int = 0
    """Forwards that came to their end by a plan."""
    planning_seconds: float = 0.0
    """Spent making plans."""

    def __str__(self) -> str:
        planned = f" ({self.planned} by a plan)" if self.planned else ""
        return (
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)};"
            f" forwards: {self.forwards}{planned}, values dropped: {self.evictions},"
            f" {format_seconds(self.rebuilt_seconds)} to rebuild them"
        )


class MemoryBudget(NotCopied):
    """The handle that `auto_checkpoint` and `budget` return. Belongs to the thread that made it.

    Args:
        limit_bytes: for all tensors that are alive at once.
        model: whose forwards are recorded; None: every module's.
        device: whose memory it is; None: every tensor counts.
    """

    _instead_of_copy = "Call gf.auto_checkpoint or gf.budget again."

    def __init__(
        self,
        limit_bytes: int,
        model: torch.nn.Module | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._model = None if model is None else weakref.ref(model)
        self.device = device
        self._work: _ThreadBudgets | None = None
        self._use = BudgetUse(limit_bytes, 0, 0, 0, 0.0)
        self._plan_at_end: Callable[[], Plan | None] = _no_plan

    def __repr__(self) -> str:
        state = "removed" if self._work is None else "at work"
        return f"<budget of {format_bytes(self.limit_bytes)}, {state}: {self.use}>"

    @property
    def model(self) -> torch.nn.Module | None:
        """Whose forwards are recorded; None: every module's, or it is gone."""
        return None if self._model is None else self._model()

    @property
    def is_active(self) -> bool:
        """Whether it is at work."""
        return self._work is not None

    @property
    def use(self) -> BudgetUse:
        """What it took and cost so far."""
        if self._work is not None:
            self._use = self._work.use_since(self._begun)._replace(budget_bytes=self.limit_bytes)
        return self._use

    @property
    def plan(self) -> Plan | None:
        """For the last forward that came to its end, and the room that there was; None before
        that.
        """
        return self._plan_at_end() if self._work is None else self._work.plans.plan_of(self.model)

    def start(self) -> None:
        """Hold the budget from now on, in this thread."""
        try:
            with uninterrupted():
                self._begin()
            self._check_what_is_there()
        except BaseException:  # Ctrl-C, too: nobody would know of a budget to remove
            self.remove()
            raise

    def _begin(self) -> None:
        work = _thread.budgets
        if work is None or work.is_closed:
            work = _ThreadBudgets(self.device)
        try:
            work.add(self)
        finally:
            work.close_if_unused()
        self._work, self._begun = work, work.mark()

    def _check_what_is_there(self) -> None:
        """Refuse what is above the budget already."""
        work = self._work
        if work is None:
            return
        if work.live_bytes > self.limit_bytes:
            gc.collect()
        if work.live_bytes > self.limit_bytes:
            raise _too_much_there(work.live_bytes, self.limit_bytes)

    def remove(self) -> None:
        """Hold it no more. What was dropped by then is rebuilt all the same when a backward pass
        asks for it.
        """
        with uninterrupted():
            if self._work is not None:
                self._use, self._plan_at_end = self.use, self._work.plans.plan_later(self.model)
                work, self._work = self._work, None
                work.discard(self)

    def __enter__(self) -> MemoryBudget:
        try:
            if self._work is None:
                self.start()
                return self
        except BaseException:
            self.remove()
            raise
        if self._model is None:
            raise MisuseError(
                "This budget is entered already. Call gf.budget() again for a block inside."
            )
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.remove()
        finally:  # Ctrl-C may have come before its first line
            self.remove()
        if kind is RuntimeError and "saved tensor hooks" in str(error):
            explain_unsupported("a block of gf.budget", kind, error, trace)

    def _covers(self, module: torch.nn.Module) -> bool:
        """Whether the module's forwards are this budget's."""
        return self._model is None or self._model() is module


def _no_plan() -> None:
    """Before it was at work."""


class _Mark(NamedTuple):
    """What had been done when a budget began."""

    forwards: int
    evictions: int
    rebuilt_seconds: float
    planned: int
    planning_seconds: float


class _ThreadBudgets:
    """All budgets of one thread, and what holds them.

    Args:
        device: whose memory is counted; None: every tensor.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.is_closed = False
        self._device = device
        self._evictor = Evictor(NO_BUDGET, device=device, advice=_ADVICE)
        self.plans = ForwardPlans(self._evictor)
        self._budgets: list[MemoryBudget] = []
        self._thread = threading.get_ident()
        self._counted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._recorder: Recorder | None = None
        self._forward: PlannedOrOnline | None = None  # what it decides by
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._forwards = 0
        self._evictor.__enter__()
        for tensor in live_tensors():
            self._evictor.watch(tensor)
        self._evictor.reset_peak()
        _thread.budgets = self
        _hooks.add(self)

    def add(self, budget: MemoryBudget) -> None:
        """Hold this one, too."""
        if budget.device != self._device:
            raise MisuseError(
                f"memory: a budget of {self._device or 'the CPU'} is at work in this thread, and"
                f" this one is of {budget.device or 'the CPU'}. Call remove() on the other first."
            )
        self._budgets.append(budget)
        self._set_limit()
        if (model := budget.model) is not None:
            self._count(model)
            weakref.finalize(model, _discard_later, weakref.ref(budget)).atexit = False

    def discard(self, budget: MemoryBudget) -> None:
        """Hold it no more; the last one ends all of it, in its own thread: another one cannot."""
        self._budgets = [one for one in self._budgets if one is not budget]
        self._set_limit()
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """End all of it, if no budget is left."""
        if not self._budgets and threading.get_ident() == self._thread and not self.is_closed:
            self.is_closed = True
            self._end_recording()
            _thread.budgets = None
            _hooks.discard(self)
            self._evictor.__exit__(None, None, None)
            self._evictor.refused = None  # whose traceback holds what the loop has

    def _set_limit(self) -> None:
        self._evictor.set_limit(min((one.limit_bytes for one in self._budgets), default=NO_BUDGET))

    @property
    def live_bytes(self) -> int:
        """Of all tensors, now."""
        return self._evictor.current_bytes

    def mark(self) -> _Mark:
        """For `use_since`; a new peak begins."""
        if len(self._budgets) == 1:
            self._evictor.reset_peak()
        evictor, plans = self._evictor, self.plans
        return _Mark(
            self._forwards,
            evictor.evictions,
            evictor.rebuilt_seconds,
            plans.planned,
            plans.planning_seconds,
        )

    def use_since(self, mark: _Mark) -> BudgetUse:
        """What was done since then."""
        evictor = self._evictor
        return BudgetUse(
            evictor.limit_bytes,
            evictor.peak_bytes,
            self._forwards - mark.forwards,
            evictor.evictions - mark.evictions,
            evictor.rebuilt_seconds - mark.rebuilt_seconds,
            self.plans.planned - mark.planned,
            self.plans.planning_seconds - mark.planning_seconds,
        )

    def forget(self) -> None:
        """In a forked process, whose memory is another one's."""
        self.is_closed, _thread.budgets = True, None
        self._evictor.set_limit(NO_BUDGET)

    # ------------------------------------------------------------------------------------- forwards

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Begin to record, if this is the outermost call of a module of ours, with gradients."""
        if not any(budget._covers(module) for budget in self._budgets):
            return
        if self._recorder is not None:
            if self._is_inside(module):
                return
            self._end_recording()  # Ctrl-C has ended the call before, and no hook was called
        if not _is_training():
            return
        self._count(module)
        for tensor in leaves(inputs):
            self._evictor.watch(tensor)
        forward = self.plans.begin(module)
        with uninterrupted():
            recorder = self._evictor.recorder(forward)
            recorder.__enter__()
            self._recorder, self._root = recorder, weakref.ref(module)
            self._forward = forward
            forward.begin(recorder)
        self._forwards += 1

    def after_forward(self, module: torch.nn.Module, result: Any) -> None:
        """End what `before_forward` has begun for this call; by an error, if there is no result."""
        if self._recorder is None or self._root_module() is not module:
            return
        if times_called(module) <= 1:
            forward = self._forward
            self._end_recording()
            if forward is not None and result is not None:
                self.plans.end(module, forward)

    def _is_inside(self, module: torch.nn.Module) -> bool:
        """Whether this call of a module is inside of the one that is recorded."""
        root = self._root_module()
        return root is not None and times_called(root) > (root is module)

    def _root_module(self) -> torch.nn.Module | None:
        return None if self._root is None else self._root()

    def _end_recording(self) -> None:
        with uninterrupted():
            recorder, self._recorder, self._root = self._recorder, None, None
            self._forward = None
            if recorder is not None:
                recorder.__exit__(None, None, None)

    def _count(self, module: torch.nn.Module) -> None:
        """Count all of a module, its last parameter when its first is read."""
        if module in self._counted:
            return
        self._counted.update(module.modules())
        self._evictor.watch(module)


def _too_much_there(live_bytes: int, limit_bytes: int) -> BudgetInfeasible:
    return BudgetInfeasible(
        f"The tensors that are there already take {format_bytes(live_bytes)}, the budget is"
        f" {format_bytes(limit_bytes)}. Raise `memory`, or let go of what is not needed.",
        min_bytes=live_bytes,
        breakdown={"there already": live_bytes},
    )


def _is_training() -> bool:
    """Whether what runs now is a forward that a backward pass may come to, and nobody else
    records it.
    """
    return (
        torch.is_grad_enabled()
        and graph_task_id() == -1
        and not is_recording()
        and not inside_functorch()
        and not inside_fake_mode()
        and not others_take_saves()
    )


def _discard_later(reference: weakref.ref[MemoryBudget]) -> None:
    """A model has died."""
    budget = reference()
    if budget is not None:
        budget.remove()


# ------------------------------------------------------------------------------------ torch's hooks


class _BudgetsHere(threading.local):
    budgets: _ThreadBudgets | None = None


_thread = _BudgetsHere()


class _ModuleHooks:
    """Those of torch for all modules, while any thread has a budget."""

    def __init__(self) -> None:
        self._users: weakref.WeakSet[_ThreadBudgets] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._lock = threading.RLock()
        self._forks = False

    def add(self, user: _ThreadBudgets) -> None:
        with self._lock:
            self._users.add(user)
            if not self._handles:
                self._handles = [
                    register_module_forward_pre_hook(_before_forward),
                    register_module_forward_hook(_after_forward, always_call=True),
                ]
            if not self._forks and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_forget_in_child)
                self._forks = True

    def discard(self, user: _ThreadBudgets) -> None:
        with self._lock:
            self._users.discard(user)
            while self._handles and not self._users:
                self._handles.pop().remove()


_hooks = _ModuleHooks()


def _before_forward(module: torch.nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():  # inside of what is one operation
        _begin(module, inputs)


def _after_forward(module: torch.nn.Module, inputs: Any, result: Any) -> None:
    if not torch.compiler.is_compiling():
        _end(module, result)


@untraced
def _begin(module: torch.nn.Module, inputs: Any) -> None:
    if _thread.budgets is not None:
        _thread.budgets.before_forward(module, inputs)


@untraced
def _end(module: torch.nn.Module, result: Any) -> None:
    if _thread.budgets is not None:
        _thread.budgets.after_forward(module, result)


def _forget_in_child() -> None:
    if _thread.budgets is not None:
        _thread.budgets.forget()


# ------------------------------------------------------------------------------------- public calls


def auto_checkpoint(model: torch.nn.Module, memory: int | float | str) -> MemoryBudget:
    """Hold a budget from now on, in whatever loop: training forwards of this model leave behind
    what can be rebuilt, and it is dropped when room is needed. No bit changes.

    Counted is every tensor that is there now, and what this thread makes or reads from now on:
    parameters, gradients, the optimizer's state, batches, activations, temporaries. An operation
    that would pass the budget with nothing left to drop is not run: `BudgetInfeasible`. Where
    several budgets are at work in a thread, the smallest holds.

    Args:
        model: whose forwards with gradients are recorded, the outermost call each time.
        memory: bytes, text such as "8 GiB", a part such as "80%" of what there is, or "auto".

    >>> import torch
    >>> import gradfit as gf
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(16)]
    >>> model = torch.nn.Sequential(*layers)
    >>> handle = gf.auto_checkpoint(model, memory="1 GiB")
    >>> model(torch.ones(256, 64)).sum().backward()
    >>> handle.remove()
    >>> handle.use.peak_bytes <= 2**30, handle.use.forwards
    (True, 1)
    """
    read_instance(model, "model", torch.nn.Module, "the torch.nn.Module that is trained")
    limit_bytes, device = read_budget_of_all(memory, model)
    handle = MemoryBudget(limit_bytes, model, device)
    try:
        handle.start()
        return handle
    except BaseException:  # it has begun, and nobody would know of a budget to remove
        handle.remove()
        raise


def budget(memory: int | float | str) -> MemoryBudget:
    """Hold a budget inside a block, `with gf.budget("8 GiB"):`, for all models together: as
    `auto_checkpoint` of every module that is called there.

    Args:
        memory: bytes, text such as "8 GiB", a part such as "80%" of what there is, or "auto".

    >>> import torch
    >>> import gradfit as gf
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> with gf.budget("1 GiB") as held:
    ...     model(torch.ones(32, 8)).sum().backward()
    >>> held.use.forwards
    1
    """
    limit_bytes, device = read_budget_of_all(memory)
    return MemoryBudget(limit_bytes, None, device)
