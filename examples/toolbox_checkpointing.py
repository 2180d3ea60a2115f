"""Save memory by rebuilding activations in the backward pass, and see what autograd holds with and
without.

python examples/toolbox_checkpointing.py
"""

import torch

import gradfit as gf

torch.manual_seed(0)
layer1 = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
head = torch.nn.Linear(64, 1)
batch = torch.randn(512, 64)

found = []
for recompute in (False, True):
    with gf.AutogradContext() as context:
        with gf.CheckpointScope("layer1", enabled=recompute):
            hidden = layer1(batch)  # its activations are not kept
        loss = head(hidden).square().mean()
    held = context.memory_stats().saved_memory_mb
    found.append((held, gf.backward(loss, dict(layer1.named_parameters()))))
    print(f"{'rebuilt' if recompute else 'kept':>8}: autograd holds {held:.2f} MB")

(kept, plain), (rebuilt, again) = found
assert rebuilt < 0.5 * kept
for name in plain:
    assert torch.equal(plain[name], again[name])
