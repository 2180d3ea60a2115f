"""A tested plan as plain JSON values, and back: what a step's and a run's state hold of it, checked
as it is read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from gradfit.errors import StateError
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.state_checks import (
    Check,
    boolean,
    fields,
    integer,
    list_of,
    optional,
    text,
    wrong,
)
from gradfit.units import NO_BUDGET

_DTYPES = {
    str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)
}
_FLAGS = ("steady", "seen", "reads_data", "copied", "by_size")
_RECORDS = ("plan", "profile", "shape", "slack")
# What states that were saved before call a field.
_SAVED_AS = {"reads_data": "looks"}
_PLAIN_FIELDS = [field for field in dataclasses.fields(TestedPlan) if field.name not in _RECORDS]


def _check_of(field: dataclasses.Field[Any]) -> Check:
    """What a field may hold."""
    if field.name in _FLAGS:
        return boolean
    whole = integer(0, NO_BUDGET)
    return optional(whole) if field.default is None else whole


_KEYS = {field.name: _SAVED_AS.get(field.name, field.name) for field in _PLAIN_FIELDS}
_NUMBERS = {_KEYS[field.name]: _check_of(field) for field in _PLAIN_FIELDS}
_REQUIRED = {
    _KEYS[field.name]: _check_of(field)
    for field in _PLAIN_FIELDS
    if field.default is dataclasses.MISSING
}
_SHAPES = list_of(lambda where, value: _check_shape(where, value))
_PLAN = fields({"plan": text(), "profile": text(), "shape": _SHAPES, **_REQUIRED}, _NUMBERS)


def write_plan(tested: TestedPlan, as_json: Any) -> dict[str, Any]:
    """A plan that was tried out as plain values; `as_json` writes a record."""
    return {
        "plan": as_json(tested.plan),
        "profile": as_json(tested.profile),
        "shape": [
            [list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in tested.shape
        ],
        **{key: getattr(tested, name) for name, key in _KEYS.items()},
    }


def read_plan(saved: dict[str, Any], where: str = "The plan") -> TestedPlan:
    """What `write_plan` gave; anything else is a `StateError`."""
    _PLAN(where, saved)
    plan, profile = _read_records(saved["plan"], saved["profile"])
    return TestedPlan(
        plan=plan,
        profile=profile,
        shape=tuple((tuple(shape), _DTYPES[dtype]) for shape, dtype in saved["shape"]),
        # one that is newer has its default
        **{name: saved[key] for name, key in _KEYS.items() if key in saved},
    )


@functools.lru_cache(maxsize=64)  # the same texts are in every state of a run
def _read_records(plan_text: str, profile_text: str) -> tuple[Plan, Profile]:
    plan, profile = Plan.from_json(plan_text), Profile.from_json(profile_text)
    _check_lengths("The plan", plan, profile)
    profile.updating(plan.update_groups)
    return plan, profile


def check_plan(where: str, value: Any) -> None:
    read_plan(value, where)


def _check_shape(where: str, value: Any) -> None:
    if type(value) is not list or len(value) != 2:
        raise wrong(where, value, "a shape and a type")
    list_of(integer(0), most=64)(where, value[0])
    text(*_DTYPES)(where, value[1])


def _check_lengths(where: str, plan: Plan, profile: Profile) -> None:
    if not len(plan.actions) == len(plan.segments) == len(profile.values):
        raise StateError(
            f"{where} is not for its profile: {len(plan.actions)} actions, {len(profile.values)}"
            " values."
        )
    if len(plan.operations) != len(profile.operations):
        raise StateError(f"{where} is not for its profile: it has other operations.")
