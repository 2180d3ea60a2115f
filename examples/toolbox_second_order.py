"""Gradients of gradients: Hessian-vector products, a gradient penalty, and both through a
recomputed scope.

python examples/toolbox_second_order.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)
x = torch.randn(10, requires_grad=True)
y = x.square().sum()

# The first gradient, and the gradient of its sum.
first = gf.backward(y, {"x": x}, create_graph=True)
second = gf.backward(first["x"].sum(), {"x": x})
assert torch.equal(second["x"], torch.full((10,), 2.0))

# The Hessian times a vector, without the Hessian.
vector = torch.randn(10)
product = gf.hessian_vector_product(lambda x: (x.sin() * x).sum(), x, vector)
hessian = torch.autograd.functional.hessian(lambda x: (x.sin() * x).sum(), x.detach())
torch.testing.assert_close(product, hessian @ vector)
print("H·v", product)

# A gradient penalty through activations that are rebuilt, bit-identical to the one that keeps them.
model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
batch = torch.randn(32, 10)
penalties = []
for recompute in (False, True):
    with gf.CheckpointScope("critic", enabled=recompute):
        loss = model(batch).mean()
    norm = gf.backward(loss, model, create_graph=True).norm()
    penalties.append(gf.backward((norm - 1) ** 2, model))
for name in penalties[0]:
    assert torch.equal(penalties[0][name], penalties[1][name])
print("penalty gradient", f"{penalties[0].norm():.4f}")
