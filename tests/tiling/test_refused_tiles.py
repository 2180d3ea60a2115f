"""A pass in tiles that is broken off leaves nothing behind."""

from __future__ import annotations

import gc
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf
from gradfit.recompute.evict import LimitGuard, LimitRefusal
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles

WORDS, WIDTH, ROWS = 4000, 16, 256
TILE = ROWS // 4 * WORDS * 4  # bytes of one tile's logits


def smoothed(model: nn.Module, x: Tensor) -> Tensor:
    words = torch.zeros(len(x), dtype=torch.long)
    return F.cross_entropy(model(x), words, label_smoothing=0.1)


@pytest.mark.parametrize("tiles_of_room", [2.5, 3.0, 3.5])
def test_a_refused_tile_leaves_nothing_behind(tiles_of_room: float) -> None:
    """A node that saves its own result must not hold itself: nobody runs it to its end."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False)), torch.randn(ROWS, WIDTH)
    loss_fn = with_tiles(smoothed, Tiles(parts=4, heads=("0",), gradients_early=True))
    with gf.meter(model, x) as live:
        before = live.current_bytes
        guard = LimitGuard(int(before + tiles_of_room * TILE))
        guard.watch(model, x)
        with pytest.raises(LimitRefusal) as refusal, guard:
            loss_fn(model, x).backward()
        traceback.clear_frames(refusal.value.__traceback__)
        del refusal
        gc.collect()
        assert live.current_bytes - before < TILE // 4
