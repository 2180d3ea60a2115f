"""A plan: what to do with every value, at which micro-batch, and what that is predicted to cost."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gradfit import records
from gradfit.planning.plan_checks import check_plan
from gradfit.tiling.tiles import Tiles
from gradfit.units import NO_BUDGET, format_bytes, format_seconds

_DONE = {"keep": "kept", "rebuild": "rebuilt", "offload": "moved out"}
_LITTLE = 0.02  # extra time below this is none


@dataclass(frozen=True, slots=True)
class Decision:
    """One value that is not simply kept, and what that costs in seconds per micro-batch."""

    value: int
    action: str
    operation: str
    module: str
    source: str
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"  {self.action} {format_bytes(self.nbytes)} of {self.operation} in"
            f" {self.module or '(no module)'} ({self.source or 'no source line'}):"
            f" +{format_seconds(self.seconds)}"
        )


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """What a plan does with the values of one name, since that was asked for."""

    name: str
    action: str
    values: int  # that the step holds, or rebuilds
    nbytes: int  # of these, in one micro-batch

    def __str__(self) -> str:
        if not self.values:
            return f"{self.name!r}, which nothing needs after the forward"
        done = _DONE.get(self.action, self.action)
        many = "1 value" if self.values == 1 else f"{self.values} values"
        return f"{self.name!r} {done} ({many}, {format_bytes(self.nbytes)})"


@dataclass(frozen=True, slots=True)
class Alternative:
    """The next plan on the trade-off: its budget and its time, for comparison."""

    micro_batch: int
    steps: int
    peak_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class Plan:
    """Which values to keep, to rebuild and to offload, the micro-batch, and the predicted peak and
    seconds.

    `actions` has one entry per value of the profile: "keep", "rebuild", "offload", or "external"
    for what is always there. `segments` gives each value's segment and `segment_parents` the tree
    of them (-1 for the root, 0): a value rebuilt on the way to another is held only if its segment
    is the other's or encloses it. `operations` are the names of the profile's operations, so that
    whoever follows the plan can see that it still fits.

    Attributes:
        micro_batch: rows that run at once.
        steps: micro-batches in one update.
        batch_size: rows of one update.
        actions: what becomes of each value.
        segments: the segment of each value.
        segment_parents: the segment that encloses each segment.
        operations: names, in the order of the forward.
        budget_bytes: what was asked for.
        peak_bytes: predicted: most bytes of live tensors during a step.
        breakdown: bytes at the peak, by what takes them.
        peak_at: when the peak comes, in words.
        step_seconds: of one update, all micro-batches and the optimizer's step.
        plain_seconds: of the same micro-batches with everything kept.
        kept_values: values that are kept between forward and backward.
        saved_values: values that plain autograd would keep.
        kept_bytes: bytes of the former, of one micro-batch.
        saved_bytes: bytes of the latter.
        decisions: the values that cost most to rebuild or move, with module and source line.
        less_memory: the next plan with less memory.
        more_memory: the next plan with more.
        heard: after so many operations nothing is written over that a rebuilt value is made from.
        predicted: whether the profile was made on fake tensors.
        seconds_measured: whether `step_seconds` was measured by running the plan.
        versions: of torch and Python, where the profile was made.
        reserved_bytes: predicted: most bytes that the device's caching allocator has reserved in a
            step, by which a budget is held there; 0 where its backend does not say.
        online: why micro-batches do not follow the plan, and what to drop is decided while they
            run; "" if they do.
        tiles: what is cut along tokens, so that gradients are equal up to the rounding of a sum;
            None: nothing.
        comparing: other plans for the same batches, which take turns with this one in real steps
            until the fastest is known; "" if it stays.
        named: what was fixed by name (`gf.name`), and the bytes that it is about.
        update_groups: how many parameters the optimizer updates at a time, in its order, so that
            fewer of its temporaries are there at once; empty: as the optimizer does it.
    """

    micro_batch: int
    steps: int
    batch_size: int
    actions: tuple[str, ...]
    segments: tuple[int, ...]
    segment_parents: tuple[int, ...]
    operations: tuple[str, ...]
    budget_bytes: int
    peak_bytes: int
    breakdown: dict[str, int]  # of the peak
    peak_at: str  # when it comes
    step_seconds: float
    plain_seconds: float  # of the same micro-batches with everything kept
    kept_values: int
    saved_values: int  # what plain autograd would keep
    kept_bytes: int  # between the passes
    saved_bytes: int
    decisions: tuple[Decision, ...] = ()
    less_memory: Alternative | None = None
    more_memory: Alternative | None = None
    # after so many operations nothing is written over that a rebuilt value is made from
    heard: int = 0
    predicted: bool = False  # from a profile on fake tensors
    # `step_seconds` is of passes that were run; the other numbers are predicted
    seconds_measured: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    # what is cut along tokens; gradients are then equal up to the rounding of a sum
    tiles: Tiles | None = None
    # why micro-batches do not follow the plan, and what to drop is decided while they run
    online: str = ""
    # what the device's allocator will have reserved, by a trial's sequence of allocations
    reserved_bytes: int = 0
    # other plans that take turns with this one until the fastest is known
    comparing: str = ""
    named: tuple[NamedChoice, ...] = ()
    # parameters in each group that the optimizer updates by itself
    update_groups: tuple[int, ...] = ()

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is rebuilt or moved out: then a forward need not be recorded."""
        return not {"rebuild", "offload"} & set(self.actions)

    @property
    def extra_seconds(self) -> float:
        """Seconds per step that recomputation and transfers add."""
        return self.step_seconds - self.plain_seconds

    @property
    def is_short(self) -> bool:
        """Whether memory is short: something is cut or recomputed, and that takes time."""
        return self.steps > 1 or self.extra_fraction > _LITTLE

    @property
    def extra_fraction(self) -> float:
        """The same as a fraction of the step that keeps everything."""
        return self.extra_seconds / self.plain_seconds if self.plain_seconds > 0 else 0.0

    def with_extra_seconds(self, seconds: float) -> Plan:
        """The same plan where every step takes so much longer for another reason than
        recomputation.

        Args:
            seconds: added to a step's.
        """
        return dataclasses.replace(
            self,
            step_seconds=self.step_seconds + seconds,
            plain_seconds=self.plain_seconds + seconds,
        )

    def with_step_seconds(self, step_seconds: float) -> Plan:
        """The same plan where a step was measured to take so long: all its seconds in proportion.

        Args:
            step_seconds: measured seconds of one update.
        """
        pace = step_seconds / self.step_seconds if self.step_seconds > 0 else 1.0
        less, more = (
            other and dataclasses.replace(other, step_seconds=other.step_seconds * pace)
            for other in (self.less_memory, self.more_memory)
        )
        return dataclasses.replace(
            self,
            step_seconds=self.step_seconds * pace,
            plain_seconds=self.plain_seconds * pace,
            less_memory=less,
            more_memory=more,
            seconds_measured=True,
        )

    @property
    def split_text(self) -> str:
        """How the batch is cut, as it is said everywhere: the size of a micro-batch × how many
        there are.
        """
        return f"{self.micro_batch} × {self.steps}"

    @property
    def kept_text(self) -> str:
        """How many values are kept, as it is said everywhere."""
        return f"{self.kept_values} of {self.saved_values} values kept"

    @property
    def signature(self) -> str:
        """A short name for the list of operations this plan is for."""
        return hashlib.sha256("\n".join(self.operations).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        plan = records.from_json(Plan, text)
        check_plan(plan)
        return plan

    def __str__(self) -> str:
        lines = [
            self._split_and_prediction(),
            (
                f"{_budget(self.budget_bytes)}; predicted to be kept between the passes: "
                f"{format_bytes(self.kept_bytes)} of {format_bytes(self.saved_bytes)}"
            ),
            f"the predicted peak is {self.peak_at}: {_parts(self.breakdown)}",
            *self._remarks(),
        ]
        if self.decisions:
            lines += ["most expensive decisions, predicted:", *map(str, self.decisions)]
        lines += self._comparison("less memory", self.less_memory)
        lines += self._comparison("more memory", self.more_memory)
        return "\n".join(lines)

    def _remarks(self) -> Iterator[str]:
        """What holds of this plan and not of every other."""
        if self.named:
            yield f"fixed by name: {_listed(self.named)}"
        if self.reserved_bytes:
            yield f"predicted to be reserved on the device: {format_bytes(self.reserved_bytes)}"
        if self.update_groups:
            yield (
                f"update in {len(self.update_groups)} groups of parameters, one after the other,"
                " for fewer temporaries"
            )
        if self.tiles is not None:
            yield (
                f"{self.tiles}: gradients are equal to the untiled ones up to the rounding of a"
                " float sum"
            )
        if self.online:
            yield f"not followed by all micro-batches, which run online, more slowly: {self.online}"
        if self.comparing:
            yield f"still compared, in real steps, with {self.comparing}"

    def _split_and_prediction(self) -> str:
        where = " for a machine that is not here" if self.predicted else ""
        step = f"step {format_seconds(self.step_seconds)}"
        numbers = f"peak {format_bytes(self.peak_bytes)}, {percent(self.extra_fraction)} time"
        said = f"{numbers}; measured: {step}" if self.seconds_measured else f"{numbers}, {step}"
        return f"micro-batch {self.split_text}, {self.kept_text}; predicted{where}: {said}"

    def _comparison(self, title: str, other: Alternative | None) -> list[str]:
        if other is None:
            return []
        change = other.step_seconds / self.step_seconds - 1 if self.step_seconds > 0 else 0.0
        return [
            f"next with {title}, predicted: micro-batch {other.micro_batch} × {other.steps}, peak"
            f" {format_bytes(other.peak_bytes)}, {percent(change)} time against this plan"
        ]


def fixed_text(plan: Plan) -> str:
    """What was fixed by name, as a sentence for a refusal; "" if nothing was."""
    return f" Fixed by name: {_listed(plan.named)}." if plan.named else ""


def _listed(named: Iterable[NamedChoice]) -> str:
    return ", ".join(map(str, named))


def _budget(count: int) -> str:
    return "no budget" if count >= NO_BUDGET else f"budget {format_bytes(count)}"


def _parts(breakdown: Mapping[str, int]) -> str:
    parts = sorted(breakdown.items(), key=lambda item: -item[1])
    return (
        ", ".join(f"{name} {format_bytes(count)}" for name, count in parts if count > 0)
        or "nothing"
    )


def percent(fraction: float) -> str:
    """A change in per cent, as it is said.

    >>> percent(0.06), percent(-0.004)
    ('+6 %', '−0.4 %')
    """
    percent = 100 * fraction
    digits = 0 if abs(percent) >= 1 or percent == 0 else 1
    return f"{'−' if percent < 0 else '+'}{abs(percent):.{digits}f} %"
