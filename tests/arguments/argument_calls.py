"""For each public callable a call that is right, and for each of its parameters what else it may
take.

A parameter that is not listed under `accepts` takes none of the bad values; a predicate says which
of them are legal.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gradfit as gf

Accepts = Callable[[Any], bool]


@dataclass
class Good:
    """A call that works. `*name` in `arguments` are the positional ones; `watched` must not change
    if it is refused.
    """

    call: Callable[..., Any]
    arguments: dict[str, Any]
    accepts: dict[str, Accepts] = field(default_factory=dict)
    watched: list[Any] = field(default_factory=list)

    def run(self, **changed: Any) -> Any:
        arguments = {**self.arguments, **changed}
        positional = [
            item for name in arguments if name.startswith("*") for item in arguments[name]
        ]
        first = {name: arguments[name] for name in arguments if name.startswith("/")}
        named = {name: value for name, value in arguments.items() if name[0] not in "*/"}
        return self.call(*first.values(), *positional, **named)


CALLS: dict[str, Callable[[], Good]] = {}


def good(name: str) -> Callable[[Callable[[], Good]], Callable[[], Good]]:
    def register(make: Callable[[], Good]) -> Callable[[], Good]:
        CALLS[name] = make
        return make

    return register


# -- what a parameter may take -------------------------------------------------------------------


def is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**63


def is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_none(value: Any) -> bool:
    return value is None


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def is_any(value: Any) -> bool:
    return True


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def is_number(value: Any) -> bool:
    number = (
        value.item() if is_tensor(value) and value.numel() == 1 and not value.is_meta else value
    )
    return type(number) in (int, float) and abs(number) < 2**63 and math.isfinite(number)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def is_not_negative(value: Any) -> bool:
    return is_number(value) and value >= 0


def is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def is_function(value: Any) -> bool:
    return callable(value)


def is_nothing_iterable(value: Any) -> bool:
    return (
        not isinstance(value, str | bytes | Tensor)
        and hasattr(value, "__iter__")
        and not list(value)
    )


def is_one_of(*kinds: Accepts) -> Accepts:
    return lambda value: any(kind(value) for kind in kinds)


def is_equal_to(*values: Any) -> Accepts:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def is_float_tensor(value: Any) -> bool:
    return is_tensor(value) and value.is_floating_point()


# -- what the calls are about --------------------------------------------------------------------


def weight() -> Tensor:
    return torch.ones(2, requires_grad=True)


def sgd(*tensors: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(tensors), lr=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_fn(module: nn.Module, batch: Any) -> Tensor:
    return module(batch).square().mean()


BATCH = torch.linspace(-1, 1, 8).reshape(4, 2)


@functools.cache
def a_profile() -> gf.Profile:
    return gf.profile(model(), loss_fn, BATCH)


@functools.cache
def a_plan() -> gf.Plan:
    return gf.plan(a_profile(), memory="1 GiB")


# -- accumulate ----------------------------------------------------------------------------------


@good("AccumulationContext")
def _() -> Good:
    return Good(
        gf.AccumulationContext,
        {"target_steps": 2},
        {
            "target_steps": is_count,
            "strategy": is_none,
            "optimizer": is_optimizer_or_none,
            "scaler": is_none,
            "dtype": is_one_of(is_none, is_equal_to(torch.float32)),
        },
    )


@good("AccumulationContext.register_tensor")
def _() -> Good:
    window = gf.AccumulationContext(2)
    return Good(window.register_tensor, {"tensor": weight()}, {"tensor": is_leaf}, [window])


def is_leaf(value: Any) -> bool:
    return is_tensor(value) and value.is_leaf and (value.is_floating_point() or value.is_complex())


@good("GradientAccumulator")
def _() -> Good:
    w = weight()
    return Good(
        gf.GradientAccumulator,
        {"optimizer": sgd(w), "parameters": [w]},
        {
            "optimizer": is_one_of(is_none, is_count),
            "steps": is_count,
            "parameters": is_none,
            "strategy": is_none,
            "dtype": is_one_of(is_none, is_equal_to(torch.float32)),
            "scaler": is_none,
            "clip": is_one_of(is_none, is_positive),
            "isolate": is_flag,
        },
        [w],
    )


@good("GradientAccumulator.accumulation_count=")
def _() -> Good:
    acc = gf.GradientAccumulator(parameters=[weight()], steps=3)
    return Good(
        setter(acc, "accumulation_count"),
        {"accumulation_count": 2},
        {"accumulation_count": is_count},
        [acc],
    )


@good("GradientAccumulator.enabled=")
def _() -> Good:
    acc = gf.GradientAccumulator(parameters=[weight()])
    return Good(setter(acc, "enabled"), {"enabled": False}, {"enabled": is_flag}, [acc])


def setter(owner: Any, name: str) -> Callable[..., None]:
    return lambda **values: setattr(owner, name, values[name])


@good("GradientAccumulator.enable_accumulation")
def _() -> Good:
    acc = gf.GradientAccumulator(2)
    return Good(acc.enable_accumulation, {"parameters": [weight()]}, {}, [acc])


@good("GradientAccumulator.backward")
def _() -> Good:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=3)
    return Good(
        acc.backward,
        {"loss": (w * 2).sum(), "weight": 2},
        {"weight": is_one_of(is_not_negative, is_equal_to("auto", 10**30)), "terms": is_none},
        [acc, w],
    )


@good("GradientAccumulator.micro_batch")
def _() -> Good:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=3, isolate=True)

    def call(weight: Any) -> None:
        with acc.micro_batch(weight):
            (w * 2).sum().backward()

    return Good(
        call,
        {"weight": 2},
        {"weight": is_one_of(is_none, is_not_negative, is_equal_to(10**30))},
        [acc, w],
    )


@good("GradientAccumulator.apply_gradients")
def _() -> Good:
    w = weight()
    acc = gf.GradientAccumulator(parameters=[w])
    acc.backward((w * 2).sum())
    return Good(acc.apply_gradients, {"fn": lambda parameter: None}, {"fn": is_module}, [acc, w])


@good("GradientAccumulator.load_state_dict")
def _() -> Good:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=3)
    return Good(acc.load_state_dict, {"state_dict": acc.state_dict()}, {}, [acc, w])


@good("GradAccumulator")
def _() -> Good:
    w = weight()
    arguments = {"optimizer": sgd(w), "parameters": [w], "accumulation_steps": 4}
    return Good(gf.GradAccumulator, arguments, {"accumulation_steps": is_count}, [w])


@good("FixedStepCount")
def _() -> Good:
    return Good(gf.FixedStepCount, {"steps": 4}, {"steps": is_count})


@good("FixedTargetBatch")
def _() -> Good:
    return Good(gf.FixedTargetBatch, {"batch_size": 4}, {"batch_size": is_positive})


@good("AdaptiveAccumulation")
def _() -> Good:
    return Good(
        gf.AdaptiveAccumulation,
        {"target_batch_size": 4},
        {
            "target_batch_size": is_positive,
            "min_steps": is_count,
            "max_steps": is_count,
            "smoothing": is_equal_to(0, 0.5),
        },
    )


for _name in ("FixedStepCount", "FixedTargetBatch", "AdaptiveAccumulation"):

    @good(f"{_name}.load_state_dict")
    def _(name: str = _name) -> Good:
        strategy = getattr(gf, name)(4)
        accepts = is_equal_to({}) if name.startswith("Fixed") else is_equal_to()
        return Good(
            strategy.load_state_dict,
            {"state": strategy.state_dict()},
            {"state": accepts},
            [strategy],
        )


@good("DynamicBatchAccumulator")
def _() -> Good:
    return Good(
        gf.DynamicBatchAccumulator,
        {"target_batch_size": 8},
        {"target_batch_size": is_count, "steps": is_none, "strategy": is_none},
    )


@good("DynamicBatchAccumulator.accumulate")
def _() -> Good:
    accumulator = gf.DynamicBatchAccumulator(8)
    return Good(
        accumulator.accumulate,
        {"batch_gradient": torch.ones(2), "batch_size": 2},
        {
            "batch_gradient": is_gradient,
            "batch_size": is_one_of(is_not_negative, is_equal_to(10**30)),
        },
        [accumulator],
    )


@good("GradientScaling.scale_by_batch_size")
def _() -> Good:
    return Good(
        gf.GradientScaling.scale_by_batch_size,
        {"gradient": torch.ones(2), "batch_size": 2, "reference_size": 4},
        {
            "gradient": is_gradient,
            "batch_size": is_one_of(is_not_negative, is_equal_to(10**30)),
            "reference_size": is_positive,
        },
    )


def is_gradient(value: Any) -> bool:
    return is_tensor(value) and (value.is_floating_point() or value.is_complex())


@good("GradientScaling.average_accumulated")
def _() -> Good:
    return Good(
        gf.GradientScaling.average_accumulated,
        {"accumulated": torch.ones(2), "total_batch_size": 2, "reference_size": 4},
        {
            "accumulated": is_gradient,
            "total_batch_size": is_positive,
            "reference_size": is_positive,
        },
    )


@good("GradientScaling.normalize_batch_gradient")
def _() -> Good:
    return Good(
        gf.GradientScaling.normalize_batch_gradient,
        {"gradient": torch.ones(2), "batch_size": 2},
        {"gradient": is_gradient, "batch_size": is_positive},
    )


@good("VariableBatchScheduler")
def _() -> Good:
    return Good(gf.VariableBatchScheduler, {"batch_schedule": [1, 2]})


@good("VariableBatchScheduler.get_effective_batch_size")
def _() -> Good:
    scheduler = gf.VariableBatchScheduler([1, 2])
    return Good(
        scheduler.get_effective_batch_size,
        {"window_size": 1},
        {"window_size": is_count},
        [scheduler],
    )


@good("VariableBatchScheduler.batches")
def _() -> Good:
    scheduler = gf.VariableBatchScheduler([1, 2])
    return Good(
        lambda sampler: list(scheduler.batches(sampler)),
        {"sampler": range(6)},
        {"sampler": is_plain_iterable},
    )


def is_plain_iterable(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | set | range)


@good("SymbolicShape")
def _() -> Good:
    return Good(gf.SymbolicShape, {"*dimensions": [2, "n"]}, {"dimensions": is_dimension})


def is_dimension(value: Any) -> bool:
    return (
        is_whole(value) or (is_text(value) and value.isidentifier()) or value == [] or value == ()
    )


@good("SymbolicShape.bounds")
def _() -> Good:
    return Good(
        gf.SymbolicShape(2, "n").bounds, {"dimension": 0}, {"dimension": is_equal_to(0, -1)}
    )


for _method in ("problem", "matches"):

    @good(f"SymbolicShape.{_method}")
    def _(method: str = _method) -> Good:
        call = getattr(gf.SymbolicShape(2, "n"), method)
        return Good(call, {"shape": (2, 3)}, {"shape": is_nothing_iterable})


@good("AccumulationBufferDynamic")
def _() -> Good:
    return Good(
        gf.AccumulationBufferDynamic,
        {"shape": ("n", 2), "max_size": 4},
        {
            "shape": is_equal_to([], ()),
            "max_size": is_count,
            "dtype": is_equal_to(torch.float32),
        },
    )


@good("AccumulationBufferDynamic.accumulate")
def _() -> Good:
    buffer = gf.AccumulationBufferDynamic(("n", 2), max_size=4)
    buffer.resize(4)
    return Good(
        buffer.accumulate,
        {"gradient": torch.ones(2, 2), "start_idx": 1, "count": 2},
        {"start_idx": is_equal_to(0)},
        [buffer],
    )


@good("AccumulationBufferDynamic.resize")
def _() -> Good:
    buffer = gf.AccumulationBufferDynamic(("n", 2), max_size=4)
    return Good(buffer.resize, {"new_size": 2}, {"new_size": is_equal_to(0, 3)}, [buffer])


@good("AccumulationBufferDynamic.get_slice")
def _() -> Good:
    buffer = gf.AccumulationBufferDynamic(("n", 2), max_size=4)
    buffer.resize(4)
    return Good(
        buffer.get_slice,
        {"start_idx": 1, "count": 2},
        {"start_idx": is_equal_to(0), "count": is_equal_to(0, 3)},
    )


@good("GradientAccumulationValidator.validate_accumulation")
def _() -> Good:
    validator = gf.GradientAccumulationValidator()
    arguments = {"gradients": [torch.ones(2)], "batch_sizes": [2]}
    return Good(
        validator.validate_accumulation, arguments, {"gradients": is_any, "batch_sizes": is_any}
    )


@good("GradientAccumulationValidator.check_shape_compatibility")
def _() -> Good:
    validator = gf.GradientAccumulationValidator()
    arguments = {"grad1": torch.ones(2), "grad2": torch.ones(2)}
    return Good(validator.check_shape_compatibility, arguments, {"grad1": is_any, "grad2": is_any})


@good("GradientAccumulationValidator.validate_accumulated_shape")
def _() -> Good:
    validator = gf.GradientAccumulationValidator()
    arguments = {"accumulated": torch.ones(2), "components": [torch.ones(2)]}
    return Good(
        validator.validate_accumulated_shape,
        arguments,
        {"accumulated": is_any, "components": is_any},
    )


@good("GradientAccumulationValidator.explain")
def _() -> Good:
    validator = gf.GradientAccumulationValidator()
    arguments = {"gradients": [torch.ones(2)], "batch_sizes": [2]}
    return Good(validator.explain, arguments, {"gradients": is_any, "batch_sizes": is_any})


for _function in ("enable_grad_accumulation", "disable_grad_accumulation", "has_grad_accumulation"):

    @good(_function)
    def _(function: str = _function) -> Good:
        accepts = is_leaf if function == "enable_grad_accumulation" else is_tensor
        return Good(getattr(gf, function), {"tensor": weight()}, {"tensor": accepts})


# -- recompute -----------------------------------------------------------------------------------


@good("CheckpointScope")
def _() -> Good:
    return Good(
        gf.CheckpointScope,
        {"name": "a"},
        {
            "name": is_text,
            "enabled": is_flag,
            "use_recomputation": is_flag,
            "keep": is_one_of(is_none, is_nothing_iterable),
        },
    )


@good("CheckpointScope.__call__")
def _() -> Good:
    return Good(gf.CheckpointScope("a"), {"function": loss_fn}, {"function": is_function})


for _property in ("is_enabled", "use_recomputation"):

    @good(f"CheckpointScope.{_property}=")
    def _(name: str = _property) -> Good:
        scope = gf.CheckpointScope("a")
        return Good(setter(scope, name), {name: False}, {name: is_flag}, [scope])


@good("GraphNode")
def _() -> Good:
    return Good(
        gf.GraphNode,
        {"/output": weight(), "/operation": "exp", "*children": [gf.GraphNode(None, "input")]},
        {"output": is_one_of(is_none, is_tensor), "operation": is_any},
    )


@good("CheckpointNode")
def _() -> Good:
    return Good(
        gf.CheckpointNode,
        {"/output": weight(), "/operation": "exp", "*children": [gf.GraphNode(None, "input")]},
        {"output": is_one_of(is_none, is_tensor), "operation": is_any},
    )


@good("CheckpointNode.is_checkpoint=")
def _() -> Good:
    node = gf.CheckpointNode(weight(), "exp")
    return Good(
        setter(node, "is_checkpoint"), {"is_checkpoint": True}, {"is_checkpoint": is_flag}, [node]
    )


@good("CheckpointNode.save_activations")
def _() -> Good:
    node = gf.CheckpointNode(weight(), "exp")
    return Good(
        node.save_activations, {"*activations": [weight()]}, {"activations": is_tensor}, [node]
    )


@good("CheckpointNode.add_recompute_function")
def _() -> Good:
    node = gf.CheckpointNode(weight(), "exp")
    return Good(node.add_recompute_function, {"function": list}, {"function": is_thunk}, [node])


def is_thunk(value: Any) -> bool:
    return getattr(value, "__name__", "") == "takes_nothing"


def exp(tensor: Tensor) -> Tensor:
    """A caller's own function."""
    return tensor.exp()


@good("CheckpointManager")
def _() -> Good:
    return Good(
        gf.CheckpointManager,
        {},
        {
            "max_memory_mb": is_one_of(is_none, is_positive),
            "auto_checkpoint": is_flag,
            "memory_threshold": lambda value: is_positive(value) and value <= 1,
        },
    )


for _property, _value, _accepts in (
    ("max_memory_mb", 64, is_one_of(is_none, is_positive)),
    ("auto_checkpoint", True, is_flag),
    ("memory_threshold", 0.5, lambda value: is_positive(value) and value <= 1),
):

    @good(f"CheckpointManager.{_property}=")
    def _(name: str = _property, value: Any = _value, accepts: Accepts = _accepts) -> Good:
        manager = gf.CheckpointManager()
        return Good(setter(manager, name), {name: value}, {name: accepts}, [manager])


for _method in ("register_scope", "unregister_scope"):

    @good(f"CheckpointManager.{_method}")
    def _(method: str = _method) -> Good:
        manager, scope = gf.CheckpointManager(), gf.CheckpointScope("a")
        manager.register_scope(scope)
        return Good(getattr(manager, method), {"scope": scope}, {}, [manager])


@good("CheckpointManager.should_checkpoint")
def _() -> Good:
    return Good(gf.CheckpointManager().should_checkpoint, {"node": gf.GraphNode(weight(), "exp")})


@good("CheckpointManager.selective_checkpointing")
def _() -> Good:
    manager = gf.CheckpointManager()
    arguments = {"nodes": [gf.CheckpointNode(weight(), "exp")]}
    return Good(
        manager.selective_checkpointing, arguments, {"nodes": is_equal_to([], ())}, [manager]
    )


@good("checkpoint")
def _() -> Good:
    return Good(
        gf.checkpoint,
        {"/function": exp, "*args": [weight()]},
        {
            "function": is_module,
            "args": is_tensor,
            "use_reentrant": is_one_of(is_none, is_flag),
            "context_fn": is_none,
            "debug": is_flag,
            "early_stop": is_flag,
            "preserve_rng_state": is_flag,
        },
    )


@good("checkpoint_sequential")
def _() -> Good:
    return Good(
        gf.checkpoint_sequential,
        {"functions": [exp, exp], "segments": 2, "input": weight()},
        {
            "functions": is_equal_to([], ()),
            "segments": is_equal_to(1),
            "input": is_tensor,
            "use_reentrant": is_one_of(is_none, is_flag),
            "preserve_rng_state": is_flag,
        },
    )


@good("chunked")
def _() -> Good:
    return Good(
        gf.chunked,
        {"fn": exp, "batch": BATCH, "size": 2},
        {
            "fn": is_module,
            "batch": lambda value: is_tensor(value) and value.dim() > 0,
            "size": is_count,
            "dim": lambda value: is_whole(value) and 0 <= int(value) < BATCH.dim(),
        },
    )


@good("name")
def _() -> Good:
    def call(tensor: Any, name: Any) -> None:
        with gf.CheckpointScope("a", keep=["a"]):
            gf.name(tensor, name)

    return Good(call, {"tensor": weight(), "name": "a"}, {"tensor": is_tensor, "name": is_text})


@good("mark_checkpoint")
def _() -> Good:
    def call(tensor: Any) -> None:
        with gf.CheckpointScope("a"):
            gf.mark_checkpoint(tensor)

    return Good(call, {"tensor": weight()}, {"tensor": is_tensor})


@good("is_checkpoint")
def _() -> Good:
    return Good(gf.is_checkpoint, {"tensor": weight()}, {"tensor": is_tensor})


# -- profile, plan, fit --------------------------------------------------------------------------


def is_callback(value: Any) -> bool:
    """Whether it can be called with a text and seconds."""
    return value is print


def is_split(value: Any) -> bool:
    return value is None


@good("profile")
def _() -> Good:
    module = model()
    return Good(
        gf.profile,
        {
            "model": module,
            "loss_fn": loss_fn,
            "sample_batch": BATCH,
            "optimizer": sgd(*module.parameters()),
        },
        {
            "model": is_module,
            "sample_batch": is_rows,
            "optimizer": is_optimizer_or_none,
            "memory_bytes": is_one_of(is_none, is_count),
            "rows": is_one_of(is_none, is_equal_to(1, 3)),
            "split": is_split,
            "fake": is_flag,
            "hardware": is_none,
            "host_bandwidth": is_not_negative,
            "tile": is_flag,
            "additivity": is_none,
        },
        [module],
    )


def is_rows(value: Any) -> bool:
    """What the model takes: floats in rows of 2."""
    return (
        is_tensor(value)
        and value.dtype == torch.float32
        and value.dim() > 0
        and value.numel() > 0
        and value.is_cpu
    )


def is_optimizer_or_none(value: Any) -> bool:
    return value is None or isinstance(value, torch.optim.Optimizer)


@good("plan")
def _() -> Good:
    return Good(
        gf.plan,
        {"profile": a_profile(), "memory": "1 MiB", "batch_size": 4},
        {
            "memory": is_count,
            "batch_size": is_one_of(is_none, is_count),
            "micro_batch": is_one_of(is_none, is_equal_to(1, 3)),
            "tile": is_flag,
            "exact": is_flag,
            "keep": is_nothing_iterable,
            "rebuild": is_nothing_iterable,
            "offload": is_nothing_iterable,
        },
    )


@good("frontier")
def _() -> Good:
    return Good(
        gf.frontier,
        {"profile": a_profile(), "points": 2},
        {
            "batch_size": is_one_of(is_none, is_count),
            "tile": is_flag,
            "points": is_equal_to(3),
            "micro_batch": is_one_of(is_none, is_equal_to(3)),
        },
    )


@good("estimate")
def _() -> Good:
    module = model()
    return Good(
        gf.estimate,
        {
            "model": module,
            "loss_fn": loss_fn,
            "batch": BATCH,
            "optimizer": sgd(*module.parameters()),
            "hardware": "t4",
        },
        {
            "model": is_module,
            "batch": is_rows,
            "optimizer": is_optimizer_or_none,
            "split": is_split,
        },
        [module],
    )


for _method in ("forward_seconds", "backward_seconds", "plain_seconds", "saved_bytes"):

    @good(f"Profile.{_method}")
    def _(method: str = _method) -> Good:
        return Good(getattr(a_profile(), method), {"batch_size": 4}, {"batch_size": is_count})


@good("Profile.update_bytes")
def _() -> Good:
    return Good(a_profile().update_bytes, {"rows": 4}, {"rows": is_count})


@good("Profile.updating")
def _() -> Good:
    return Good(a_profile().updating, {"groups": ()}, {"groups": is_equal_to(())})


for _record in (
    "AuditReport",
    "AutogradGraph",
    "Estimate",
    "GradientReport",
    "Hardware",
    "MemoryStats",
    "Plan",
    "Profile",
):

    @good(f"{_record}.from_json")
    def _(record: str = _record) -> Good:
        return Good(getattr(gf, record).from_json, {"text": a_record(record).to_json()})


@functools.cache
def a_record(name: str) -> Any:
    if name == "Plan":
        return a_plan()
    if name == "Profile":
        return a_profile()
    if name == "Estimate":
        return gf.estimate(model(), loss_fn, BATCH, hardware="t4")
    if name == "Hardware":
        return gf.Hardware("1 GiB")
    if name == "AuditReport":
        return gf.audit(model(), loss_fn, BATCH, a_plan())
    loss = (weight() * 2).exp().sum()
    if name == "AutogradGraph":
        return gf.AutogradContext.graph(loss)
    return (
        gf.AutogradContext.memory_stats()
        if name == "MemoryStats"
        else gf.inspect_gradients([weight()])
    )


@good("apply")
def _() -> Good:
    module = model()

    def call(**arguments: Any) -> None:
        gf.apply(**arguments).remove()

    return Good(call, {"model": module, "plan": a_plan()}, {"model": is_module}, [module])


@good("auto_checkpoint")
def _() -> Good:
    module = model()

    def call(**arguments: Any) -> None:
        gf.auto_checkpoint(**arguments).remove()

    accepts = {"model": is_module, "memory": is_positive}
    return Good(call, {"model": module, "memory": "1 GiB"}, accepts, [module])


@good("budget")
def _() -> Good:
    return Good(gf.budget, {"memory": "1 GiB"}, {"memory": is_positive})


@good("tile")
def _() -> Good:
    module = model()

    def call(**arguments: Any) -> None:
        gf.tile(**arguments).remove()

    accepts = {
        "model": is_module,
        "size": lambda value: value is None or is_count(value),
        "exclude": is_nothing_iterable,
        "gradients_early": is_flag,
    }
    accepts["modules"] = is_one_of(is_none, is_nothing_iterable)
    return Good(call, {"model": module, "size": 4, "modules": [], "exclude": []}, accepts, [module])


@good("audit")
def _() -> Good:
    module = model()
    return Good(
        gf.audit,
        {"model": module, "loss_fn": loss_fn, "batch": BATCH, "plan": a_plan()},
        {"model": is_module, "batch": is_rows, "plan": is_none, "split": is_none},
        [module],
    )


@good("fit")
def _() -> Good:
    module = model()
    return Good(
        gf.fit,
        {
            "model": module,
            "optimizer": sgd(*module.parameters()),
            "loss_fn": loss_fn,
            "sample_batch": BATCH,
            "memory": "1 GiB",
        },
        {
            "model": is_module,
            "optimizer": is_optimizer,
            "sample_batch": is_rows,
            "memory": is_one_of(is_none, is_positive),
            "micro_batch": is_one_of(is_none, is_equal_to(3)),
            "tile": is_flag,
            "exact": is_flag,
            "planning_share": is_not_negative,
            "plan_ahead": is_flag,
            "on_progress": is_one_of(is_none, is_callback),
            "batch_size": is_one_of(is_none, is_count),
            "split": is_split,
            "clip": is_one_of(is_none, is_positive),
            "scaler": is_none,
            "dtype": is_one_of(is_none, is_equal_to(torch.float32)),
            "offload": is_one_of(is_flag, is_nothing_iterable),
            "keep": is_nothing_iterable,
            "rebuild": is_nothing_iterable,
            "known": is_nothing_iterable,
            "reproducible": is_flag,
        },
        [module],
    )


@functools.cache
def a_step() -> gf.TrainStep:
    module = model()
    return gf.fit(module, sgd(*module.parameters()), loss_fn, BATCH, memory="1 GiB")


@good("TrainStep.__call__")
def _() -> Good:
    step = a_step()
    return Good(
        step,
        {"batch": BATCH},
        {"batch": is_rows, "progress": is_none, "after_micro_batch": is_one_of(is_none, is_module)},
        [step.model, step.accumulator],
    )


@good("TrainStep.load_state_dict")
def _() -> Good:
    step = a_step()
    return Good(
        step.load_state_dict, {"state": step.state_dict()}, {}, [step.model, step.accumulator]
    )


@good("whole")
def _() -> Good:
    return Good(gf.whole, {"content": BATCH}, {"content": is_any})


@good("Hardware")
def _() -> Good:
    return Good(
        gf.Hardware,
        {"memory": "1 GiB"},
        {
            "memory": is_positive,
            "flops": is_positive,
            "bandwidth": is_positive,
            "host_bandwidth": is_not_negative,
            "devices": is_count,
            "name": lambda value: isinstance(value, str),
        },
    )


@good("Job")
def _() -> Good:
    module = model()
    return Good(
        gf.Job,
        {
            "model": module,
            "loss_fn": loss_fn,
            "data": BATCH,
            "optimizer": sgd(*module.parameters()),
            "batch_size": 2,
        },
        {
            "data": is_any,
            "batch_size": is_count,
            "scheduler": is_none,
            "split": is_none,
            "fit_options": is_equal_to({}),
        },
        [module],
    )


@good("Loss")
def _() -> Good:
    return Good(
        gf.Loss,
        {"sum": weight().sum(), "count": 2, "logs": {}},
        {
            "sum": is_any,
            "count": is_any,
            "logs": is_any,
        },  # read by the step that gets it, which names loss_fn
    )


@good("count_tokens")
def _() -> Good:
    return Good(
        gf.count_tokens,
        {"labels": torch.zeros(2, 3, dtype=torch.int64)},
        {
            "labels": is_int_tensor,
            "ignore_index": lambda value: type(value) is int and abs(value) < 2**63,
            "shift": is_flag,
        },
    )


def is_int_tensor(value: Any) -> bool:
    return is_tensor(value) and value.dtype == torch.int64


class LanguageModel(nn.Linear):
    """What a model of transformers returns."""

    def forward(self, labels: Tensor) -> Any:
        return types.SimpleNamespace(loss=super().forward(labels.float()).mean())


for _function in ("causal_lm", "masked_lm", "seq2seq_lm", "classification"):

    @good(f"losses.{_function}")
    def _(function: str = _function) -> Good:
        labels = torch.zeros(3, 2, dtype=torch.int64)
        return Good(
            getattr(gf.losses, function),
            {"model": LanguageModel(2, 2), "batch": {"labels": labels}},
        )


@good("meter")
def _() -> Good:
    return Good(
        gf.meter,
        {"*watch": [weight()]},
        {"watch": is_any, "timeline": is_flag, "device": is_none},
    )


@good("Meter")
def _() -> Good:
    return Good(gf.Meter, {}, {"timeline": is_flag, "device": is_none})


@good("Meter.watch")
def _() -> Good:
    return Good(gf.Meter().watch, {"*tensors": [weight()]}, {"tensors": is_any})


# -- autograd ------------------------------------------------------------------------------------


@good("backward")
def _() -> Good:
    w = weight()
    return Good(
        gf.backward,
        {"loss": (w * 2).sum(), "inputs": [w]},
        {"inputs": is_one_of(is_none, is_module), "create_graph": is_flag},
        [w],
    )


@functools.cache
def a_graph() -> gf.AutogradGraph:
    return gf.AutogradContext.graph((weight() * 2).sum())


@good("AutogradContext.graph")
def _() -> Good:
    return Good(gf.AutogradContext.graph, {"loss": (weight() * 2).sum()}, {})


@good("topological_sort")
def _() -> Good:
    entries = a_graph().entries
    return Good(gf.topological_sort, {"entries": entries}, {"entries": is_nothing_iterable})


@good("AutogradGraph.__getitem__")
def _() -> Good:
    return Good(a_graph().__getitem__, {"position": 0}, {"position": is_equal_to(0, -1)})


@good("GradientMap")
def _() -> Good:
    arguments = {"gradients": {"w": torch.ones(2)}}
    return Good(gf.GradientMap, arguments, {"gradients": is_nothing_iterable})


@good("GradientMap.from_grads")
def _() -> Good:
    return Good(gf.GradientMap.from_grads, {"source": [weight()]}, {"source": is_source})


def is_source(value: Any) -> bool:
    return is_tensor(value) or is_module(value) or is_nothing_iterable(value)


def a_map() -> gf.GradientMap:
    return gf.GradientMap({"w": torch.ones(2)})


for _method in ("__getitem__", "__delitem__", "tensor"):

    @good(f"GradientMap.{_method}")
    def _(method: str = _method) -> Good:
        grads = a_map()
        return Good(getattr(grads, method), {"key": "w"}, {}, [grads])


for _method in ("__contains__", "get_mut"):

    @good(f"GradientMap.{_method}")
    def _(method: str = _method) -> Good:
        grads = a_map()
        return Good(getattr(grads, method), {"key": "w"}, {"key": is_any}, [grads])


for _method in ("__setitem__", "insert"):

    @good(f"GradientMap.{_method}")
    def _(method: str = _method) -> Good:
        grads = a_map()
        return Good(
            getattr(grads, method),
            {"key": "w", "gradient": torch.ones(2)},
            {"key": is_one_of(is_text, is_key_of_two), "gradient": is_tensor},
            [grads],
        )


def is_key_of_two(value: Any) -> bool:
    return is_tensor(value) and value.shape == (2,)


@good("GradientMap.bind")
def _() -> Good:
    grads = a_map()
    return Good(
        grads.bind,
        {"key": "v", "tensor": weight(), "gradient": torch.ones(2)},
        {
            "key": is_one_of(is_text, is_key_of_two),
            "tensor": is_one_of(is_none, is_key_of_two),
            "gradient": is_key_of_two,
        },
        [grads],
    )


@good("GradientMap.add_")
def _() -> Good:
    grads = a_map()
    return Good(
        grads.add_, {"other": a_map()}, {"other": is_equal_to({}), "alpha": is_number}, [grads]
    )


@good("GradientMap.scale_")
def _() -> Good:
    grads = a_map()
    return Good(
        grads.scale_, {"factor": 2.0}, {"factor": is_one_of(is_number, is_one_element)}, [grads]
    )


def is_one_element(value: Any) -> bool:
    """Its value is not looked at: that would wait for an accelerator."""
    return is_float_tensor(value) and value.numel() == 1


@good("GradientMap.norm")
def _() -> Good:
    return Good(a_map().norm, {}, {"p": is_one_of(is_positive, is_equal_to(math.inf))})


@good("GradientMap.clip_")
def _() -> Good:
    grads = a_map()
    return Good(grads.clip_, {"max_norm": 1.0}, {"max_norm": is_positive}, [grads])


@good("GradientMap.require_finite")
def _() -> Good:
    return Good(a_map().require_finite, {}, {"norm": is_one_of(is_none, is_number)})


@good("GradientMap.load_state_dict")
def _() -> Good:
    grads = a_map()
    return Good(grads.load_state_dict, {"state": grads.state_dict()}, {}, [grads])


@good("GradientClipper")
def _() -> Good:
    return Good(
        gf.GradientClipper,
        {"max_norm": 1.0, "max_value": 1.0},
        {
            "max_norm": is_one_of(is_none, is_positive),
            "max_value": is_one_of(is_none, is_positive),
            "per_parameter": is_flag,
        },
    )


@good("GradientClipper.clip_grads")
def _() -> Good:
    grads = a_map()
    clipper = gf.GradientClipper(1.0)
    return Good(
        clipper.clip_grads, {"grads": grads}, {"grads": is_source, "scale": is_positive}, [grads]
    )


@good("custom_op")
def _() -> Good:
    return Good(
        gf.custom_op,
        {"forward": lambda x: x * 2, "backward": lambda grad_output, x: grad_output * 2},
        {"forward": is_function, "backward": is_function, "name": is_one_of(is_none, is_text)},
    )


@good("check_gradients")
def _() -> Good:
    return Good(
        gf.check_gradients,
        {"/fn": exp, "*inputs": [weight()]},
        {
            "fn": is_module,
            "inputs": lambda value: is_float_tensor(value) and value.numel() and value.is_cpu,
            "eps": is_one_of(is_none, is_positive),
        },
    )


@good("hessian_vector_product")
def _() -> Good:
    w = weight()
    return Good(
        gf.hessian_vector_product,
        {"loss": w.pow(3).sum(), "inputs": w, "vector": torch.ones(2)},
        {"vector": is_direction},
        [w],
    )


def is_direction(value: Any) -> bool:
    return is_key_of_two(value) and value.is_floating_point() and value.is_cpu


@good("inspect_gradients")
def _() -> Good:
    return Good(gf.inspect_gradients, {"source": [weight()]}, {"source": is_source})


@good("LossScaler")
def _() -> Good:
    return Good(
        gf.LossScaler,
        {},
        {
            "init_scale": is_positive,
            "growth_factor": lambda value: is_positive(value) and value > 1,
            "backoff_factor": is_equal_to(0.5),
            "growth_interval": is_count,
            "enabled": is_flag,
            "dynamic": is_flag,
        },
    )


@good("LossScaler.scale")
def _() -> Good:
    outputs = is_one_of(is_gradient, is_equal_to([], ()))
    return Good(gf.LossScaler().scale, {"outputs": weight().sum()}, {"outputs": outputs})


@good("LossScaler.unscale_")
def _() -> Good:
    w = weight()
    w.grad = torch.ones(2)
    return Good(gf.LossScaler().unscale_, {"target": sgd(w)}, {"target": is_optimizer}, [w])


def is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


@good("LossScaler.step")
def _() -> Good:
    w = weight()
    w.grad = torch.ones(2)
    return Good(
        gf.LossScaler().step, {"/optimizer": sgd(w), "*args": []}, {"optimizer": is_optimizer}, [w]
    )


@good("LossScaler.update")
def _() -> Good:
    scaler = gf.LossScaler()
    scaler.unscale_(a_map())
    return Good(
        scaler.update, {"new_scale": 2.0}, {"new_scale": is_one_of(is_none, is_positive)}, [scaler]
    )


@good("LossScaler.load_state_dict")
def _() -> Good:
    scaler = gf.LossScaler()
    return Good(scaler.load_state_dict, {"state_dict": scaler.state_dict()}, {}, [scaler])
