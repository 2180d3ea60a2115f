"""The allocator on paper against the device's own counters, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradfit.planning.allocator import CachingAllocator, ExpandableAllocator

pytestmark = pytest.mark.on_device
MIB = 1 << 20
SIZES = [1, 600, 5000, 300_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 12 * MIB, 21 * MIB + 5]


@pytest.fixture
def sim() -> Iterator[Any]:
    import simulated

    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    yield simulated
    torch.accelerator.empty_cache()
    simulated.settings().set_expandable(False)
    simulated.settings().set_cap(1, 1 << 62)


def on_paper(sim: Any, expandable: bool, cap: int | None = None) -> CachingAllocator:
    made = ExpandableAllocator(cap) if expandable else CachingAllocator(cap)
    made.load(sim.settings().snapshot(1))
    return made


def counted() -> tuple[int, int]:
    stats = torch.accelerator.memory_stats("sim:1")
    return stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]


@pytest.mark.parametrize("capped", [False, True], ids=["uncapped", "capped"])
@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", range(3))
def test_random_allocations(sim: Any, seed: int, expandable: bool, capped: bool) -> None:
    """After every single one both have allocated and reserved the same, or both refuse."""
    sim.settings().set_expandable(expandable)
    draw = random.Random(seed)
    cap = 130 * MIB if capped else None
    if cap is not None:
        sim.settings().set_cap(1, cap)
    paper = on_paper(sim, expandable, cap)
    held: list[tuple[Any, Any]] = []
    refused = 0
    for number in range(500):
        if held and draw.random() < 0.48:
            tensor, block = held.pop(draw.randrange(len(held)))
            paper.free(block)
            del tensor
        elif draw.random() < 0.02:
            torch.accelerator.empty_cache()
            paper.empty_cache()
        else:
            size = draw.choice(SIZES) if draw.random() < 0.7 else draw.randrange(1, 15 * MIB)
            block = paper.allocate(size)
            try:
                tensor = torch.empty(size, dtype=torch.uint8, device="sim:1")
            except torch.OutOfMemoryError:
                assert block is None
                refused += 1
            else:
                assert block is not None
                held.append((tensor, block))
            tensor = None
        assert counted() == (paper.allocated_bytes, paper.reserved_bytes), number
    assert (refused > 0) == capped


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_from_the_middle_of_a_run(sim: Any, expandable: bool) -> None:
    """Loaded from the device's snapshot, it goes on as the device does."""
    sim.settings().set_expandable(expandable)
    draw = random.Random(3)
    before = [torch.empty(draw.choice(SIZES), dtype=torch.uint8, device="sim:1") for _ in range(60)]
    draw.shuffle(before)
    del before[::2]
    paper = on_paper(sim, expandable)
    assert counted() == (paper.allocated_bytes, paper.reserved_bytes)
    after = []
    for _ in range(100):
        size = draw.choice(SIZES)
        after.append(torch.empty(size, dtype=torch.uint8, device="sim:1"))
        paper.allocate(size)
        assert counted() == (paper.allocated_bytes, paper.reserved_bytes)
