"""`tile`: cut along tokens what one row of a batch makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit.arguments import invalid, read_count, read_instance, read_list
from gradfit.errors import MisuseError
from gradfit.not_copied import NotCopied
from gradfit.tiling.cut import DEFAULT_SIZE, Cut
from gradfit.tiling.heads import LazyForward, find_heads, is_linear, make_lazy
from gradfit.tiling.lazy import Head
from gradfit.tiling.tiles import Tiles


class TiledModel(NotCopied):
    """The handle that `tile` returns: `remove()` undoes it; as a context manager it is undone at the end."""

    _instead_of_copy = "Call remove(), copy the model, and tile both."

    def __init__(self, model: torch.nn.Module, heads: dict[str, bool], cut: Cut) -> None:
        self._model, self.cut = model, cut
        self.heads: dict[str, Head] = make_lazy(model, heads, cut)

    def __repr__(self) -> str:
        named = ", ".join(name for name, head in self.heads.items() if head.says_so or head.reduced)
        return f"<tiles of {self.cut.size} rows: lazy logits of {named or 'nothing'}>"

    def remove(self) -> None:
        """Undo it: the model is as before `tile`. Lazy logits that it has returned stay as they are."""
        for name in self.heads:
            module = self._model.get_submodule(name)
            if isinstance(module.__dict__.get("forward"), LazyForward):
                del module.__dict__["forward"]

    def __enter__(self) -> TiledModel:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def tile(model: torch.nn.Module, size: int | None = None, *, exclude: Iterable[str] = ()) -> TiledModel:
    """Compute what is wider than the model's hidden states a few tokens at a time, with the same gradients.

    The projection to a vocabulary becomes lazy: what the model returns has the shape of logits, and prints, views,
    shifts, casts and slices like them, but a cross-entropy (torch's own, or one of `transformers`' losses) computes
    them tile by tile, in the forward and in the backward pass, so that they never exist whole. Whoever asks for the
    numbers gets them, and a warning says who did.

    Gradients are those of the untiled model up to the rounding of a float sum, and the same bits every time.

    Args:
        model: any module; projections to a vocabulary are found by what it says of itself, and by their shape.
        size: rows (tokens) in a tile; None for 256.
        exclude: names of modules that stay as they are.

    Raises:
        MisuseError: the model is tiled already, a name is not one of its modules, or `size` is no count.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 1000))
    >>> tokens = torch.arange(512)
    >>> with tile(model, size=128):
    ...     loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
    >>> loss.backward()
    """
    read_instance(model, "model", torch.nn.Module, "a torch.nn.Module")
    cut = Cut(DEFAULT_SIZE if size is None else read_count(size, "size"))
    heads = find_heads(model)
    for name in _names(model, exclude, "exclude"):
        heads.pop(name, None)
    _refuse_tiled(model)
    return TiledModel(model, heads, cut)


def with_tiles(loss_fn: Callable[[torch.nn.Module, Any], Any], tiles: Tiles | None) -> Callable[..., Any]:
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
    return TiledModel(model, dict.fromkeys(tiles.heads, False), Cut(parts=tiles.parts))


def is_tiled(model: torch.nn.Module) -> bool:
    """Whether the user has tiled it."""
    return any(isinstance(module.__dict__.get("forward"), LazyForward) for module in model.modules())


def _names(model: torch.nn.Module, names: Any, parameter: str) -> list[str]:
    known = dict(model.named_modules())
    found = read_list(names, parameter, f"{parameter}=['lm_head']")
    for name in found:
        if name not in known:
            raise invalid(
                parameter, name, "is not the name of a module of this model", "names of model.named_modules()"
            )
    return found


def _refuse_tiled(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if is_linear(module) and isinstance(module.__dict__.get("forward"), LazyForward):
            raise MisuseError(f"{name or 'The model'} is tiled already. Call remove() on what gf.tile returned first.")
