"""Whether a module treats each token by itself, found out by following single tokens through it.

One token is made NaN: whatever its numbers flow into becomes NaN, so the result may have NaN at
that token alone. And the module is run whole and in parts, as it will be, which must give the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_TOKENS = 12  # are enough to tell


def mixes_tokens(module: nn.Module, x: Tensor) -> str:
    """Why this module cannot run in tiles of tokens; empty if it can.

    Args:
        module: its own forward is called, without its hooks; it is left as it was.
        x: an input that it was called with; a few tokens of it are used.
    """
    if any(isinstance(each, _NormBase) for each in module.modules()):
        return "it normalises over the batch"
    # A copy: the module may write to its input.
    tokens = x.detach().reshape(-1, x.shape[-1])[:_TOKENS].clone()
    if len(tokens) < 2:
        return "it was called with one token, which tells nothing"
    with _quiet(module), torch.no_grad():
        try:
            return _compare(module, tokens, x.dim())
        except Exception as error:  # the user's code, on shapes that it need not be written for
            return f"with fewer tokens it raises {type(error).__name__}: {error}"


def _compare(module: nn.Module, tokens: Tensor, dims: int) -> str:
    before = [buffer.clone() for buffer in module.buffers()]
    count = len(tokens)
    whole = _run(module, tokens, dims)
    if not isinstance(whole, Tensor):
        return f"it returns a {type(whole).__name__}, not a tensor"
    if whole.shape[:-1] != _shaped(tokens, dims).shape[:-1]:
        return f"it makes {tuple(whole.shape)} of {tuple(_shaped(tokens, dims).shape)}"
    whole = whole.reshape(count, -1)
    return (
        _flows(module, tokens, dims)
        or _differs_in_parts(module, tokens, dims, whole)
        or _changes_buffers(module, before)
    )


def _changes_buffers(module: nn.Module, before: list[Tensor]) -> str:
    pairs = zip(before, module.buffers(), strict=True)
    are_same = all(torch.equal(old, new) for old, new in pairs)
    return "" if are_same else "it changes its buffers"


def _flows(module: nn.Module, tokens: Tensor, dims: int) -> str:
    """Make one token NaN, and see how far that goes."""
    count = len(tokens)
    poisoned = tokens.clone()
    poisoned[count // 2] = float("nan")
    reached = _run(module, poisoned, dims).reshape(count, -1).isnan().any(-1)
    reached[count // 2] = False
    others = int(reached.sum())
    return f"a token's numbers flow into {others} of {count - 1} others" if others else ""


def _differs_in_parts(module: nn.Module, tokens: Tensor, dims: int, whole: Tensor) -> str:
    # By one, where a module that looks at its neighbours has none; and in parts of unequal sizes.
    for size in (1, len(tokens) // 3 + 1):
        parts = torch.cat(
            [_run(module, part, dims).reshape(len(part), -1) for part in torch.split(tokens, size)]
        )
        error = float((parts - whole).double().norm() / whole.double().norm().clamp(min=1e-30))
        if not error <= torch.finfo(whole.dtype).eps ** 0.5:  # a NaN differs, too
            return f"run in parts of {size} tokens it differs by {error:.2g}"
    return ""


def _shaped(tokens: Tensor, dims: int) -> Tensor:
    return tokens if dims == 2 else tokens.unsqueeze(0)


def _run(module: nn.Module, tokens: Tensor, dims: int) -> Any:
    return type(module).forward(module, _shaped(tokens, dims))


@contextlib.contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """Without dropout, and with generators as they were."""
    modes = [(each, each.training) for each in module.modules()]
    state = torch.get_rng_state()
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, was_training in modes:
            each.training = was_training
        torch.set_rng_state(state)
