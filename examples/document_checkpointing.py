"""The three usage examples that the document "Gradient checkpointing system" prints, line by line.

python examples/document_checkpointing.py
"""

import torch
from torch import nn

import gradfit as gf

torch.manual_seed(0)
large_layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(5))
large_layer1, large_layer2, large_layer3, large_layer4, large_layer5 = large_layers


def manual_checkpointing() -> None:
    """Two blocks out of five are rebuilt in the backward pass."""
    input = torch.rand(256, 256, requires_grad=True)

    # First block (checkpoint)
    with gf.CheckpointScope("layer1") as checkpoint1:
        x1 = large_layer1(input)

    # Intermediate block (no checkpoint)
    x2 = large_layer2(x1)
    x3 = large_layer3(x2)

    # Second block (checkpoint)
    with gf.CheckpointScope("layer4") as checkpoint2:
        x4 = large_layer4(x3)

    output = large_layer5(x4)
    loss = output.sum()

    # Backward pass will recompute x1 and x4
    loss.backward()

    for scope in (checkpoint1, checkpoint2):
        print(f"{scope.name}: {scope.stats}")
        assert scope.stats.freed_bytes > 0
    rebuilt = input.grad

    input.grad = None
    plain = input
    for layer in large_layers:
        plain = layer(plain)
    plain.sum().backward()
    assert torch.equal(input.grad, rebuilt)


def automatic_checkpointing() -> None:
    """A limit in memory, and nothing marked by hand."""
    model, input = nn.Sequential(*large_layers), torch.rand(256, 256)
    manager = gf.CheckpointManager()
    manager.auto_checkpoint = True
    manager.max_memory_mb = 5
    manager.memory_threshold = 0.8

    # Manager automatically selects checkpoints based on memory
    with gf.meter(model, input) as meter:
        manager.start()
        output = model(input)
        loss = output.sum()
        loss.backward()
        manager.stop()

    print(
        f"automatic: peak {meter.peak_bytes / 2**20:.2f} MiB of {manager.limit_bytes / 2**20:.2f}"
    )
    assert meter.peak_bytes <= manager.limit_bytes


class CheckpointedLayer:
    """Layer-level checkpointing: the layer's user knows nothing of it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gf.CheckpointScope("layer"):
            return self.layer.forward(x)


def layer_level_checkpointing() -> None:
    """A layer that opens its own scope in each call."""
    x = torch.rand(256, 256, requires_grad=True)
    CheckpointedLayer(large_layer1).forward(x).sum().backward()
    print(f"layer: gradient norm {x.grad.norm():.3f}")


if __name__ == "__main__":
    manual_checkpointing()
    for parameter in large_layers.parameters():
        parameter.grad = None
    automatic_checkpointing()
    layer_level_checkpointing()
