"""What a step of `fit` takes beside the same step by hand, where everything is kept.

    python benchmarks/step.py
    python benchmarks/step.py --before path/to/another/tree/src   # that version's steps, too

Hand and step take turns in one process; each figure is the least CPU time of its rounds, because a
step's fixed cost is the same every time and everything else that happens on a machine adds to it.
Versions take turns in processes of their own, and the ratio is the median over the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = {"10 ms": (2, 64, 4, 32), "100 ms": (4, 128, 8, 96)}  # layers, width, rows, tokens
ROUNDS, PROCESSES = 60, 5


def setup(layers: int, width: int, rows: int, tokens: int) -> tuple[Any, Any, Any, Any]:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=512, n_positions=tokens
    )
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 512, (rows, tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, ids, lambda model, ids: model(input_ids=ids, labels=ids).loss


def least_seconds(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """The least CPU seconds of each, one after the other in every round."""
    least = [float("inf")] * len(works)
    for _ in range(rounds):
        for which, work in enumerate(works):
            started = time.process_time()
            work()
            least[which] = min(least[which], time.process_time() - started)
    return least


def measure(name: str) -> dict[str, float]:
    """One process: the loop by hand and `fit`'s step, interleaved."""
    import gradfit as gf

    torch.set_num_threads(1)
    model, optimizer, ids, loss_fn = setup(*SHAPES[name])
    hand_model, hand_optimizer, _, _ = setup(*SHAPES[name])
    step = gf.fit(model, optimizer, loss_fn, ids, memory="4 GiB")

    def by_hand() -> float:
        loss = loss_fn(hand_model, ids)
        loss.backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad()
        return float(loss)

    hand, ours = least_seconds([by_hand, lambda: float(step(ids).loss)], ROUNDS)
    return {"hand": hand, "step": ours}


def in_child(name: str, source: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="the src folder of another version")
    parser.add_argument("--one", choices=SHAPES, help="one process's figures, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    trees = {"now": Path(__file__).resolve().parents[1] / "src"}
    if arguments.before:
        trees = {"before": arguments.before.resolve(), **trees}
    print(f"torch {torch.__version__}, one thread, least CPU time of {ROUNDS} rounds")
    print(f"{PROCESSES} processes a version; ratios are medians over them")
    print(f"  {'step':8}{'version':>10}{'hand ms':>10}{'step ms':>10}{'ratio':>8}")
    for name in SHAPES:
        figures: dict[str, list[dict[str, float]]] = {version: [] for version in trees}
        for _ in range(PROCESSES):
            for version, source in trees.items():
                figures[version].append(in_child(name, source))
        for version, found in figures.items():
            ratio = statistics.median(one["step"] / one["hand"] for one in found)
            hand, ours = (1000 * min(one[key] for one in found) for key in ("hand", "step"))
            print(f"  {name:8}{version:>10}{hand:10.2f}{ours:10.2f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
