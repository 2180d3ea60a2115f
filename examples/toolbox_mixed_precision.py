"""float16 and its smallest number: scale the loss, unscale the gradients; by hand, and with a
scaler that adapts.

python examples/toolbox_mixed_precision.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
x, y = torch.randn(32, 8), torch.randn(32, 1)


def small_loss() -> torch.Tensor:
    """Its gradients are below 2**-24, the smallest float16 number."""
    with torch.autocast("cpu", dtype=torch.float16):
        return (model(x) - y.half()).square().mean() * 2.0**-22


lost = gf.backward(small_loss(), model)
assert not lost["weight"].any()

# A static scale, by hand.
scale = 1024.0
grads = gf.backward(small_loss() * scale, model)
grads.scale_(1.0 / scale)
print("by hand", f"{grads.norm():.3g}")
assert grads["weight"].any()

# A dynamic scale: half after an overflow, double after a while without.
optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
scaler = gf.LossScaler(init_scale=2.0**40, growth_interval=5)
scales = []
for _ in range(40):
    optimizer.zero_grad()
    scaler.scale(small_loss()).backward()
    scaler.step(optimizer)  # left out if a gradient is not finite
    scaler.update()
    scales.append(scaler.get_scale())
print("scales", [f"2**{int(s).bit_length() - 1}" for s in scales])
assert min(scales) < 2.0**40
assert scales[-1] > 2.0**10
