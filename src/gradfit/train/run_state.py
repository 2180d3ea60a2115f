"""What the state of a training run holds, field by field: the one place that says so, for whoever writes and reads one.

It is checked before a state is written, so that one which could not be read is refused while the last one is still
there, and again when it is read, before anything is done with it: a file can be changed together with its checksums.
Whether it is a state of *this* job, by names and shapes, is said in `snapshot.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from gradfit.errors import StateError
from gradfit.planning.record import Plan
from gradfit.profiling.record import Profile
from gradfit.train.expected import (
    MANY,
    any_number,
    boolean,
    dict_of,
    fields,
    integer,
    list_of,
    number,
    optional,
    tensor,
    text,
    wrong,
)
from gradfit.train.fitted import Fitted
from gradfit.train.nest import Piece
from gradfit.train.randomness import check_random

MOST_RANKS = 2**16
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def anything(where: str, value: Any) -> None:
    """What only the job can judge."""


def _generator(where: str, value: Any) -> None:
    tensor(torch.uint8)(where, value)


def _tensor_or_piece(where: str, value: Any) -> None:
    if not isinstance(value, Piece):
        tensor()(where, value)


def _size_or_whole(where: str, value: Any) -> None:
    (text("whole") if isinstance(value, str) else integer(1))(where, value)


check_settings = fields(
    {
        "batch_size": integer(1),
        "memory_bytes": integer(1),
        "seed": integer(0, 2**64 - 1),
        "steps": optional(integer(1)),
        "epochs": optional(integer(1)),
    },
    {"micro_batch": optional(_size_or_whole)},
)
_DATA = fields(
    {
        "kind": text("rows", "batches"),
        "rows": optional(integer(1)),
        "epoch": integer(0),
        "position": integer(0),
        "offset": integer(0),
        "at_start": optional(check_random),
        "before_pending": optional(check_random),
        "own": list_of(_generator),
    }
)
_PROGRESS = fields(
    {
        "done": integer(1),
        "micro_batch": integer(1),
        "total": any_number,
        "items": number(0),
        "window": optional(anything),
        "buffers": dict_of(tensor()),
        "random": check_random,
    },
    {"logs": dict_of(any_number)},
)
_JOB = fields(
    {
        "model": dict_of(_tensor_or_piece),
        "extra": dict_of(anything),
        "optimizer": anything,
        "scheduler": anything,
    },
    {"own": dict_of(anything)},  # since an optimizer's own attributes are saved too
)
_STATE = fields(
    {
        "step": integer(0),
        "settings": check_settings,
        "place": fields({"data": _DATA, "random": check_random}),
        "progress": optional(_PROGRESS),
        "accumulator": optional(fields({"tensors": dict_of(tensor()), "window": dict_of(anything)})),
        "job": _JOB,
        "plans": list_of(lambda where, value: _check_plan(where, value)),
    },
    {"ranks": integer(1, MOST_RANKS)},
)


def check_state(content: dict[str, Any]) -> None:
    """Raise a `StateError` unless this can be the state of a run, whatever its job."""
    _STATE("The state", content)
    data = content["place"]["data"]
    if data["rows"] is not None and data["position"] > data["rows"]:
        raise StateError(f"The state.place is at row {data['position']} of {data['rows']}.")
    if data["offset"] and data["before_pending"] is None:
        raise StateError("The state.place is in the middle of a batch, and does not say where that began.")


# ------------------------------------------------------------------------------------------------ plans


_FLAGS = ("steady", "seen", "looks", "copied")
_PLAIN_FIELDS = [field for field in dataclasses.fields(Fitted) if field.name not in ("plan", "profile", "shape")]
_NUMBERS = {
    field.name: boolean if field.name in _FLAGS else optional(integer(0)) if field.default is None else integer(0)
    for field in _PLAIN_FIELDS
}
_REQUIRED = {field.name: _NUMBERS[field.name] for field in _PLAIN_FIELDS if field.default is dataclasses.MISSING}
_SHAPES = list_of(lambda where, value: _check_shape(where, value))
_PLAN = fields({"plan": text(), "profile": text(), "shape": _SHAPES, **_REQUIRED}, _NUMBERS)


def write_plan(fitted: Fitted, as_json: Any) -> dict[str, Any]:
    """A plan that was tried out as plain values; `as_json` writes a record."""
    return {
        "plan": as_json(fitted.plan),
        "profile": as_json(fitted.profile),
        "shape": [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in fitted.shape],
        **{name: getattr(fitted, name) for name in _NUMBERS},
    }


def read_plan(saved: dict[str, Any], where: str = "The plan") -> Fitted:
    """What `write_plan` gave; anything else is a `StateError`."""
    _PLAN(where, saved)
    plan, profile = _read_records(saved["plan"], saved["profile"])
    return Fitted(
        plan=plan,
        profile=profile,
        shape=tuple((tuple(shape), _DTYPES[dtype]) for shape, dtype in saved["shape"]),
        **{name: saved[name] for name in _NUMBERS if name in saved},  # one that is newer has its default
    )


@functools.lru_cache(maxsize=64)  # the same texts are in every state of a run
def _read_records(plan_text: str, profile_text: str) -> tuple[Plan, Profile]:
    plan, profile = Plan.from_json(plan_text), Profile.from_json(profile_text)
    _check_numbers("The plan", plan, profile)
    return plan, profile


def _check_plan(where: str, value: Any) -> None:
    read_plan(value, where)


def _check_shape(where: str, value: Any) -> None:
    if type(value) is not list or len(value) != 2:
        raise wrong(where, value, "a shape and a type")
    list_of(integer(0), most=64)(where, value[0])
    text(*_DTYPES)(where, value[1])


def _check_numbers(where: str, plan: Plan, profile: Profile) -> None:
    """That a plan can be followed: it fits its profile, and its numbers are ones."""
    for name in ("micro_batch", "steps", "batch_size", "budget_bytes"):
        integer(1)(f"{where}.{name}", getattr(plan, name))
    for name in ("peak_bytes", "kept_values", "saved_values", "kept_bytes", "saved_bytes", "heard"):
        integer(0)(f"{where}.{name}", getattr(plan, name))
    for record in (plan, profile):
        for field in dataclasses.fields(record):
            if isinstance(value := getattr(record, field.name), float):
                number(-MANY, MANY)(f"{where}.{field.name}", value)
    for name in ("batch_size", "min_batch"):
        integer(1)(f"{where}.profile.{name}", getattr(profile, name))
    for index, action in enumerate(plan.actions):
        text("keep", "rebuild", "offload", "external")(f"{where}.actions[{index}]", action)
    if not len(plan.actions) == len(plan.segments) == len(profile.values):
        raise StateError(f"{where} is not for its profile: {len(plan.actions)} actions, {len(profile.values)} values.")
    if len(plan.operations) != len(profile.operations):
        raise StateError(f"{where} is not for its profile: it has other operations.")
    if any(not 0 <= parent < index for index, parent in enumerate(plan.segment_parents[1:], start=1)):
        raise StateError(f"{where} has segments that lie in no earlier one.")
    if any(not 0 <= segment < len(plan.segment_parents) for segment in plan.segments):
        raise StateError(f"{where} has a value in a segment that it does not have.")
    for index, value in enumerate(profile.values):
        number(-MANY, MANY)(f"{where}.values[{index}]", value.nbytes.fixed)
        number(-MANY, MANY)(f"{where}.values[{index}]", value.nbytes.per_item)
        integer(-1)(f"{where}.values[{index}]", value.dies)
        integer(0)(f"{where}.values[{index}]", value.storage)
