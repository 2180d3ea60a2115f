"""How gradfit learns that a storage has died."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from child_process import run_child

import gradfit as gf
from gradfit._torch import output_bytes, storage_key
from gradfit._torch_storage import StorageWatch, newest_life, watch_storage


class Note:
    """An attribute that somebody sets."""


def lives_of(storage: torch.UntypedStorage) -> int:
    count, life = 0, newest_life(storage)
    while life is not None:
        count, life = count + 1, life.older
    return count


def test_a_budget_that_cannot_be_held_does_not_crash_the_interpreter() -> None:
    assert run_child("budget_that_cannot_be_held.py") == 100


def test_many_watches_that_are_garbage_do_not_crash_the_interpreter() -> None:
    assert run_child("garbage_watches.py") == 200


def test_nested_tensors_under_a_limit_do_not_end_the_process() -> None:
    assert run_child("nested_tensors.py") >= 11


def test_a_watch_tells_once_and_only_when_the_storage_dies() -> None:
    dead: list[StorageWatch] = []
    x = torch.zeros(8)
    watch = watch_storage(x.untyped_storage(), dead.append)
    view = x.view(2, 4)
    gc.collect()
    del x
    assert not dead
    del view
    assert dead == [watch]
    assert dead[0] is watch


def test_a_storage_that_dies_in_another_thread() -> None:
    dead: list[StorageWatch] = []
    box = [torch.zeros(8)]
    watch = watch_storage(box[0].untyped_storage(), dead.append)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert dead == [watch]


def test_each_watcher_is_told() -> None:
    dead: list[StorageWatch] = []
    x = torch.zeros(8)
    watches = [watch_storage(x.untyped_storage(), dead.append) for _ in range(3)]
    del watches[1]
    del x
    assert len(dead) == 2


def test_a_watched_storage_keeps_the_attributes_that_it_has_and_gets() -> None:
    dead: list[StorageWatch] = []
    x = torch.zeros(8)
    storage: Any = x.untyped_storage()
    storage.before = "set before anybody watches"
    watches = [watch_storage(storage, dead.append)]
    storage.between = "two watchers"
    watches.append(watch_storage(storage, dead.append))
    assert (storage.before, storage.between) == ("set before anybody watches", "two watchers")
    note = storage.note = Note()
    held = weakref.ref(note)
    watches.append(watch_storage(storage, dead.append))
    del storage.note, note
    assert held() is None  # no dictionary of before has it
    del storage, x
    assert len(dead) == len(watches) == 3


def test_watching_a_storage_takes_few_bytes() -> None:
    """Of Python's memory: it is paid for each storage of a forward pass."""
    watches: list[StorageWatch] = []
    storages = [torch.zeros(1).untyped_storage() for _ in range(100)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    watches.extend(watch_storage(storage, print) for storage in storages)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= 100 * 200
    del watches[:]


def test_watching_a_parameter_again_and_again_leaves_nothing_behind() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    for _ in range(10):
        with gf.meter(weight), gf.meter(weight):
            pass
        gc.collect()
    storage = weight.untyped_storage()
    assert lives_of(storage) <= 2
    assert weakref.getweakrefcount(storage) == 0


def _metered(x: torch.Tensor) -> None:
    with gf.meter(x):
        pass


def _held_to_a_budget(x: torch.Tensor) -> None:
    model = torch.nn.Identity()
    model.register_buffer("x", x)
    gf.auto_checkpoint(model, "1 GiB").remove()


@pytest.mark.parametrize("count", [_metered, _held_to_a_budget])
def test_who_counts_no_more_watches_no_more_before_any_collection(
    count: Callable[[torch.Tensor], None],
) -> None:
    """The collector waits while a tape lives: each new meter passed all that were before it."""
    x = torch.zeros(4, 4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            count(x)
    finally:
        gc.enable()
    assert lives_of(x.untyped_storage()) == 1


def test_nothing_of_ours_refers_to_a_storage_weakly() -> None:
    """Neither a meter, nor a scope, nor the question how much an operation will allocate."""
    x = torch.randn(4, 4, requires_grad=True)
    with gf.meter(x), gf.CheckpointScope("scope"):
        h = gf.mark_checkpoint(x * 2)
        y = h.sin()
    assert output_bytes(torch.ops.aten.mm.default, (x, x), {}) == 64
    for tensor in (x, h, y):
        assert weakref.getweakrefcount(tensor.untyped_storage()) == 0


def test_what_an_operation_will_allocate() -> None:
    a, sparse = torch.randn(4, 6), torch.eye(4).to_sparse()
    aten = torch.ops.aten
    assert output_bytes(aten.mm.default, (a, a.t()), {}) == 4 * 4 * 4
    assert output_bytes(aten.add_.Tensor, (a, a), {}) == 0
    assert output_bytes(aten.cat.default, ([a, a],), {}) == 2 * 4 * 6 * 4
    assert output_bytes(aten.t.default, (a,), {}) == 0
    assert output_bytes(aten.nonzero.default, (a,), {}) is None
    assert output_bytes(aten.mm.default, (sparse, a), {}) is None


def test_a_mark_goes_with_its_storage() -> None:
    x = torch.randn(4, requires_grad=True)
    with gf.CheckpointScope("scope"):
        h = gf.mark_checkpoint(x.exp())
        gf.mark_checkpoint(h.view(2, 2))
        key = storage_key(h)
    assert gf.is_checkpoint(h.view(4))
    h.sum().backward()
    del h
    from gradfit.recompute import function

    assert key not in function._marked
