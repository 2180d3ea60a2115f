"""Where the native core is in use: what it has to know of the tape, once for the process and once
for each recorder.

It makes the tape's own objects, and finds their slots by name. `native/core.cpp` says how.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from gradfit import _torch_listen, _torch_storage
from gradfit._torch_native import core
from gradfit.choices import HOLD, KEEP, REBUILD
from gradfit.tape import generators
from gradfit.tape.decisions import ALL, Decisions, ExpectedOperation, FollowingPolicy
from gradfit.tape.operators import LOAD, OpInfo, info_of
from gradfit.tape.parameter_reads import ParameterReads
from gradfit.tape.storage import Untrackable
from gradfit.tape.storage_table import ATOMS, NO_KWARGS, StorageTable, each_once, next_index
from gradfit.tape.stream import results_of
from gradfit.tape.values import (
    Handle,
    ParameterRef,
    Scratch,
    Segment,
    Slice,
    Tape,
    TapeOperation,
    TapeValue,
    new_handle,
    new_operation,
    new_slice,
    new_value,
    nothing,
)

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_lock = threading.Lock()
_connected: list[bool] = []
_SIZE = 13  # of a session


def session_of(recorder: Any) -> tuple[Any, ...] | None:
    """What the native core needs of one recorder, in the order of its `Session`; None where Python
    records.
    """
    if _connected_core() is None:
        return None
    return _session(recorder, recorder.table, recorder.saved_tensors, recorder._decisions)


def hooks_of(saved_tensors: Any, table: StorageTable) -> Hooks | None:
    """The native `SavedTensors.pack` and `unpack`; None where Python packs.

    The graph holds them: they hold no recorder, and no policy.
    """
    native = _connected_core()
    if native is None:
        return None
    session = _session(None, table, saved_tensors, None)
    return functools.partial(native.pack, session), native.unpack


def counting_hooks(counter: bytearray, otherwise: Callable[[torch.Tensor], Any]) -> Hooks | None:
    """Native hooks that keep every tensor, and add up its bytes; None where Python packs.

    Args:
        counter: an int64, the bytes so far, and a double, how many there may be.
        otherwise: packs what is above that, or not usual.
    """
    native = _connected_core()
    if native is None:
        return None
    return functools.partial(native.pack_kept, counter, otherwise), native.unpack


def _session(
    recorder: Any, table: StorageTable, saved_tensors: Any, decisions: Any
) -> tuple[Any, ...]:
    return (
        recorder,
        table,
        table.values,
        table.roots,
        table.dead,
        table.unwatched.by_storage,
        table.split_results.by_storage,
        saved_tensors,
        decisions,
        table._note_death,
        table.parameters.by_storage,
        table.inherited,
        saved_tensors.tape,
    )


def _connected_core() -> Any:
    native = core()
    if native is not None and not _connected:
        with _lock:
            if not _connected:
                with _torch_listen.unseen():  # somebody may record already: samples are made
                    _connect(native)
                _connected.append(True)
    return native


def _connect(native: Any) -> None:
    from gradfit.tape import recorder, saved_tensors  # which use this

    value = new_value(0, (torch.Size(), (), 0, torch.float32), Segment(None))
    nobody: Any = None
    native.connect(
        {
            "session_size": _SIZE,
            "expected_size": len(ExpectedOperation._fields),
            "thread": _torch_listen._thread,
            "Link": _torch_listen._Link,
            "Life": _torch_storage.Life,
            "StorageWatch": _torch_storage.StorageWatch,
            "watch_storage": _torch_storage.watch_storage,
            "Tensor": torch.Tensor,
            "Parameter": torch.nn.Parameter,
            "Untrackable": Untrackable,
            "Decisions": Decisions,
            "FollowingPolicy": FollowingPolicy,
            "OpInfo": OpInfo,
            "Segment": Segment,
            "Tape": Tape,
            "Scratch": Scratch,
            "ATOMS": ATOMS,
            "NO_KWARGS": NO_KWARGS,
            "ALL": ALL,
            "KEEP": KEEP,
            "REBUILD": REBUILD,
            "HOLD": HOLD,
            "next_index": next_index,
            "info_of": info_of,
            "results_of": results_of,
            "each_once": each_once,
            "nothing": nothing,
            "draws": generators.draws,
            "capture": generators.capture,
            "in_training": recorder._in_training,
            "running_statistics": recorder._running_statistics,
            "with_scratch": recorder._with_scratch,
            "as_replayed": recorder._as_replayed,
            "unpack": saved_tensors.unpack,
            "TapeValue": TapeValue,
            "TapeOperation": TapeOperation,
            "Slice": Slice,
            "ParameterRef": ParameterRef,
            "Handle": Handle,
            # each as it is when it was made
            "a_value": value,
            "an_operation": new_operation(0, None, LOAD, [], NO_KWARGS, []),
            "a_slice": new_slice(value, value.geometry),
            "a_read": ParameterReads().refer(torch.empty(0), 0),
            "a_handle": new_handle(nobody, nobody, None),
        }
    )
