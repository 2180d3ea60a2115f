"""Every public parameter × bad values: an error that names the parameter, with nothing changed, or
a legal value.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import argument_calls
import pytest
import torch
from argument_calls import CALLS
from torch import Tensor, nn

import gradfit as gf

# Records that gradfit returns, objects that its functions make, and what its own engine calls:
# nobody passes these.
RESULTS = {
    "Estimate",
    "Lever",
    "AuditReport",
    "AutogradGraph",
    "GradientCheck",
    "GradientEntry",
    "GradientReport",
    "MemoryStats",
    "Plan",
    "Profile",
    "NativeCore",
    "StepResult",
    "TrainResult",
    "AppliedPlan",
    "BudgetUse",
    "MemoryBudget",
    "TiledModel",
    "TrainStep",
}
ENGINE = re.compile(
    r"AccumulationContext\.(?!register_tensor$)|CheckpointScope\.note_|CheckpointNode\.of$|Plan\.with_(extra|step)_seconds$|"
    r"Profile\.(at|in_tiles)$|Meter\.hear$|TiledModel\.add_modules$|GradientAccumulationValidator\.incompatibility$|Strategy\.|"
    r"\w+\.(is_complete|progress|expected_weight|observe|end_window)$"
)
# A number in the first place is the number of steps.
ALSO_CALLED = {("GradientAccumulator", "optimizer"): "optimizer|steps"}
OPERATORS = ("__call__", "__getitem__", "__setitem__", "__delitem__", "__contains__")


def parameters_of(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD,)
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.name not in ("self", "cls") and one.kind not in kinds]


def public_callables() -> Iterator[tuple[str, list[str]]]:
    """Each public callable with its parameters: functions, constructors, methods, and settable
    properties.
    """
    for name in gf.__all__:
        thing = getattr(gf, name)
        if inspect.isfunction(thing):
            yield name, parameters_of(thing)
        elif inspect.ismodule(thing):
            for member, function in vars(thing).items():
                if (
                    inspect.isfunction(function)
                    and function.__module__ == thing.__name__
                    and member[0] != "_"
                ):
                    yield f"{name}.{member}", parameters_of(function)
        elif inspect.isclass(thing) and not issubclass(thing, BaseException):
            if (
                name not in RESULTS
                and not inspect.isabstract(thing)
                and (names := parameters_of(thing))
            ):
                yield name, names
            yield from public_methods(name, thing)


def public_methods(name: str, kind: type) -> Iterator[tuple[str, list[str]]]:
    members: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("gradfit")]):
        members |= vars(base)
    for member, value in members.items():
        if member.startswith("_") and member not in OPERATORS:
            continue
        if isinstance(value, property):
            if value.fset is not None:
                yield f"{name}.{member}=", [member]
            continue
        function = getattr(value, "__func__", getattr(value, "function", value))
        if inspect.isfunction(function) and (names := parameters_of(function)):
            yield f"{name}.{member}", names


WALK = {
    name: parameters
    for name, parameters in public_callables()
    if parameters and not ENGINE.match(name)
}


def takes_nothing() -> None: ...


# Made anew for each case, since some are used up.
BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "three": lambda: 3,
    "a half": lambda: 0.5,
    "two and a half": lambda: 2.5,
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "minus infinity": lambda: -math.inf,
    "complex": lambda: 1 + 2j,
    "huge": lambda: 10**30,
    "more than a float": lambda: 10**400,
    "empty text": lambda: "",
    "text": lambda: "x",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"x",
    "empty list": list,
    "empty tuple": lambda: (),
    "empty dict": dict,
    "empty iterator": lambda: iter(()),
    "list of objects": lambda: [object()],
    "list of None": lambda: [None, None],
    "list of lists": lambda: [[1], [2, 3]],
    "dict": lambda: {"x": 1},
    "dict of objects": lambda: {1: object()},
    "object": object,
    "function of nothing": lambda: takes_nothing,
    "module": lambda: nn.Linear(2, 2),
    "optimizer": lambda: torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1),
    "dtype": lambda: torch.float32,
    "integer dtype": lambda: torch.int64,
    "tensor": lambda: torch.ones(2),
    "matrix": lambda: torch.ones(3, 2),
    "one number": lambda: torch.tensor(2.0),
    "NaN tensor": lambda: torch.tensor(math.nan),
    "empty tensor": lambda: torch.ones(0),
    "integers": lambda: torch.zeros(2, dtype=torch.int64),
    "booleans": lambda: torch.ones(2, dtype=torch.bool),
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "another device": lambda: torch.ones(2, device="meta"),
    "sparse tensor": lambda: torch.ones(2).to_sparse(),
}


def fingerprint(things: list[Any]) -> list[Any]:
    """What a refused call must not change."""
    found: list[Any] = [torch.get_rng_state().numpy().tobytes()]
    for thing in things:
        if isinstance(thing, Tensor):
            found.append((thing.tolist(), None if thing.grad is None else thing.grad.tolist()))
        elif isinstance(thing, nn.Module):
            found += fingerprint(list(thing.parameters()))[1:]
        else:
            found.append(repr(thing))
    return found


def problem(name: str, parameter: str, value: Any) -> str | None:
    """What is wrong with the outcome of a call with one bad value; None if it is refused by name,
    or legal.
    """
    good = CALLS[name]()
    names = ALSO_CALLED.get((name, parameter), parameter)
    key = next((key for key in good.arguments if key.lstrip("*/") == parameter), parameter)
    before = fingerprint(good.watched)
    legal = good.accepts.get(parameter, lambda value: False)
    try:
        good.run(**{key: [value] if key.startswith("*") else value})
    except gf.GradfitError as error:
        if not re.search(rf"\b({names})\b", str(error)):
            return f"does not name {parameter}: {type(error).__name__}: {str(error)[:200]}"
        return (
            None
            if fingerprint(good.watched) == before
            else f"refused, but something changed: {error}"
        )
    except Exception as error:
        if came_from_the_caller(error):
            return None if fingerprint(good.watched) == before else f"something changed: {error}"
        return f"raw {type(error).__name__}: {str(error)[:150]}"
    return None if legal(value) else "accepted"


def came_from_the_caller(error: BaseException) -> bool:
    """Whether it was raised by the caller's own function, or in calling the caller's model, with a
    bad value.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = any(
        code.co_filename == argument_calls.__file__ and code.co_name in ("loss_fn", "exp")
        for code in codes
    )
    return own or codes[-1] is nn.Module._call_impl.__code__


def outcomes(name: str, *, every: int) -> dict[str, str]:
    """What is wrong with each parameter of a callable, with one in `every` bad values, others for
    each parameter.
    """
    found = {}
    for at, parameter in enumerate(WALK[name]):
        for number, (bad, make) in enumerate(BAD.items()):
            if (number + at + len(name)) % every == 0:
                what = problem(name, parameter, make())
                if what is not None:
                    found[f"{parameter}={bad}"] = what
    return found


def test_every_public_callable_has_a_call_that_is_right() -> None:
    assert sorted(WALK) == sorted(CALLS)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_right_call_works(name: str) -> None:
    CALLS[name]().run()


@pytest.mark.filterwarnings("ignore")  # of plans and automatic managers that are made and not used
@pytest.mark.parametrize("name", sorted(CALLS))
def test_bad_values_in_a_sample(name: str) -> None:
    assert not outcomes(name, every=7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_bad_value(name: str) -> None:
    assert not outcomes(name, every=1)


def test_a_raw_exception_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_anything(**arguments: Any) -> None:
        if arguments["steps"] is None:
            raise KeyError("steps")

    monkeypatch.setitem(
        CALLS, "FixedStepCount", lambda: argument_calls.Good(takes_anything, {"steps": 2})
    )
    found = outcomes("FixedStepCount", every=1)
    assert found.pop("steps=None") == "raw KeyError: 'steps'"
    assert set(found.values()) == {"accepted"}
