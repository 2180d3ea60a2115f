"""GPT-2, BERT, ViT and ResNet shapes as stem, blocks and head, so that every peer can be put around
the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer's block: attention and a perceptron, with dropout, around a residual stream."""

    def __init__(self, width: int, heads: int, *, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.norm_first = heads, causal, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.drop(self.out(h.transpose(1, 2).reshape(batch, length, width)))

    def perceive(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x))
            return x + self.perceive(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.perceive(x))


class Bottleneck(nn.Module):
    """ResNet's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True), nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Parameter(torch.zeros(length, width)),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions[: ids.size(1)]


class Patches(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, size, stride=size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.cut(pixels).flatten(2).transpose(1, 2)


class MeanHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x).mean(1))


class Network(nn.Module):
    """A stem, blocks in a row, a head; `runner` is how the blocks are run."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.Sequential(*blocks), head
        self.runner: Callable[[nn.Sequential, torch.Tensor], torch.Tensor] = lambda blocks, x: (
            blocks(x)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.runner(self.blocks, self.stem(x)))


@dataclass
class Case:
    name: str
    model: Network
    batch: dict[str, torch.Tensor]

    @staticmethod
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def language(name: str, *, layers: int, width: int, rows: int, length: int, causal: bool) -> Case:
    vocabulary = 1024
    blocks = [
        Block(width, width // 64 or 1, causal=causal, norm_first=causal) for _ in range(layers)
    ]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    model = Network(Embedding(vocabulary, length, width), list(blocks), head)
    ids = torch.randint(0, vocabulary, (rows, length + 1))
    return Case(name, model, {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()})


def vision(name: str, *, layers: int, width: int, rows: int) -> Case:
    blocks = [Block(width, width // 64, causal=False, norm_first=True) for _ in range(layers)]
    return Case(name, Network(Patches(8, width), list(blocks), MeanHead(width)), images(rows))


def residual(name: str, *, layers: int, width: int, rows: int) -> Case:
    stem = nn.Sequential(
        nn.Conv2d(3, width, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return Case(name, Network(stem, [Bottleneck(width) for _ in range(layers)], head), images(rows))


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3, 64, 64), "y": torch.randint(0, 10, (rows,))}


def cases(*, quick: bool, wide: bool = False) -> list[Case]:
    """All of 12 blocks or more; small ones for a quick look, or one as wide as it is in use, with a
    batch to match.
    """
    torch.manual_seed(0)
    if wide:
        return [language("GPT-2-wide", layers=12, width=768, rows=16, length=128, causal=True)]
    width, rows = (128, 4) if quick else (256, 8)
    return [
        language("GPT-2", layers=12, width=width, rows=rows, length=128, causal=True),
        language("BERT", layers=12, width=width, rows=rows, length=128, causal=False),
        vision("ViT", layers=12, width=width, rows=2 * rows),
        residual("ResNet", layers=16, width=width // 2, rows=rows),
    ]
