"""`predict`: the profile of a model and a machine that are not here, on tensors that have a shape
but no memory.

The step runs as it is written, once at the batch's size and once at eight times that, on shapes
(see `shapes`): its operations, values, bytes and lifetimes are those of a real run. Only the
seconds are a model's (see `roofline`).

Fake tensors need a dispatch mode, and torch takes other operators for a few functions where one
looks, or where a tensor is a fake one: an attention mask is not added in place, and `max_pool1d`
finds indices. A real profile has what really runs.

Autograd is given descriptions of what it saves, so that Python alone decides when a value dies, and
gets another fake tensor of the same description back when it asks.

With `Hardware(devices=n)` the model is fully sharded, as by FSDP2: parameters, gradients and the
optimizer's state are cut along dim 0 into n shards. A *unit* is what is gathered together: an item
of a `ModuleList` or `Sequential` (a layer), or a module outside of them (an embedding). Beside the
shards there are, all the time, the whole parameters of two units (one in use, one being fetched)
and the whole gradients of one, each as large as the largest unit: an upper bound. The time of
communication is not in it; it is taken to hide behind the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch import (
    FakeTensorMode,
    optimizers_take_fakes_for_real,
    outside_fake_mode,
)
from gradfit._torch_listen import eager_functions
from gradfit.arguments import check_model
from gradfit.batches.runner import LossFunction, count_rows, run_part
from gradfit.batches.snapshot import Generators
from gradfit.profiling.assemble import Sample, assemble, same_structure
from gradfit.profiling.optimizer_bytes import OptimizerCost, optimizer_cost
from gradfit.profiling.profile import Hardware, Profile
from gradfit.profiling.roofline import Roofline, Stopwatch, this_machine
from gradfit.profiling.shapes import Shapes, emptied
from gradfit.profiling.tile_choices import tile_choices
from gradfit.profiling.trace import Trace
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles
from gradfit.tree import map_tensors, split_batch
from gradfit.units import format_bytes

_TIMES = 8
_Empty = Callable[[torch.Tensor, int], torch.Tensor]
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
# a core's, where seconds are only compared with each other
_SOME = Hardware(memory=1, flops=5e10, bandwidth=1e10)


def predict(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    sample_batch: Any,
    optimizer: Any = None,
    *,
    hardware: Hardware | None = None,
    split: Callable[[Any, int], Iterable[Any]] | None = None,
    tile: bool = True,
) -> Profile:
    """What one step would do on `hardware`, found without running it; without `hardware`, on this
    machine.

    The model may be on the meta device, or be a real one, which is neither copied nor changed.
    Parameters on the meta device are taken to be on the accelerator, where torch sees one, and on
    the CPU otherwise. With `tile`, the step with lazy logits is predicted, too (`Profile.tiled`);
    whether a module treats each token by itself cannot be told from shapes.

    >>> from torch import nn
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(50_000, 50_000), nn.GELU(), nn.Linear(50_000, 1))
    >>> batch, machine = torch.ones(4, 50_000), Hardware("80 GiB")
    >>> expected = predict(model, lambda m, x: m(x).square().mean(), batch, hardware=machine)
    >>> expected.predicted, expected.parameter_bytes
    (True, 10000400004)
    """
    rows = count_rows(sample_batch, split, "sample_batch", fake=True)
    check_model(model, fake=True)
    device = _device_of(model)
    if hardware is None:
        hardware = this_machine(device, next(model.parameters()).dtype)
    roofline = Roofline(hardware)
    shapes = Shapes()
    generators = Generators()
    profiles: list[Profile] = []
    try:
        cost = _optimizer_cost(optimizer, shapes.fake, roofline, device, hardware.devices)
        with outside_fake_mode(), eager_functions(), emptied(model, shapes, device) as empty:
            batches = list(_batches(sample_batch, rows, split, empty))
            choices: tuple[Tiles, ...] = ()
            if tile:
                row = next(iter((split or split_batch)(sample_batch, 1)))
                choices = _choose_tiles(model, loss_fn, row, shapes, empty)
            for tiles in (None, *choices):
                samples = [
                    _sample(model, with_tiles(loss_fn, tiles), batch, size, shapes, roofline)
                    for size, batch in batches
                ]
                one = assemble(
                    model, sample_batch, rows, samples, cost, host_bandwidth=hardware.host_bandwidth
                )
                profiles.append(replace(one, tiles=tiles))
    finally:
        generators.restore()
    name = hardware.name or _describe(hardware)
    profiles = [
        replace(_sharded(one, model, hardware.devices), device=name, predicted=True)
        for one in profiles
    ]
    return replace(profiles[0], tiled=tuple(profiles[1:]))


def _choose_tiles(
    model: torch.nn.Module, loss_fn: LossFunction, row: Any, shapes: Shapes, empty: _Empty
) -> tuple[Tiles, ...]:
    with shapes:
        row = map_tensors(row, lambda tensor: empty(tensor, 1))
        return tile_choices(model, loss_fn, row).tiles


def extrapolated(
    model: torch.nn.Module, loss_fn: LossFunction, parts: list[tuple[int, Any]], run: Sample
) -> list[Sample]:
    """The second of two micro-batches, each with its rows, of which there was room to run the first
    only.

    Without it everything has to be taken to grow with the rows: gradients of parameters, too, which
    are the most where rows are small. Empty if shapes are not enough, or tell something else than
    the `run` did. The seconds are in proportion to those of what was run.
    """
    try:
        small, large = _on_shapes(model, loss_fn, parts)
    except Exception:
        # where the data decide what is done, the user's own code fails on shapes, in any way it
        # likes
        return []
    if not _did_the_same(small, run, large):
        return []
    _grow(run.trace, small.trace, large.trace)
    return [replace(large, plain_seconds=None, extrapolated=True)]


def _did_the_same(small: Sample, run: Sample, large: Sample) -> bool:
    """Whether shapes of the rows that were run tell of the same values, and more rows do the
    same.
    """
    return (
        _sizes(small.trace) == _sizes(run.trace)
        and same_structure(small.trace, large.trace)
        and same_structure(run.trace, large.trace)
    )


def _sizes(trace: Trace) -> list[int]:
    return [value.nbytes for value in trace.values if value.operation is not None]


def _grow(run: Trace, small: Trace, large: Trace) -> None:
    """Seconds of the large one from those that were measured, and what only a real run shows."""
    for ran, little, much in zip(run.operations, small.operations, large.operations, strict=True):
        much.seconds = ran.seconds * _growth(little.seconds, much.seconds)
    for node, before, after in zip(run.nodes, small.nodes, large.nodes, strict=True):
        after.seconds = node.seconds * _growth(before.seconds, after.seconds)
        # what only a real run shows does not grow
        after.before_bytes += max(0, node.before_bytes - before.before_bytes)
        after.peak_bytes += max(0, node.peak_bytes - before.peak_bytes)
        after.after_bytes += max(0, node.after_bytes - before.after_bytes)


def _on_shapes(
    model: torch.nn.Module, loss_fn: LossFunction, parts: list[tuple[int, Any]]
) -> list[Sample]:
    shapes, roofline, generators = Shapes(), Roofline(_SOME), Generators()
    try:
        device = _device_of(model)
        with outside_fake_mode(), eager_functions(), emptied(model, shapes, device) as empty:
            return [
                _sample(
                    model,
                    loss_fn,
                    map_tensors(part, lambda tensor: empty(tensor, 1)),
                    size,
                    shapes,
                    roofline,
                )
                for size, part in parts
            ]
    finally:
        generators.restore()


def _growth(little: float, much: float) -> float:
    return max(1.0, much / little) if little else 1.0


class _FakeTrace(Trace):
    """A trace whose seconds come from a roofline."""

    def __init__(self, model: torch.nn.Module, roofline: Roofline) -> None:
        super().__init__(model)
        self._roofline = roofline
        self._aside = False

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As for a trace of a real run."""
        # a fake tensor asks for its device like this, again and again
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if self._aside:
            return func(*args, **kwargs)
        return super()._observe(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        out = func(*args, **kwargs)
        return out, self._roofline.seconds(func, args, kwargs, out)

    def packing_seconds(self, mask: torch.Tensor) -> float:
        return 2 * self.run(torch.ops.aten._to_copy.default, (mask,), {"dtype": torch.bool})[1]

    def describe(self, tensor: torch.Tensor) -> Any:
        """What autograd gets instead of a tensor that it saves."""
        if tensor.layout is not torch.strided:
            return self.pack(tensor), tensor
        return self.pack(tensor), (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)

    def stand_in(self, packed: Any) -> torch.Tensor:
        """A tensor of that description, for a backward node; it is the tape's and not counted."""
        value, saved = packed
        self.unpack(value)
        if isinstance(saved, torch.Tensor):
            return saved
        size, stride, dtype, device = saved
        self._aside = True
        try:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        finally:
            self._aside = False


def _batches(
    batch: Any,
    rows: int,
    split: Callable[[Any, int], Iterable[Any]] | None,
    empty: _Empty,
) -> Iterator[tuple[int, Any]]:
    """The batch and, as shapes cost nothing, many times it; or half of it, where only `split` can
    cut it.

    What peaks is the larger of several lines. The line through two sizes is above it between them,
    and below it beyond.
    """
    if split is None:
        yield _TIMES * rows, map_tensors(batch, lambda tensor: empty(tensor, _TIMES))
    elif rows > 1:
        yield (
            rows // 2,
            map_tensors(next(iter(split(batch, rows // 2))), lambda tensor: empty(tensor, 1)),
        )
    yield rows, map_tensors(batch, lambda tensor: empty(tensor, 1))


def _sample(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    size: int,
    shapes: Shapes,
    roofline: Roofline,
) -> Sample:
    trace = _FakeTrace(model, roofline)
    with shapes, trace.listening(model), trace, saved_tensors_hooks(trace.describe, trace.stand_in):
        loss = run_part(loss_fn, model, batch).loss
        trace.finish_forward()
        torch.autograd.backward(loss)
        del loss
    trace.finish_backward()
    for parameter in model.parameters():
        parameter.grad = None
    sample = Sample(size, trace, None)
    return replace(sample, plain_seconds=sample.busy_seconds)


def _device_of(model: torch.nn.Module) -> torch.device:
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _optimizer_cost(
    optimizer: Any, mode: FakeTensorMode, roofline: Roofline, device: torch.device, devices: int
) -> OptimizerCost:
    if optimizer is None:
        return OptimizerCost(0, 0, 0.0)

    def shard(parameter: torch.Tensor) -> torch.Tensor:
        where = device if parameter.is_meta else parameter.device
        return torch.zeros(_shard_shape(parameter, devices), dtype=parameter.dtype, device=where)

    watch = Stopwatch(roofline)
    with mode, watch, optimizers_take_fakes_for_real():
        cost = optimizer_cost(optimizer, stand_in=shard, clock=lambda: watch.seconds)
    return cost if devices == 1 else cost._replace(ways=())  # shards are updated all at once


def _sharded(whole: Profile, model: torch.nn.Module, devices: int) -> Profile:
    if devices == 1:
        return whole
    parameters = list(model.parameters())
    units = _units(model)
    gathered = min(2 * max(map(_nbytes, units)), _nbytes(parameters))
    reduced = max(_nbytes(_trained(unit)) for unit in units)
    return replace(
        whole,
        parameter_bytes=_shard_bytes(parameters, devices) + gathered,
        gradient_bytes=_shard_bytes(_trained(parameters), devices) + reduced,
        nodes=tuple(
            replace(node, gradient_bytes=node.gradient_bytes // devices) for node in whole.nodes
        ),
    )


def _trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _units(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """The parameters in the groups in which they would be gathered; see the top of this file."""
    items = _items_of_containers(model)
    units: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        units.setdefault(_unit_of(name, items), []).append(parameter)
    return list(units.values())


def _items_of_containers(model: torch.nn.Module) -> set[str]:
    """The names of modules that lie in containers, and are none."""
    containers = [(n, m) for n, m in model.named_modules() if isinstance(m, _CONTAINERS)]
    return {
        f"{name}.{key}" if name else key
        for name, container in containers
        for key, child in container.named_children()
        if not isinstance(child, _CONTAINERS)
    }


def _unit_of(name: str, items: set[str]) -> str:
    """The item of a container that a parameter is in, or else its module."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in items), name.rpartition(".")[0])


def _shard_shape(parameter: torch.Tensor, devices: int) -> tuple[int, ...]:
    if not parameter.dim():
        return ()
    return (math.ceil(parameter.size(0) / devices), *parameter.shape[1:])


def _shard_bytes(parameters: Iterable[torch.Tensor], devices: int) -> int:
    return sum(math.prod(_shard_shape(p, devices)) * p.element_size() for p in parameters)


def _describe(hardware: Hardware) -> str:
    each = f"{format_bytes(int(hardware.memory))}, {hardware.flops / 1e12:.3g} Tflop/s"
    return f"{hardware.devices} × ({each})" if hardware.devices > 1 else f"hardware of {each}"
