"""Seconds of planning: one simulation, one budget, and a model of 70 billion parameters from its
shapes to its plan.

CPU seconds of this process, the least of three. `python benchmarks/planning.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradfit as gf
from gradfit.planning.simulate import KEEP, REBUILD, simulate
from gradfit.planning.solver import FastSolver
from gradfit.profiling.step_graph import Graph

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planning"))

from planning_graphs import transformer


def least(function: Callable[[], object], rounds: int = 3) -> float:
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return min(seconds)


def solve(graph: Graph, share: float) -> None:
    solver = FastSolver(graph)
    room = solver.plain.peak_bytes - graph.static_bytes
    assert solver.solve(int(graph.static_bytes + share * room)) is not None


def seventy_billion() -> None:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    profile = gf.profile(
        model,
        lambda m, ids: m(input_ids=ids, labels=ids).loss,
        torch.zeros(1, 4096, dtype=torch.long),
        torch.optim.AdamW(model.parameters()),
        fake=True,
        hardware=gf.Hardware(memory="80 GiB", devices=64),
    )
    gf.plan(profile, memory="80 GiB", batch_size=8)


def main() -> None:
    for layers in (45, 455):
        graph = transformer(layers).at(8)
        operations = f"{len(graph.op_inputs):,} operations"
        actions = [KEEP if producer < 0 else REBUILD for producer in graph.producer]
        once = least(lambda: simulate(graph, actions))  # noqa: B023
        print(f"{operations}: one simulation {1000 * once:.1f} ms")
        for share in (0.5, 0.15):
            seconds = least(lambda: solve(graph, share))  # noqa: B023
            print(
                f"{operations}: a plan for {share:.0%} of the activations {seconds:.2f} s",
                flush=True,
            )
    print(
        "70 billion parameters over 64 devices, profile and plan:"
        f" {least(seventy_billion, 1):.0f} s"
    )


if __name__ == "__main__":
    main()
