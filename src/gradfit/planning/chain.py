"""The best choice of pieces and of their options: dynamic programming over the cuts.

State: bytes kept so far. A piece's own worst moment comes when everything before it is kept and
everything after it is done, so `kept before + its peak ≤ limit` is the whole constraint, and the
sum of seconds the objective: for given menus, the optimum (the persistent schedules of Beaumont et
al.'s rotor, with a menu per piece instead of all or nothing). Bytes are rounded to 1/512 of the
limit; the simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradfit.planning.piece_options import Option

SLOTS = 512


def best_chain(
    cuts: int,
    spans: Callable[[int], Sequence[int]],
    menu: Callable[[int, int], tuple[Sequence[Option], int]],
    limit_bytes: float,
) -> list[tuple[int, int, Option]] | None:
    """The pieces (first cut, last cut, option) of least seconds under the limit; None if there are
    none.

    `spans(i)` are the cuts at which a piece that starts at cut i may end; `menu` gives its options
    and the bytes that are around in its time whatever it does.
    """
    if limit_bytes <= 0:
        return None
    slot = limit_bytes / SLOTS
    cost = np.full((cuts, SLOTS + 1), np.inf)
    # which cut, by which option, which slot
    came_from = np.full((3, cuts, SLOTS + 1), -1, dtype=np.int64)
    cost[0, 0] = 0.0
    slots = np.arange(SLOTS + 1)
    for start in range(cuts - 1):
        row = cost[start]
        finite = np.flatnonzero(np.isfinite(row))
        if not len(finite):
            continue
        lowest = int(finite[0])
        for stop in spans(start):
            options, around = menu(start, stop)
            ways = [
                (
                    number,
                    min(int((limit_bytes - around - option.peak_bytes) / slot), SLOTS - shift),
                    shift,
                    option,
                )
                for number, option in enumerate(options)
                for shift in (round(option.kept_bytes / slot),)
            ]
            ways = [way for way in ways if way[1] >= lowest]
            if not ways:
                continue
            offered = np.full((len(ways), SLOTS + 1), np.inf)
            for place, (_, highest, shift, option) in enumerate(ways):
                offered[place, lowest + shift : highest + shift + 1] = (
                    row[lowest : highest + 1] + option.seconds
                )
            best = offered.argmin(axis=0)
            least = offered[best, slots]
            better = np.flatnonzero(least < cost[stop])
            if len(better):
                numbers, _, shifts, _ = zip(*ways, strict=True)
                cost[stop, better] = least[better]
                came_from[0, stop, better] = start
                came_from[1, stop, better] = np.array(numbers)[best[better]]
                came_from[2, stop, better] = better - np.array(shifts)[best[better]]
    slot_index = int(np.argmin(cost[cuts - 1]))
    if not np.isfinite(cost[cuts - 1, slot_index]):
        return None
    chain: list[tuple[int, int, Option]] = []
    stop = cuts - 1
    while stop > 0:
        start, number, previous = (int(x) for x in came_from[:, stop, slot_index])
        chain.append((start, stop, menu(start, stop)[0][number]))
        stop, slot_index = start, previous
    return chain[::-1]
