"""The example of the document "Gradient accumulation over multiple micro-batches", and the loop its
text describes.

python examples/document_grad_accumulator.py
"""

import torch

from gradfit import GradAccumulator

w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
params = [w]
sgd = torch.optim.SGD(params, lr=0.01)
accum = GradAccumulator(sgd, params, 4)
print(accum)

# After each micro-batch's backward pass, call step. Every 4 calls the gradients are divided by 4,
# the inner optimizer performs a step, and the gradients are zeroed.
for micro_batch in range(1, 7):
    (w * float(micro_batch)).sum().backward()
    if accum.step():
        print(f"micro-batch {micro_batch}: stepped, w = {w.tolist()}")
expected = torch.tensor([1.0, 2.0], dtype=torch.float64) - 0.01 * (1 + 2 + 3 + 4) / 4
assert torch.equal(w.detach(), expected)

# Two micro-batches are left: divided by 2, which is what there is.
assert accum.current_step == 2
accum.flush()
assert torch.equal(w.detach(), expected - 0.01 * (5 + 6) / 2)
assert accum.inner is sgd
