"""Who owns what, and for how long: the graph's handles own the tape, and nothing else does."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.choices import HOLD
from gradfit.tape.decisions import TapeDecision
from gradfit.tape.recorder import Recorder
from gradfit.tape.values import Handle, Segment, TapeOperation, TapeValue


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """No cycles: everything must die by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def objects_of_the_tape() -> int:
    return sum(type(o) in (TapeValue, TapeOperation, Handle) for o in gc.get_objects())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Tanh(),
        nn.Linear(16, 1),
    )


def test_backward_frees_the_tape() -> None:
    with gf.CheckpointScope("first"):  # the native core keeps one sample of each object
        pass
    before = objects_of_the_tape()
    model = net()
    with gf.CheckpointScope("net"):
        loss = model(torch.randn(8, 16)).sum()
    assert objects_of_the_tape() > before
    loss.backward()
    assert objects_of_the_tape() == before


def test_a_dropped_graph_frees_the_tape() -> None:
    before = objects_of_the_tape()
    model = net()
    with gf.CheckpointScope("net") as scope:
        loss = model(torch.randn(8, 16)).sum()
    del loss
    assert objects_of_the_tape() == before
    assert scope.stats.recomputed_seconds == 0


def test_a_scope_without_a_graph_frees_the_tape() -> None:
    before = objects_of_the_tape()
    with gf.CheckpointScope("nothing to differentiate"):
        y = torch.randn(4).exp().sin()
    del y
    assert objects_of_the_tape() == before


def test_an_exception_frees_the_tape() -> None:
    before = objects_of_the_tape()
    model = net()

    def fail() -> None:
        with gf.CheckpointScope("net"):
            model(torch.randn(8, 16)).sum()
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert objects_of_the_tape() == before
    with gf.CheckpointScope("afterwards"):
        loss = model(torch.randn(8, 16)).sum()
    loss.backward()
    assert objects_of_the_tape() == before


def test_an_input_written_to_later_makes_no_cycle() -> None:
    """An input without a graph gets one when it is written to, and that graph's tape must not hold
    it.
    """
    before = objects_of_the_tape()
    weight = torch.randn(4, requires_grad=True)

    def step() -> weakref.ref[torch.Tensor]:
        x = torch.zeros(4)
        with gf.CheckpointScope("a"):
            y = (x * weight).exp().sin()
        x.add_(y)
        return weakref.ref(x)

    assert step()() is None
    assert objects_of_the_tape() == before


@pytest.mark.parametrize("kind", ["drop", "hold", "keep"])
def test_an_output_saved_by_its_own_node_makes_no_cycle(kind: str) -> None:
    class Holding:
        def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
            return TapeDecision((HOLD,) * len(results))

    before = objects_of_the_tape()
    x = torch.randn(4, requires_grad=True)

    def step() -> list[weakref.ref[Any]]:
        scope: Any = {
            "drop": gf.CheckpointScope("a"),
            "hold": Recorder(Segment(None), Holding()),
            "keep": gf.CheckpointScope("a", keep=lambda op, output: True),
        }[kind]
        with scope:
            y = x.exp()
            z = (y * y.sigmoid()).tanh()
        return [weakref.ref(t.untyped_storage()) for t in (y, z)]

    assert [reference() for reference in step()] == [None, None]
    assert objects_of_the_tape() == before


def test_activations_die_in_the_forward() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with gf.CheckpointScope("a"):
        h = x.exp()
        storage = weakref.ref(h.untyped_storage())
        loss = h.sin().square().sum()
        del h
        assert storage() is None
    loss.backward()


def test_handles_die_node_by_node() -> None:
    """A value is freed when the last backward node that needs it is done, not at the end of the
    pass.
    """
    x = torch.randn(1024, requires_grad=True)
    with gf.meter() as meter:
        with gf.CheckpointScope("a"):
            loss = x
            for _ in range(20):
                with gf.CheckpointScope("part"):
                    loss = loss.sin().exp().tanh()
            loss = loss.sum()
        meter.reset_peak()
        loss.backward()
    assert meter.peak_bytes < 30 * x.nbytes


def test_no_leak_over_a_thousand_steps() -> None:
    model = net()
    x = torch.randn(8, 16)

    def step(number: int) -> None:
        with gf.CheckpointScope(
            "net", keep=(lambda op, out: number % 3 == 0) if number % 2 else None
        ):
            loss = model(x).sum()
        if number % 5:
            loss.backward()
            model.zero_grad()

    with gf.meter() as meter:
        for number in range(50):
            step(number)
        live, objects = meter.current_bytes, len(gc.get_objects())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(1000):
            step(number)
        assert meter.current_bytes == live
    assert len(gc.get_objects()) - objects < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20 << 10  # KiB


def test_a_long_chain_dies_without_recursion() -> None:
    x = torch.ones(2, requires_grad=True)
    with gf.CheckpointScope("long"):
        y = x
        for _ in range(20_000):
            y = y * 1.0001
        loss = (y.exp() * y).sum()
    loss.backward(retain_graph=True)
    del y, loss
    assert x.grad is not None


def test_addresses_are_used_again() -> None:
    """A dead storage's address goes to the next tensor at once; the tape must not take one for the
    other.
    """
    x = torch.randn(256, requires_grad=True)
    seen = set()
    with gf.CheckpointScope("a"):
        y = x
        for _ in range(50):
            y = y.sin() + y.cos()
            seen.add(y.untyped_storage().data_ptr())
        y = y.sum()
    y.backward()
    assert len(seen) < 50
    found = x.grad
    x.grad = None
    z = x
    for _ in range(50):
        z = z.sin() + z.cos()
    z.sum().backward()
    assert torch.equal(found, x.grad)


def test_meter_does_not_keep_anything_alive() -> None:
    with gf.meter() as meter:
        x = torch.zeros(1000)
        assert meter.current_bytes == 4000
        del x
        assert meter.current_bytes == 0
    assert meter.peak_bytes == 4000
