"""A training loop with gradients as values: backward, clip, update, clear; then inference without a
graph.

python examples/toolbox_training_loop.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)
inputs = torch.randn(256, 4)
targets = inputs.sum(dim=1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
clipper = gf.GradientClipper(1.0)  # max norm = 1.0

history = []
for _ in range(20):
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        with gf.AutogradContext() as context:
            loss = torch.nn.functional.mse_loss(model(x), y)
        if not history:
            print(context.memory_stats())
        grads = gf.backward(loss, model)
        clipper.clip_grads(grads)
        grads.assign()
        optimizer.step()
        history.append(loss)  # keeps the loss, and with it the graph …
        gf.AutogradContext.clear()  # … but not what the graph had saved
print(f"loss {history[0]:.4f} -> {history[-1]:.4f}")
assert history[-1] < 0.5 * history[0]
print(f"Saved tensors: {gf.AutogradContext.memory_stats().saved_memory_mb} MB")

# Inference, method 1: detach. Method 2: no graph at all.
weight = model[0].weight
assert not inputs.detach().matmul(weight.detach().t()).requires_grad
with gf.AutogradContext.no_grad():
    assert not model(inputs).requires_grad
