"""Which of a few ways is the fastest, by the clock, in few passes.

All of them take turns, so that a machine that is slow for a while is so for each; what is clearly
behind is not run again. A way that is alone is timed for its own sake, and briefly.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Passes of each way: at most; at least, where there are several; and until they took so long.
_MOST, _LEAST, _SECONDS = 10, 3, 0.4
_ALONE_SECONDS = 0.25
_PLENTY_SECONDS = 5.0  # where passes are as long as this, one of each is enough
_BEFORE_DROPPING = 2
_BEHIND = 1.2  # times the fastest way's seconds


class Race:
    """Seconds of passes, by the number of the way.

    Args:
        passes: how many passes of each way a step has, by its rows.
        together: several processes run these passes together, each with its own clock: then all
            ways are run equally often.

    >>> race = Race([1.0, 1.0])
    >>> for place, seconds in ((0, 0.1), (1, 0.3), (0, 0.5), (1, 0.3)):
    ...     race.add(place, seconds)
    >>> race.drop_slow()
    >>> race.running, race.is_over
    ([0], True)
    """

    def __init__(self, passes: Sequence[float], *, together: bool = False) -> None:
        self.running = list(range(len(passes)))
        """The ways that are to be timed again."""
        self._passes, self._together = passes, together
        self._taken: list[list[float]] = [[] for _ in passes]

    def add(self, place: int, seconds: float) -> None:
        """One more pass of a way."""
        self._taken[place].append(seconds)

    def drop_slow(self) -> None:
        """Leave out what is clearly behind: by the faster of two passes or more, so that one
        disturbance does not decide.
        """
        if self._together or len(self._taken[self.running[0]]) < _BEFORE_DROPPING:
            return
        best = min(self._least(place) for place in self.running)
        self.running = [place for place in self.running if self._least(place) <= _BEHIND * best]

    def _least(self, place: int) -> float:
        return min(self._taken[place]) * self._passes[place]

    @property
    def is_over(self) -> bool:
        """Whether more passes would tell nothing new."""
        taken = [self._taken[place] for place in self.running]
        rounds, seconds = len(taken[0]), sum(map(sum, taken)) / len(taken)
        if self._together:
            return rounds >= _LEAST
        if rounds >= _MOST or seconds >= _PLENTY_SECONDS:
            return True
        if len(self.running) > 1:
            return rounds >= _LEAST and seconds >= _SECONDS
        has_won = len(self._taken) > 1  # else it has no rivals
        return rounds > 0 and (has_won or seconds >= _ALONE_SECONDS)

    def step_seconds(self, place: int) -> float:
        """Of all passes of a step of this way."""
        return statistics.median(self._taken[place]) * self._passes[place]
