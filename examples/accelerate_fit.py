"""What `accelerator.prepare` returns goes into `gf.fit` as it is: model, optimizer, loader and
schedule.

The step is the one plain PyTorch makes of the whole batch, in a fraction of its memory.
"""

import copy

import torch
from accelerate import Accelerator

import gradfit as gf

torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64)]
for _ in range(4):
    layers += [torch.nn.Tanh(), torch.nn.Linear(64, 64)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 3)).double()
plain = copy.deepcopy(model)
rows = torch.randn(512, 16, dtype=torch.float64)
labels = rows[:, :3].argmax(1).masked_fill(rows[:, 3] > 0.5, -100)  # some rows have no label


def loss_fn(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)  # the mean over the labels that there are


accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=256)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

sample = next(iter(loader))
step = gf.fit(model, optimizer, loss_fn, sample, memory="700 KiB")
print(step.plan)
for _ in range(3):
    for batch in loader:
        # instead of accelerator.backward, optimizer.step and optimizer.zero_grad
        result = step(batch)
        schedule.step()
print(f"loss {result.loss:.4f}, measured peak {result.peak_bytes / 1024:.0f} KiB")

# The same without gradfit and without accelerate.
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
for _ in range(3):
    for part in (slice(0, 256), slice(256, 512)):
        optimizer.zero_grad()
        loss_fn(plain, (rows[part], labels[part])).backward()
        optimizer.step()
        schedule.step()
difference = max(
    (a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True)
)
print(f"largest difference of a parameter to plain PyTorch: {difference:.1e}")
assert step.plan.steps > 1
assert result.peak_bytes <= step.budget_bytes
assert difference < 1e-9
