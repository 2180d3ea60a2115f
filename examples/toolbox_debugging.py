"""Finding bad gradients: by name, in numbers, and by comparing with finite differences.

python examples/toolbox_debugging.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
x = torch.randn(16, 4)

grads = gf.backward(model(x).square().mean(), model)
for name, stats in grads.stats().items():
    print(f"{name}: norm {stats.norm:.3g}, mean {stats.mean:.2g}")
print(f"Gradient norm: {grads.norm():.4f}")

x[3, 1] = float("nan")
bad = gf.backward(model(x).square().mean(), model)
for name in bad.nonfinite():
    print("Invalid gradient detected for", name)
assert "0.weight" in bad.nonfinite()
try:
    bad.clip_(1.0)
except gf.NonFiniteGradient as error:
    print(error)
print(gf.inspect_gradients(bad))

# The analytic gradient against the numeric one, element by element, in float32.
print(gf.check_gradients(lambda x: model(x).square().mean(), torch.randn(3, 4)))
