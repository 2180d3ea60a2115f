"""FSDP2: each rank holds a shard of every parameter, and while a window fills, full gradients of
its own.

`fully_shard` keeps unreduced gradients apart from the parameters, full and on every rank; they are
this window's *sources*. At the end FSDP2's own reduction runs once, by the policy the units were
given, as a sum.

The units' parameters are gathered in every forward and backward, by all ranks together;
`gathers.py` lets them run different numbers of passes all the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from gradfit import _torch_fsdp as fsdp
from gradfit.accumulate.scaling import gradient_norm
from gradfit.distributed.fsdp_gathers import Gathers
from gradfit.distributed.no_sync import modules_of
from gradfit.distributed.process_group import Group
from gradfit.distributed.shared_window import AllRanks
from gradfit.errors import MisuseError
from gradfit.own_passes import own_pass


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is one of a `fully_shard` unit."""
    return isinstance(tensor, DTensor)


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether any part of a model is a `fully_shard` unit."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def data_parallel_size(model: torch.nn.Module) -> int:
    """Over how many ranks a `fully_shard` model's gradients are added up."""
    units = _units_of([module for module in model.modules() if isinstance(module, FSDPModule)])
    return fsdp.data_parallel_group(units[0]).size() if units else 1


def fully_sharded_modules(tensors: list[Tensor]) -> list[Any]:
    """The `fully_shard` modules that hold these parameters, of which some are DTensors."""
    modules = modules_of((FSDPModule,), tensors)
    if not modules:
        raise MisuseError(
            "The parameters are DTensors of no fully_shard module, as tensor parallelism alone"
            " makes them, so it is not known which ranks have rows of their own. Call"
            " fully_shard(model) over a mesh of those ranks."
        )
    return modules


def _units_of(modules: list[Any]) -> list[Any]:
    return [unit for module in modules for unit in fsdp.param_groups(module)]


class Unsharded:
    """A parameter's full gradient on this rank, under the name that autograd's own would have."""

    def __init__(self, tensor: Tensor, kept: Any) -> None:
        self.shape, self._kept = tensor.shape, kept

    @property
    def grad(self) -> Tensor | None:
        return fsdp.unsharded_gradient(self._kept)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        fsdp.set_unsharded_gradient(self._kept, gradient)


class Sharded(AllRanks):
    """The processes of a `fully_shard` module."""

    lockstep = True

    def __init__(self, modules: list[Any], tensors: list[Tensor], window: Any) -> None:
        self.units = _units_of(modules)
        self._kept = {
            id(tensor): kept
            for unit in self.units
            for tensor, kept in fsdp.sharded_parameters(unit)
        }
        self._check_all_kept(tensors)
        super().__init__(modules, Group(fsdp.data_parallel_group(self.units[0])), window)
        self._not_reducing: list[Any] = []
        self._depth = 0
        self._gathers = Gathers(self.group, modules, self.units)

    def _check_all_kept(self, tensors: list[Tensor]) -> None:
        for at, tensor in enumerate(tensors):
            if id(tensor) not in self._kept:
                raise MisuseError(
                    f"The parameter at {at}, of shape {tuple(tensor.shape)}, is a DTensor of no"
                    " fully_shard module. Make the optimizer after fully_shard, from"
                    " model.parameters()."
                )

    @property
    def reduce_bytes(self) -> int:  # type: ignore[override]
        """The largest unit twice: what goes into its reduction and what comes out, or, for a rank
        that waits at the end of its window while others gather, what was sent and the parameters
        made of it."""
        return 2 * max(fsdp.unit_bytes(unit) for unit in self.units)

    def sources(self, tensors: list[Tensor]) -> list[Unsharded]:
        return [Unsharded(tensor, self._kept[id(tensor)]) for tensor in tensors]

    def warm_up(self) -> None:
        """FSDP2 makes the storages that it gathers into in the first pass: a plan has no such
        operations.
        """
        fsdp.initialise(self.modules)
        for unit in self.units:
            _gather_first(unit)

    # -- while a window fills ---------------------------------------------------------------------

    def before_forward(self, module: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not self.filling:
            return
        self._keep_from_reducing()
        self._gathers.begin_pass()

    def _keep_from_reducing(self) -> None:
        self._not_reducing += [unit for unit in self.units if fsdp.set_reduces(unit, False)]

    def after_forward(self, module: Any) -> None:
        self._depth -= 1
        window = self._window()
        if self._depth or window is None:
            return
        for tensor in window.tensors:
            self._follow_gathered(tensor, window)

    def _follow_gathered(self, tensor: Tensor, window: Any) -> None:
        """A parameter has been gathered: backward passes reach the whole one, not the shard."""
        kept = self._kept[id(tensor)]
        fsdp.hand_over_gradient(kept)
        full = fsdp.unsharded_parameter(kept)
        if full is not None and full.requires_grad:
            window.plain.watch(full)
        if tensor.grad_dtype is not None and tensor.grad_dtype != tensor.dtype:
            fsdp.accumulate_in(kept, tensor.grad_dtype)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._gathers.lost = True  # in the middle of a pass, perhaps

    def release(self) -> None:
        self._gathers.announces = False
        while self._not_reducing:
            fsdp.set_reduces(self._not_reducing.pop(), True)

    def resume(self) -> None:
        self._keep_from_reducing()
        self._gathers.announces = self._gathers.announces_passes

    # -- at its end -------------------------------------------------------------------------------

    def settle(self) -> None:
        self._gathers.wait()

    def add_up(
        self, window: Any, positions: tuple[int, ...], sparse: tuple[int, ...], factor: float
    ) -> None:
        present = {id(window.tensors[at]) for at in positions}
        fsdp.initialise(self.modules)
        with torch.no_grad(), own_pass():
            for unit in reversed(self.units):  # as a backward pass reduces them, on every rank
                self._reduce_unit(unit, present, factor)

    def _reduce_unit(self, unit: Any, present: set[int], factor: float) -> None:
        """Add up the gradients of a unit's parameters that are `present`, by id, over the ranks."""
        parameters = fsdp.sharded_parameters(unit)
        mine = [(tensor, kept) for tensor, kept in parameters if id(tensor) in present]
        if not mine:
            return
        _gather_first(unit)
        another_optimizers = [kept for tensor, kept in parameters if id(tensor) not in present]
        with _gradients_taken_out(another_optimizers):
            for tensor, kept in mine:
                fsdp.set_unsharded_gradient(kept, _scaled_or_zeros(tensor, kept, factor))
            last = mine[-1][0]
            fsdp.reduce_group(unit, last.grad_dtype or last.dtype)

    def norm(self, gradients: list[Tensor]) -> float:
        # By the ranks that share a gradient, not by the mesh: fully_shard makes one for each unit
        # that is given none.
        ranks: dict[int, tuple[int, ...]] = {}
        shares: dict[tuple[int, ...], tuple[Any, list[float]]] = {}
        for gradient in gradients:
            mesh = gradient.device_mesh  # type: ignore[attr-defined]
            if id(mesh) not in ranks:
                ranks[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
            shares.setdefault(ranks[id(mesh)], (mesh, []))[1].append(_squares(gradient))
        return math.sqrt(sum(self._sum_over(mesh, local) for mesh, local in shares.values()))

    def _sum_over(self, mesh: Any, local: list[float]) -> float:
        """The sum of these numbers over the ranks of a mesh."""
        total = torch.tensor(math.fsum(local), dtype=torch.float64, device=self.group.device)
        for dimension in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dimension))
        return float(total.item())

    def spread_nonfinite(self, gradients: list[Tensor]) -> None:
        if not math.isfinite(self.norm(gradients)):
            parts = map(_local_part, gradients)
            # One element is enough for whoever looks; a rank's shards may all be empty.
            first = next((part for part in parts if part.numel()), None)
            if first is not None:
                first.view(-1)[0] = math.inf


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather_first(unit: Any) -> None:
    """Have a unit gather if it never did on this rank, and so on no other: they gather together."""
    if fsdp.never_gathered(unit):
        fsdp.take_part(unit)


@contextlib.contextmanager
def _gradients_taken_out(parameters: list[Any]) -> Iterator[None]:
    """Inside, these have no gradients to reduce."""
    gradients = [fsdp.unsharded_gradient(kept) for kept in parameters]
    for kept in parameters:
        fsdp.set_unsharded_gradient(kept, None)
    yield
    for kept, gradient in zip(parameters, gradients, strict=True):
        fsdp.set_unsharded_gradient(kept, gradient)


def _scaled_or_zeros(tensor: Tensor, kept: Any, factor: float) -> Tensor:
    """This rank's sum for a parameter, times a factor; zeros if nothing has come in."""
    gradient = fsdp.unsharded_gradient(kept)
    if gradient is None:
        # In the type in which the others add up: FSDP2 reduces no gradients of two types together
        # (torch 2.13, https://github.com/pytorch/pytorch/issues/196996).
        dtype = tensor.grad_dtype or tensor.dtype
        return torch.zeros(fsdp.unsharded_size(kept), dtype=dtype, device=tensor.device)
    return gradient if factor == 1.0 else gradient.mul_(factor)


def _squares(gradient: Tensor) -> float:
    """This rank's share of a gradient's squared norm."""
    spread: Any = gradient
    copies = 1  # ranks that have the same shard, each of which adds it to the sum
    for dimension, placement in enumerate(spread.placements):
        if isinstance(placement, Replicate):
            copies *= spread.device_mesh.size(dimension)
    local: Tensor = spread.to_local()
    return gradient_norm([local]) ** 2 / copies if local.numel() else 0.0
