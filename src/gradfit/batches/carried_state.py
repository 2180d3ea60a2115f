"""Do parts see each other through what a forward writes and the next one reads?

A running mean that normalises, a queue of keys, an averaged codebook, the vectors of a spectral
norm: run in parts, the second part sees what the first has written, which in one piece nobody sees.
Counters and statistics that are only written (BatchNorm's, read in evaluation) do not matter.

So one part is run from the state that all begin with, and from the state that the parts before it
leave, in which the numbers that they have written are moved further: what has nearly converged may
matter later. The same rows give the same bits, unless the state was read. And some state is only
read by as many rows as have left it (a recurrent net that goes on where it was), so that the part
is run once more right after itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfit._torch import counted_writes
from gradfit.batches.snapshot import Generators

_MOVED = 0.05  # of a buffer's mean size


class StateReads(NamedTuple):
    """What the loss of the same rows is, before and after others were run."""

    before: float
    after: float
    written: tuple[str, ...]
    """Buffers that a forward has changed."""

    @property
    def error(self) -> float:
        """The relative difference of the two."""
        largest = max(abs(self.before), abs(self.after))
        return abs(self.before - self.after) / largest if largest else 0.0

    @property
    def reason(self) -> str:
        """Why the batch is not cut."""
        named = ", ".join(map(repr, self.written[:3])) or "its own attributes"
        return (
            f"a forward changes what the next one reads ({named}), so micro-batches would see each"
            " other. Change it after the step, not in the forward, or freeze it with"
            " module.eval()"
        )


def read_carried_state(
    model: nn.Module, parts: Sequence[Any], run: Callable[[Any], float], rewind: Callable[[], None]
) -> StateReads:
    """Run the last part first, then after the others, and then after itself.

    Args:
        model: its buffers are left changed.
        parts: rows, cut.
        run: gives the loss of a part, from the state that there is.
        rewind: makes the state what it was at first.
    """
    rewind()
    generators = Generators()
    before = run(parts[-1])
    rewind()
    versions = _versions(model)
    for part in parts[:-1]:
        run(part)
    written = {
        name: buffer
        for name, buffer in model.named_buffers()
        if versions.get(name) != _version(buffer)
    }
    # Further than the forwards did: a mean that has converged would hardly show that it is read.
    _move(written.values())
    generators.restore()  # what is drawn is no state that anybody has written
    after = run(parts[-1])
    if after == before:
        generators.restore()
        after = run(parts[-1])
    return StateReads(before, after, tuple(written))


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: _version(buffer) for name, buffer in model.named_buffers()}


def _version(buffer: Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was written to."""
    return id(buffer), counted_writes(buffer)


def _move(buffers: Any) -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for buffer in buffers:
            if buffer.is_floating_point() and not buffer.is_inference():
                noise = torch.randn(buffer.shape, generator=generator, device="cpu").to(buffer)
                buffer.add_(noise * (_MOVED * buffer.abs().mean()))
