"""More options for a short piece, and nested plans that are made to fit."""

from __future__ import annotations

from planning_graphs import transformer

from gradfit.planning.local_search import drop_to_fit
from gradfit.planning.menu_search import with_changed_options
from gradfit.planning.piece_options import Option, evaluate, is_no_worse, options, prune, unit_ways
from gradfit.planning.pieces import Anatomy, Piece, find_cuts, keep_needed
from gradfit.planning.simulate import Segments, Simulator


def block_of_a_transformer() -> tuple[Piece, list[Option]]:
    graph = transformer(2).at(8)
    cuts = find_cuts(graph)
    start, end = cuts[1], cuts[3]
    piece = Anatomy(graph).piece(start, end, graph.op_seconds[start:end])
    return piece, prune(options(piece, unit_ways(piece)))


def test_changes_lose_no_option_and_find_faster_ones_in_no_more_memory() -> None:
    piece, before = block_of_a_transformer()
    after = with_changed_options(piece, before, 6000)
    assert all(any(is_no_worse(one, old) for one in after) for old in before)
    assert prune(after) == sorted(after, key=lambda o: (o.seconds, o.kept_bytes, o.peak_bytes))
    smallest = min(before, key=lambda one: one.peak_bytes)
    as_small = [one for one in after if one.peak_bytes <= smallest.peak_bytes]
    assert min(one.seconds for one in as_small) < 0.9 * smallest.seconds


def test_changed_options_cost_what_the_simulator_says() -> None:
    piece, before = block_of_a_transformer()
    simulator = Simulator(piece.graph)
    for option in with_changed_options(piece, before, 2000):
        assert option == evaluate(piece, simulator, option.actions, option.segments)


def test_without_changes_the_options_are_those_that_none_beats() -> None:
    piece, before = block_of_a_transformer()
    assert with_changed_options(piece, [*before, *before], 0) == before


def test_a_plan_a_little_above_the_budget_is_made_to_fit_by_rebuilding_little() -> None:
    graph = transformer(4).at(8)
    simulator, flat = Simulator(graph), Segments([0] * len(graph.nbytes))
    kept = keep_needed(graph)
    budget = int(0.99 * simulator.run(kept, flat).peak_bytes)
    actions = drop_to_fit(simulator, kept, flat, budget, drops=3)
    assert actions is not None
    found = simulator.run(actions, flat)
    assert found.peak_bytes <= budget
    assert found.extra_seconds < 0.02 * graph.plain_seconds


def test_a_plan_far_above_the_budget_is_left() -> None:
    graph = transformer(4).at(8)
    simulator, flat = Simulator(graph), Segments([0] * len(graph.nbytes))
    assert drop_to_fit(simulator, keep_needed(graph), flat, graph.static_bytes, drops=2) is None
