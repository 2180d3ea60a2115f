"""An operation with a gradient of one's own, and the check that the two belong together.

python examples/toolbox_custom_op.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)

double = gf.custom_op(
    forward=lambda x: x * 2.0,
    backward=lambda grad_output, x: grad_output * 2.0,
    name="double",
)
x = torch.randn(3, requires_grad=True)
print(gf.backward(double(x).sum())[x])
print(gf.check_gradients(double, x))

# A straight-through estimator: rounds on the way forward, lets the gradient pass on the way back.
straight_through = gf.custom_op(
    torch.round, lambda grad_output, x: grad_output, name="straight_through"
)
assert torch.equal(gf.backward(straight_through(x).sum())[x], torch.ones(3))

# A mistake in one element is found, and named.
wrong = gf.custom_op(
    forward=lambda x: x.sin(),
    backward=lambda grad_output, x: grad_output * x.cos() * torch.tensor([1.0, 1.1, 1.0]),
    name="wrong_sine",
)
try:
    gf.check_gradients(wrong, x)
except gf.GradientMismatch as error:
    print(error)
else:
    raise SystemExit("the planted error was not found")
