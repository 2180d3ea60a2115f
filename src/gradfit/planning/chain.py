"""The best choice of pieces and of their options: dynamic programming over the cuts.

Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova, "Optimal checkpointing for heterogeneous chains"
(rotor, 2019, https://arxiv.org/abs/1911.13214), the persistent schedules, with a menu per piece
instead of all or nothing.

State: bytes kept so far. A piece's own worst moment comes when everything before it is kept and
everything after it is done, so `kept before + its peak ≤ limit` is the whole constraint, for each
pass with what else is around in it, and the sum of seconds the objective.

Bound reached: for given menus the optimum, up to bytes rounded to 1/512 of the limit. Weaknesses:
the rounding, and that a piece knows nothing of gradients which its neighbours' recomputation
leaves around; the simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradfit.planning.piece_options import Option

# Fine enough for any limit: what the rounding misses, the solver makes up for by moving the limit.
SLOTS = 512

Spans = Callable[[int], Sequence[int]]


class Around(NamedTuple):
    """Bytes around in a piece's time whatever is done with it: in the forward what earlier
    operations made and Python still holds, in backward gradients.
    """

    forward: int
    backward: int


Menu = Callable[[int, int], tuple[Sequence[Option], Around]]


class _Offer(NamedTuple):
    """An option of a piece, in slots: it can follow `highest` kept ones or fewer, and keeps `shift`
    more.
    """

    number: int
    highest: int
    shift: int
    seconds: float


def best_chain(
    cuts: int, spans: Spans, menu: Menu, limit_bytes: float
) -> list[tuple[int, int, Option]] | None:
    """The pieces (first cut, last cut, option) of least seconds under the limit; None if there are
    none.

    `spans(i)` are the cuts at which a piece that starts at cut i may end; `menu` gives its options
    and the bytes that are around in its time whatever it does.
    """
    if limit_bytes <= 0:
        return None
    table = _Table(cuts, limit_bytes)
    for start in range(cuts - 1):
        table.extend_from(start, spans, menu)
    return None if table.lowest_slot(cuts - 1) is None else table.chain_to(cuts - 1, menu)


class _Table:
    """The least seconds in which each cut is reached with so many slots of bytes kept, and how."""

    def __init__(self, cuts: int, limit_bytes: float) -> None:
        self.limit_bytes, self.slot_bytes = limit_bytes, limit_bytes / SLOTS
        self.seconds = np.full((cuts, SLOTS + 1), np.inf)
        self.seconds[0, 0] = 0.0
        # which cut, by which option, which slot
        self.came_from = np.full((3, cuts, SLOTS + 1), -1, dtype=np.int64)

    def lowest_slot(self, cut: int) -> int | None:
        """The fewest slots with which a cut is reached; None if it is not."""
        reached = np.flatnonzero(np.isfinite(self.seconds[cut]))
        return int(reached[0]) if len(reached) else None

    def extend_from(self, start: int, spans: Spans, menu: Menu) -> None:
        """Go on from a cut, if it is reached, by all pieces that may start there."""
        lowest = self.lowest_slot(start)
        if lowest is not None:
            for stop in spans(start):
                self.extend(start, stop, lowest, *menu(start, stop))

    def extend(
        self, start: int, stop: int, lowest: int, options: Sequence[Option], around: Around
    ) -> None:
        """Go on from one cut to another by each of the options."""
        row = self.seconds[start]
        offers = [self.offer(number, option, around) for number, option in enumerate(options)]
        offers = [offer for offer in offers if offer.highest >= lowest]
        if offers:
            self.take_better(start, stop, offers, _seconds_offered(offers, row, lowest))

    def offer(self, number: int, option: Option, around: Around) -> _Offer:
        # To the nearest slot, since errors of many pieces then cancel: rounded up, a hundred pieces
        # would waste a tenth of the limit. The peak, which is not added up, is rounded up.
        shift = round(option.kept_bytes / self.slot_bytes)
        in_forward = around.forward + option.forward_bytes
        in_backward = around.backward + option.backward_bytes
        room = int((self.limit_bytes - max(in_forward, in_backward)) / self.slot_bytes)
        return _Offer(number, min(room, SLOTS - shift), shift, option.seconds)

    def take_better(
        self, start: int, stop: int, offers: Sequence[_Offer], offered: np.ndarray
    ) -> None:
        """Note the best offer in each slot where it is faster than what there was."""
        best = offered.argmin(axis=0)
        least = offered[best, np.arange(SLOTS + 1)]
        better = np.flatnonzero(least < self.seconds[stop])
        numbers, _, shifts, _ = zip(*offers, strict=True)
        self.seconds[stop, better] = least[better]
        self.came_from[0, stop, better] = start
        self.came_from[1, stop, better] = np.array(numbers)[best[better]]
        self.came_from[2, stop, better] = better - np.array(shifts)[best[better]]

    def chain_to(self, stop: int, menu: Menu) -> list[tuple[int, int, Option]]:
        """The fastest way to a cut, walking back from it."""
        # Whatever is kept at the end is below the limit, so the fastest slot it is.
        slot = int(np.argmin(self.seconds[stop]))
        chain: list[tuple[int, int, Option]] = []
        while stop > 0:
            start, number, previous = self.came_from[:, stop, slot].tolist()
            chain.append((start, stop, menu(start, stop)[0][number]))
            stop, slot = start, previous
        return chain[::-1]


def _seconds_offered(offers: Sequence[_Offer], row: np.ndarray, lowest: int) -> np.ndarray:
    """For each offer the seconds in which it reaches each slot."""
    offered = np.full((len(offers), SLOTS + 1), np.inf)
    for place, (_, highest, shift, seconds) in enumerate(offers):
        offered[place, lowest + shift : highest + shift + 1] = row[lowest : highest + 1] + seconds
    return offered
