"""Batch sizes that follow a schedule, and windows that follow the items, the steps or the noise.

python examples/variable_batches.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import gradfit as gf


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 8))
    schedule = gf.VariableBatchScheduler([4, 8, 16])
    loader = DataLoader(data, batch_sampler=schedule.batches(RandomSampler(data)))
    strategies: dict[str, gf.Strategy] = {
        "32 items": gf.FixedTargetBatch(32),
        "3 micro-batches": gf.FixedStepCount(3),
        "32 items, more if they are uneven": gf.AdaptiveAccumulation(32),
        "as the gradient's noise asks": gf.AdaptiveAccumulation(32, by="noise_scale", min_steps=2),
    }
    for name, strategy in strategies.items():
        model = nn.Linear(8, 1)
        acc = gf.GradientAccumulator(
            torch.optim.SGD(model.parameters(), lr=0.01), strategy=strategy, isolate=True
        )
        windows = []
        for _epoch in range(2):
            for (micro,) in loader:
                acc.backward(model(micro).square().mean(), weight=len(micro))
                if result := acc.step():
                    windows.append(result.weight)
        print(f"{name:34} windows of {windows} items")

    # Gradients that come as values: the same mean, without parameters or an optimizer.
    model = nn.Linear(8, 1)
    values = gf.DynamicBatchAccumulator(target_batch_size=28)
    for (micro,) in loader:
        values.accumulate(gf.backward(model(micro).square().mean(), model), len(micro))
        if values.is_complete():
            break
    print(f"as values: {values}, {values.get_accumulated_gradient()}")

    buffer = gf.AccumulationBufferDynamic(gf.SymbolicShape(("items", 0, 64), 8), max_size=64)
    for start in range(0, 64, 16):
        buffer.accumulate(torch.ones(16, 8), start, 16)
    buffer.resize(24)
    print(f"per item: {buffer}")


if __name__ == "__main__":
    main()
