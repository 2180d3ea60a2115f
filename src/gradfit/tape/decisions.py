"""Who decides what becomes of results, and how they say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gradfit.choices import KEEP, Choice
from gradfit.tape.operators import OpInfo
from gradfit.tape.storage_table import StorageTable
from gradfit.tape.stream import results_of
from gradfit.tape.values import Segment


class TapeDecision(NamedTuple):
    """What becomes of the results of one operation."""

    choices: tuple[Choice, ...] | None
    """One for each result; None: all are kept, and nothing is written down."""
    segment: Segment | None = None
    """The one that they are rebuilt with, from here on; None: the one before."""
    last: bool = False
    """Nothing that comes after it will be rebuilt."""


ALL_KEPT = TapeDecision(None)
ALL = (KEEP,)  # of `Decisions.of`: all results are kept, however many they are


class Policy(Protocol):
    """Follows one forward, and decides for each of its operations.

    It is told what happens, and answers; it holds neither the recorder nor its table. Two more
    methods are called if a policy has them: `offload` (`OffloadingPolicy`) and, after a decision
    that is the last, `begin_rest` (`RestPolicy`).
    """

    def decide(
        self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any
    ) -> TapeDecision | None:
        """Asked once for each operation, after it ran as `func(*args, **kwargs)`; None: rebuild all
        its results.
        """


class ExpectedOperation(NamedTuple):
    """What a policy has next, and decides of it, if nothing differs: the operator, and by number
    where it is.
    """

    func: Any
    first: int
    """The number of its first value."""
    most_bytes: tuple[int, ...]
    """Of each result; 0: however many."""
    choices: tuple[Choice, ...] | None
    """As in `TapeDecision`."""
    segment: int
    last: bool
    next_operation: int
    next_value: int
    is_mask: bool
    """Its result must be such a one that a mask is drawn into."""


class FollowingPolicy:
    """A policy that follows a script: the next operation is expected, and what comes is compared
    with it. After its last decision it counts what autograd saves. The native core does both
    without asking, as `decide`, `before_save` and `after_save` would.
    """

    __slots__ = (
        "expected", "in_rest", "last_rebuilt", "most_bytes", "most_saves", "operation",
        "saved_bytes", "saves", "segments", "value",
    )  # fmt: skip

    expected: list[ExpectedOperation | None] | None
    """By the number of the operation; None: ask."""
    operation: int
    value: int
    segments: list[Segment]
    in_rest: bool
    """The last decision was made. What follows is about the saves since then."""
    saves: int
    saved_bytes: int  # each tensor as often as it is saved
    last_rebuilt: int  # the number of the last save of a tensor that is rebuilt
    most_saves: int  # that are counted
    most_bytes: int  # that may be saved


class OffloadingPolicy(Policy, Protocol):
    """One that also says OFFLOAD."""

    def offload(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Move a result out; returns the function that brings it back."""


class SaveObserver(Protocol):
    """Follows what autograd saves."""

    def before_save(self, tensor: torch.Tensor) -> bool:
        """Autograd saves a tensor. True: it may save by itself from the next one on."""

    def after_save(self, packed: Any) -> None:
        """What it got: a `Handle` if the tensor will be rebuilt."""


class Rest(NamedTuple):
    """How the unrecorded rest of a forward is followed, after a policy's last decision."""

    observer: SaveObserver
    observe_operations: bool
    """False: no operation is observed any more, and none is recorded."""


class RestPolicy(Policy, Protocol):
    """One whose decisions come to an end before the forward does."""

    def begin_rest(self) -> Rest:
        """Asked after its last decision."""


class Decisions:
    """Asks the policy once for every operation, right after it ran."""

    __slots__ = ("_table", "is_over", "policy")

    def __init__(self, policy: Policy | None, table: StorageTable) -> None:
        self.policy = policy  # may be set to another one between two operations
        self.is_over = False  # the last one was made
        self._table = table

    def of(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any, out: Any
    ) -> tuple[list[torch.Tensor], Sequence[Choice] | None]:
        """An operation's results, and what becomes of each: `ALL` if all are kept, None if all are
        rebuilt.
        """
        if self.policy is None:
            return [], None
        if type(out) is torch.Tensor and not info.writes:  # as nearly all: it is the one result
            results = [out]
        else:
            results = results_of(info, args, kwargs, out)
        return results, self.choices_for(func, results, args, kwargs) if results else ALL

    def choices_for(
        self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any
    ) -> Sequence[Choice] | None:
        """What becomes of these results, which an operation has."""
        if self.policy is None:
            return None
        decision = self.policy.decide(func, results, args, kwargs)
        if decision is None:
            return None
        choices, segment, last = decision  # hot: by their names, each would take as long as a call
        if segment is not None:
            self._table.segment = segment
        if last:
            self.is_over = True
        return ALL if choices is None else choices
