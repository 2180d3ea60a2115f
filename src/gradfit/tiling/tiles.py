"""Which tiles a plan has, as a record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """What is cut along tokens, and into how many parts.

    The number of parts is the same for every micro-batch, so that the operations are, too: a plan is made for them.
    """

    parts: int
    heads: tuple[str, ...] = ()  # projections to a vocabulary, whose logits are lazy
    modules: tuple[str, ...] = ()  # modules that treat each token by itself

    def __str__(self) -> str:
        named = [*self.heads, *self.modules]
        shown = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        return f"{self.parts} tiles of {shown}"
