"""The text that ships with the package, as bytes: 256 tokens, no tokenizer to train, no
download.
"""

from __future__ import annotations

from importlib import resources

import torch
from torch.utils.data import Dataset

VOCABULARY = 256


def prose() -> torch.Tensor:
    """Some 44 kB of prose written for gradfit, one token per byte.

    >>> bytes(prose()[:25].tolist()).decode()
    'THE LIGHT AT HOLLOW POINT'
    """
    content = resources.files("gradfit").joinpath("data/prose.txt").read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


class Windows(Dataset[torch.Tensor]):
    """Every window of `length` tokens that begins at a multiple of `stride`.

    >>> [window.tolist() for window in Windows(torch.arange(6), length=3, stride=2)]
    [[0, 1, 2], [2, 3, 4]]
    """

    def __init__(self, tokens: torch.Tensor, *, length: int, stride: int) -> None:
        self.tokens, self.length, self.stride = tokens, length, stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - self.length) // self.stride + 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.stride
        return self.tokens[start : start + self.length]
