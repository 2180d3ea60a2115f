"""The training loop that the document "Gradient accumulation system" prints, line by line, against
the full batch.

python examples/document_accumulation.py
"""

import copy

import torch
from torch import nn

import gradfit as gf

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
twin = copy.deepcopy(model)
parameters = list(model.parameters())
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(parameters, lr=0.1)
epochs, num_batches = 3, 8
inputs, targets = torch.randn(num_batches, 3, 4).double(), torch.randn(num_batches, 3, 1).double()

accumulator = gf.GradientAccumulator(4)
accumulator.enable_accumulation(parameters)

for epoch in range(epochs):
    for batch in range(num_batches):
        # Forward pass
        output = model(inputs[batch])
        loss = criterion(output, targets[batch])

        # Backward pass (accumulates gradients)
        loss.backward()

        # Check if ready to step optimizer
        if accumulator.is_ready:
            optimizer.step()  # Applies scaled gradients
            optimizer.zero_grad()

    print(f"epoch {epoch}: loss {loss:.4f}, {accumulator.windows} updates")

# The same training without accumulation: two batches of 12 rows in each epoch.
plain = torch.optim.SGD(twin.parameters(), lr=0.1)
for _ in range(epochs):
    for x, y in zip(inputs.flatten(0, 1).split(12), targets.flatten(0, 1).split(12), strict=True):
        plain.zero_grad()
        criterion(twin(x), y).backward()
        plain.step()
for mine, other in zip(parameters, twin.parameters(), strict=True):
    torch.testing.assert_close(mine, other)

accumulator.dispose()
