"""The simulated device itself: as strict as it says, and otherwise the CPU, bit by bit."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.on_device
MIB = 1 << 20


@pytest.fixture
def sim() -> Iterator[object]:
    import simulated

    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    simulated.set_delays()
    yield simulated
    simulated.set_delays()
    simulated.settings().set_expandable(False)
    for index in range(simulated.DEVICES):
        simulated.settings().set_cap(index, 1 << 62)


def test_the_host_cannot_touch_the_device_s_memory() -> None:
    code = (
        "import simulated, torch, ctypes; simulated.load()\n"
        "x = torch.ones(4, device='sim'); print(ctypes.c_float.from_address(x.data_ptr()).value)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True
    )
    assert child.returncode < 0  # ended by a signal


def test_a_model_gives_the_cpu_s_numbers() -> None:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )
    here = nn.Sequential(*layers)
    there = copy.deepcopy(here).to("cpu")
    x = torch.randn(6, 3, 8, 8)
    for model, rows in ((here, x), (there, x.cpu())):
        torch.manual_seed(1)
        model(rows).logsumexp(1).sum().backward()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert a.grad is not None
        assert a.grad.device.type == "sim"
        assert torch.equal(a.grad.cpu(), b.grad)
    assert torch.equal(here[1].running_mean.cpu(), there[1].running_mean)  # type: ignore[union-attr,operator,arg-type]


def test_a_stream_that_does_not_wait_reads_nonsense(sim) -> None:
    sim.set_delays(1, 1.0, 3000)
    side = torch.Stream("sim")
    x = torch.ones(1000) * 3
    with side:
        y = x + 1
    assert not torch.equal(y.cpu(), torch.full((1000,), 4.0, device="cpu"))
    torch.accelerator.synchronize()
    x = torch.ones(1000) * 3
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    torch.accelerator.current_stream().wait_stream(side)
    assert torch.equal(y.cpu(), torch.full((1000,), 4.0, device="cpu"))


def test_a_copy_that_does_not_wait_arrives_late(sim) -> None:
    x = torch.ones(1000)
    host = torch.empty(1000, device="cpu", pin_memory=True)
    sim.set_delays(2, 0.0, 3000)
    host.copy_(x, non_blocking=True)
    assert host.isnan().any()
    torch.accelerator.synchronize()
    assert torch.equal(host, torch.ones(1000, device="cpu"))


def test_memory_that_another_stream_still_reads_is_reused_unless_that_is_recorded(sim) -> None:
    for recorded in (False, True):
        host = torch.empty(1000, device="cpu", pin_memory=True)
        x = torch.ones(1000)
        side = torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        sim.set_delays(3, 0.0, 5000)
        with side:
            host.copy_(x, non_blocking=True)
            if recorded:
                x.record_stream(side)
        del x
        torch.zeros(1000)
        torch.accelerator.synchronize()
        sim.set_delays()
        assert torch.equal(host, torch.ones(1000, device="cpu")) == recorded


def test_the_cap_holds_and_cached_segments_are_given_back_for_it(sim) -> None:
    torch.sim.set_per_process_memory_fraction(64 * MIB / sim.settings().total(0), 0)  # type: ignore[attr-defined]
    free = torch.accelerator.memory_reserved()
    first = torch.empty(30 * MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(60 * MIB, dtype=torch.uint8)
    del first
    torch.empty(40 * MIB, dtype=torch.uint8)  # two segments cannot be there at once
    assert torch.accelerator.memory_reserved() <= free + 40 * MIB


def test_rounding_and_segments_are_those_of_cuda(sim) -> None:
    def taken(nbytes: int) -> tuple[int, int]:
        before = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
        made = torch.empty(nbytes, dtype=torch.uint8)
        after = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
        del made
        torch.accelerator.empty_cache()
        return after[0] - before[0], after[1] - before[1]

    assert taken(2 * MIB) == (2 * MIB, 20 * MIB)
    assert taken(9 * MIB + 1)[1] == 20 * MIB
    assert taken(19 * MIB) == (20 * MIB, 20 * MIB)  # less than 1 MiB would be left: not split
    assert taken(21 * MIB) == (22 * MIB, 22 * MIB)
    small = taken(1)
    assert small[0] == 512
    assert small[1] in (0, 2 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_random_allocations_leave_nothing_behind(sim, expandable: bool) -> None:
    sim.settings().set_expandable(expandable)
    before = torch.accelerator.memory_allocated()
    draw = random.Random(0)
    held: list[tuple[torch.Tensor, int]] = []
    for number in range(400):
        if held and draw.random() < 0.5:
            tensor, content = held.pop(draw.randrange(len(held)))
            assert bool((tensor == content).all())
        else:
            size = draw.choice([1, 600, 5000, MIB, MIB + 1, 3 * MIB, 12 * MIB])
            held.append((torch.full((size,), number % 251, dtype=torch.uint8), number % 251))
        if draw.random() < 0.05:
            torch.accelerator.empty_cache()
    for tensor, content in held:
        assert bool((tensor == content).all())
    del held, tensor
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == before


def test_reads_are_counted(sim) -> None:
    x = torch.ones(3)
    before = sim.counters()["reads"]
    y = x * 2
    assert sim.counters()["reads"] == before
    y.sum().item()
    y.cpu()
    assert sim.counters()["reads"] == before + 2


def test_views_are_no_kernels_and_lists_are_one(sim) -> None:
    x, many = torch.ones(4, 6), [torch.ones(2, 3) for _ in range(5)]
    before = sim.counters()["kernels"]
    x.view(24)[3:].detach().unsqueeze(0).expand(2, -1)
    x.t().transpose(0, 1)
    assert sim.counters()["kernels"] == before
    torch._foreach_mul_(many, 2.0)
    assert sim.counters()["kernels"] == before + 1
    assert all(bool((one == 2).all()) for one in many)


def test_a_view_of_a_tensor_of_inference_mode_is_one(sim) -> None:
    with torch.inference_mode():
        x = torch.ones(4, 6)
    assert x[1:].is_inference()
    assert x.view(24).is_inference()


def test_two_devices_have_generators_of_their_own() -> None:
    torch.manual_seed(0)
    first, second = torch.rand(3, device="sim:0"), torch.rand(3, device="sim:1")
    assert torch.equal(first.cpu(), second.cpu())
    assert not torch.equal(torch.rand(3, device="sim:0").cpu(), first.cpu())


def test_zeros_without_memory_are_of_the_device() -> None:
    """Tangents in forward mode begin so."""
    zeros = torch._efficientzerotensor((3,), device="sim")  # type: ignore[attr-defined]
    assert (zeros.device.type, zeros._is_zerotensor()) == ("sim", True)
    assert torch.equal((zeros + torch.ones(3)).cpu(), torch.ones(3, device="cpu"))


def test_the_history_has_what_kernels_take_inside(sim) -> None:
    sim.say_what_is_reserved(True)
    try:
        q = torch.ones(2, 4, 8)
        sim.memory._record_memory_history("all", context=None, clear_history=True)
        nn.functional.scaled_dot_product_attention(q, q, q)
        trace = sim.memory._snapshot()["device_traces"][0]
        sim.memory._record_memory_history(None, clear_history=True)
        assert sum(entry["action"] == "alloc" for entry in trace) > 1
        assert not any(sim.memory._snapshot()["device_traces"])
    finally:
        sim.say_what_is_reserved(False)
