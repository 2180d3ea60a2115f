"""An audit, a profile and an own backward pass between the steps of a run: they change nothing of
it.
"""

import copy

import torch

import gradfit as gf

torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64)]
for _ in range(4):
    layers += [torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64)]
model = torch.nn.Sequential(*layers)
other = copy.deepcopy(model)
batch = torch.randn(256, 16)


def loss_fn(model, x):
    return model(x).square().mean()


def trained(model, between):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = gf.fit(model, optimizer, loss_fn, batch, memory="600 KiB", reproducible=True)
    for number in range(4):
        step(batch)
        between(number, step)
    return step


def look(number, step):
    if number == 1:
        # runs the batch five times, and leaves no trace
        report = gf.audit(model, loss_fn, batch, plan=step.plan)
        print(report)
        assert report.identical
        assert report.exact
    if number == 2:
        gf.profile(model, loss_fn, batch)
        generators = torch.get_rng_state()
        # of somebody else's: the next step drops what it left in .grad
        loss_fn(model, batch).backward()
        torch.set_rng_state(generators)


step = trained(model, look)
trained(other, lambda number, step: None)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
print(
    f"{step.plan.split_text}: the parameters are bit-identical to those of the run that nobody"
    f" looked at: {same}"
)
assert same
