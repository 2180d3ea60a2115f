"""The exact solver against brute force, and the fast one against the exact."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable

import pytest
from exact_solver import solve_exact
from planning_graphs import random_profile, resnet, transformer

from gradfit.planning.pieces import keep_needed
from gradfit.planning.simulate import KEEP, REBUILD, simulate
from gradfit.planning.solver import FastSolver
from gradfit.profiling.step_graph import Graph


def brute_force(graph: Graph, budget: int) -> float:
    """The least seconds over every keep-set there is."""
    free = [v for v, can in enumerate(graph.keepable) if can]
    best = math.inf
    for bits in itertools.product((KEEP, REBUILD), repeat=len(free)):
        actions = [KEEP if p < 0 else REBUILD for p in graph.producer]
        for value, action in zip(free, bits, strict=True):
            actions[value] = action
        result = simulate(graph, actions)
        if result.peak_bytes <= budget:
            best = min(best, result.extra_seconds)
    return best


def budgets(graph: Graph, shares: Iterable[float], low: int | None = None) -> list[int]:
    plain = simulate(graph, keep_needed(graph)).peak_bytes
    low = graph.static_bytes if low is None else low
    return [int(low + share * (plain - low)) for share in shares]


@pytest.mark.parametrize("seed", range(16))
def test_exact_is_what_brute_force_finds(seed: int) -> None:
    graph = random_profile(seed, 4 + seed % 5, odd=seed % 2 == 0).at(1)
    if sum(graph.keepable) > 11:
        pytest.skip("too many keep-sets to try them all")
    for budget in budgets(graph, (0.95, 0.8, 0.65, 0.5)):
        exact = solve_exact(graph, budget)
        assert exact.proven
        assert exact.extra_seconds == pytest.approx(brute_force(graph, budget))
        if exact.actions is not None:
            assert simulate(graph, exact.actions).peak_bytes <= budget


def ratios(
    graphs: Iterable[Graph], shares: Iterable[float], seconds_limit: float = 20.0
) -> list[float]:
    """Fast over exact, for every budget that one level of recomputation can reach."""
    found = []
    for graph in graphs:
        solver = FastSolver(graph)
        for budget in budgets(graph, shares, solver.smallest().peak_bytes):
            exact = solve_exact(graph, budget, seconds_limit=seconds_limit)
            if not exact.proven or exact.actions is None:
                continue
            fast = solver.solve(budget)
            assert fast is not None, "the exact solver fits a budget that the fast one does not"
            assert fast.peak_bytes <= budget
            found.append(
                fast.extra_seconds / exact.extra_seconds
                if exact.extra_seconds
                else 1.0 + fast.extra_seconds
            )
    return found


def random_graphs(seeds: Iterable[int]) -> list[Graph]:
    return [
        random_profile(
            seed, 15 + seed * 7 % 30, odd=seed % 2 == 0, branchy=(0, 0.2, 0.5)[seed % 3]
        ).at(1)
        for seed in seeds
    ]


def test_fast_is_near_the_optimum() -> None:
    real = ratios(
        [transformer(1).at(8), transformer(2, dropout=False).at(8), resnet(4).at(8)], (0.5, 0.4)
    )
    drawn = ratios(random_graphs(range(4)), (0.7, 0.45))
    found = real + drawn
    assert len(found) >= 12
    assert statistics.mean(found) <= 1.05
    assert max(found) <= 1.2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fast_is_near_the_optimum_at_length() -> None:
    real = [
        transformer(1).at(8),
        transformer(2).at(8),
        transformer(2, dropout=False).at(8),
        resnet(4).at(8),
        resnet(6).at(8),
    ]
    found = ratios(real, (0.85, 0.7, 0.55, 0.4), 60.0) + ratios(
        random_graphs(range(60)), (0.85, 0.7, 0.55, 0.4), 60.0
    )
    assert len(found) >= 200
    assert statistics.mean(found) <= 1.05
    assert max(found) <= 1.2


def test_a_budget_below_every_keep_set_is_infeasible() -> None:
    graph = random_profile(1, 8).at(1)
    exact = solve_exact(graph, graph.static_bytes)
    assert exact.actions is None
    assert math.isinf(exact.extra_seconds)
