"""What several threads, or everybody in the process, share: hooks on forwards, FSDP2's functions,
the default store.
"""

from __future__ import annotations

import datetime
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from gradfit import _torch_distributed as private
from gradfit import _torch_fsdp
from gradfit.distributed.no_sync import ForwardHooks
from gradfit.distributed.process_group import Group


class Waiting(nn.Module):
    """Its forward ends when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.entered = {True: threading.Event(), False: threading.Event()}
        self.leave = {True: threading.Event(), False: threading.Event()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grad = torch.is_grad_enabled()
        self.entered[grad].set()
        assert self.leave[grad].wait(10)
        return x * self.weight


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def before_forward(self, module: nn.Module) -> None:
        self.notes.append("before")

    def after_forward(self, module: nn.Module) -> None:
        self.notes.append("after")

    def failed(self, error: BaseException) -> None:
        self.notes.append("failed")


def test_forwards_in_two_threads_are_told_apart() -> None:
    module, notes = Waiting(), Notes()
    ear = ForwardHooks([module], notes)

    def evaluate() -> None:
        with torch.no_grad():
            module(torch.ones(1))

    training, evaluating = (
        threading.Thread(target=module, args=(torch.ones(1),)),
        threading.Thread(target=evaluate),
    )
    training.start()
    assert module.entered[True].wait(10)
    evaluating.start()
    assert module.entered[False].wait(10)
    module.leave[True].set()  # the first ends first
    training.join()
    assert notes.notes == ["before", "after"]
    module.leave[False].set()
    evaluating.join()
    assert notes.notes == ["before", "after"]
    ear.close()


def test_two_threads_that_hear_of_resizes_leave_fsdp_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [(w, n) for w, n in _torch_fsdp._resizers if hasattr(sys.modules.get(w), n)]
    originals = [getattr(sys.modules[where], name) for where, name in there]
    telling = _torch_fsdp._telling_of_resizes
    ends: list[Any] = []
    second = threading.Thread(
        target=lambda: ends.append(_torch_fsdp.observe_resizes(lambda tensor: None))
    )

    def slowly(call: Any) -> Any:
        if second.ident is None:  # the first thread is in the middle of patching
            second.start()
            second.join(0.2)
        return telling(call)

    monkeypatch.setattr(_torch_fsdp, "_telling_of_resizes", slowly)
    ends.append(_torch_fsdp.observe_resizes(lambda tensor: None))
    second.join()
    for end in ends:
        end()
    assert [getattr(sys.modules[where], name) for where, name in there] == originals


def test_the_default_stores_timeout_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = torch.distributed.HashStore()
    store.set_timeout(datetime.timedelta(seconds=77))
    monkeypatch.setattr(private, "default_store", lambda: store)
    monkeypatch.setattr(private, "group_name", lambda handle: "all")
    group = object.__new__(Group)
    group.handle, group.size, group.rank, group.meetings = None, 2, 0, 0  # type: ignore[assignment]
    group.leave_word(ValueError("why"))
    assert group._read(0) == "ValueError: why"
    assert store.timeout == datetime.timedelta(seconds=77)
