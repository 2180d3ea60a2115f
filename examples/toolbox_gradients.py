"""Gradients as values: the graph, the backward pass, and accumulation by hand.

python examples/toolbox_gradients.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)

# The forward pass builds the graph.
x = torch.randn(10, 5, requires_grad=True)
w = (torch.randn(5, 3) * 0.1).requires_grad_()
b = torch.zeros(3, requires_grad=True)

y = x.matmul(w)  # records Mm
z = y.add(b)  # records Add
loss = z.sum()  # records Sum

graph = gf.AutogradContext.graph(loss)
print(graph)
assert [entry.op for entry in graph] == ["Mm", "Add", "Sum"]

# The backward pass gives the gradients as a value; nobody's .grad is touched.
grads = gf.backward(loss)
print("x", tuple(grads[x].shape), "w", tuple(grads[w].shape), "b", grads[b].tolist())
assert x.grad is None
assert torch.equal(grads[b], torch.full((3,), 10.0))

# Accumulation for a batch that does not fit: add up micro-batches, each with its share of the
# batch.
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
batch = torch.randn(10, 5)
accumulated = gf.GradientMap()
for micro in batch.split(4):  # 4, 4 and 2 items: a mean of means would be wrong
    accumulated.add_(
        gf.backward(model(micro).square().mean(), model), alpha=len(micro) / len(batch)
    )

full = gf.backward(model(batch).square().mean(), model)
for name, gradient in full.items():
    torch.testing.assert_close(accumulated[name], gradient)
print("accumulated", accumulated, "norm", f"{accumulated.norm():.4f}")
