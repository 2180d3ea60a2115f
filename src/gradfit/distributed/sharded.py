"""FSDP2: each rank holds a shard of every parameter, and while a window fills, full gradients of its own.

`fully_shard` keeps unreduced gradients apart from the parameters, full and on every rank; they are this window's
*sources*. At the end FSDP2's own reduction runs once, by the policy the units were given, as a sum.

The units' parameters are gathered in every forward and backward, by all ranks together. So that ranks may hold
different numbers of micro-batches, each announces its passes: a rank that waits at the end of its window takes part in
the gathers of the others' passes, and lets go of what it got.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from gradfit import _torch_distributed as private
from gradfit.accumulate.ranks import Part, Whole
from gradfit.accumulate.scaling import gradient_norm
from gradfit.distributed.group import Group
from gradfit.distributed.silence import modules_of
from gradfit.distributed.sync import Together
from gradfit.errors import MisuseError


class Passes:
    """Lets ranks run different numbers of passes, though each pass gathers parameters from all ranks.

    A rank announces each pass, without waiting for an answer. A rank that waits at the end of its window answers
    instead, and takes part in the gathers of one pass for every announcement, until all wait.
    """

    def __init__(self, group: Group, modules: list[Any], units: list[Any]) -> None:
        self._group, self._modules = group, modules
        self._gathers = private.Gathers(units, self._surprised) if group.size > 1 else None
        self._said: tuple[Tensor, Tensor, Any] | None = None

    def announce(self) -> None:
        """A pass begins."""
        if self._gathers is not None:
            self._gathers.begin()
            self._said = self._say(1)

    def wait(self) -> None:
        """This rank has no more passes in this window: help until nobody has."""
        if self._gathers is not None:
            self._gathers.end()
        while self._gathers is not None:
            _, everybody, work = self._say(0)
            work.wait()
            if not everybody.any():
                break
            private.initialise(self._modules)
            self._gathers.repeat()

    @property
    def order(self) -> list[int]:
        """In which order a pass gathers, as far as this rank has seen one."""
        return [] if self._gathers is None else self._gathers.usual

    def learn(self, orders: list[list[int]]) -> None:
        """Take over the order from a rank that has seen one."""
        if self._gathers is not None and not self._gathers.usual:
            self._gathers.usual = next((order for order in orders if order), [])

    def _surprised(self) -> None:
        """This pass gathers in another order than the last: a rank that only takes part would gather something else."""
        if self._said is None:
            return
        _, everybody, work = self._said
        work.wait()
        if not everybody.all():
            raise MisuseError(
                "The fully_shard units run in another order than in the last pass (or, in the first, than they are "
                "defined in), while another rank has no micro-batch left and takes part without a pass. Give every "
                "rank as many micro-batches; weight=0 for one that does not count."
            )

    def _say(self, word: int) -> tuple[Tensor, Tensor, Any]:
        mine = torch.tensor([word], dtype=torch.uint8, device=self._group.device)
        everybody = torch.empty(self._group.size, dtype=torch.uint8, device=self._group.device)
        return mine, everybody, private.all_gather_flat(everybody, mine, self._group.handle, async_op=True)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is one of a `fully_shard` unit."""
    return isinstance(tensor, DTensor)


class Unsharded:
    """A parameter's full gradient on this rank, under the name that autograd's own would have."""

    def __init__(self, tensor: Tensor, kept: Any) -> None:
        self.shape, self._kept = tensor.shape, kept

    @property
    def grad(self) -> Tensor | None:
        return private.unsharded_gradient(self._kept)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        private.set_unsharded_gradient(self._kept, gradient)


class Sharded(Together):
    """The processes of a `fully_shard` module."""

    lockstep = True

    def __init__(self, tensors: list[Tensor], window: Any) -> None:
        modules = modules_of(FSDPModule, tensors)
        self.units = [unit for module in modules for unit in private.param_groups(module)]
        self._kept = {id(tensor): kept for unit in self.units for tensor, kept in private.sharded_parameters(unit)}
        for at, tensor in enumerate(tensors):
            if id(tensor) not in self._kept:
                raise MisuseError(
                    f"The parameter at {at}, of shape {tuple(tensor.shape)}, is a DTensor of no fully_shard module. "
                    "Make the optimizer after fully_shard, from model.parameters()."
                )
        super().__init__(modules, Group(private.data_parallel_group(self.units[0])), window)
        self._silenced: list[Any] = []
        self._depth = 0
        self._passes = Passes(self.group, modules, self.units)

    def sources(self, tensors: list[Tensor]) -> list[Unsharded]:
        return [Unsharded(tensor, self._kept[id(tensor)]) for tensor in tensors]

    # -- while a window fills -----------------------------------------------------------------------------------------

    def before_forward(self, module: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not self.filling:
            return
        self._silenced += [unit for unit in self.units if private.set_reduces(unit, False)]
        self._passes.announce()

    def after_forward(self, module: Any) -> None:
        self._depth -= 1
        window = self._window()
        if self._depth or window is None:
            return
        for tensor in window.tensors:
            kept = self._kept[id(tensor)]
            full = private.unsharded_parameter(kept)
            if full is not None and full.requires_grad:
                window.counter.watch(full)  # backward passes reach this one, not the shard
            if tensor.grad_dtype is not None and tensor.grad_dtype != tensor.dtype:
                private.accumulate_in(kept, tensor.grad_dtype)

    def release(self) -> None:
        while self._silenced:
            private.set_reduces(self._silenced.pop(), True)

    # -- at its end ---------------------------------------------------------------------------------------------------

    def meet(self, part: Part) -> Whole:
        self._passes.wait()
        return super().meet(part)

    def describe(self) -> dict[str, Any]:
        return {} if self.group.meetings else {"order": self._passes.order}

    def learn(self, records: list[dict[str, Any]]) -> None:
        if self.group.meetings == 1:
            self._passes.learn([one["order"] for one in records])

    def reduce(self, window: Any, whole: Whole, factor: float) -> float:
        present = {id(window.tensors[at]): window.tensors[at] for at in whole.present}
        with torch.no_grad(), window.counter.owned():
            for unit in reversed(self.units):
                others, dtype = {}, None
                for tensor, kept in private.sharded_parameters(unit):
                    gradient = private.unsharded_gradient(kept)
                    if id(tensor) not in present:
                        others[kept] = gradient
                        private.set_unsharded_gradient(kept, None)
                        continue
                    dtype = tensor.grad_dtype or tensor.dtype
                    if gradient is None:
                        gradient = torch.zeros(private.unsharded_size(kept), dtype=dtype, device=tensor.device)
                    elif factor != 1.0:
                        gradient.mul_(factor)
                    private.set_unsharded_gradient(kept, gradient)
                if dtype is not None:
                    private.reduce_group(unit, dtype)
                for kept, gradient in others.items():  # another optimizer's
                    private.set_unsharded_gradient(kept, gradient)
        return 1.0

    def norm(self, gradients: list[Tensor]) -> float:
        local = math.fsum(_squares(gradient) for gradient in gradients)
        total = torch.tensor(local, dtype=torch.float64, device=self.group.device)
        meshes = {id(g.device_mesh): g.device_mesh for g in gradients if isinstance(g, DTensor)}
        for mesh in meshes.values():
            for dimension in range(mesh.ndim):
                dist.all_reduce(total, group=mesh.get_group(dimension))
        return math.sqrt(total.item())

    def spread_nonfinite(self, gradients: list[Tensor]) -> None:
        if not math.isfinite(self.norm(gradients)):
            for gradient in gradients:
                part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                if part.numel():
                    part.view(-1)[0] = math.inf
                    break


def _squares(gradient: Tensor) -> float:
    """This rank's share of a gradient's squared norm."""
    if not isinstance(gradient, DTensor):
        return gradient_norm([gradient]) ** 2
    copies = 1
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Replicate):
            copies *= gradient.device_mesh.size(dimension)
    local = gradient.to_local()
    return gradient_norm([local]) ** 2 / copies if local.numel() else 0.0
