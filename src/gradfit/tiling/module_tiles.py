"""Runs a module that treats each token by itself a few tokens at a time, forward and backward.

Between the passes only its input is kept. The backward pass runs each tile again, and adds up the
gradients of the parameters, so that each of them gets its gradient once, as from the whole module.

Dropout draws for each tile as it comes, and draws the same again in the backward pass: another mask
than that of the untiled module, of the same law, as it is between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradfit.tiling.cut import Cut
from gradfit.tiling.expression import AutocastState
from gradfit.tiling.gradient_sum import GradientSum, in_places
from gradfit.tiling.whole_here import whole_modules


def run_in_tiles(module: nn.Module, x: Tensor, cut: Cut) -> Tensor:
    """What `module.forward(x)` gives.

    Args:
        module: treats each token by itself: the last dimension is its features, the others are
            tokens.
        x: its only input.
        cut: how many tokens at a time.
    """
    shell = _Shell(module)
    named = dict(shell.named_parameters())
    # One long row of tokens, so that a tile is a slice of it; in as many dimensions as before,
    # which is what a module may look at.
    tokens = x.reshape(1, -1, x.shape[-1]) if x.dim() > 2 else x
    # Parameters are passed one by one: autograd gives gradients to arguments of `apply` alone.
    result: Tensor = _TiledModule.apply(shell, cut, tuple(named), tokens, *named.values())  # type: ignore[no-untyped-call]
    return result.reshape(*x.shape[:-1], result.shape[-1])


class _Shell(nn.Module):
    """Calls a module's own forward, without its hooks: they run around all tiles, once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        with whole_modules():
            return type(self.inner).forward(self.inner, x)


class Draws:
    """The generators' states that something began with, if it drew.

    Args:
        device: its generator, and the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    def _now(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def have_been_used(self) -> bool:
        return any(not torch.equal(a, b) for a, b in zip(self._states, self._now(), strict=True))

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.get_device_module(self._device).set_rng_state(self._states[1], self._device)


class _TiledModule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shell: _Shell, cut: Cut, names: tuple[str, ...], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.shell, ctx.cut, ctx.names = shell, cut, names
        ctx.autocast = AutocastState.now(x.device)
        ctx.save_for_backward(x, *parameters)
        ctx.draws = []  # of each tile, to draw the same again
        results = []
        for begin, end in cut.bounds(x.shape[-2]):
            draws = Draws(x.device)
            results.append(shell(x[..., begin:end, :]))
            # Most tiles draw nothing, and a generator's state is 5 kB.
            ctx.draws.append(draws if draws.have_been_used() else None)
        return torch.cat(results, -2) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        with ctx.autocast():
            gradients = (
                _differentiate_whole(ctx, gradient)
                if torch.is_grad_enabled()
                else _differentiate_tiles(ctx, x, parameters, gradient, needed)
            )
        return None, None, None, *gradients


def _differentiate_tiles(
    ctx: Any, x: Tensor, parameters: list[Tensor], gradient: Tensor, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    gradients = _TileGradients(x, parameters, needed)
    call = _with_parameters(ctx.shell, ctx.names, gradients.leaves)
    # The tiles draw what they drew in the forward; whoever draws next must not notice.
    after = Draws(x.device)
    for (begin, end), draws in zip(ctx.cut.bounds(x.shape[-2]), ctx.draws, strict=True):
        if draws is not None and begin < end:
            draws.restore()
        if begin < end:
            gradients.add_tile(call, begin, end, gradient)
    after.restore()
    return gradients.results()


class _TileGradients:
    """Of a module's input and its parameters, tile by tile.

    Args:
        x: the input.
        parameters: as they were in the forward.
        needed: of the input and each parameter, whether its gradient is asked for.
    """

    def __init__(self, x: Tensor, parameters: list[Tensor], needed: tuple[bool, ...]) -> None:
        self._x, self._needed = x, needed
        self.leaves = [
            each.detach().requires_grad_(is_needed)
            for each, is_needed in zip(parameters, needed[1:], strict=True)
        ]
        self._trained = [each for each in self.leaves if each.requires_grad]
        self._sums = [GradientSum(each) for each in self._trained]
        self._of_input = torch.empty_like(x) if needed[0] else None

    def add_tile(
        self, call: Callable[[Tensor], Tensor], begin: int, end: int, gradient: Tensor
    ) -> None:
        """Run these tokens again, and differentiate them."""
        tile = self._x[..., begin:end, :].detach().requires_grad_(self._needed[0])
        with torch.enable_grad():
            result = call(tile)
        wanted = [*self._trained] if self._of_input is None else [tile, *self._trained]
        gradients = list(
            torch.autograd.grad(result, wanted, gradient[..., begin:end, :], allow_unused=True)
        )
        del result  # and with it the tile's graph, before the next tile's
        if self._of_input is not None:
            of_tile = gradients.pop(0)
            self._of_input[..., begin:end, :] = 0 if of_tile is None else of_tile
        for total, one in zip(self._sums, gradients, strict=True):
            total.add(one)

    def results(self) -> list[Tensor | None]:
        """One gradient, or None, for the input and each parameter."""
        gradients = [total.result() for total in self._sums]
        return [self._of_input, *in_places(gradients, self._needed[1:])]


def _differentiate_whole(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """Where the gradient is differentiated again: autograd's own, of all tokens at once."""
    x, *parameters = ctx.saved_tensors
    if any(draws is not None for draws in ctx.draws):
        raise RuntimeError(
            "A module with dropout that runs in tiles cannot be differentiated twice: its masks"
            " were drawn tile by tile. Leave it out: gf.tile(model, exclude=[...])."
        )
    needed = ctx.needs_input_grad[3:]
    wanted = list(compress((x, *parameters), needed))
    result = _with_parameters(ctx.shell, ctx.names, parameters)(x)
    gradients = torch.autograd.grad(result, wanted, gradient, create_graph=True, allow_unused=True)
    return list(in_places(gradients, needed))


def _with_parameters(
    shell: _Shell, names: tuple[str, ...], tensors: list[Tensor]
) -> Callable[[Tensor], Tensor]:
    given = dict(zip(names, tensors, strict=True))
    return lambda x: functional_call(shell, given, (x,))
