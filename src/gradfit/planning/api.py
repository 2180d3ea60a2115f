"""`plan` and `frontier`: from a profile and a budget to a plan. Pure arithmetic; no model is
touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from typing import TypeVar

from gradfit.arguments import invalid, read_count, read_flag, read_instance
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.planning.microbatch import MicrobatchSearch, SizedPlan
from gradfit.planning.named_choices import Named, fix_each, named_choices, read_named
from gradfit.planning.plan import Alternative, Decision, Plan
from gradfit.planning.recording_extent import in_effect, last_write
from gradfit.planning.simulate import ACTION_NAMES, KEEP, REBUILD, Segments, Simulation
from gradfit.planning.solver import Effort, Solution
from gradfit.profiling.profile import Operation, Profile, Value
from gradfit.profiling.step_graph import Graph
from gradfit.units import format_bytes, parse_bytes

_T = TypeVar("_T")
_Candidate = tuple[SizedPlan, MicrobatchSearch]
_DECISIONS = 10
_MOST_POINTS = 1000  # of a frontier: each takes a search
_EFFORTS: tuple[Effort, ...] = ("glance", "fill")  # for a plan that is only named


def plan(
    profile: Profile,
    *,
    memory: int | float | str,
    batch_size: int | None = None,
    micro_batch: int | None = None,
    exact: bool = True,
    tile: bool = True,
    keep: Iterable[str] = (),
    rebuild: Iterable[str] = (),
    offload: Iterable[str] = (),
) -> Plan:
    """The fastest step whose peak stays within `memory`: what to keep, rebuild and offload, at
    which micro-batch.

    With `batch_size` the batch may be split, and micro-batch and recomputation are chosen together;
    without it the plan is for the profiled batch in one piece. `micro_batch` fixes the micro-batch.
    A batch whose parts' losses do not make that of the whole (`profile.additivity`) is not cut,
    unless `exact=False`. If nothing fits, `BudgetInfeasible` says what would.

    Args:
        profile: what a step does: from `gf.profile`, or read from JSON.
        memory: the budget for all tensors of a step, in bytes or as text ("1.5 GiB").
        batch_size: rows of one update; None: the profiled batch, in one piece.
        micro_batch: rows to run at once; None chooses.
        exact: False cuts a batch whose parts' losses do not add up all the same.
        tile: False leaves out plans that cut along tokens (`profile.tiled`).
        keep: names (`gf.name`) of values that are kept, whatever is chosen for the others.
        rebuild: names of values that are rebuilt.
        offload: names of values that are moved out; no others are then. The profile must have a
            `host_bandwidth`.

    >>> from gradfit.profiling.profile import BackwardNode, Linear, Operation, Profile, Value
    >>> def op(name, *inputs, out):
    ...     return Operation(name, inputs, (out,), seconds=Linear(per_item=1.0), module="net")
    >>> profile = Profile(
    ...     values=tuple(
    ...         Value(Linear(per_item=100), i if i >= 0 else None, i, i + 1) for i in (-1, 0, 1, 2)
    ...     ),
    ...     operations=(op("mm", 0, out=1), op("relu", 1, out=2), op("sum", 2, out=3)),
    ...     nodes=(BackwardNode("relu", (2, 1)), BackwardNode("mm", (0,))),
    ... )
    >>> print(str(plan(profile, memory=1000)).splitlines()[0])
    micro-batch 1 × 1, 2 of 2 values kept; predicted: peak 300 B, +0 % time, step 3 s
    """
    named = read_named(keep=keep, rebuild=rebuild, offload=offload)
    is_exact = read_flag(exact, "exact")
    found = _find(profile, memory, batch_size, micro_batch, named, exact=is_exact, tile=tile)
    return _with_alternatives(*found)


def bare_plan(
    profile: Profile,
    *,
    memory: int,
    batch_size: int,
    micro_batch: int | None = None,
    quickly: bool = False,
) -> Plan:
    """The same as `plan`, without looking for the next ones with less memory and with more;
    `quickly`: in a fraction of the time, one that may be some per cent slower.
    """
    return _find(profile, memory, batch_size, micro_batch, read_named(), quickly=quickly)[0]


class PlansInOnePiece:
    """Plans for one profile and many budgets; none cuts the batch, and what they have in common is
    found once.

    Args:
        profile: of one row.
    """

    def __init__(self, profile: Profile) -> None:
        self._search = MicrobatchSearch(profile, 1, split=False)

    def within(self, memory: int, beside_bytes: int) -> Plan:
        """A plan for this much memory, or the one that needs the least if none does with so little.

        Args:
            memory: bytes for what the profile is about.
            beside_bytes: what is there beside that, and is in the plan's numbers.
        """
        choice = self._search.quick(memory) or self._search.smallest()
        found = _plan(self._search, choice, memory + beside_bytes)
        return dataclasses.replace(
            found,
            peak_bytes=found.peak_bytes + beside_bytes,
            breakdown={**found.breakdown, "there already": beside_bytes},
        )


def plan_for_fit(
    profile: Profile,
    *,
    memory: int,
    batch_size: int,
    micro_batch: int | None = None,
    quickly: bool = False,
) -> Plan:
    """The same as `bare_plan`, where the optimizer's step is run by whoever follows the plan: if it
    is what does not fit, its parameters are updated in groups, in as few as are enough.
    """

    def plan_with(updating: Profile) -> Plan:
        return bare_plan(
            updating,
            memory=memory,
            batch_size=batch_size,
            micro_batch=micro_batch,
            quickly=quickly,
        )

    *others, last = updates_within(profile, memory, batch_size)
    for updating in others:
        with contextlib.suppress(BudgetInfeasible):
            return plan_with(updating)
    return plan_with(last)


def updates_within(profile: Profile, memory: int, batch_size: int) -> list[Profile]:
    """The profile with its update in more and more groups, from the first that can stay within so
    many bytes; the last is in the most groups in any case.
    """
    *others, last = profile.smaller_updates()
    return [*(one for one in others if one.update_bytes(batch_size) <= memory), last]


def with_update_groups(profile: Profile, plan: Plan, groups: tuple[int, ...]) -> Plan:
    """A plan from this profile, with its update in these groups."""
    of_plan = profile.in_tiles(plan.tiles)
    before = _of_plan(of_plan, plan)[1].step_seconds
    plan = dataclasses.replace(plan, update_groups=groups)
    search, choice = _of_plan(of_plan, plan)
    predicted = _plan(search, choice, plan.budget_bytes)
    return dataclasses.replace(
        plan.with_extra_seconds(choice.step_seconds - before),
        peak_bytes=predicted.peak_bytes,
        peak_at=predicted.peak_at,
        breakdown=predicted.breakdown,
    )


def with_alternatives(profile: Profile, plan: Plan) -> Plan:
    """A plan from this profile with the next ones that need less memory and more; seconds are in
    proportion to the plan's own, which may have been measured.
    """
    search, choice = _of_plan(profile.in_tiles(plan.tiles), plan)
    named = _with_alternatives(_plan(search, choice, plan.budget_bytes), choice)
    pace = plan.step_seconds / choice.step_seconds if choice.step_seconds > 0 else 1.0
    less, more = (
        other and dataclasses.replace(other, step_seconds=other.step_seconds * pace)
        for other in (named.less_memory, named.more_memory)
    )
    return dataclasses.replace(plan, less_memory=less, more_memory=more)


def _find(
    profile: Profile,
    memory: int | float | str,
    batch_size: int | None,
    micro_batch: int | None,
    named: Named,
    *,
    exact: bool = True,
    tile: bool = True,
    quickly: bool = False,
) -> tuple[Plan, SizedPlan]:
    budget = parse_bytes(memory)
    size = _batch_size(profile, batch_size)
    profiles = fix_each(_variants(profile, read_flag(tile, "tile")), named)
    if not exact:
        profiles = _cut_all_the_same(profiles)
    _check_micro_batch(profiles[0], size, micro_batch)
    searches = _searches(profiles, size, batch_size, micro_batch)
    candidates = _that_fit(searches, budget, quickly=quickly)
    if not candidates:
        error = _infeasible(_least_demanding(searches), budget, batch_size, micro_batch)
        if not tile:
            tiled = fix_each([profile, *profile.tiled], named)[1:]
            error = _with_tiles_named(error, tiled, size, batch_size)
        raise error
    plans = [(_plan(search, choice, budget), choice) for choice, search in candidates]
    return _fastest(plans)


def _cut_all_the_same(profiles: Sequence[Profile]) -> list[Profile]:
    return [dataclasses.replace(one, splittable=True) for one in profiles]


def _searches(
    profiles: Sequence[Profile], size: int, batch_size: int | None, micro_batch: int | None
) -> list[MicrobatchSearch]:
    """One for each profile; a batch of no given size is not split."""
    split = batch_size is not None
    return [MicrobatchSearch(one, size, split=split, micro_batch=micro_batch) for one in profiles]


def _that_fit(
    searches: Sequence[MicrobatchSearch], budget: int, *, quickly: bool
) -> list[_Candidate]:
    find = MicrobatchSearch.quick if quickly else MicrobatchSearch.best
    choices = [(find(search, budget), search) for search in searches]
    return [(choice, search) for choice, search in choices if choice is not None]


def _fastest(plans: Sequence[tuple[Plan, SizedPlan]]) -> tuple[Plan, SizedPlan]:
    """Of these the one to take: with tiles only where memory is short, whatever the clock said of
    them.
    """
    ample = [(one, choice) for one, choice in plans if _is_ample(one)]
    return min(ample or plans, key=lambda one: one[1].step_seconds)


def _is_ample(plan: Plan) -> bool:
    return plan.tiles is None and not plan.is_short


def _check_micro_batch(profile: Profile, size: int, micro_batch: int | None) -> None:
    """Refuse a micro-batch that is no count, larger than the batch, or cuts what must not be."""
    if micro_batch is None:
        return
    _check_within_batch(size, micro_batch)
    if micro_batch < size and not profile.splittable:
        raise MisuseError(
            f"micro_batch={micro_batch!r} cuts a batch of {size} whose loss does not add up:"
            f" {_why_not_splittable(profile)}. Leave it out, or pass exact=False to cut all the"
            " same."
        )


def _check_within_batch(size: int, micro_batch: int) -> None:
    if read_count(micro_batch, "micro_batch") > size:
        raise MisuseError(
            f"micro_batch={micro_batch!r} must be from 1 to the batch size, {size}. Pass less, or"
            " None."
        )


def _why_not_splittable(profile: Profile) -> str:
    return "its profile says so" if profile.additivity is None else profile.additivity.reason


def _variants(profile: Profile, tile: bool) -> list[Profile]:
    """The profile and, with tiles, those of the same step in tiles."""
    return [profile, *profile.tiled] if tile else [profile]


def _least_demanding(searches: Sequence[MicrobatchSearch]) -> MicrobatchSearch:
    return min(searches, key=lambda one: one.smallest().solution.peak_bytes)


def _with_tiles_named(
    error: BudgetInfeasible, tiled: Iterable[Profile], size: int, batch_size: int | None
) -> BudgetInfeasible:
    """What the smallest budget would be with tiles, if that is less."""
    split = batch_size is not None
    searches = [MicrobatchSearch(one, size, split=split) for one in tiled]
    least = min((one.smallest().solution.peak_bytes for one in searches), default=error.min_bytes)
    if least >= error.min_bytes:
        return error
    text = f"{error} With tile=True the smallest is {format_bytes(least)}."
    return BudgetInfeasible(text, min_bytes=error.min_bytes, breakdown=error.breakdown)


def plain_plan(
    profile: Profile, *, memory: int, batch_size: int, micro_batch: int | None = None
) -> Plan | None:
    """The plan of the largest micro-batch, or of this one, if it needs no recomputation; None if
    each does.
    """
    search = MicrobatchSearch(
        profile, _batch_size(profile, batch_size), split=True, micro_batch=micro_batch
    )
    choice = search.plain(memory)
    return None if choice is None else _plan(search, choice, memory)


def recomputing_plan(
    profile: Profile, *, memory: int, batch_size: int, above: int, most_seconds: float
) -> Plan | None:
    """The fastest plan at a micro-batch above the largest that needs no recomputation; None if none
    is worth a try.
    """
    search = MicrobatchSearch(profile, _batch_size(profile, batch_size), split=True)
    choice = search.recomputing(above, memory, most_seconds)
    return None if choice is None else _plan(search, choice, memory)


def frontier(
    profile: Profile,
    *,
    batch_size: int | None = None,
    points: int = 16,
    micro_batch: int | None = None,
    tile: bool = True,
) -> list[Plan]:
    """The trade-off from the fastest plan to the smallest: each with strictly less memory and
    strictly more time.

    Args:
        profile: Of the step.
        batch_size: Rows of a batch that may be split; None for the profiled batch in one piece.
        points: How many budgets are tried, at most so many plans.
        micro_batch: Only plans of this size.
        tile: False leaves out plans that cut along tokens.
    """
    if read_count(points, "points", minimum=2) > _MOST_POINTS:
        raise invalid("points", points, f"must be at most {_MOST_POINTS}", "points=16")
    size = _batch_size(profile, batch_size)
    if micro_batch is not None:
        _check_within_batch(size, micro_batch)
    profiles = _variants(profile, read_flag(tile, "tile"))
    candidates: list[_Candidate] = []
    for search in _searches(profiles, size, batch_size, micro_batch):
        candidates += _points(search, points)
    return [
        _plan(search, choice, choice.solution.peak_bytes)
        for choice, search in reversed(_undominated(candidates))
    ]


def _undominated(candidates: list[_Candidate]) -> list[_Candidate]:
    """Those that are faster than everything smaller, the smallest first."""
    candidates = sorted(
        candidates, key=lambda pair: (pair[0].solution.peak_bytes, pair[0].step_seconds)
    )
    front = candidates[:1]
    for choice, search in candidates[1:]:
        if choice.step_seconds < front[-1][0].step_seconds:
            front.append((choice, search))
    return front


def _points(search: MicrobatchSearch, points: int) -> list[_Candidate]:
    """The best choices for so many budgets between the smallest and that of the fastest."""
    fastest = search.solver(search.largest).plain.peak_bytes
    smallest = search.smallest()
    budgets = _budgets(smallest.solution.peak_bytes, fastest, points)
    best = [search.best(budget, effort="fill") for budget in budgets]
    return [(choice, search) for choice in (smallest, *best) if choice is not None]


def _budgets(smallest: int, fastest: int, points: int) -> list[int]:
    """Even in memory at the top and in ratio at the bottom: the mean of both."""
    shares = [index / (points - 1) for index in range(points)]
    return [max(int(_between(smallest, fastest, share)), smallest) for share in shares]


def _between(smallest: int, fastest: int, share: float) -> float:
    ratio = fastest / smallest if smallest else 1.0
    in_ratio: float = smallest * ratio**share
    return (smallest + share * (fastest - smallest) + in_ratio) / 2


def predicted(profile: Profile, plan: Plan) -> tuple[int, float]:
    """The peak in bytes and the seconds of a step that the profile alone predicts for a plan.

    A plan that was tried out holds measured seconds, and perhaps the bytes of a copy beside the
    optimizer's step. To be compared with plans that were not, it must be predicted as they were.
    """
    _, choice = _of_plan(profile.in_tiles(plan.tiles), plan)
    return choice.solution.peak_bytes, choice.step_seconds


def _of_plan(profile: Profile, plan: Plan) -> tuple[MicrobatchSearch, SizedPlan]:
    """What the profile says of a plan, whatever was measured of it since."""
    profile = profile.updating(plan.update_groups)
    search = MicrobatchSearch(profile, plan.batch_size, split=True, micro_batch=plan.micro_batch)
    choice = search.of_plan(
        plan.micro_batch, _action_numbers(plan), Segments(plan.segments, plan.segment_parents)
    )
    return search, choice


def _action_numbers(plan: Plan) -> list[int]:
    numbers = {name: number for number, name in enumerate(ACTION_NAMES)}
    return [numbers.get(action, KEEP) for action in plan.actions]  # "external" is always there


def beginning_like(profile: Profile, plan: Plan, other: Plan) -> Plan | None:
    """The plan with the choices of another one in all operations that both begin with; None if that
    cannot be.

    A forward can then go over from the other plan to this one where it leaves that.
    """
    profile = profile.updating(plan.update_groups)
    pairs = _shared_values(profile, plan, other)
    if any(other.segments[theirs] for _, theirs in pairs):
        return None
    actions = _taken_over(_action_numbers(plan), _action_numbers(other), pairs)
    segments = _taken_over(plan.segments, other.segments, pairs)  # all of these are in the root
    search = MicrobatchSearch(profile, plan.batch_size, split=True, micro_batch=plan.micro_batch)
    choice = search.of_plan(plan.micro_batch, actions, Segments(segments, plan.segment_parents))
    if not _can_be_run_within(choice.solution, plan.budget_bytes):
        return None
    alike = _plan(search, choice, plan.budget_bytes)
    # where nothing asks for a value it was made a kept one, which it need not be
    names = _taken_over(alike.actions, other.actions, pairs)
    return dataclasses.replace(alike, actions=tuple(names))


def _taken_over(
    own: Sequence[_T], others: Sequence[_T], pairs: Iterable[tuple[int, int]]
) -> list[_T]:
    """What is there for each value, where the shared ones (numbered here and there) have the
    other's.
    """
    taken = list(own)
    for mine, theirs in pairs:
        taken[mine] = others[theirs]
    return taken


def _can_be_run_within(solution: Solution, budget: int) -> bool:
    return solution.can_be_run and solution.peak_bytes <= budget


def _shared_values(profile: Profile, plan: Plan, other: Plan) -> list[tuple[int, int]]:
    """The values of the operations that two plans begin with, by their numbers in each; the profile
    is the first's.
    """
    operations = _shared_operations(plan, other)
    mine = [value for value, one in enumerate(profile.values) if _is_made_before(one, operations)]
    theirs = [value for value, action in enumerate(other.actions) if action != "external"]
    return list(zip(mine, theirs, strict=False))


def _is_made_before(value: Value, operation: int) -> bool:
    return value.operation is not None and value.operation < operation


def _shared_operations(plan: Plan, other: Plan) -> int:
    """How many operations two plans have in common, from the first."""
    names = zip(plan.operations, other.operations, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], names))


def _batch_size(profile: Profile, batch_size: int | None) -> int:
    read_instance(
        profile, "profile", Profile, "what gf.profile(model, loss_fn, sample_batch) returns"
    )
    if not profile.operations:
        raise MisuseError(
            "This profile has no operations, so there is nothing to plan. Profile a step that"
            " computes."
        )
    if batch_size is None:
        return profile.batch_size
    return read_count(batch_size, "batch_size")


def _infeasible(
    search: MicrobatchSearch, budget: int, batch_size: int | None, micro_batch: int | None
) -> BudgetInfeasible:
    choice = search.smallest()
    parts = _breakdown(choice.solver.graph, choice.solution.simulation)
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in largest_first if count)
    smallest = choice.solution.peak_bytes
    hint = _what_would_help(search, choice, batch_size, micro_batch)
    return BudgetInfeasible(
        f"Smallest feasible peak is {format_bytes(smallest)} ({listed}) at micro-batch"
        f" {choice.micro_batch}, the budget is {format_bytes(budget)}. {hint}"
        f"{_what_names_take(search, choice)}",
        min_bytes=smallest,
        breakdown=parts,
    )


def _what_names_take(search: MicrobatchSearch, choice: SizedPlan) -> str:
    """What of the smallest peak was asked for by name, and the smallest without; "" if nothing
    was.
    """
    if not search.profile.fixed:
        return ""
    free = dataclasses.replace(search.profile, fixed={})
    split = search.least < search.largest
    size = None if split else search.largest
    without = MicrobatchSearch(free, search.batch_size, split=split, micro_batch=size).smallest()
    until = choice.solver.simulator.alive_until(choice.solution.actions)
    fixed = ", ".join(map(str, named_choices(search.profile, choice.solver.graph, until)))
    return (
        f" Fixed by name: {fixed}; without names the smallest is"
        f" {format_bytes(without.solution.peak_bytes)}."
    )


def _what_would_help(
    search: MicrobatchSearch, choice: SizedPlan, batch_size: int | None, micro_batch: int | None
) -> str:
    if search.profile.splittable:
        smaller = _how_to_allow_smaller(search, choice, batch_size, micro_batch)
    else:
        smaller = _how_to_lower_the_batch(search)
    return smaller or (
        f"Raise `memory` to at least {choice.solution.peak_bytes} bytes, or make the model or an"
        " item of the batch smaller."
    )


def _how_to_lower_the_batch(search: MicrobatchSearch) -> str:
    """For a batch that cannot be split; "" if it cannot be smaller."""
    if search.batch_size <= 1:
        return ""
    return "Lower `batch_size` or raise `memory`; this batch cannot be split."


def _how_to_allow_smaller(
    search: MicrobatchSearch, choice: SizedPlan, batch_size: int | None, micro_batch: int | None
) -> str:
    """Which argument stands against smaller micro-batches; "" if none does."""
    size, least = search.batch_size, search.profile.min_batch
    if micro_batch is not None and choice.micro_batch > least:
        return "Leave out `micro_batch`, so that it can be smaller, or raise `memory`."
    if batch_size is None and size > least:
        return f"Pass batch_size={size} so that the batch may be split, or raise `memory`."
    return ""


def _breakdown(graph: Graph, result: Simulation) -> dict[str, int]:
    parts = dict(graph.static_breakdown)
    parts["kept activations"] = result.kept_bytes
    parts["recomputation burst"] = result.rebuilt_bytes
    name = {"forward": "widest operation", "optimizer": "optimizer step"}.get(
        result.phase, "gradients in flight"
    )
    parts[name] = result.other_bytes
    return parts


def _plan(search: MicrobatchSearch, choice: SizedPlan, budget: int) -> Plan:
    profile, graph, solution = search.profile, choice.solver.graph, choice.solution
    result = solution.simulation
    until = choice.solver.simulator.alive_until(solution.actions)
    effective = in_effect(solution.actions, until)
    saved, kept = _saved_and_kept(choice, until)
    return Plan(
        micro_batch=choice.micro_batch,
        steps=choice.steps,
        batch_size=search.batch_size,
        actions=_action_names(graph, effective),
        segments=tuple(solution.segments.of),
        segment_parents=tuple(solution.segments.parent),
        operations=tuple(op.name for op in profile.operations),
        budget_bytes=budget,
        peak_bytes=result.peak_bytes,
        breakdown=_breakdown(graph, result),
        peak_at=_where(profile, result),
        step_seconds=choice.step_seconds,
        plain_seconds=choice.plain_seconds,
        kept_values=len(kept),
        saved_values=len(saved),
        kept_bytes=result.saved_bytes,
        saved_bytes=sum(graph.held_bytes[v] for v in saved),
        decisions=_dearest_decisions(profile, graph, solution),
        heard=last_write(graph, effective) + 1,
        predicted=profile.predicted,
        versions=dict(profile.versions),
        tiles=profile.tiles,
        named=tuple(named_choices(profile, graph, until)),
        update_groups=profile.update_groups,
    )


def _saved_and_kept(choice: SizedPlan, until: Sequence[int]) -> tuple[set[int], set[int]]:
    """The values that autograd saves, and those that the plan keeps between the passes."""
    graph, actions = choice.solver.graph, choice.solution.actions
    plain = graph.plain_needs if choice.solution is choice.solver.plain else None
    saved = _made_here(graph, chain.from_iterable(plain or graph.node_needs))
    alive = _made_here(graph, (value for value, last in enumerate(until) if last >= 0))
    kept = {value for value in alive if actions[value] == KEEP}
    return saved, kept & saved if plain else kept


def _made_here(graph: Graph, values: Iterable[int]) -> set[int]:
    """Those of the values that an operation of the forward makes."""
    return {value for value in values if graph.producer[value] >= 0}


def _action_names(graph: Graph, actions: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        "external" if op < 0 else ACTION_NAMES[action]
        for op, action in zip(graph.producer, actions, strict=True)
    )


def _where(profile: Profile, result: Simulation) -> str:
    """When the peak comes, in words."""
    if result.phase == "optimizer":
        return "in the optimizer's step"
    if result.phase == "forward":
        return f"in the forward pass, at {_operation_in_module(profile.operations[result.index])}"
    doing = "rebuilding for" if result.phase == "sweep" else "at"
    return f"in the backward pass, {doing} {profile.nodes[result.index].name}"


def _operation_in_module(operation: Operation) -> str:
    return f"{operation.name} in {operation.module or 'the model'}"


def _dearest_decisions(profile: Profile, graph: Graph, solution: Solution) -> tuple[Decision, ...]:
    decisions = [
        _decision(profile, graph, solution, value)
        for value in range(len(graph.producer))
        if _is_decided(graph, solution.actions, value)
    ]
    decisions.sort(key=lambda d: (-d.seconds, d.value))
    return tuple(d for d in decisions[:_DECISIONS] if d.seconds > 0)


def _is_decided(graph: Graph, actions: Sequence[int], value: int) -> bool:
    """Whether a value stands for a decision: of results rebuilt together the first."""
    op = graph.producer[value]
    if op >= 0 and actions[value] == REBUILD:
        return graph.op_outputs[op][0] == value
    return op >= 0 and actions[value] != KEEP


def _decision(profile: Profile, graph: Graph, solution: Solution, value: int) -> Decision:
    op, action = graph.producer[value], solution.actions[value]
    if action == REBUILD:
        nbytes, seconds = _cost_of_rebuilding(graph, solution, op)
    else:
        nbytes, seconds = _cost_of_moving(graph, value)
    by = profile.operations[op]
    return Decision(value, ACTION_NAMES[action], by.name, by.module, by.source, nbytes, seconds)


def _cost_of_rebuilding(graph: Graph, solution: Solution, op: int) -> tuple[int, float]:
    seconds = graph.op_seconds[op] * solution.simulation.replays[op]
    return sum(graph.nbytes[output] for output in graph.op_outputs[op]), seconds


def _cost_of_moving(graph: Graph, value: int) -> tuple[int, float]:
    nbytes = graph.nbytes[value]
    return nbytes, 2 * nbytes * graph.transfer_seconds_per_byte


def _with_alternatives(plan: Plan, choice: SizedPlan) -> Plan:
    """Look one step of a twentieth of the way down and up the trade-off, at the same
    micro-batch.
    """
    solver, peak = choice.solver, choice.solution.peak_bytes
    step = max(1, (solver.plain.peak_bytes - solver.graph.static_bytes) // 20)
    return dataclasses.replace(
        plan,
        less_memory=_alternative(plan, choice, solver.solve(peak - step, effort="glance")),
        more_memory=_alternative(plan, choice, _faster_within(choice, peak + step)),
    )


def _alternative(plan: Plan, choice: SizedPlan, other: Solution | None) -> Alternative | None:
    if other is None:
        return None
    more_seconds = other.extra_seconds - choice.solution.extra_seconds
    change = more_seconds * plan.batch_size / choice.micro_batch
    return Alternative(
        choice.micro_batch, choice.steps, other.peak_bytes, choice.step_seconds + change
    )


def _faster_within(choice: SizedPlan, budget: int) -> Solution | None:
    """A plan with more memory than the choice, if it is faster."""
    now = choice.solution
    if not now.extra_seconds:
        return None
    others = (choice.solver.solve(budget, effort=effort) for effort in _EFFORTS)
    return next((other for other in others if _buys_time(other, now)), None)


def _buys_time(other: Solution | None, now: Solution) -> bool:
    if other is None:
        return False
    return other.peak_bytes > now.peak_bytes and other.extra_seconds < now.extra_seconds
