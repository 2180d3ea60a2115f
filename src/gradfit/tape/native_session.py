"""Where the native core is in use: what it has to know of the tape, once for the process and once
for each recorder.

It makes the tape's own objects, and finds their slots by name. `native/core.cpp` says how.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradfit import _torch_listen, _torch_storage
from gradfit._torch_native import core
from gradfit.choices import HOLD, KEEP, REBUILD
from gradfit.tape.decisions import Decisions
from gradfit.tape.operators import LOAD, info_of
from gradfit.tape.storage import Untrackable
from gradfit.tape.storage_table import ATOMS, NO_KWARGS, each_once, next_index
from gradfit.tape.stream import results_of
from gradfit.tape.values import ParameterRef, Segment, Slice, TapeOperation, TapeValue

_lock = threading.Lock()
_connected: list[bool] = []
_SIZE = 11  # of a session


def session_of(recorder: Any) -> tuple[Any, ...] | None:
    """What the native core needs of one recorder, in the order of its `Session`; None where Python
    records.
    """
    native = core()
    if native is None:
        return None
    if not _connected:
        with _lock:
            if not _connected:
                _connect(native)
                _connected.append(True)
    table = recorder.table
    return (
        recorder,
        table,
        table.values,
        table.roots,
        table.dead,
        table.unwatched.by_storage,
        table.split_results.by_storage,
        recorder.saved_tensors,
        recorder._decisions,
        table._note_death,
        table.parameters.by_storage,
    )


def _connect(native: Any) -> None:
    value = TapeValue(0, (torch.Size(), (), 0, torch.float32), Segment(None))
    native.connect(
        {
            "session_size": _SIZE,
            "thread": _torch_listen._thread,
            "Link": _torch_listen._Link,
            "Life": _torch_storage._Life,
            "StorageWatch": _torch_storage.StorageWatch,
            "watch_storage": _torch_storage.watch_storage,
            "Tensor": torch.Tensor,
            "Parameter": torch.nn.Parameter,
            "Untrackable": Untrackable,
            "Decisions": Decisions,
            "ATOMS": ATOMS,
            "NO_KWARGS": NO_KWARGS,
            "next_index": next_index,
            "info_of": info_of,
            "results_of": results_of,
            "each_once": each_once,
            "KEEP": KEEP,
            "REBUILD": REBUILD,
            "HOLD": HOLD,
            "TapeValue": TapeValue,
            "TapeOperation": TapeOperation,
            "Slice": Slice,
            "ParameterRef": ParameterRef,
            "a_value": value,
            "an_operation": TapeOperation(0, None, LOAD, [], NO_KWARGS, []),
            "a_slice": Slice(value, value.geometry),
            "a_read": ParameterRef(torch.empty(0)),
        }
    )
