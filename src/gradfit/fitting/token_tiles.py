"""Which cuts along tokens are worth measuring for a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradfit import _torch_distributed as distributed
from gradfit._torch_fsdp import units_of
from gradfit.batches.first_rows import FirstRows
from gradfit.fitting.batch_rows import RowCounter
from gradfit.fitting.step_to_plan import StepToPlan, local_bytes, trained
from gradfit.profiling.measure import choose_tiles
from gradfit.profiling.tile_choices import TileChoices
from gradfit.tiling.heads import find_heads
from gradfit.tiling.tiles import Tiles
from gradfit.tree import leaves

_LONGEST_NUMBER = 8  # bytes


class TokenTiles:
    """Ways to cut a step's batches along tokens.

    Args:
        step: whose.
        rows: counts them.
    """

    def __init__(self, step: StepToPlan, rows: RowCounter) -> None:
        self._step, self._rows = step, rows
        self._sharded_choices: TileChoices | None = None

    def worth_trying(self, batch: Any) -> Iterator[Tiles | None]:
        """Without tiles first, unless one row's logits alone, of which three are there at once,
        pass the budget.
        """
        if not self._step.tile:
            yield None
            return
        if self._surely_holds_logits(batch):
            yield None
            yield from self.choices(batch).tiles
            return
        choices = self.choices(batch)
        least = 2 * local_bytes(trained(self._step.model)) + 3 * choices.whole_bytes
        if not choices.tiles or least <= self._step.limit_bytes:
            yield None
        yield from choices.tiles

    def _surely_holds_logits(self, batch: Any) -> bool:
        """Whether one row's logits are small beside the budget, so that nothing need be run to
        see it: for each number of the row at most one for each word.
        """
        if distributed.is_running():  # all ranks must run the same
            return False
        model = self._step.model
        heads: list[Any] = [model.get_submodule(name) for name in find_heads(model)]
        words = max((int(head.out_features) for head in heads), default=0)
        numbers = [tensor.numel() for tensor in leaves(batch)]
        row = max(numbers, default=0) / max(1, self._rows.count(batch))
        least = 2 * local_bytes(trained(model)) + 6 * row * words * _LONGEST_NUMBER
        return least <= self._step.limit_bytes

    def choices(self, batch: Any) -> TileChoices:
        """All that there are, the one that takes the least last."""
        if not units_of(self._step.model):
            return self._choose(batch)
        # FSDP2 gathers in every forward, from all ranks: looked for once, when all of them fit.
        if self._sharded_choices is None:
            self._sharded_choices = self._choose(batch)
        return self._sharded_choices

    def _choose(self, batch: Any) -> TileChoices:
        runner = self._step.runner
        return choose_tiles(runner.model, runner.loss_fn, FirstRows(batch, runner.split))


def are_last_resort(tiles: Tiles | None) -> bool:
    """Whether modules are run in tiles, and so again in each backward pass: that is for where
    nothing else is enough.
    """
    return tiles is not None and bool(tiles.modules)
