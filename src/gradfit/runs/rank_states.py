"""The states of a run on several ranks: each rank writes its own, and only states of one step
belong together.

The first rank's go where those of a process alone would, the others' into directories below. A
state says how many ranks the run had; directories beyond that number are left over from a time when
it had more, and are not looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradfit.distributed.launch import Ranks
from gradfit.errors import StateError
from gradfit.runs.run_state import check_state
from gradfit.runs.state_codec import Shard
from gradfit.runs.state_files import SavedState, StateStore


class RankStates:
    """The states in `out` of all ranks; `store` is where this one writes its own.

    >>> import tempfile
    >>> states = RankStates(Path(tempfile.mkdtemp()), Ranks())
    >>> states.load() is None
    True
    """

    def __init__(self, out: Path, ranks: Ranks) -> None:
        self.out, self._ranks = out, ranks
        self.store = self._store_of(ranks.rank)

    def _store_of(self, rank: int) -> StateStore:
        return StateStore(self.out if rank == 0 else self.out / "ranks" / str(rank), check_state)

    def load(self) -> SavedState | None:
        """The newest state that all ranks can go on from, on all ranks together; None if the first
        rank has none.

        A rank that is new to the run gets the first rank's.
        """
        if self._ranks.size == 1:
            saved = self.store.load()
            if saved is None or not _is_sharded(saved):
                return saved
        return self._load_together()

    def _load_together(self) -> SavedState | None:
        problems: list[str] = []
        steps = self._ranks.tell_all({"steps": self.store.steps()})[0]["steps"]
        for step in steps:
            mine = self._load_with_others(step, problems)
            if mine is not None:
                self.store.forget_after(step)
                return dataclasses.replace(mine, passed_over=(*problems, *mine.passed_over))
        if steps:
            raise StateError(
                f"No step in {str(self.out)!r} has a whole state of every rank."
                f" {' '.join(problems)} Pass another --out."
            )
        return None

    def _load_with_others(self, step: int, problems: list[str]) -> SavedState | None:
        """The state of a step, if all ranks that wrote one have it, on all ranks together."""
        mine = self._load(step, problems)
        told = self._ranks.tell_all({"ranks": 0 if mine is None else ranks_of(mine)})
        count = told[0]["ranks"]
        if not count or any(one["ranks"] != count for one in told[:count]):
            return None
        return self._store_of(0).load(step) if self._ranks.rank >= count else mine

    def _load(self, step: int, problems: list[str]) -> SavedState | None:
        try:
            mine = self.store.load(step)
            if mine is not None and self._ranks.rank == 0 and _is_sharded(mine):
                self._check_absent_ranks(step, ranks_of(mine))
            return mine
        except StateError as error:
            problems.append(str(error))
            return None

    def _check_absent_ranks(self, step: int, ranks: int) -> None:
        """Those that the run had and has no more: nobody is there to look at theirs."""
        for rank in range(self._ranks.size, ranks):
            if step not in self._store_of(rank).steps():
                raise StateError(f"rank {rank} has no state of step {step}.")

    def read_all_ranks(self, saved: SavedState) -> list[Mapping[str, Any]]:
        """The job's state as each rank wrote it together with this one; tensors are read where they
        are indexed.
        """
        jobs = []
        for rank in range(ranks_of(saved)):
            state = self._store_of(rank).load(int(saved.content["step"]), lazily=True)
            if state is None:
                raise StateError(
                    f"Rank {rank} has no state of step {saved.content['step']} in"
                    f" {str(self.out)!r}, and it is needed at another number of ranks. Put all"
                    " ranks' directories there."
                )
            jobs.append(state.content["job"])
        return jobs


def ranks_of(saved: SavedState) -> int:
    """How many ranks the run had that wrote a state."""
    return int(saved.content.get("ranks", 1))


def _is_sharded(saved: SavedState) -> bool:
    job = saved.content.get("job")
    model = job.get("model") if isinstance(job, dict) else None
    return isinstance(model, dict) and any(isinstance(tensor, Shard) for tensor in model.values())
