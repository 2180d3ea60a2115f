"""What the state of a training run holds, field by field: the one place that says so, for whoever
writes and reads one.

It is checked before a state is written, so that one which could not be read is refused while the
last one is still there, and again when it is read, before anything is done with it: a file can be
changed together with its checksums. Whether it is a state of *this* job, by names and shapes, is
said in `job_state.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from gradfit.errors import StateError
from gradfit.fitting.plan_state import check_plan
from gradfit.runs.random_state import check_random
from gradfit.runs.state_codec import Shard
from gradfit.state_checks import (
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
)

MOST_RANKS = 2**16


def anything(where: str, value: Any) -> None:
    """What only the job can judge."""


def _generator(where: str, value: Any) -> None:
    tensor(torch.uint8)(where, value)


def _tensor_or_shard(where: str, value: Any) -> None:
    if not isinstance(value, Shard):
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
    {"micro_batch": optional(_size_or_whole), "tile": boolean},
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
        "model": dict_of(_tensor_or_shard),
        "extra": dict_of(anything),
        "optimizer": anything,
        "scheduler": anything,
    },
    {"own": dict_of(anything), "scaler": dict_of(anything)},  # that an earlier version did not save
)
_STATE = fields(
    {
        "step": integer(0),
        "settings": check_settings,
        "place": fields({"data": _DATA, "random": check_random}),
        "progress": optional(_PROGRESS),
        "accumulator": optional(
            fields({"tensors": dict_of(tensor()), "window": dict_of(anything)})
        ),
        "job": _JOB,
        "plans": list_of(lambda where, value: check_plan(where, value)),
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
        raise StateError(
            "The state.place is in the middle of a batch, and does not say where that began."
        )
