"""How long `fit` takes, in steps of the same model by hand, and what it runs: a 12-layer GPT-2,
where everything fits and where memory is short.

A full collection of Python's takes as long as most of a step here, and may fall into `fit` or not:
so there is one before each, and what collections in `fit` take is said. CPU seconds; rows are those
of all forwards in `fit`, in batches. `python benchmarks/fit_time.py [--layers 12] [--width 128]`.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings
from typing import Any

import torch
from fair import one_thread
from loops import causal_lm, hand_step, lm_batch, lm_loss

import gradfit as gf

ROWS, LENGTH = 8, 128


class Collector:
    """How long Python's collector runs."""

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __call__(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._started = time.process_time()
        else:
            self.seconds += time.process_time() - self._started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    print(f"{one_thread()}; torch {torch.__version__}; CPU seconds")
    warnings.simplefilter("ignore")
    for share in (1.2, 0.4, 0.15):
        torch.manual_seed(0)
        model = causal_lm(options.layers, options.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = lm_batch(random.Random(0), LENGTH, padded=False, rows=ROWS)
        with gf.meter(model, optimizer, batch) as live:
            hand_step(model, optimizer, lm_loss, batch)
            optimizer.zero_grad()
        activations = live.peak_bytes - live.current_bytes
        times = []
        for _ in range(3):
            started = time.process_time()
            hand_step(model, optimizer, lm_loss, batch)
            times.append(time.process_time() - started)
        optimizer.zero_grad()
        seen: list[int] = []

        def counted(model: Any, batch: Any, seen: list[int] = seen) -> torch.Tensor:
            seen.append(len(batch["input_ids"]))
            return lm_loss(model, batch)

        budget = int(live.peak_bytes - (1 - share) * activations)
        gc.collect()
        collector = Collector()
        gc.callbacks.append(collector)
        started = time.process_time()
        step = gf.fit(model, optimizer, counted, batch, memory=budget)
        taken = time.process_time() - started
        gc.callbacks.remove(collector)
        print(
            f"{share:>5.0%} of the activations: step {min(times):.3f} s, fit {taken:6.2f} s ="
            f" {taken / min(times):5.2f} steps (collector {collector.seconds / min(times):.2f});"
            f" {len(seen)} forwards of {sum(seen) / ROWS:.1f}"
            f" batches; {str(step.plan).splitlines()[0]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
