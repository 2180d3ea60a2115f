"""Lets ranks run different numbers of passes, though FSDP2 gathers parameters from all ranks in
each of them.

Before it gathers a unit a rank says which, in an exchange of one small number per rank that it does
not wait for. So ranks that run passes cost each other nothing, and ranks that do not can listen:

1. One that has come to the end of its window says so, takes part in every gather of the others, and
   lets go of what it got, until all have come.
2. One whose pass has failed half-way (memory ran out, and it will try again) takes part in the same
   way until those that run begin their next pass, or none runs: there it begins its own. So all
   that run a pass are at the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfit import _torch_distributed as private
from gradfit import _torch_fsdp as fsdp
from gradfit._torch_listen import unseen
from gradfit.distributed.process_group import Group
from gradfit.errors import RankFailed

_WAITS = 0  # … then the units' numbers, from 1, and two words more


class Gathers:
    """What this rank tells the others of its gathers, and how it follows theirs."""

    def __init__(self, group: Group, modules: list[Any], units: list[Any]) -> None:
        self._group, self._modules, self._units = group, modules, units
        self.announces = False
        self.lost = False  # a pass has failed: nobody knows at which unit
        self._begins, self._follows = len(units) + 1, len(units) + 2
        # Once for all: a tensor for each word would be an operation more in each gather.
        self._words = torch.arange(len(units) + 3, dtype=torch.int32, device=group.device)
        fsdp.before_gather(units, self)

    @property
    def announces_passes(self) -> bool:
        """Whether there is anybody to announce gathers to."""
        return self._group.size > 1

    def begin_pass(self) -> None:
        """A forward begins, and its backward will follow."""
        self.announces = False
        if self._find_again():
            with unseen():  # it is none of this pass's operations
                self._follow(self._follows)
        elif self._group.size > 1:
            self._say(self._begins)
        self.announces = self.announces_passes

    def gathering(self, number: int) -> None:
        """A unit is about to gather."""
        if self.announces:
            self._say(number + 1)

    def wait(self) -> None:
        """This rank has no more passes in this window: take part in those of the others."""
        self.announces = False
        self._find_again()
        self._follow(_WAITS)

    def failed(self, error: RuntimeError) -> RankFailed:
        """A gather did not come about: who did not come?"""
        self.announces = False
        return self._group.explain(error, "a gather")

    def _find_again(self) -> bool:
        """After a failed pass: let FSDP2 forget it."""
        lost, self.lost = self.lost, False
        if lost:
            fsdp.forget_pass(self._modules)
        return lost

    def _follow(self, word: int) -> None:
        """Take part in the others' gathers, until all wait (rule 1), or those that run begin a pass
        (rule 2).
        """
        while self._group.size > 1:
            words = self._hear(word)
            running = set(words) - {_WAITS, self._follows}
            if set(words) == {_WAITS} or (word == self._follows and running <= {self._begins}):
                return
            if len(running) > 1:
                raise RankFailed(
                    f"The ranks gather different fully_shard units at once: {words} ({_WAITS} for"
                    " a rank at the end of its window). Let all ranks run the same modules in the"
                    " same order."
                )
            for number in running - {self._begins}:
                fsdp.initialise(self._modules)
                fsdp.take_part(self._units[number - 1])

    def _hear(self, word: int) -> list[int]:
        """Say a word, and wait for those of all ranks."""
        of_all_ranks, work = self._say(word)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._group.explain(error, "the end of a window") from error
        words: list[int] = of_all_ranks.tolist()
        return words

    def _say(self, word: int) -> tuple[Tensor, Any]:
        with unseen():
            of_all_ranks = torch.empty(
                self._group.size, dtype=torch.int32, device=self._group.device
            )
            mine = self._words[word : word + 1]
            return of_all_ranks, private.all_gather_flat(
                of_all_ranks, mine, self._group.handle, async_op=True
            )
