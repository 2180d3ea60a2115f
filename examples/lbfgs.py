"""An optimizer that computes the loss again and again (LBFGS): accumulate inside its closure.

python examples/lbfgs.py
"""

import torch
from torch import nn

import gradfit as gf

torch.manual_seed(0)
x, y = torch.randn(24, 5).double(), torch.randn(24, 1).double()
micro_batches = list(zip(x.split([3, 11, 10]), y.split([3, 11, 10]), strict=True))
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
accumulator = gf.GradientAccumulator(parameters=model.parameters(), steps=len(micro_batches))


def closure() -> torch.Tensor:
    """The loss of the whole batch, with its gradients in `.grad`, one micro-batch at a time."""
    accumulator.reset()
    total = torch.zeros((), dtype=torch.float64)
    for inputs, targets in micro_batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accumulator.backward(loss, weight=len(inputs))
        accumulator.step()  # the last one makes the gradients the mean over all 24 rows
        total += loss.detach() * len(inputs)
    return total / len(x)


losses = [optimizer.step(closure).item() for _ in range(5)]
print("loss", ", ".join(f"{loss:.2e}" for loss in losses))
assert losses[-1] < 0.1 * losses[0]
