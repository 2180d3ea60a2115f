"""Windows that several processes fill together: DDP and FSDP2 modules, kept from communicating and
reduced once per window.

Neither module communicates gradients by itself while a window fills: a forward under the
accumulator is a forward under `no_sync`. At the window's end the processes meet once. Each then
multiplies its own sums by its factor, which makes the sum over the ranks the mean over all items,
and no rank needs to have held as many micro-batches as another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradfit import _torch_distributed as private
from gradfit.accumulate.processes import (
    SINGLE_PROCESS,
    AllParts,
    ProcessPart,
    SingleProcess,
    WindowOfProcess,
)
from gradfit.arguments import Number
from gradfit.distributed.no_sync import ForwardHooks, modules_of
from gradfit.distributed.process_group import Group
from gradfit.errors import MisuseError, RankFailed


def all_ranks(tensors: list[Tensor], window: WindowOfProcess) -> SingleProcess:
    """The processes that share these parameters; nobody if no DDP or FSDP2 module holds them."""
    # Here and not above: both are built on this file, and FSDP2 takes 0.6 s to import.
    from gradfit.distributed.fsdp import Sharded, fully_sharded_modules, is_sharded
    from gradfit.distributed.replicas import replicas_of

    sharded = [is_sharded(tensor) for tensor in tensors]
    if any(sharded):
        units = fully_sharded_modules(tensors)
        _check_all_sharded(sharded, tensors)
        return Sharded(units, tensors, window)
    flat = private.flat_sharding_class()
    kinds = (private.DistributedDataParallel, *([] if flat is None else [flat]))
    modules = modules_of(kinds, tensors)
    if not modules:
        return replicas_of(tensors, window) or SINGLE_PROCESS
    if flat is not None:
        _check_none_flat(modules, flat)
    return _of_ddp_modules(modules, tensors, window)


def _check_all_sharded(sharded: list[bool], tensors: list[Tensor]) -> None:
    if not all(sharded):
        at = sharded.index(False)
        raise MisuseError(
            f"The parameter at {at}, of shape {tuple(tensors[at].shape)}, is not sharded,"
            " others are: nobody would add up its gradient over the ranks. Call"
            " fully_shard(model) on the root module too."
        )


def _check_none_flat(modules: list[Any], flat: type) -> None:
    if any(isinstance(module, flat) for module in modules):
        raise MisuseError(
            "The parameters belong to a FullyShardedDataParallel module, which averages over the"
            " ranks in every backward pass, whatever each rank's rows weigh. Shard the model with"
            " torch.distributed.fsdp.fully_shard instead, or wrap it in DistributedDataParallel."
        )


def _of_ddp_modules(
    modules: list[Any], tensors: list[Tensor], window: WindowOfProcess
) -> SingleProcess:
    from gradfit.distributed.ddp import Replicated

    groups = {id(private.ddp_group(module)): private.ddp_group(module) for module in modules}
    if len(groups) > 1:
        raise MisuseError(
            f"The parameters belong to {len(modules)} DDP modules with {len(groups)} different"
            " process groups. Pass each module's parameters to an accumulator of its own."
        )
    _check_all_held(modules, tensors)
    return Replicated(modules, Group(next(iter(groups.values()))), window)


def _check_all_held(modules: list[Any], tensors: list[Tensor]) -> None:
    held = {id(tensor) for module in modules for tensor in module.parameters()}
    for at, tensor in enumerate(tensors):
        if id(tensor) not in held:
            raise MisuseError(
                f"The parameter at {at}, of shape {tuple(tensor.shape)}, is not in the DDP module"
                " that holds others: nobody would add up its gradient over the ranks. Wrap a"
                " module that holds all of them."
            )


class AllRanks(SingleProcess):
    """What DDP and FSDP2 have in common: the meeting."""

    def __init__(self, modules: list[Any], group: Group, window: WindowOfProcess) -> None:
        self.modules, self.group, self.size = modules, group, group.size
        self._window = weakref.ref(window)  # which holds this
        self._in_trial = False
        self._forward_hooks = ForwardHooks(modules, self)

    def warm_up(self) -> None:
        """Do what only the first pass does, so that all passes are alike; by all ranks together."""

    def settle(self) -> None:
        """This rank has come to a meeting: do what the others still need it for."""

    def meet(self, part: ProcessPart) -> AllParts:
        self.settle()
        window = self._window()
        count = 0 if window is None else len(window.tensors)
        records = self.group.exchange(_record_of(part, count))
        self.check(records)
        return _add_up_records(records, part, count)

    def reduce(self, window: Any, whole: AllParts, factor: float) -> float:
        # FSDP2 reduces on one rank, too: nothing else brings its gradients to `.grad`.
        if self.size == 1 and not self.lockstep:
            return factor
        self.add_up(window, whole.present, whole.sparse, factor)
        return 1.0

    def add_up(
        self, window: Any, present: tuple[int, ...], sparse: tuple[int, ...], factor: float
    ) -> None:
        """Make `.grad` the sum over the ranks of `factor` times each one's sources, for these
        parameters.
        """
        raise NotImplementedError

    def total(self, window: Any, gradients: dict[int, Tensor], factor: float) -> list[Tensor]:
        """The sum over the ranks of other tensors than the window's, laid out as the parameters'
        gradients are.
        """
        with _gradients_aside([*window.tensors, *window.sources]):
            for at, gradient in gradients.items():
                # A copy: whoever adds up gives up the sources.
                window.sources[at].grad = to_dense(gradient).clone()
            self.add_up(window, tuple(range(len(window.tensors))), (), factor)
            return [tensor.grad for tensor in window.tensors]

    def check(self, records: list[dict[str, Any]]) -> None:
        """Refuse to go on unless all ranks do the same, and can."""
        kinds = [one["kind"] for one in records]
        if len(set(kinds)) > 1:
            raise RankFailed(
                f"The ranks do different things: {', '.join(kinds)}. Call"
                " step(), flush() and state_dict() on all ranks in the same order."
            )
        self._check_none_broken(records)
        counts = [one["parameters"] for one in records]
        if len(set(counts)) > 1:
            raise MisuseError(
                f"The ranks accumulate {counts} parameters. Pass the same parameters on every rank."
            )

    def _check_none_broken(self, records: list[dict[str, Any]]) -> None:
        """On no rank but this one, which has raised by itself."""
        broken = {rank for rank, one in enumerate(records) if one["flags"][2]}
        others = sorted(broken - {self.group.rank})
        if others:
            raise RankFailed(
                f"On rank {', '.join(map(str, others))} a backward pass failed half-way, so the"
                " window holds part of a micro-batch. Call reset() on every rank and repeat the"
                " window."
            )

    def agree(self, error: Exception | None) -> None:
        """Each rank has tried something that may fail on it alone: if it did anywhere, nobody goes
        on.
        """
        self.settle()
        said = "" if error is None else f"{type(error).__name__}: {error}"
        records = self.group.exchange({"kind": "fit", "failed": said})
        reasons = [
            f"rank {rank} raised {one['failed']}"
            for rank, one in enumerate(records)
            if one.get("failed")
        ]
        if reasons and error is None:
            raise RankFailed("; ".join(reasons))

    def share_options(self, optimizer: Any, whole: AllParts, joined: bool) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if whole.leader is None or groups is None:
            return
        records = self.group.exchange({"groups": list(map(_numbers_in, groups))})
        if joined:
            for group, current in zip(groups, records[whole.leader]["groups"], strict=True):
                group.update(current)

    def failed(self, error: BaseException) -> None:
        self.group.leave_word(error)

    def close(self) -> None:
        self.release()
        self._forward_hooks.close()

    @property
    def filling(self) -> bool:
        """Whether a forward now is one of a window, or a trial for one."""
        window = self._window()
        return self._in_trial or (window is not None and window.enabled)

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        self._in_trial = True
        try:
            yield
        finally:
            self._in_trial = False
            window = self._window()
            for source in () if window is None else window.sources:
                source.grad = None
            self.release()

    def before_forward(self, module: Any) -> None:
        """Keep the module from communicating in this forward and its backward."""
        raise NotImplementedError

    def after_forward(self, module: Any) -> None:
        """A forward has ended."""


def _numbers_in(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options that are numbers, as a learning rate."""
    return {name: value for name, value in group.items() if type(value) in (int, float, bool)}


def _record_of(part: ProcessPart, count: int) -> dict[str, Any]:
    """What a rank tells the others at the end of a window of so many parameters."""
    return {
        "kind": "end of a window",
        "weights": part.weights,
        "notes": part.notes,
        "counts": [part.micro_batches, part.skipped],
        "scales": [part.base, part.scale],
        "flags": [int(part.flushing), int(part.joined), int(part.broken)],
        "present": _pack(part.present, count),
        "sparse": _pack(part.sparse, count),
        "parameters": count,
    }


def _add_up_records(records: list[dict[str, Any]], part: ProcessPart, count: int) -> AllParts:
    """The window as all ranks hold it."""
    all_of = {name: [one[name] for one in records] for name in records[0]}
    micro_batches, skipped = zip(*all_of["counts"], strict=True)
    bases, scales = zip(*all_of["scales"], strict=True)
    flushing, joined, _ = zip(*all_of["flags"], strict=True)
    active = [rank for rank, counts in enumerate(all_of["counts"]) if sum(counts)]
    return AllParts(
        weights=_add_by_name(all_of["weights"]),
        notes={name: _sum_of_notes(name, all_of["notes"]) for name in part.notes},
        micro_batches=sum(micro_batches),
        skipped=sum(skipped),
        base=bases[active[0]] if active else part.base,
        scale=min(scales),
        flushing=all(flushing),
        present=_unpack(all_of["present"], count),
        sparse=_unpack(all_of["sparse"], count),
        leader=_leader(list(joined)),
        active=tuple(active),
    )


def _sum_of_notes(name: str, notes: list[dict[str, float]]) -> float:
    return math.fsum(one.get(name, 0.0) for one in notes)


def _leader(joined: list[int]) -> int | None:
    """The first rank that has not joined since (0); None if all have, or nobody."""
    return joined.index(0) if len(set(joined)) == 2 else None


def _add_by_name(weights: list[dict[str, Number]]) -> dict[str, Number]:
    names = dict.fromkeys(itertools.chain(*weights))
    return {name: add_weights([one.get(name, 0) for one in weights]) for name in names}


@contextlib.contextmanager
def _gradients_aside(slots: list[Any]) -> Iterator[None]:
    """Inside, nobody has a gradient; afterwards all have theirs."""
    kept = [slot.grad for slot in slots]
    try:
        for slot in slots:
            slot.grad = None
        yield
    finally:
        # All are emptied before any is filled: under DDP a parameter is in the list twice, as its
        # own source.
        for slot in slots:
            slot.grad = None
        for slot, gradient in zip(slots, kept, strict=True):
            if gradient is not None:
                slot.grad = gradient


def add_weights(weights: list[Number]) -> Number:
    """The sum, exact for whole numbers, and for others the same in any order."""
    return sum(weights) if all(type(one) is int for one in weights) else math.fsum(weights)


def to_dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _pack(positions: tuple[int, ...], count: int) -> str:
    """Positions as a string that is short if they are all there, or none is."""
    if len(positions) == count:
        return "*"
    return format(sum(1 << at for at in positions), "x") if positions else ""


def _unpack(packed: list[str], count: int) -> tuple[int, ...]:
    if "*" in packed:
        return tuple(range(count))
    bits = functools.reduce(operator.or_, (int(one or "0", 16) for one in packed))
    return tuple(at for at in range(count) if bits >> at & 1)
