"""`torch.compile` with `activation_memory_budget`, where there is a compiler: another engine, shown
for comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch._functorch.config as functorch
from frontier_models import Case
from torch.profiler import ProfilerActivity, profile

BUDGETS = (1.0, 0.5, 0.25, 0.1)


def compiled_points(case: Case) -> Iterator[tuple[str, Callable[[], None], int]]:
    """(setting, what to run, peak bytes) for each budget, compiled before it is given out."""
    for budget in BUDGETS:
        torch.compiler.reset()
        functorch.activation_memory_budget = budget
        model = copy.deepcopy(case.model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        compiled = torch.compile(model)

        def run(compiled: torch.nn.Module = compiled) -> None:
            case.loss(compiled, case.batch).backward()

        for _ in range(2):
            run()
        yield f"budget {budget}", run, _peak_bytes(run)


def _peak_bytes(run: Callable[[], None]) -> int:
    """Of what the allocator gave out: a compiled function's buffers are no tensors that a meter
    could see.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
