"""Several losses of one forward pass, each divided by its own number of items over the whole
window.

A language model's loss is a mean over tokens, its auxiliary loss a mean over the sequences that
have a label. Neither total is known before the window ends.

    python examples/loss_terms.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import gradfit as gf


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    full = copy.deepcopy(model)
    data, labelled = torch.randn(20, 6).double(), torch.rand(20) < 0.3

    acc = gf.GradientAccumulator(steps=3, parameters=model.parameters())
    for rows in torch.arange(20).split([9, 4, 7]):
        out, chosen = model(data[rows]), labelled[rows]
        acc.backward(
            terms={
                "main": (out[:, 0].square().sum(), len(rows)),
                "aux": (out[chosen, 1].exp().sum(), int(chosen.sum())),
            }
        )
    assert acc.is_ready

    out = full(data)
    (out[:, 0].square().mean() + out[labelled, 1].exp().mean()).backward()
    for ours, theirs in zip(model.parameters(), full.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    print("two terms, two denominators: equal to the full batch")


if __name__ == "__main__":
    main()
