"""`plan` and `frontier`: from a profile and a budget to a plan. Pure arithmetic; no model is
touched.
"""

from __future__ import annotations

import dataclasses
import math

from gradfit.arguments import invalid, read_count, read_flag, read_instance
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.planning.microbatch import Choice, MicrobatchSearch
from gradfit.planning.plan import Alternative, Decision, Plan
from gradfit.planning.recording_extent import in_effect, last_write
from gradfit.planning.simulate import ACTION_NAMES, KEEP, REBUILD, Segments, Simulation
from gradfit.planning.solver import Effort, Solution
from gradfit.profiling.profile import Profile
from gradfit.profiling.step_graph import Graph
from gradfit.units import format_bytes, parse_bytes

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
    budget = parse_bytes(memory)
    size = _batch_size(profile, batch_size)
    if micro_batch is not None:
        read_count(micro_batch, "micro_batch")
    is_exact = read_flag(exact, "exact")
    profiles = _variants(profile, read_flag(tile, "tile"))
    if not is_exact:
        profiles = [dataclasses.replace(one, splittable=True) for one in profiles]
    if micro_batch is not None and micro_batch < size and not profiles[0].splittable:
        why = profile.additivity.reason if profile.additivity is not None else "its profile says so"
        raise MisuseError(
            f"micro_batch={micro_batch!r} cuts a batch of {size} whose loss does not add up: {why}."
            " Leave it out, or pass exact=False to cut all the same."
        )
    if micro_batch is not None and micro_batch > size:
        raise MisuseError(
            f"micro_batch={micro_batch!r} must be from 1 to the batch size, {size}. Pass less, or"
            " None."
        )
    searches = [
        MicrobatchSearch(one, size, split=batch_size is not None, micro_batch=micro_batch)
        for one in profiles
    ]
    found = [(choice, search) for search in searches if (choice := search.best(budget)) is not None]
    if not found:
        search = min(searches, key=lambda one: one.smallest().solution.peak_bytes)
        error = _infeasible(
            search, budget, split=batch_size is not None, fixed=micro_batch is not None
        )
        raise (
            _with_tiles_named(error, profile, size, split=batch_size is not None)
            if not tile
            else error
        )
    made = {id(choice): _plan(search.profile, search, choice, budget) for choice, search in found}
    untiled = [
        choice
        for choice, search in found
        if search.profile.tiles is None and not made[id(choice)].is_short
    ]
    # tiles only where memory is short, whatever the clock said of them
    best = min(untiled or [choice for choice, _ in found], key=lambda one: one.step_seconds)
    return _with_alternatives(made[id(best)], best)


def _variants(profile: Profile, tile: bool) -> list[Profile]:
    """The profile and, with tiles, those of the same step in tiles."""
    return [profile, *profile.tiled] if tile else [profile]


def _with_tiles_named(
    error: BudgetInfeasible, profile: Profile, size: int, *, split: bool
) -> BudgetInfeasible:
    """What the smallest budget would be with tiles, if that is less."""
    searches = [MicrobatchSearch(one, size, split=split) for one in profile.tiled]
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
    return None if choice is None else _plan(profile, search, choice, memory)


def recomputing_plan(
    profile: Profile, *, memory: int, batch_size: int, above: int, most_seconds: float
) -> Plan | None:
    """The fastest plan at a micro-batch above the largest that needs no recomputation; None if none
    is worth a try.
    """
    search = MicrobatchSearch(profile, _batch_size(profile, batch_size), split=True)
    choice = search.recomputing(above, memory, most_seconds)
    return None if choice is None else _plan(profile, search, choice, memory)


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
    if micro_batch is not None and read_count(micro_batch, "micro_batch") > size:
        raise MisuseError(
            f"micro_batch={micro_batch!r} must be from 1 to the batch size, {size}. Pass less, or"
            " None."
        )
    searches = [
        MicrobatchSearch(one, size, split=batch_size is not None, micro_batch=micro_batch)
        for one in _variants(profile, read_flag(tile, "tile"))
    ]
    found = [pair for search in searches for pair in _points(search, points)]
    front: list[tuple[Choice, MicrobatchSearch]] = []
    for choice, search in sorted(
        found, key=lambda pair: (pair[0].solution.peak_bytes, pair[0].step_seconds)
    ):
        # faster than everything smaller
        if not front or choice.step_seconds < front[-1][0].step_seconds:
            front.append((choice, search))
    return [
        _plan(search.profile, search, choice, choice.solution.peak_bytes)
        for choice, search in reversed(front)
    ]


def _points(search: MicrobatchSearch, points: int) -> list[tuple[Choice, MicrobatchSearch]]:
    """The best choices for so many budgets between the smallest and that of the fastest."""
    fastest = search.solver(search.largest).plain.peak_bytes
    smallest = search.smallest()
    found = [(smallest, search)]
    ratio = (fastest / smallest.solution.peak_bytes) if smallest.solution.peak_bytes else 1.0
    for index in range(points):
        # Even in memory at the top and in ratio at the bottom: the mean of both.
        share = index / (points - 1)
        even = smallest.solution.peak_bytes + share * (fastest - smallest.solution.peak_bytes)
        budget = int((even + smallest.solution.peak_bytes * ratio**share) / 2)
        choice = search.best(max(budget, smallest.solution.peak_bytes), effort="fill")
        if choice is not None:
            found.append((choice, search))
    return found


def predicted(profile: Profile, plan: Plan) -> tuple[int, float]:
    """The peak in bytes and the seconds of a step that the profile alone predicts for a plan.

    A plan that was tried out holds measured seconds, and perhaps the bytes of a copy beside the
    optimizer's step. To be compared with plans that were not, it must be predicted as they were.
    """
    profile = profile.in_tiles(plan.tiles)
    search = MicrobatchSearch(profile, plan.batch_size, split=True, micro_batch=plan.micro_batch)
    numbers = {name: number for number, name in enumerate(ACTION_NAMES)}
    actions = [numbers.get(action, KEEP) for action in plan.actions]
    choice = search.of_plan(
        plan.micro_batch, actions, Segments(plan.segments, plan.segment_parents)
    )
    return choice.solution.peak_bytes, choice.step_seconds


def beginning_like(profile: Profile, plan: Plan, other: Plan) -> Plan | None:
    """The plan with the choices of another one in all operations that both begin with; None if that
    cannot be.

    A forward can then go over from the other plan to this one where it leaves that.
    """
    pairs = _shared_values(profile, plan, other)
    if any(other.segments[theirs] for _, theirs in pairs):
        return None
    numbers = {name: number for number, name in enumerate(ACTION_NAMES)}
    actions = [numbers.get(action, KEEP) for action in plan.actions]
    segments = list(plan.segments)
    for mine, theirs in pairs:
        actions[mine], segments[mine] = numbers[other.actions[theirs]], 0
    search = MicrobatchSearch(profile, plan.batch_size, split=True, micro_batch=plan.micro_batch)
    choice = search.of_plan(plan.micro_batch, actions, Segments(segments, plan.segment_parents))
    if (
        not math.isfinite(choice.solution.extra_seconds)
        or choice.solution.peak_bytes > plan.budget_bytes
    ):
        return None
    found = _plan(profile, search, choice, plan.budget_bytes)
    # where nothing asks for a value it was made a kept one, which it need not be
    names = list(found.actions)
    for mine, theirs in pairs:
        names[mine] = other.actions[theirs]
    return dataclasses.replace(found, actions=tuple(names))


def _shared_values(profile: Profile, plan: Plan, other: Plan) -> list[tuple[int, int]]:
    """The values of the operations that two plans begin with, by their numbers in each; the profile
    is the first's.
    """
    names = zip(plan.operations, other.operations, strict=False)
    length = min(len(plan.operations), len(other.operations))
    operations = next(
        (place for place, (mine, theirs) in enumerate(names) if mine != theirs), length
    )
    made = [
        value
        for value, one in enumerate(profile.values)
        if one.operation is not None and one.operation < operations
    ]
    return list(
        zip(
            made,
            [v for v, action in enumerate(other.actions) if action != "external"],
            strict=False,
        )
    )


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
    search: MicrobatchSearch, budget: int, *, split: bool, fixed: bool
) -> BudgetInfeasible:
    choice = search.smallest()
    parts = _breakdown(choice.solver.graph, choice.solution.simulation)
    listed = ", ".join(
        f"{name} {format_bytes(count)}"
        for name, count in sorted(parts.items(), key=lambda p: -p[1])
        if count
    )
    smallest = choice.solution.peak_bytes
    if fixed and search.profile.splittable and choice.micro_batch > search.profile.min_batch:
        hint = "Leave out `micro_batch`, so that it can be smaller, or raise `memory`."
    elif not split and search.batch_size > search.profile.min_batch and search.profile.splittable:
        hint = (
            f"Pass batch_size={search.batch_size} so that the batch may be split, or raise"
            " `memory`."
        )
    elif search.batch_size > 1 and not search.profile.splittable:
        hint = "Lower `batch_size` or raise `memory`; this batch cannot be split."
    else:
        hint = (
            f"Raise `memory` to at least {smallest} bytes, or make the model or an item of the"
            " batch smaller."
        )
    return BudgetInfeasible(
        f"Smallest feasible peak is {format_bytes(smallest)} ({listed}) at micro-batch"
        f" {choice.micro_batch}, the budget is {format_bytes(budget)}. {hint}",
        min_bytes=smallest,
        breakdown=parts,
    )


def _breakdown(graph: Graph, result: Simulation) -> dict[str, int]:
    parts = dict(graph.static_breakdown)
    parts["kept activations"] = result.kept_bytes
    parts["recomputation burst"] = result.rebuilt_bytes
    name = {"forward": "widest operation", "optimizer": "optimizer step"}.get(
        result.phase, "gradients in flight"
    )
    parts[name] = result.other_bytes
    return parts


def _plan(profile: Profile, search: MicrobatchSearch, choice: Choice, budget: int) -> Plan:
    graph, solution = choice.solver.graph, choice.solution
    result, actions = solution.simulation, solution.actions
    until = choice.solver.simulator.alive_until(actions)
    plain = graph.plain_needs if solution is choice.solver.plain else None
    saved = {v for needs in plain or graph.node_needs for v in needs if graph.producer[v] >= 0}
    kept = {
        v for v, a in enumerate(actions) if graph.producer[v] >= 0 and a == KEEP and until[v] >= 0
    }
    kept = kept & saved if plain else kept
    effective = in_effect(actions, until)
    names = tuple(
        "external" if p < 0 else ACTION_NAMES[a]
        for p, a in zip(graph.producer, effective, strict=True)
    )
    operation = profile.operations[result.index] if result.phase == "forward" else None
    node = profile.nodes[result.index] if result.phase in ("sweep", "backward") else None
    where = {
        "forward": (
            f"in the forward pass, at {operation.name} in {operation.module or 'the model'}"
            if operation
            else ""
        ),
        "sweep": f"in the backward pass, rebuilding for {node.name}" if node else "",
        "backward": f"in the backward pass, at {node.name}" if node else "",
        "optimizer": "in the optimizer's step",
    }[result.phase]
    return Plan(
        micro_batch=choice.micro_batch,
        steps=choice.steps,
        batch_size=search.batch_size,
        actions=names,
        segments=tuple(solution.segments.of),
        segment_parents=tuple(solution.segments.parent),
        operations=tuple(op.name for op in profile.operations),
        budget_bytes=budget,
        peak_bytes=result.peak_bytes,
        breakdown=_breakdown(graph, result),
        peak_at=where,
        step_seconds=choice.step_seconds,
        plain_seconds=choice.plain_seconds,
        kept_values=len(kept),
        saved_values=len(saved),
        kept_bytes=result.saved_bytes,
        saved_bytes=sum(graph.held_bytes[v] for v in saved),
        decisions=_decisions(profile, graph, actions, result),
        heard=last_write(graph, effective) + 1,
        predicted=profile.predicted,
        versions=dict(profile.versions),
        tiles=profile.tiles,
    )


def _decisions(
    profile: Profile, graph: Graph, actions: tuple[int, ...], result: Simulation
) -> tuple[Decision, ...]:
    found = []
    for value, op in enumerate(graph.producer):
        if op < 0 or actions[value] == KEEP:
            continue
        if actions[value] == REBUILD:
            seconds = graph.op_seconds[op] * result.replays[op]
            if graph.op_outputs[op][0] != value:
                continue  # one decision per operation
        else:
            seconds = 2 * graph.nbytes[value] * graph.transfer_seconds_per_byte
        operation = profile.operations[op]
        size = (
            sum(graph.nbytes[v] for v in graph.op_outputs[op])
            if actions[value] == REBUILD
            else graph.nbytes[value]
        )
        found.append(
            Decision(
                value,
                ACTION_NAMES[actions[value]],
                operation.name,
                operation.module,
                operation.source,
                size,
                seconds,
            )
        )
    found.sort(key=lambda d: (-d.seconds, d.value))
    return tuple(d for d in found[:_DECISIONS] if d.seconds > 0)


def _with_alternatives(made: Plan, choice: Choice) -> Plan:
    """Look one step of a twentieth of the way down and up the trade-off, at the same
    micro-batch.
    """
    solver, peak = choice.solver, choice.solution.peak_bytes
    step = max(1, (solver.plain.peak_bytes - solver.graph.static_bytes) // 20)
    found: list[Alternative | None] = []
    for target in (peak - step, peak + step):
        other = _alternative(choice, target)
        if other is None:
            found.append(None)
            continue
        change = (
            (other.extra_seconds - choice.solution.extra_seconds)
            * made.batch_size
            / choice.micro_batch
        )
        found.append(
            Alternative(
                choice.micro_batch, choice.steps, other.peak_bytes, choice.step_seconds + change
            )
        )
    return dataclasses.replace(made, less_memory=found[0], more_memory=found[1])


def _alternative(choice: Choice, budget: int) -> Solution | None:
    """A plan for this budget that is no worse a bargain than the choice: with more memory it is
    faster.
    """
    now = choice.solution
    if budget < now.peak_bytes:
        return choice.solver.solve(budget, effort="glance")
    if now.extra_seconds:
        for effort in _EFFORTS:
            other = choice.solver.solve(budget, effort=effort)
            if (
                other is not None
                and other.peak_bytes > now.peak_bytes
                and other.extra_seconds < now.extra_seconds
            ):
                return other
    return None
