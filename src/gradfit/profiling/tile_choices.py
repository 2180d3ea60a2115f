"""Which tiles are worth a look, found by running one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gradfit._torch import inside_fake_mode
from gradfit.tiling.cut import MODULE_SIZE, Cut
from gradfit.tiling.heads import find_heads
from gradfit.tiling.lazy import Head
from gradfit.tiling.tile import TiledModel, find_modules, is_tiled
from gradfit.tiling.tiles import Tiles
from gradfit.tree import unmarked

_FEW_ROWS = 64  # of one item: a head that makes fewer is no projection of tokens
_LARGEST, _SMALLEST = 256, 32  # rows of a tile
_FEWEST_PARTS, _MOST_PARTS, _MOST_MODULE_PARTS = 4, 128, 16


class TileChoices(NamedTuple):
    """What could be cut, and what it would take whole."""

    tiles: tuple[Tiles, ...] = ()
    whole_bytes: int = 0  # of all logits of the row that was run


def tile_choices(model: torch.nn.Module, loss_fn: Any, part: Any) -> TileChoices:
    """Tiles of projections to a vocabulary whose logits are only reduced; and of modules as well.

    Args:
        model: as it is trained; the caller puts buffers and generators back.
        loss_fn: as `fit` takes it.
        part: few rows of a batch.
    """
    names = find_heads(model)
    modules = find_modules(model, [name for name, is_sure in names.items() if is_sure])
    if not (names or modules) or is_tiled(model):
        return TileChoices()
    cut = Cut(_rows_of(model, names))
    with TiledModel(model, dict.fromkeys(names, False), cut) as tiled, torch.no_grad():
        tiled.add_modules(modules, Cut(MODULE_SIZE))
        try:
            loss_fn(model, unmarked(part))
        # the user's code, which may need gradients or more rows: measured it will be said
        except Exception:
            return TileChoices()
        modules, tokens = list(tiled.modules), tiled.tokens
    heads = [head for head in tiled.heads.values() if _is_worth_cutting(head)]
    choices = tuple(_choices(_head_tiles(model, heads), modules, tokens))
    return TileChoices(choices, sum(head.nbytes for head in heads))


def _choices(head_tiles: Tiles, modules: list[str], tokens: int) -> Iterator[Tiles]:
    """The fastest first, each in less memory."""
    if head_tiles.heads:
        yield head_tiles
    if modules and tokens >= _FEW_ROWS:
        in_modules = _with_modules(head_tiles, modules, tokens)
        yield in_modules
        if head_tiles.gradients_early:
            parts = min(_MOST_PARTS, 2 * head_tiles.parts)
            yield dataclasses.replace(in_modules, parts=parts, gradients_early=False)


def _with_modules(tiles: Tiles, modules: list[str], tokens: int) -> Tiles:
    parts = _within(_FEWEST_PARTS, -(-tokens // MODULE_SIZE), _MOST_MODULE_PARTS)
    return dataclasses.replace(tiles, module_parts=parts, modules=tuple(modules))


def _is_worth_cutting(head: Head) -> bool:
    """Whether its logits are of many tokens, and only reduced."""
    return bool(head.reduced) and not head.materialised and head.rows >= _FEW_ROWS


def _head_tiles(model: torch.nn.Module, heads: list[Head]) -> Tiles:
    if not heads:
        return Tiles()
    rows = _rows_of(model, [head.name for head in heads])
    parts = -(-max(head.rows for head in heads) // rows)
    names = tuple(head.name for head in heads)
    # Fake tensors are followed operator by operator.
    return Tiles(
        _within(_FEWEST_PARTS, parts, _MOST_PARTS), names, gradients_early=not inside_fake_mode()
    )


def _within(least: int, number: int, most: int) -> int:
    return min(most, max(least, number))


def _rows_of(model: torch.nn.Module, heads: Iterable[str]) -> int:
    """Of a tile: it takes the weights' own bytes, as their gradient is there beside it."""
    widths = [_width(model, name) for name in heads]
    return _within(_SMALLEST, min(widths, default=_LARGEST), _LARGEST)


def _width(model: torch.nn.Module, name: str) -> int:
    weight: Any = model.get_submodule(name).weight
    return int(weight.shape[1])
