"""Whether a module treats each token by itself, found out by following single tokens through it.

One token is made NaN: whatever its numbers flow into becomes NaN, so the result may have NaN at
that token alone. And the module is run whole and in parts, as it will be, which must give the same
result and the same gradient of its input (a mixture of experts may add the gradient of a balance
over all tokens, which no result shows). What it leaves behind for others (a loss beside its result,
a count) would be that of a tile: such a module runs as it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradfit.tiling.module_tiles import Draws

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
    left_behind = _Attributes(module)
    try:
        reason = _looked_at(module, tokens, x.dim())
    except Exception as error:  # the user's code, on shapes that it need not be written for
        reason = f"with fewer tokens it raises {type(error).__name__}: {error}"
    return left_behind.put_back() or reason


def _looked_at(module: nn.Module, tokens: Tensor, dims: int) -> str:
    """As it is trained, and, where that draws (dropout), without: then parts can be compared."""
    before = Draws(tokens.device)
    try:
        with torch.no_grad():
            reason = _compare(module, tokens, dims, parts=False)
        draws = before.have_been_used()
        with _not_training(module) if draws else contextlib.nullcontext():
            with torch.no_grad():
                reason = reason or _compare(module, tokens, dims, parts=True)
            return reason or _gradient_differs(module, tokens, dims)
    finally:
        before.restore()


def _compare(module: nn.Module, tokens: Tensor, dims: int, *, parts: bool) -> str:
    count = len(tokens)
    whole = _run(module, tokens, dims)
    if not isinstance(whole, Tensor):
        return f"it returns a {type(whole).__name__}, not a tensor"
    if whole.shape[:-1] != _shaped(tokens, dims).shape[:-1]:
        return f"it makes {tuple(whole.shape)} of {tuple(_shaped(tokens, dims).shape)}"
    if not parts:
        return _flows(module, tokens, dims)
    return _differs_in_parts(module, tokens, dims, whole.reshape(count, -1))


class _Attributes:
    """What a module and those inside it hold, buffers among it."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(each, dict(each.__dict__)) for each in module.modules()]
        self._filled = [
            (name, value, copy.copy(value))
            for _, held in self._held
            for name, value in held.items()
            if isinstance(value, list | dict | set)
        ]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def put_back(self) -> str:
        """Why what it holds shows that it keeps something of a call; empty if it does not."""
        changed = [name for module, held in self._held for name in _changed(module, held)]
        grown = [each for each in self._filled if len(each[1]) != len(each[2])]
        is_written = any(not torch.equal(now, old) for now, old in self._buffers)
        with torch.no_grad():
            for now, old in self._buffers if is_written else []:
                now.copy_(old)
        for module, held in self._held:
            if _changed(module, held):
                module.__dict__.clear()
                module.__dict__.update(held)
        for _, value, before in grown:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(before)
        if is_written:
            return "it changes its buffers"
        names = sorted({*changed, *(name for name, _, _ in grown)})
        return f"it keeps something of each call in {names[0]}" if names else ""


def _changed(module: nn.Module, held: dict[str, Any]) -> list[str]:
    now = module.__dict__
    return [name for name in {**held, **now} if now.get(name, held) is not held.get(name, now)]


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


def _gradient_differs(module: nn.Module, tokens: Tensor, dims: int) -> str:
    """Of the input alone: the parameters' would take as much memory as they do."""
    if torch.is_inference_mode_enabled():
        return ""
    whole = _gradient(module, tokens, dims)
    half = len(tokens) // 2
    parts = torch.cat([_gradient(module, part, dims) for part in (tokens[:half], tokens[half:])])
    error = float((parts - whole).double().norm() / whole.double().norm().clamp(min=1e-30))
    if error <= torch.finfo(whole.dtype).eps ** 0.5:
        return ""
    return f"in two parts the gradient of its input differs by {error:.2g}"


def _gradient(module: nn.Module, tokens: Tensor, dims: int) -> Tensor:
    with torch.enable_grad():
        leaf = tokens.detach().clone().requires_grad_()
        result = _run(module, leaf * 1, dims)  # which it may write to
        if not result.requires_grad:
            return torch.zeros_like(leaf)
        weights = torch.linspace(0.5, 1.5, result.shape[-1], device=leaf.device).to(result.dtype)
        return torch.autograd.grad((result * weights).sum(), leaf)[0]


def _shaped(tokens: Tensor, dims: int) -> Tensor:
    return tokens if dims == 2 else tokens.unsqueeze(0)


def _run(module: nn.Module, tokens: Tensor, dims: int) -> Any:
    return type(module).forward(module, _shaped(tokens, dims))


@contextlib.contextmanager
def _not_training(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, was_training in modes:
            each.training = was_training
