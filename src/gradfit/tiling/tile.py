"""`tile`: cut along tokens what one row of a batch makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit.arguments import invalid, read_count, read_flag, read_instance, read_list
from gradfit.errors import MisuseError
from gradfit.not_copied import NotCopied
from gradfit.tiling.cut import DEFAULT_SIZE, MODULE_SIZE, Cut
from gradfit.tiling.heads import LazyForward, find_heads, make_lazy
from gradfit.tiling.lazy import Head
from gradfit.tiling.module_forward import TiledForward, may_run_in_tiles
from gradfit.tiling.tiles import Tiles


class TiledModel(NotCopied):
    """The handle that `tile` returns: `remove()` undoes it; as a context manager it is undone at
    the end.

    Args:
        model: the model whose projections to a vocabulary become lazy.
        heads: by the name of each such projection, whether it says so when its numbers are made
            after all.
        cut: how its rows are cut.
        gradients_early: whether a loss computes its gradients with its value.
    """

    _instead_of_copy = "Call remove(), copy the model, and tile both."

    def __init__(
        self,
        model: torch.nn.Module,
        heads: dict[str, bool],
        cut: Cut,
        *,
        gradients_early: bool = True,
    ) -> None:
        self._model, self.cut = model, cut
        self.heads: dict[str, Head] = make_lazy(model, heads, cut, gradients_early=gradients_early)
        self._modules: dict[str, TiledForward] = {}

    def add_modules(
        self, names: Iterable[str], cut: Cut, *, is_named: bool = False, is_checked: bool = False
    ) -> None:
        """Have these modules run in tiles, too.

        Args:
            names: of modules of the model, as `named_modules()` has them.
            cut: how their tokens are cut.
            is_named: whether the user named them, so that one which cannot run in tiles is an
                error.
            is_checked: whether it is known already that their parts make the whole.
        """
        for name in names:
            module: Any = self._model.get_submodule(name)
            # On the instance, which hides its class's: `nn.Module.__call__`, and so all hooks,
            # stay around it.
            forward = TiledForward(module, name, cut, is_named=is_named, is_checked=is_checked)
            module.forward = self._modules[name] = forward

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that have run in tiles so far."""
        return tuple(name for name, forward in self._modules.items() if forward.is_tiled)

    @property
    def untiled(self) -> dict[str, str]:
        """Modules that were looked at and run as they are, with the reason."""
        return {name: forward.reason for name, forward in self._modules.items() if forward.reason}

    @property
    def tokens(self) -> int:
        """The most that a tiled module was called with."""
        return max((forward.tokens for forward in self._modules.values()), default=0)

    def __repr__(self) -> str:
        heads = [name for name, head in self.heads.items() if head.says_so or head.reduced]
        named = [*(f"lazy logits of {name}" for name in heads), *self.modules]
        return f"<tiles of {self.cut.size} rows: {', '.join(named) or 'nothing has run yet'}>"

    def remove(self) -> None:
        """Undo it: the model is as before `tile`. Lazy logits that it has returned stay as they
        are.
        """
        for name in (*self.heads, *self._modules):
            module = self._model.get_submodule(name)
            # Somebody may have put another forward in its place since.
            if _has_our_forward(module):
                del module.__dict__["forward"]

    def __enter__(self) -> TiledModel:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def tile(
    model: torch.nn.Module,
    size: int | None = None,
    *,
    modules: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    gradients_early: bool = True,
) -> TiledModel:
    """Compute what is wider than the model's hidden states a few tokens at a time, with the same
    gradients.

    The projection to a vocabulary becomes lazy: what the model returns has the shape of logits, and
    prints, views, shifts, casts and slices like them, but a cross-entropy (torch's own, or one of
    `transformers`' losses) computes them tile by tile, in the forward and in the backward pass, so
    that they never exist whole. Whoever asks for the numbers gets them, and a warning says who did.

    Modules that treat each token by itself (an MLP, the experts of a mixture) run in tiles of
    tokens, too, and once more in the backward pass. They are found when they are first called:
    single tokens are followed through them, and they are run whole and in parts. What mixes tokens
    (attention, a convolution over time) runs as it is.

    Gradients are those of the untiled model up to the rounding of a float sum, and the same bits
    every time. Dropout inside a tiled module draws another mask, of the same law.

    Args:
        model: any module; projections to a vocabulary are found by what it says of itself, and by
            their shape.
        size: rows (tokens) in a tile; None for 256 of logits and 1,024 of modules.
        modules: names of the modules to run in tiles, each refused if it mixes tokens; None looks
            for them.
        exclude: names of modules that stay as they are.
        gradients_early: in training mode, a loss that adds up its rows computes their gradients
            while a tile's logits are there, and keeps them for the backward pass: three matrix
            products in the place of four. False: always in the backward pass, for where many
            losses are computed and few of them differentiated.

    Raises:
        MisuseError: the model is tiled already, a name is not one of its modules, or `size` is no
            count. In the first forward: a module that was named mixes tokens.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 1000))
    >>> tokens = torch.arange(512)
    >>> with tile(model, size=128):
    ...     loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
    >>> loss.backward()
    """
    read_instance(model, "model", torch.nn.Module, "a torch.nn.Module")
    if size is not None:
        read_count(size, "size")
    read_flag(gradients_early, "gradients_early")
    left_out = set(_names(model, exclude, "exclude"))
    named = None if modules is None else _names(model, modules, "modules")
    if is_tiled(model):
        raise MisuseError(
            "The model is tiled already. Call remove() on what gf.tile returned first."
        )
    heads = {name: is_sure for name, is_sure in find_heads(model).items() if name not in left_out}
    candidates = _find_candidates(model, heads) if named is None else named
    tiled = TiledModel(model, heads, Cut(size or DEFAULT_SIZE), gradients_early=gradients_early)
    tiled_modules = [name for name in candidates if name not in left_out]
    tiled.add_modules(tiled_modules, Cut(size or MODULE_SIZE), is_named=named is not None)
    return tiled


def _find_candidates(model: torch.nn.Module, heads: dict[str, bool]) -> list[str]:
    return find_modules(model, [name for name, is_sure in heads.items() if is_sure])


def find_modules(model: torch.nn.Module, heads: Iterable[str]) -> list[str]:
    """Names of modules that may treat each token by itself; their first call will show. None with
    lazy logits inside.

    Args:
        model: any module.
        heads: names of the projections whose logits are lazy.
    """
    left_out = {"", *(around for name in heads for around in _names_around(name))}
    named = model.named_modules()
    return [name for name, module in named if name not in left_out and may_run_in_tiles(module)]


def _names_around(name: str) -> list[str]:
    """A module's own name, and those of the modules that it is in.

    >>> _names_around("decoder.lm_head")
    ['decoder', 'decoder.lm_head']
    """
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def with_tiles(
    loss_fn: Callable[[torch.nn.Module, Any], Any], tiles: Tiles | None
) -> Callable[..., Any]:
    """The same loss, of the model with these tiles; outside of the call it has none.

    Args:
        loss_fn: `loss_fn(model, batch)`.
        tiles: as a plan has them; None for no tiles.
    """
    if tiles is None:
        return loss_fn

    def tiled_loss(model: torch.nn.Module, batch: Any) -> Any:
        with tile_as(model, tiles):
            return loss_fn(model, batch)

    return tiled_loss


def tile_as(model: torch.nn.Module, tiles: Tiles) -> TiledModel:
    """Put a plan's tiles on a model."""
    heads = dict.fromkeys(tiles.heads, False)
    cut = Cut(parts=tiles.parts)
    tiled = TiledModel(model, heads, cut, gradients_early=tiles.gradients_early)
    tiled.add_modules(tiles.modules, Cut(parts=tiles.module_parts), is_checked=True)
    return tiled


def is_tiled(model: torch.nn.Module) -> bool:
    """Whether the user has tiled it."""
    return any(map(_has_our_forward, model.modules()))


def _has_our_forward(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), LazyForward | TiledForward)


def _names(model: torch.nn.Module, names: Any, parameter: str) -> list[str]:
    modules = dict(model.named_modules())
    given = read_list(names, parameter, f"{parameter}=['lm_head']")
    for name in given:
        if not isinstance(name, str) or name not in modules:
            raise invalid(
                parameter,
                name,
                "is not the name of a module of this model",
                "names of model.named_modules()",
            )
    return given
