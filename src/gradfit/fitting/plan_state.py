"""A tested plan as plain JSON values, and back: what a step's and a run's state hold of it, checked
as it is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from gradfit.errors import StateError
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.state_checks import (
    MANY,
    Check,
    boolean,
    fields,
    integer,
    list_of,
    number,
    optional,
    text,
    wrong,
)

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
    return optional(integer(0)) if field.default is None else integer(0)


_KEYS = {field.name: _SAVED_AS.get(field.name, field.name) for field in _PLAIN_FIELDS}
_NUMBERS = {_KEYS[field.name]: _check_of(field) for field in _PLAIN_FIELDS}
_REQUIRED = {
    _KEYS[field.name]: _check_of(field)
    for field in _PLAIN_FIELDS
    if field.default is dataclasses.MISSING
}
_AT_LEAST_1 = ("micro_batch", "steps", "batch_size", "budget_bytes")
_AT_LEAST_0 = (
    "peak_bytes", "kept_values", "saved_values", "kept_bytes", "saved_bytes", "heard",
)  # fmt: skip
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
    _check_numbers("The plan", plan, profile)
    return plan, profile


def check_plan(where: str, value: Any) -> None:
    read_plan(value, where)


def _check_shape(where: str, value: Any) -> None:
    if type(value) is not list or len(value) != 2:
        raise wrong(where, value, "a shape and a type")
    list_of(integer(0), most=64)(where, value[0])
    text(*_DTYPES)(where, value[1])


def _check_numbers(where: str, plan: Plan, profile: Profile) -> None:
    """That a plan can be followed: it fits its profile, and its numbers are ones."""
    _check_attributes(where, plan, _AT_LEAST_1, integer(1))
    _check_attributes(where, plan, _AT_LEAST_0, integer(0))
    for record in (plan, profile):
        _check_attributes(where, record, _floats_of(record), number(-MANY, MANY))
    _check_attributes(f"{where}.profile", profile, ("batch_size", "min_batch"), integer(1))
    for index, action in enumerate(plan.actions):
        text("keep", "rebuild", "offload", "external")(f"{where}.actions[{index}]", action)
    _check_lengths(where, plan, profile)
    _check_segments(where, plan)
    list_of(integer(1))(f"{where}.update_groups", list(plan.update_groups))
    profile.updating(plan.update_groups)
    _check_values(where, profile)


def _check_attributes(where: str, record: Any, names: Iterable[str], check: Check) -> None:
    for name in names:
        check(f"{where}.{name}", getattr(record, name))


def _floats_of(record: Plan | Profile) -> list[str]:
    names = [field.name for field in dataclasses.fields(record)]
    return [name for name in names if isinstance(getattr(record, name), float)]


def _check_lengths(where: str, plan: Plan, profile: Profile) -> None:
    if not len(plan.actions) == len(plan.segments) == len(profile.values):
        raise StateError(
            f"{where} is not for its profile: {len(plan.actions)} actions, {len(profile.values)}"
            " values."
        )
    if len(plan.operations) != len(profile.operations):
        raise StateError(f"{where} is not for its profile: it has other operations.")


def _check_segments(where: str, plan: Plan) -> None:
    parents = plan.segment_parents
    if any(not 0 <= parent < index for index, parent in enumerate(parents[1:], start=1)):
        raise StateError(f"{where} has segments that lie in no earlier one.")
    if any(not 0 <= segment < len(parents) for segment in plan.segments):
        raise StateError(f"{where} has a value in a segment that it does not have.")


def _check_values(where: str, profile: Profile) -> None:
    for index, value in enumerate(profile.values):
        number(-MANY, MANY)(f"{where}.values[{index}]", value.nbytes.fixed)
        number(-MANY, MANY)(f"{where}.values[{index}]", value.nbytes.per_item)
        integer(-1)(f"{where}.values[{index}]", value.dies)
        integer(0)(f"{where}.values[{index}]", value.storage)
