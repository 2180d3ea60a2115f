"""Plans for forwards in a loop that is not ours.

The first forward of a sequence of operations runs online, and is watched. When the next one begins
there is a plan for that sequence and the room that there is then: what the plan rebuilds is let go
of at once, in segments; what it keeps is held, and dropped as online where room is needed all the
same. So a plan need not be right for the budget to hold, and a forward that leaves its plan needs
no other. Where something was dropped, the next plan is given less room.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from gradfit.choices import HOLD, REBUILD, Choice
from gradfit.planning.api import PlansInOnePiece
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.profiling.watched_forward import WatchedForward
from gradfit.recompute.evict import Evictor
from gradfit.tape.decisions import TapeDecision
from gradfit.tape.recorder import Recorder
from gradfit.tape.stream import new_bytes
from gradfit.tape.values import Segment

_MOST_SEQUENCES = 16  # of one module; the one that was not run for longest is forgotten
_MOST_ROOMS = 16  # of one sequence
_ROOMS = 32  # rooms that differ by less than this part of the budget have one plan
_FIRST_PLANS = 3  # of a sequence: they are made whatever that takes
_PLANNING_SHARE = 0.05  # of the time, for the others
_TRIES = 5  # plans for one sequence and room, before the best of them stays

_Step = tuple[Any, ...]  # an operator, and the bytes of each of its results


class _Script:
    """A plan as a forward follows it: what the plan keeps is held."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self.parents = plan, plan.segment_parents
        self.choices: list[tuple[Choice, ...]] = []
        self.segments: list[int] = []
        for operation in profile.operations:
            actions = [plan.actions[number] for number in operation.outputs]
            self.choices.append(tuple(REBUILD if one == "rebuild" else HOLD for one in actions))
            self.segments.append(plan.segments[operation.outputs[0]])


class _RoomPlans:
    """The plans for one sequence in one room, one after the other."""

    def __init__(self) -> None:
        self.script: _Script | None = None  # to be followed
        self.wants_another = True
        self.less_bytes = 0  # of the room, for the next one
        self._tried: list[tuple[float, _Script]] = []  # and the seconds that rebuilding took

    def follow(self, script: _Script) -> None:
        """From now on."""
        self.script, self.wants_another = script, False

    def learn(self, script: _Script, dropped_bytes: int, rebuilt_seconds: float) -> None:
        """How a pass by a plan was: if something had to be dropped beside it, another is wanted for
        less room, until the best of some stays.
        """
        if script is not self.script or self.wants_another or len(self._tried) == _TRIES:
            return
        self._tried.append((rebuilt_seconds, script))
        if not dropped_bytes:
            self._tried = [self._tried[-1]] * _TRIES
        elif len(self._tried) == _TRIES:
            self.script = min(self._tried, key=lambda one: one[0])[1]
        else:
            self.less_bytes += dropped_bytes
            self.wants_another = True


class _Known:
    """A sequence of operations that a module's forwards run, with the plans for it."""

    def __init__(self, steps: list[_Step]) -> None:
        self.steps = steps
        self.profile: Profile | None = None  # known once one was watched
        self.saved_bytes = 0
        self.made = 0  # plans
        self._planner: PlansInOnePiece | None = None
        self._rooms: dict[int, _RoomPlans] = {}

    def watched(self, profile: Profile) -> None:
        """Now it is known what it does."""
        self.profile, self.saved_bytes = profile, profile.saved_bytes(1)

    def script_for(self, room: int) -> _Script | None:
        """To follow in a room of this number: made for it, or else for the next smaller one."""
        made = {number: one.script for number, one in self._rooms.items() if one.script}
        smaller = [number for number in made if number <= room]
        return made[max(smaller)] if smaller else None

    def make_plan(self, room: int, room_bytes: int, limit_bytes: int) -> None:
        """For a room of this number."""
        if self.profile is not None:
            plans = self.plans(room)
            self._planner = self._planner or PlansInOnePiece(self.profile)
            memory = max(0, room_bytes - plans.less_bytes)
            plan = self._planner.within(memory, limit_bytes - memory)
            self.made += 1
            plans.follow(_Script(plan, self.profile))

    def plan_of(self, room: int, room_bytes: int, limit_bytes: int) -> Plan | None:
        """For a room of this number; made now if there is none yet."""
        if self.plans(room).wants_another:
            self.make_plan(room, room_bytes, limit_bytes)
        script = self.plans(room).script
        return None if script is None else script.plan

    def plans(self, room: int) -> _RoomPlans:
        """For a room of this number."""
        if room not in self._rooms and len(self._rooms) >= _MOST_ROOMS:
            del self._rooms[next(iter(self._rooms))]
        return self._rooms.setdefault(room, _RoomPlans())


class PlannedOrOnline:
    """The policy of one forward: by a plan as long as the operations are those of a sequence that
    has one, and online where they are not.

    Args:
        evictor: that holds the budget.
        known: sequences that the module has run, the last first.
        room: the number of the room that there is.
    """

    def __init__(self, evictor: Evictor, known: list[_Known], room: int) -> None:
        self.steps: list[_Step] = []
        self.room, self.script = room, known[0].script_for(room) if known else None
        self.watched: WatchedForward | None = None
        if not known or any(one.profile is None for one in known):
            self.watched = WatchedForward()
        self._evictor, self._known = evictor, known
        self._followed = known[0] if known else None
        self._segments: list[Segment] = []

    def begin(self, recorder: Recorder) -> None:
        """Its recording begins."""
        self._segments = [recorder.segment]
        recorder.saved_tensors.observer = self.watched
        self._add_segments()

    def _add_segments(self) -> None:
        del self._segments[1:]
        for parent in self.script.parents[1:] if self.script is not None else ():
            self._segments.append(Segment(self._segments[parent]))

    def decide(
        self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any
    ) -> TapeDecision:
        """Hold the results, or let go of what the plan rebuilds."""
        place = len(self.steps)
        step = (func, *map(new_bytes, results))
        self.steps.append(step)
        if self.watched is not None:
            seconds = self._evictor.last_seconds
            self.watched.note(func, results, (args, *kwargs.values()), seconds)
        followed = self._followed
        if followed is not None and not _is_at(followed.steps, place, step):
            self._go_over(place, step)
        script = self.script
        if script is None:
            return TapeDecision((HOLD,) * len(results))
        return TapeDecision(script.choices[place], self._segments[script.segments[place]])

    def _go_over(self, place: int, step: _Step) -> None:
        """Follow another sequence that has begun in the same way, if there is one."""
        self._followed, self.script = None, None
        for known in self._known:
            if _is_at(known.steps, place, step) and known.steps[:place] == self.steps[:place]:
                self._followed, self.script = known, known.script_for(self.room)
                break
        self._add_segments()


def _is_at(steps: list[_Step], place: int, step: _Step) -> bool:
    return place < len(steps) and steps[place] == step


class _Begun(NamedTuple):
    """A pass that goes by a plan, and what the evictor had done before it."""

    plans: _RoomPlans
    script: _Script
    dropped_bytes: int
    rebuilt_seconds: float


class ForwardPlans:
    """What is known of the forwards of one thread's modules.

    Args:
        evictor: that holds the thread's budget.
    """

    def __init__(self, evictor: Evictor) -> None:
        self.planned = 0
        self.planning_seconds = 0.0
        self._began = time.perf_counter()
        self._evictor = evictor
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, list[_Known]] = (
            weakref.WeakKeyDictionary()
        )
        self._last: tuple[weakref.ref[torch.nn.Module], int] | None = None  # with its room
        self._begun: _Begun | None = None

    def begin(self, module: torch.nn.Module) -> PlannedOrOnline:
        """The policy for a forward that begins."""
        self._learn()
        known = self._known.get(module, [])
        room = self._room()
        if known:
            self._make_plan(known[0], room)
        return PlannedOrOnline(self._evictor, list(known), room)

    def end(self, module: torch.nn.Module, forward: PlannedOrOnline) -> None:
        """A forward has come to its end."""
        known = self._known.setdefault(module, [])
        same = next((one for one in known if one.steps == forward.steps), None)
        if same is None:
            same = _Known(forward.steps)
        else:
            known.remove(same)
        known.insert(0, same)
        del known[_MOST_SEQUENCES:]
        if same.profile is None and forward.watched is not None and forward.steps:
            same.watched(forward.watched.profile())
        self._last = weakref.ref(module), forward.room
        if forward.script is not None:
            self.planned += 1
            evictor, plans = self._evictor, same.plans(forward.room)
            self._begun = _Begun(
                plans, forward.script, evictor.evicted_bytes, evictor.rebuilt_seconds
            )

    def plan_of(self, module: torch.nn.Module | None) -> Plan | None:
        """For the last forward of a module, or of all; made now if there is none yet."""
        if (last := self._last_of(module)) is not None:
            self._make_plan(*last, in_any_case=True)
        return self.plan_later(module)()

    def plan_later(self, module: torch.nn.Module | None) -> Callable[[], Plan | None]:
        """What gives the same plan when it is asked for, which may be after the budget: making one
        may take longer than a step, and most are never asked for. It holds nothing of the evictor.
        """
        if (last := self._last_of(module)) is None:
            return lambda: None
        known, room = last
        return partial(known.plan_of, room, room * self._room_bytes, self._evictor.limit_bytes)

    def _last_of(self, module: torch.nn.Module | None) -> tuple[_Known, int] | None:
        """The sequence that a module, or any, has run last, and the number of the room it had."""
        if self._last is None:
            return None
        last, room = self._last[0](), self._last[1]
        known = None if last is None else self._known.get(module or last)
        return (known[0], room) if known else None

    def _room(self) -> int:
        """The number of the room that is left now."""
        left = self._evictor.limit_bytes - self._evictor.current_bytes
        return max(0, left) // self._room_bytes

    @property
    def _room_bytes(self) -> int:
        return max(1, self._evictor.limit_bytes // _ROOMS)

    def _learn(self) -> None:
        """From the pass before, which is over when another forward begins."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.plans.learn(
                begun.script,
                self._evictor.evicted_bytes - begun.dropped_bytes,
                self._evictor.rebuilt_seconds - begun.rebuilt_seconds,
            )

    def _make_plan(self, known: _Known, room: int, *, in_any_case: bool = False) -> None:
        """If there is none yet, and memory is short."""
        plans, room_bytes = known.plans(room), room * self._room_bytes
        if known.profile is None or not plans.wants_another:
            return
        if not in_any_case and not self._is_due(known, room, room_bytes):
            return
        began = time.perf_counter()
        known.make_plan(room, room_bytes, self._evictor.limit_bytes)
        self.planning_seconds += time.perf_counter() - began

    def _is_due(self, known: _Known, room: int, room_bytes: int) -> bool:
        """Whether memory is short, and planning within its share of the time, as first plans
        are.
        """
        if not self._evictor.evictions and known.saved_bytes < room_bytes:
            return False
        if known.made < _FIRST_PLANS and known.script_for(room) is None:
            return True
        share = _PLANNING_SHARE * (time.perf_counter() - self._began)
        return self.planning_seconds <= share
