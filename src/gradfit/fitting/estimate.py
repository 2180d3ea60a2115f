"""`estimate`: will it fit on a machine that is not here, why not, and what each lever would give.
On shapes alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradfit import records
from gradfit.arguments import check_arguments
from gradfit.batches.runner import LossFunction, count_rows
from gradfit.errors import BudgetInfeasible, UnsupportedOp
from gradfit.machines import find_machine
from gradfit.planning.api import plain_plan, plan, updates_within
from gradfit.planning.plan import Plan
from gradfit.planning.simulate import KEEP, REBUILD, Simulation, simulate
from gradfit.profiling.make_profile import profile as make_profile
from gradfit.profiling.profile import Hardware, Profile
from gradfit.profiling.step_graph import Graph
from gradfit.units import NO_BUDGET, format_bytes, format_seconds

_Split = Callable[[Any, int], Iterable[Any]] | None
_LARGEST = 6  # modules that are named at the peak


@dataclass(frozen=True, slots=True)
class Lever:
    """One way to need less memory, by itself or with others.

    Attributes:
        name: what it is.
        peak_bytes: of a step with it: within what was aimed at (the machine's memory, or half of
            what plain PyTorch needs if that fits) if it can be, else the least there is.
        step_seconds: of one update by the machine's data sheet; None where only the peak is known.
        fits: whether the peak is within what was aimed at.
        how: the call that pulls it.
    """

    name: str
    peak_bytes: int
    step_seconds: float | None
    fits: bool
    how: str


@dataclass(frozen=True)
class Estimate:
    """What one step would need on a machine, and what would make it less.

    Attributes:
        machine: its name.
        memory_bytes: what it has.
        batch_size: rows of one update.
        peak_bytes: most bytes of live tensors, plain PyTorch with the whole batch at once.
        parts: bytes at the peak, by what takes them.
        peak_at: when the peak comes, in words.
        alive: bytes of values that are alive at the peak, by the module that made them, the largest
            first.
        step_seconds: of one plain update, by the machine's data sheet.
        levers: what each would give.
        kernels: the kind of device whose operators were followed on shapes; another one's may save
            other tensors.
        versions: of torch and Python.
    """

    machine: str
    memory_bytes: int
    batch_size: int
    peak_bytes: int
    parts: dict[str, int]
    peak_at: str
    alive: dict[str, int]
    step_seconds: float
    levers: tuple[Lever, ...]
    kernels: str
    versions: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether a plain step's tensors are within the machine's memory."""
        return self.peak_bytes <= self.memory_bytes

    def to_json(self) -> str:
        """As JSON text."""
        return records.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Estimate:
        """Read what `to_json` wrote.

        Args:
            text: JSON.
        """
        return records.from_json(cls, text)

    def __str__(self) -> str:
        answer = "fits" if self.fits else "does not fit"
        lines = [
            (
                f"A batch of {self.batch_size} {answer} on {self.machine or 'this hardware'}: plain"
                f" PyTorch needs {format_bytes(self.peak_bytes)} of"
                f" {format_bytes(self.memory_bytes)} ({self.peak_bytes / self.memory_bytes:.0%}),"
                f" and {format_seconds(self.step_seconds)} a step."
            ),
            f"The peak is {self.peak_at}:",
        ]
        lines += [f"  {name:<22}{format_bytes(count):>12}" for name, count in _by_size(self.parts)]
        lines.append("Alive then, by the module that made it:")
        lines += [f"  {name:<34}{format_bytes(count):>12}" for name, count in self.alive.items()]
        lines += self._lines_of_levers()
        lines.append(
            f"Followed on shapes with the operators of {self.kernels}. Bytes of tensors: what an"
            " allocator rounds, and a driver takes, comes on top."
        )
        return "\n".join(lines)

    def _lines_of_levers(self) -> list[str]:
        heading, enough = "What would help:", "fits"
        if self.fits:
            heading, enough = "What would make it half of that:", "yes"
        return [heading, *(_line_of_lever(lever, enough) for lever in self.levers)]


def _line_of_lever(lever: Lever, enough: str) -> str:
    seconds = "" if lever.step_seconds is None else format_seconds(lever.step_seconds)
    answer = enough if lever.fits else "too large"
    return (
        f"  {lever.name:<34}{format_bytes(lever.peak_bytes):>12}  {seconds:>9} "
        f" {answer:<10}{lever.how}"
    )


def estimate(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Any = None,
    hardware: str | Hardware = "a100-80gb",
    *,
    split: _Split = None,
) -> Estimate:
    """Will it fit? What one update of this model with this batch would need on a machine that need
    not be here.

    Nothing is run: the step is followed on shapes, as by `profile(..., fake=True)`. The model may
    be on the meta device.

    Args:
        model: in training mode, on any device.
        loss_fn: as for `fit`: `loss_fn(model, batch)`.
        batch: of the size of one update.
        optimizer: whose state and temporaries count; None leaves them out.
        hardware: a name (`gradfit.machines.MACHINES`), or a `Hardware`.
        split: how the batch is cut, as for `fit`.

    Raises:
        UnsupportedOp: the step asks what is in a tensor, or an operator of it has no shapes.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    >>> batch = torch.ones(64, 512)
    >>> said = estimate(model, lambda m, x: m(x).square().mean(), batch, hardware="t4")
    >>> said.fits, said.parts["parameters"]
    (True, 8398848)
    """
    check_arguments(model, loss_fn, split=split)
    count_rows(batch, split, "batch", fake=True)
    machine = find_machine(hardware, _dtype_of(model))
    try:
        profile = make_profile(
            model, loss_fn, batch, optimizer, fake=True, hardware=machine, split=split
        )
    except UnsupportedOp as error:
        raise UnsupportedOp(
            f"A step with this batch cannot be followed on shapes: {error}"
        ) from error
    rows = count_rows(batch, split, "batch", fake=True)
    plain = _plain_at_once(profile, rows)
    memory = int(machine.memory)
    # Where plain PyTorch fits, too, the levers are shown for half of what it needs.
    target = memory if plain.peak_bytes > memory else plain.peak_bytes // 2
    levers = [*_levers(profile, rows, target)]
    levers += _optimizer_levers(model, loss_fn, batch, optimizer, machine, split, profile, target)
    return Estimate(
        machine=machine.name,
        memory_bytes=memory,
        batch_size=rows,
        peak_bytes=plain.peak_bytes,
        parts={name: count for name, count in plain.breakdown.items() if count},
        peak_at=plain.peak_at,
        alive=_alive_at_peak(profile, rows),
        step_seconds=plain.step_seconds,
        levers=tuple(levers),
        kernels=_kernels_of(model),
        versions=dict(profile.versions),
    )


def _plain_at_once(profile: Profile, rows: int) -> Plan:
    """All rows in one plain step."""
    plain = plain_plan(profile, memory=NO_BUDGET, batch_size=rows, micro_batch=rows)
    assert plain is not None, "everything can be kept where there is no budget"
    return plain


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    types = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return types[0] if types else torch.float32


def _kernels_of(model: torch.nn.Module) -> str:
    """The kind of device that the shapes were on: that of the model, or for the meta device this
    machine's.
    """
    kind = next(model.parameters()).device.type
    if kind != "meta":
        return kind
    here = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if here is None else here.type


def _levers(profile: Profile, rows: int, memory: int) -> Iterable[Lever]:
    """What cutting, recomputing, offloading and tiling give, alone and together."""
    at_hand = dataclasses.replace(profile, host_bandwidth=0.0, tiled=())
    may_cut = profile.splittable and rows > profile.min_batch
    if may_cut:
        yield _plain_lever(at_hand, rows, memory)
    yield _lever("recomputing", at_hand, memory, None, "fit(..., micro_batch='whole', tile=False)")
    if may_cut:
        yield _lever("micro-batches and recomputing", at_hand, memory, rows, "fit(..., tile=False)")
    if profile.host_bandwidth:
        moved = dataclasses.replace(profile, tiled=())
        yield _lever(
            "recomputing and offloading",
            moved,
            memory,
            None,
            "fit(..., micro_batch='whole', offload=True)",
        )
    if profile.tiled:
        tiled = dataclasses.replace(profile, host_bandwidth=0.0)
        yield _lever(
            "all of these and tiles",
            tiled,
            memory,
            rows if profile.splittable else None,
            "fit(...)",
        )


def _plain_lever(profile: Profile, rows: int, memory: int) -> Lever:
    """The largest micro-batch that needs no recomputation; the smallest there is, if none fits."""
    plain = plain_plan(profile, memory=memory, batch_size=rows)
    fits = plain is not None
    if plain is None:
        plain = plain_plan(
            profile, memory=NO_BUDGET, batch_size=rows, micro_batch=profile.min_batch
        )
    assert plain is not None
    name = f"micro-batches of {plain.micro_batch}"
    return Lever(
        name,
        plain.peak_bytes,
        plain.step_seconds,
        fits,
        f"fit(..., micro_batch={plain.micro_batch})",
    )


def _lever(name: str, profile: Profile, memory: int, batch_size: int | None, how: str) -> Lever:
    # as `fit` would, with the update in groups where nothing else is enough
    for updating in updates_within(profile, memory, batch_size or profile.batch_size):
        try:
            within = plan(updating, memory=memory, batch_size=batch_size)
        except BudgetInfeasible as smallest:
            least = smallest.min_bytes
        else:
            return Lever(name, within.peak_bytes, within.step_seconds, True, how)
    return Lever(name, least, None, False, how)


def _optimizer_levers(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Any,
    machine: Hardware,
    split: _Split,
    profile: Profile,
    target: int,
) -> list[Lever]:
    """Some parameters after the others instead of all at once: fewer temporaries, more launches."""
    return [
        *_grouped_levers(profile, target),
        *_one_by_one_levers(model, loss_fn, batch, optimizer, machine, split, profile, target),
    ]


def _grouped_levers(profile: Profile, target: int) -> list[Lever]:
    """With the same bits, in as few groups as are enough; in the most there can be, if none are."""
    updates = [
        (one, _plain_at_once(one, profile.batch_size)) for one in profile.smaller_updates()[1:]
    ]
    if not updates:
        return []
    enough = [pair for pair in updates if pair[1].peak_bytes <= target]
    updating, plain = enough[0] if enough else updates[-1]
    name = f"the update in {len(updating.update_groups)} groups"
    return [Lever(name, plain.peak_bytes, plain.step_seconds, bool(enough), "fit(...)")]


def _one_by_one_levers(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Any,
    machine: Hardware,
    split: _Split,
    profile: Profile,
    target: int,
) -> list[Lever]:
    groups = getattr(optimizer, "param_groups", [])
    if not profile.optimizer_burst_bytes or not any("foreach" in group for group in groups):
        return []
    single = copy.copy(optimizer)
    single.param_groups = [{**group, "foreach": False, "fused": None} for group in groups]
    other = make_profile(
        model, loss_fn, batch, single, fake=True, hardware=machine, split=split, tile=False
    )
    plain = _plain_at_once(other, profile.batch_size)
    fits = plain.peak_bytes <= target
    how = f"{type(optimizer).__name__}(..., foreach=False)"
    return [Lever("the optimizer, one by one", plain.peak_bytes, plain.step_seconds, fits, how)]


def _alive_at_peak(profile: Profile, rows: int) -> dict[str, int]:
    """Bytes of the values that are alive at the peak, by module; the smaller ones together."""
    graph = profile.at(rows, accumulates=False)
    result = simulate(graph, [KEEP if keepable else REBUILD for keepable in graph.keepable])
    taken: dict[str, int] = {}
    for value, producer in enumerate(graph.producer):
        if producer >= 0 and _lives(value, graph, result):
            module = profile.operations[producer].module or "the model"
            taken[module] = taken.get(module, 0) + graph.held_bytes[value]
    return _largest_named(taken)


def _lives(value: int, graph: Graph, result: Simulation) -> bool:
    """Whether a value is there at the peak."""
    is_needed = graph.last_need[value] >= result.index
    if result.phase != "forward":
        return is_needed and result.phase != "optimizer"
    is_there = graph.producer[value] <= result.index
    return is_there and (graph.last_need[value] >= 0 or graph.dies[value] >= result.index)


def _largest_named(taken: dict[str, int]) -> dict[str, int]:
    named = _by_size(taken)  # without those of no bytes
    shown = dict(named[:_LARGEST])
    if len(named) > _LARGEST:
        shown[f"{len(named) - _LARGEST} others"] = sum(count for _, count in named[_LARGEST:])
    return shown


def _by_size(parts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(
        ((name, count) for name, count in parts.items() if count), key=lambda part: -part[1]
    )
