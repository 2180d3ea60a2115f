"""`CheckpointManager`: scopes and nodes seen together, under one limit of memory."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradfit._torch import inside_functorch
from gradfit.arguments import read_flag, read_instance, read_number
from gradfit.errors import MisuseError
from gradfit.interrupts import uninterrupted
from gradfit.recompute.node import CheckpointNode, GraphNode
from gradfit.recompute.scope import (
    CheckpointScope,
    ScopeStats,
    add_observer,
    explain_unsupported,
    remove_observer,
)
from gradfit.units import format_bytes

_MB = 1024 * 1024


class CheckpointManager:
    """Looks after scopes, and decides which activations are worth keeping below `memory_threshold`
    of `max_memory_mb`.

    Inside `with manager:`, or between `manager.start()` and `manager.stop()`, every scope that is
    entered is registered. With `auto_checkpoint=True` no scope is needed: activations are evicted
    while the forward runs, so that live bytes stay below the limit; keep the block open around the
    backward pass too. Counted is what the block makes, what it reads, and the modules that it calls
    as a whole; memory that it never meets (an optimizer's state) is not in `max_memory_mb`.

    >>> import torch
    >>> manager = CheckpointManager(max_memory_mb=64)
    >>> x = torch.ones(1024, requires_grad=True)
    >>> with manager:
    ...     with CheckpointScope("block"):
    ...         loss = x.exp().sin().sum()
    ...     loss.backward()
    >>> [scope.name for scope in manager.scopes], manager.stats.freed_bytes
    (['block'], 4096)

    Args:
        max_memory_mb: the memory there is, in MiB; None: not limited.
        auto_checkpoint: evict what does not fit, without scopes.
        memory_threshold: the part of `max_memory_mb` that may be used.
    """

    def __init__(
        self,
        max_memory_mb: float | None = None,
        auto_checkpoint: bool = False,
        memory_threshold: float = 0.8,
    ) -> None:
        self._entered = self._was_entered = False
        self._scopes: list[CheckpointScope] = []
        self._nodes: list[CheckpointNode] = []
        self._online: Any = None
        self._hook: Any = None
        self.max_memory_mb = max_memory_mb
        self.memory_threshold = memory_threshold
        self.auto_checkpoint = auto_checkpoint

    def __repr__(self) -> str:
        limit = (
            "no limit" if self.limit_bytes is None else f"limit {format_bytes(self.limit_bytes)}"
        )
        return (
            f"<CheckpointManager: {len(self._scopes)} scopes, {limit},"
            f" auto_checkpoint={self.auto_checkpoint}>"
        )

    @property
    def max_memory_mb(self) -> float | None:
        """The memory there is, in MiB; None: not limited."""
        return self._max_memory_mb

    @max_memory_mb.setter
    def max_memory_mb(self, megabytes: float | None) -> None:
        self._max_memory_mb = (
            None
            if megabytes is None
            else read_number(megabytes, "max_memory_mb", above=0, like=1024)
        )

    @property
    def memory_threshold(self) -> float:
        """The part of `max_memory_mb` that may be used."""
        return self._memory_threshold

    @memory_threshold.setter
    def memory_threshold(self, threshold: float) -> None:
        self._memory_threshold = read_number(
            threshold, "memory_threshold", above=0, maximum=1, like=0.8
        )

    @property
    def auto_checkpoint(self) -> bool:
        """Whether activations are evicted while the forward runs, without scopes."""
        return self._auto_checkpoint

    @auto_checkpoint.setter
    def auto_checkpoint(self, automatic: bool) -> None:
        self._auto_checkpoint = read_flag(automatic, "auto_checkpoint")
        if automatic and not self._was_entered:
            _say_if_never_entered(self)

    @property
    def limit_bytes(self) -> int | None:
        """`max_memory_mb` times `memory_threshold`."""
        return (
            None
            if self.max_memory_mb is None
            else int(self.max_memory_mb * _MB * self.memory_threshold)
        )

    @property
    def scopes(self) -> tuple[CheckpointScope, ...]:
        """The registered scopes, in the order in which they came."""
        return tuple(self._scopes)

    @property
    def stats(self) -> ScopeStats:
        """The sum over the registered scopes."""
        stats = [scope.stats for scope in self._scopes]
        return ScopeStats(
            kept_bytes=sum(one.kept_bytes for one in stats),
            freed_bytes=sum(one.freed_bytes for one in stats),
            recomputed_seconds=sum(one.recomputed_seconds for one in stats),
        )

    @property
    def checkpoint_bytes(self) -> int:
        """What the nodes that this manager made checkpoints hold."""
        return sum(node.nbytes for node in self._nodes if node.is_checkpoint)

    def register_scope(self, scope: CheckpointScope) -> None:
        """Look after a scope: its statistics, and its checkpoints when they are cleared.

        Args:
            scope: entered or not yet.
        """
        read_instance(scope, "scope", CheckpointScope, "a CheckpointScope")
        if not any(registered is scope for registered in self._scopes):
            self._scopes.append(scope)

    def unregister_scope(self, scope: CheckpointScope) -> None:
        """Forget a scope.

        Args:
            scope: one that was registered.
        """
        if not any(registered is scope for registered in self._scopes):
            raise MisuseError(f"scope: {scope!r} is not registered. Call register_scope() first.")
        self._scopes = [each for each in self._scopes if each is not scope]

    def should_checkpoint(self, node: GraphNode) -> bool:
        """Whether to keep a node's result: it is marked, or it fits below the limit beside what is
        kept already.

        Args:
            node: of a scope's `nodes()`, or made by hand.
        """
        read_instance(node, "node", GraphNode, "one of scope.nodes()")
        if isinstance(node, CheckpointNode) and node.is_checkpoint:
            return True
        return (
            self.limit_bytes is not None and self.checkpoint_bytes + node.nbytes <= self.limit_bytes
        )

    def selective_checkpointing(self, nodes: Sequence[GraphNode]) -> list[CheckpointNode]:
        """Keep some of the nodes, evenly spread, as many as fit below the limit; without a limit,
        √n of them.

        Nodes that are checkpoints already stay so; a `GraphNode` that is no `CheckpointNode` has
        nothing to keep. Returns those that were chosen.

        Args:
            nodes: in the order of the forward, such as a scope's `nodes()`.
        """
        for node in read_instance(nodes, "nodes", (list, tuple), "scope.nodes()"):
            read_instance(node, "nodes", GraphNode, "scope.nodes()")
        free = [
            node for node in nodes if isinstance(node, CheckpointNode) and not node.is_checkpoint
        ]
        chosen = self._chosen_of(free)
        for node in chosen:
            node.is_checkpoint = True
        self._nodes.extend(chosen)
        return chosen

    def _chosen_of(self, free: list[CheckpointNode]) -> list[CheckpointNode]:
        if self.limit_bytes is None:
            return _spread(free, math.isqrt(len(free)))
        room = self.limit_bytes - self.checkpoint_bytes
        choices = (_spread(free, count) for count in range(len(free), 0, -1))
        return next((chosen for chosen in choices if _total_bytes(chosen) <= room), [])

    def clear_all_checkpoints(self) -> None:
        """Let go of everything that was kept: it is recomputed when backward asks for it."""
        for node in [*self._nodes, *(node for scope in self._scopes for node in scope.nodes())]:
            node.is_checkpoint = False
            node.clear_saved_activations()
        self._nodes.clear()

    def start(self) -> CheckpointManager:
        """Begin to look after scopes and memory, in this thread, until `stop()`: `with manager:`
        without a block.
        """
        return self.__enter__()

    def stop(self) -> None:
        """End what `start()` began; after the backward pass, which is held to the limit as well."""
        if not self._entered:
            raise MisuseError("This CheckpointManager is not started. Call start() before stop().")
        self.__exit__(None, None, None)

    def __enter__(self) -> CheckpointManager:
        if self._entered:
            raise MisuseError(
                "This CheckpointManager is entered already. Make another one for a second block."
            )
        try:
            with uninterrupted():
                if self.auto_checkpoint:
                    self._begin_evicting()
                self._entered = self._was_entered = True
                add_observer(self.register_scope)
            return self
        except BaseException as error:  # Ctrl-C has waited, or came just now: no block will end it
            self._end(type(error), error, error.__traceback__)
            raise

    def _begin_evicting(self) -> None:
        limit = self.limit_bytes
        if limit is None:
            raise MisuseError(
                "auto_checkpoint=True needs to know how much memory there is. Pass"
                " max_memory_mb=1024, for example."
            )
        # only automatic managers need the eviction engine
        from gradfit.recompute.evict import Online

        self._online = Online(limit)
        self._online.__enter__()
        # A module's last parameter is there when its first is used, so it must be counted from
        # the beginning.
        self._hook = register_module_forward_pre_hook(self._online.count_module)

    def __exit__(self, *error: Any) -> None:
        try:
            was_automatic = self._online is not None
            self._end(*error)
        finally:  # Ctrl-C may have come before its first line
            self._end(*error)
        if was_automatic:
            explain_unsupported("a CheckpointManager with auto_checkpoint=True", *error)

    def _end(self, *error: Any) -> None:
        """Be as before `start()`; may be called twice."""
        with uninterrupted():
            remove_observer(self.register_scope)
            self._entered = False
            hook, self._hook = self._hook, None
            if hook is not None:
                hook.remove()
            online, self._online = self._online, None
            if online is not None:
                online.__exit__(*error)


def _total_bytes(nodes: Sequence[GraphNode]) -> int:
    return sum(node.nbytes for node in nodes)


def _spread(nodes: Sequence[CheckpointNode], count: int) -> list[CheckpointNode]:
    """`count` of the nodes, with equal gaps, the last one included."""
    return [nodes[(number + 1) * len(nodes) // count - 1] for number in range(count)]


def _say_if_never_entered(manager: CheckpointManager) -> None:
    """Warn, once, when a backward pass begins that an automatic manager would have helped, had it
    been started.

    Until then every module's forward is looked at: only a result knows when its backward pass
    comes.
    """
    reference = weakref.ref(manager)
    handle: Any = None

    def watch(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if _idle(reference()) is None:
            handle.remove()
        elif _will_be_differentiated(output):
            output.grad_fn.register_prehook(warn)

    def warn(gradients: Any) -> None:
        idle = _idle(reference())
        if idle is not None:
            idle._was_entered = True  # it is said once
            warnings.warn(
                f"A backward pass runs, but {idle!r} was never started, so nothing is evicted and"
                " no limit is held. Put forward and backward into `with manager:`, or call"
                " manager.start() before and manager.stop() after them.",
                stacklevel=2,
            )

    with uninterrupted():
        handle = register_module_forward_hook(watch)


def _will_be_differentiated(output: Any) -> bool:
    return (
        isinstance(output, torch.Tensor) and output.grad_fn is not None and not inside_functorch()
    )


def _idle(manager: CheckpointManager | None) -> CheckpointManager | None:
    waits = manager is not None and manager.auto_checkpoint and not manager._was_entered
    return manager if waits else None
