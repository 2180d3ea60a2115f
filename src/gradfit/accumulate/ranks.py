"""Where several processes would speak with each other; alone there is nobody to ask."""

from __future__ import annotations

from gradfit.accumulate.numbers import Number


class Alone:
    """One process: its totals are the totals, its decisions stand.

    The two questions a window asks. A group of processes answers them together: totals summed over all, a decision only
    if all agree.
    """

    def totals(self, weights: dict[str, Number]) -> dict[str, Number]:
        """What the window's items weigh, by term; the main loss goes by the name ""."""
        return weights

    def agree(self, decision: bool) -> bool:
        """Whether to go on: the window is full, the gradient is finite."""
        return decision
