"""The built-in jobs' networks: plain PyTorch, nothing of gradfit in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, dropout_p=dropout
        )
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention, then two linear layers with a GELU between, each behind a LayerNorm and added to
    what came in.
    """

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Tokens in, logits out; causal as in GPT or looking both ways as in BERT."""

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        layers: int,
        width: int,
        heads: int,
        causal: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=causal, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_small_weights)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class VisionTransformer(nn.Module):
    """An image as a row of patches, the mean of what becomes of them, a class."""

    def __init__(
        self, *, side: int, patch: int, classes: int, layers: int, width: int, heads: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=False, dropout=0.1) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(dim=1))
        return out


class Residual(nn.Module):
    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        same = narrow == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """He and others' network for small images: three stages of residual blocks, each half the size
    of the last.
    """

    def __init__(self, *, classes: int, blocks: int, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        narrow = width
        for wide, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for index in range(blocks):
                stages.append(Residual(narrow, wide, stride if index == 0 else 1))
                narrow = wide
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(narrow, classes)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return out


def _small_weights(module: nn.Module) -> None:
    """GPT-2's initialisation: torch's own would be far too large for an embedding that is also the
    head.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
