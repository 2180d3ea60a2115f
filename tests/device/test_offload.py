"""Values that go out to the host and come back on streams of their own: a missing wait gives NaN,
or what was written over them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradfit.planning.simulate import IN_FLIGHT
from gradfit.recompute.offload import Store

pytestmark = pytest.mark.on_device
SIZE = 1 << 16  # bytes: computing takes less than a copy that is late
COUNT = 6


@pytest.fixture
def sim() -> Iterator[Any]:
    import simulated

    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    yield simulated
    simulated.set_delays()


def values(store: Store) -> tuple[list[Any], list[Tensor]]:
    """What went out, and the same on the host. Each is freed at once, some are written over."""
    loads, expected = [], []
    for number in range(COUNT):
        torch.manual_seed(number)
        made = torch.rand(SIZE // 4)
        loads.append(store.put(made))
        expected.append(number)
        if number % 2:
            loads[-1].before_write()
            made.fill_(-1.0)
        del made
        torch.full((SIZE // 4,), -2.0)  # in the same memory, perhaps
    return loads, [_made(number) for number in expected]


def _made(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.rand(SIZE // 4)


@pytest.mark.parametrize("seed", range(20))
def test_values_come_back_as_they_went_out(sim: Any, seed: int) -> None:
    """In the order of a backward pass, and in any; used and freed at once, or held."""
    sim.set_delays(seed, 0.2 * (seed % 2), 5000)  # of copies, all
    loads, expected = values(Store())
    order = list(reversed(range(COUNT)))
    if seed % 2:
        random.Random(seed).shuffle(order)
    used, held = [], []
    for number in order * (1 + seed % 3 // 2):
        there = loads[number]()
        used.append((number, there * 2))  # at once: nothing else gives a copy time to come
        if seed % 5 == 0:
            held.append(there)
        del there
        torch.full((SIZE // 4,), -3.0)
    for number, twice in used:
        assert torch.equal(twice.cpu(), 2 * expected[number].cpu()), number


def test_few_values_more_than_those_in_use_are_on_the_device(sim: Any) -> None:
    before = torch.accelerator.memory_stats()["allocated_bytes.all.current"]

    def most() -> int:
        peak = torch.accelerator.memory_stats()["allocated_bytes.all.peak"] - before
        torch.accelerator.reset_peak_memory_stats()
        return round(peak / SIZE)

    torch.accelerator.reset_peak_memory_stats()
    store = Store()
    loads = []
    for _ in range(COUNT):
        made = torch.ones(SIZE // 4)
        loads.append(store.put(made))
        del made
    assert most() == 1 + IN_FLIGHT  # the value that is made, and those before it
    while loads:
        there = loads.pop()()
        assert bool((there == 1).all())
        del there
    assert most() == 2  # one in use, one on its way; the comparison is a quarter
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == before


def test_copies_that_nobody_asks_for_any_more_are_let_go(sim: Any) -> None:
    sim.set_delays(3, 1.0, 500)
    before = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
    loads = values(Store())[0]
    loads[4]()  # fetches the one before it
    del loads
    later = torch.full((SIZE // 4,), 5.0)
    assert bool((later == 5).all())
    del later
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == before


def test_copies_take_no_time_of_the_stream_that_computes(sim: Any) -> None:
    """By the device's own time: each copy takes as long as a kernel, and has one of its own."""
    kernel = 100_000  # µs: what the host takes beside it does not matter
    x, store = torch.ones(64), Store()

    def simulated_kernels(puts: bool) -> int:
        torch.accelerator.synchronize()
        started = sim.settings().now()
        loads = []
        for _ in range(COUNT):
            for _ in range(4):
                x * 2
            if puts:
                loads.append(store.put(x))
        while loads:
            loads.pop()()
            for _ in range(4):
                x * 2
        torch.accelerator.synchronize()
        return round((sim.settings().now() - started) * 1e6 / kernel)

    sim.settings().set_kernel_time(kernel)
    try:
        without, with_copies = simulated_kernels(puts=False), simulated_kernels(puts=True)
    finally:
        sim.settings().set_kernel_time(0)
    back = 4 * COUNT  # the kernels of the way back
    # only the first that comes back is waited for, and the last that goes out
    assert with_copies - without - back <= 3
