"""The clock of operations: few system calls, and what others take is not counted."""

from __future__ import annotations

import pytest
import torch

from gradfit.profiling import clock
from gradfit.profiling.clock import OperationClock


class _Machine:
    """Time that passes only as told: on the wall, and of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.own = 0.0
        self.looks = 0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(clock.time, "thread_time", self._thread_time)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def _thread_time(self) -> float:
        self.looks += 1
        return self.own

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.own += seconds

    def wait(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(monkeypatch)


def test_short_operations_need_no_system_call(machine: _Machine) -> None:
    timer = OperationClock()
    taken = []
    for _ in range(1000):
        started = timer.start()
        machine.run(2e-5)
        taken.append(timer.since(started))
        machine.run(5e-5)  # what the interpreter does in between
    assert machine.looks == 1
    assert taken == pytest.approx([2e-5] * 1000)


def test_what_others_take_is_taken_off_the_operation_it_fell_into(machine: _Machine) -> None:
    timer = OperationClock()
    started = timer.start()
    machine.run(0.01)
    machine.wait(0.03)
    assert timer.since(started) == pytest.approx(0.01)
    started = timer.start()
    machine.run(0.01)
    assert timer.since(started) == pytest.approx(0.01)


def test_what_others_take_between_two_operations_is_not_taken_off_the_next(
    machine: _Machine,
) -> None:
    timer = OperationClock()
    started = timer.start()
    machine.run(1e-5)
    timer.since(started)
    machine.wait(0.5)
    started = timer.start()
    machine.run(0.01)
    assert timer.since(started) == pytest.approx(0.01)
