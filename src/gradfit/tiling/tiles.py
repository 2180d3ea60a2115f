"""Which tiles a plan has, as a record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """What is cut along tokens, and into how many parts.

    The number of parts is the same for every micro-batch, so that the operations are, too: a plan
    is made for them.
    """

    parts: int = 1
    heads: tuple[str, ...] = ()  # projections to a vocabulary, whose logits are lazy
    module_parts: int = 1
    modules: tuple[str, ...] = ()  # modules that treat each token by itself
    # whether a loss computes its gradients with its value, while the logits are there
    gradients_early: bool = False

    def __str__(self) -> str:
        parts = ((self.parts, self.heads), (self.module_parts, self.modules))
        return " and ".join(f"{count} tiles of {_shown(names)}" for count, names in parts if names)


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
