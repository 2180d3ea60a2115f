"""Batch sizes that change from step to step, and a batch sampler that follows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized

from torch import Tensor
from torch.utils.data import Sampler

from gradfit.arguments import invalid, read_count, read_list
from gradfit.errors import MisuseError


class VariableBatchScheduler:
    """Walks through a list of batch sizes, one per step.

    Args:
        batch_schedule: the size of each step's batch, in rows.

    >>> scheduler = VariableBatchScheduler([4, 8, 16])
    >>> scheduler.advance(); scheduler.get_current_batch_size(), scheduler.get_remaining_steps()
    (8, 2)
    >>> [len(batch) for batch in scheduler.batches(range(40))]
    [4, 8, 16, 4, 8]
    """

    def __init__(self, batch_schedule: Sequence[int]) -> None:
        sizes = read_list(batch_schedule, "batch_schedule", "a list, for example [8, 16, 32]")
        if not sizes:
            raise MisuseError("batch_schedule is empty. Pass for example [8, 16, 32].")
        self.batch_schedule = [
            read_count(size, f"batch_schedule[{step}]") for step, size in enumerate(sizes)
        ]
        self.current_step = 0

    @property
    def total_steps(self) -> int:
        """How many steps the schedule has."""
        return len(self.batch_schedule)

    @property
    def effective_batch_size(self) -> int:
        """The average batch size over the whole schedule, rounded down."""
        return sum(self.batch_schedule) // self.total_steps

    def get_current_batch_size(self) -> int:
        """The batch size of the current step."""
        if not self.get_remaining_steps():
            raise MisuseError(
                f"The schedule's {self.total_steps} steps are over. Call reset() to start again."
            )
        return self.batch_schedule[self.current_step]

    def get_remaining_steps(self) -> int:
        """How many steps are left, the current one included."""
        return self.total_steps - self.current_step

    def get_effective_batch_size(self, window_size: int) -> int:
        """The average batch size over the next `window_size` steps, or as many as are left, rounded
        down.

        Args:
            window_size: steps to look ahead, the present one included.
        """
        window = self.batch_schedule[self.current_step :][: read_count(window_size, "window_size")]
        if not window:
            raise MisuseError(
                f"The schedule's {self.total_steps} steps are over. Call reset() to start again."
            )
        return sum(window) // len(window)

    def advance(self) -> None:
        """Go on to the next step."""
        if not self.get_remaining_steps():
            raise MisuseError(
                f"advance: the schedule's {self.total_steps} steps are over. Call reset() to start"
                " again."
            )
        self.current_step += 1

    def reset(self) -> None:
        """Go back to the first step."""
        self.current_step = 0

    def batches(self, sampler: Iterable[int]) -> ScheduledBatchSampler:
        """A batch sampler for `DataLoader(..., batch_sampler=...)`, the schedule over and over.

        Every pass over it begins at the schedule's first step and ends with the sampler; the last
        batch holds what is left. The scheduler's own step is not moved.

        Args:
            sampler: gives the rows' indices in the order of an epoch.
        """
        if isinstance(sampler, str | bytes | Tensor) or not isinstance(sampler, Iterable):
            raise invalid(
                "sampler",
                sampler,
                f"is a {type(sampler).__name__}",
                "RandomSampler(dataset) or range(len(dataset))",
            )
        return ScheduledBatchSampler(sampler, tuple(self.batch_schedule))

    def __repr__(self) -> str:
        return f"VariableBatchScheduler({self.batch_schedule}, current_step={self.current_step})"


class ScheduledBatchSampler(Sampler[list[int]]):
    """Indices in batches whose sizes follow a schedule, over and over."""

    def __init__(self, sampler: Iterable[int], schedule: tuple[int, ...]) -> None:
        self.sampler = sampler
        self.schedule = schedule

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        for size in itertools.cycle(self.schedule):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise MisuseError(
                f"The sampler, a {type(self.sampler).__name__}, has no length, so neither have its"
                " batches."
            )
        rounds, left = divmod(len(self.sampler), sum(self.schedule))
        reached = itertools.accumulate(self.schedule, initial=0)
        return rounds * len(self.schedule) + sum(
            before < left for before in itertools.islice(reached, len(self.schedule))
        )
