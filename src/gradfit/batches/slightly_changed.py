"""A model whose small parameters are a little different for a while: at its first step a model may
be in a place where different losses are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn

_SMALL_SHARE = 1 / 16  # of the parameters' bytes: so much is changed and put back


@contextlib.contextmanager
def slightly_changed(model: nn.Module, share: float = 0.05, least: float = 0.01) -> Iterator[None]:
    """Some small trained parameters, biases and the like, are a little different inside: by a share
    of their mean size, and at least by so much.
    """
    chosen = [(parameter, parameter.detach().clone()) for parameter in _small_parameters(model)]
    # The same numbers each time, and from the CPU: the program's own generators stay untouched.
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        with torch.no_grad():
            for parameter, content in chosen:
                noise = torch.randn(content.shape, generator=generator, device="cpu").to(content)
                parameter.add_(noise * (share * content.abs().mean() + least))
        yield
    finally:
        with torch.no_grad():
            for parameter, content in chosen:
                parameter.copy_(content)


def _small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The smallest trained parameters: few bytes of all, and at least one."""
    trained = sorted(filter(_is_trained_plainly, model.parameters()), key=lambda p: p.numel())
    room = _SMALL_SHARE * sum(p.nbytes for p in trained)
    taken = accumulate(parameter.nbytes for parameter in trained)
    few = sum(1 for nbytes in taken if nbytes <= room)
    return trained[: max(1, few)]


def _is_trained_plainly(parameter: nn.Parameter) -> bool:
    """Whether it is a trained tensor of real numbers, and of no subclass."""
    is_plain = type(parameter.data) is Tensor and parameter.is_floating_point()
    return parameter.requires_grad and is_plain
