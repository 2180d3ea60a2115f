"""Built-in jobs, of a size that two cores train in seconds per step: `gpt`, `bert`, `vit`,
`resnet`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradfit.runs.builtin_networks import ResNet, Transformer, VisionTransformer
from gradfit.runs.builtin_text import VOCABULARY, Windows, prose
from gradfit.runs.job import Job

_MASK = VOCABULARY  # one token more than there are bytes


def gpt(*, layers: int = 6, width: int = 192, length: int = 128, batch_size: int = 32) -> Job:
    """Predict each byte of the prose from those before it."""
    model = Transformer(
        vocabulary=VOCABULARY,
        length=length,
        layers=layers,
        width=width,
        heads=6,
        causal=True,
        dropout=0.1,
    )
    data = Windows(prose(), length=length + 1, stride=length // 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return Job(model, next_byte_loss, data, optimizer, batch_size)


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def bert(*, layers: int = 4, width: int = 192, length: int = 128, batch_size: int = 32) -> Job:
    """Fill in bytes of the prose that were masked; the loss is a sum and a count, since no two rows
    mask as many.
    """
    model = Transformer(
        vocabulary=VOCABULARY + 1,
        length=length,
        layers=layers,
        width=width,
        heads=6,
        causal=False,
        dropout=0.1,
    )
    data = Windows(prose(), length=length, stride=length // 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return Job(model, masked_byte_loss, data, optimizer, batch_size)


def masked_byte_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.rand(tokens.shape, device=tokens.device) < 0.15
    logits = model(tokens.masked_fill(hidden, _MASK))
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses * hidden.flatten()).sum(), hidden.sum()


def vit(*, layers: int = 6, width: int = 128, batch_size: int = 64) -> Job:
    """Tell discs, squares, rings and stripes apart."""
    model = VisionTransformer(
        side=32, patch=4, classes=len(_SHAPES), layers=layers, width=width, heads=4
    )
    return Job(
        model, image_loss, shapes(2048), torch.optim.AdamW(model.parameters(), lr=1e-3), batch_size
    )


def resnet(*, blocks: int = 3, width: int = 16, batch_size: int = 64) -> Job:
    """The same images for a network with BatchNorm, which cannot be exact in micro-batches, and is
    warned about.
    """
    model = ResNet(classes=len(_SHAPES), blocks=blocks, width=width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return Job(model, image_loss, shapes(2048), optimizer, batch_size)


def image_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


_SHAPES = ("disc", "square", "ring", "stripes")


def shapes(count: int, *, side: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Noisy pictures of one shape each, drawn from a generator of their own.

    >>> {name: tuple(tensor.shape) for name, tensor in shapes(8).items()}
    {'image': (8, 3, 32, 32), 'label': (8,)}
    """
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(len(_SHAPES), (count,), generator=draw)
    center = torch.rand(2, count, 1, 1, generator=draw) * side / 2 + side / 4
    size = torch.rand(count, 1, 1, generator=draw) * side / 6 + side / 8
    places = torch.arange(side, dtype=torch.float32)
    down, across = places.view(1, -1, 1) - center[0], places.view(1, 1, -1) - center[1]
    far = (down.square() + across.square()).sqrt()
    drawn = torch.stack(
        [
            far < size,
            torch.maximum(down.abs(), across.abs()) < size,
            (far - size).abs() < 2,
            (torch.maximum(down.abs(), across.abs()) < size) & (across % 4 < 2),
        ]
    )
    mask = drawn[label, torch.arange(count)].unsqueeze(1).float()
    color = torch.rand(count, 3, 1, 1, generator=draw) + 0.5
    return {
        "image": mask * color + 0.3 * torch.randn(count, 3, side, side, generator=draw),
        "label": label,
    }


JOBS: dict[str, Callable[[], Job]] = {"bert": bert, "gpt": gpt, "resnet": resnet, "vit": vit}
