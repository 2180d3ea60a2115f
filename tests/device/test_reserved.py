"""A budget on a device whose allocator says what it has reserved is about that."""

from __future__ import annotations

import copy
import gc
from collections.abc import Container, Iterator
from typing import Any

import pytest
import torch
from test_on_device import a_batch, mean_loss, network
from torch import nn

import gradfit as gf
from gradfit._torch_memory_history import RequestHistory
from gradfit.fitting import reserved
from gradfit.fitting.reserved import ReservedMemory, TrialRecord
from gradfit.fitting.update_requests import UpdateSizes
from gradfit.planning.allocator import rounded
from gradfit.profiling.meter import Meter

pytestmark = pytest.mark.on_device
MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["segments", "expandable"])
def sim(request: pytest.FixtureRequest) -> Iterator[Any]:
    import simulated

    gc.collect()  # what tests before have left in cycles
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    simulated.settings().set_expandable(request.param)
    simulated.say_what_is_reserved(True)
    yield simulated
    simulated.say_what_is_reserved(False)
    torch.accelerator.empty_cache()
    simulated.settings().set_expandable(False)
    simulated.settings().set_cap(0, 1 << 62)


def peak_reserved() -> int:
    return torch.accelerator.memory_stats()["reserved_bytes.all.peak"]


def bytes_of_others(*own: Any) -> int:
    """What is allocated on the device beside these."""
    allocated = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
    return allocated - ReservedMemory({torch.device("sim", 0)}).rounded_bytes(*own)


def test_the_sequence_of_a_pass_predicts_the_counter_to_the_byte(sim: Any) -> None:
    model, batch = network(32, 4), a_batch(8192, 32)
    mean_loss(model, batch).backward()
    model.zero_grad()
    record = TrialRecord(ReservedMemory({torch.device("sim", 0)}))
    record.begin(model, batch, beside=[])
    others = bytes_of_others(model, batch)
    torch.accelerator.reset_peak_memory_stats()
    live = Meter(device="sim")
    live.events = record.events
    live.watch(model, batch)
    with live, gf.CheckpointScope("some"):
        loss = mean_loss(model, batch)
    with live:
        loss.backward()
        del loss
    predicted = record.reserved_bytes(UpdateSizes([], [], 0, 0), copied=False)
    record.end()
    assert predicted + others == peak_reserved()
    model.zero_grad()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
}


@pytest.mark.parametrize("share", [pytest.param(0.9, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_counter_is_never_above_the_budget(sim: Any, optimizer: str, share: float) -> None:
    batch = a_batch(16384, 16)
    plain_model = network(16, 5)
    start = copy.deepcopy(plain_model)
    plain = OPTIMIZERS[optimizer](plain_model.parameters())
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    for number in range(3):
        torch.manual_seed(number)
        plain.zero_grad()
        mean_loss(plain_model, batch).backward()
        plain.step()
    expected = [p.detach().cpu() for p in plain_model.parameters()]
    budget = int(share * peak_reserved())
    del plain, plain_model
    torch.accelerator.empty_cache()

    model = start
    stepper = OPTIMIZERS[optimizer](model.parameters())
    step = gf.fit(model, stepper, mean_loss, batch, memory=budget, micro_batch="whole")
    assert 0 < step.plan.reserved_bytes <= budget
    others = bytes_of_others(model, stepper, batch)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    for number in range(3):
        torch.manual_seed(number)
        result = step(batch)
        assert result.attempts == 1
        assert result.peak_bytes <= budget
    assert peak_reserved() - others <= step.plan.reserved_bytes <= budget
    assert all(
        torch.equal(a.detach().cpu(), b) for a, b in zip(model.parameters(), expected, strict=True)
    )
    assert torch.sim.get_per_process_memory_fraction(0) == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "capturable"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_counter_is_what_was_predicted(sim: Any, optimizer: str, dropout: float) -> None:
    """Also where the first update's state lies between what the passes have left free, and where
    kernels take memory inside of an operation.
    """
    model, batch = attending(dropout), torch.randn(24, 24, 16)
    stepper = STEPPERS[optimizer](model.parameters())
    step = gf.fit(
        model, stepper, square_loss, batch, "4 MiB", micro_batch="whole", reproducible=True
    )
    others = bytes_of_others(model, stepper, batch)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        assert step(batch).attempts == 1
    assert peak_reserved() - others == step.plan.reserved_bytes


STEPPERS = OPTIMIZERS | {
    "capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "scaled": lambda p: torch.optim.AdamW(p, fused=True),
}


def attending(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 2, 64, dropout, batch_first=True, norm_first=True)
        for _ in range(3)
    ]
    return nn.Sequential(*layers, nn.Linear(16, 16))


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def class_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    classes = torch.zeros(len(batch) * 24, dtype=torch.int64)
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), classes)


def scaled_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("sim", torch.float16):
        return class_loss(model, batch)


LOSSES = {"AdamW": square_loss, "SGD": class_loss, "scaled": scaled_loss}


@pytest.mark.parametrize("how", LOSSES)
def test_each_request_of_a_step_was_foreseen(
    sim: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Sizes, order, and when what was asked for is free again: so whatever segments come of it are
    those that were predicted.
    """
    followed: list[list[Request]] = []

    class Noted(reserved.AllOnPaper):
        def __init__(self, devices: Any) -> None:
            super().__init__(devices)
            self.events: list[Request] = []
            followed.append(self.events)

        def _follow(self, name: int, nbytes: int, device: int) -> bool:
            if nbytes < 0 or device == 0:  # and not the host's
                self.events.append((name, nbytes))
            return super()._follow(name, nbytes, device)

        def free(self, keep: Container[int] = ()) -> None:
            self.events += [(name, -1) for name in self._held if name not in keep]
            super().free(keep)

    monkeypatch.setattr(reserved, "AllOnPaper", Noted)
    model, batch = attending(0.0), torch.randn(24, 24, 16)
    stepper = STEPPERS[how](model.parameters())
    scaler = torch.amp.GradScaler("sim") if how == "scaled" else None
    step = gf.fit(
        model, stepper, LOSSES[how], batch, "4 MiB", micro_batch="whole", scaler=scaler,
        reproducible=True,
    )  # fmt: skip
    history = RequestHistory([torch.device("sim", 0)])
    history.begin()
    try:
        for _ in range(2):
            step(batch)
    finally:
        asked = [(name, nbytes) for name, nbytes, _ in history.end() or ()]
    assert in_order(asked) in [in_order(events) for events in followed]


Request = tuple[int, int]


def in_order(requests: list[Request]) -> list[tuple[int, set[int]]]:
    """What was asked for, in the allocator's blocks, each with which of those before it were freed
    since the one before.
    """
    numbers: dict[int, int] = {}
    made: list[tuple[int, set[int]]] = []
    freed: set[int] = set()
    for name, nbytes in requests:
        if nbytes > 0:
            numbers[name] = len(made)
            made.append((rounded(nbytes), freed))
            freed = set()
        elif nbytes < 0 and name in numbers:
            freed.add(numbers.pop(name))
    return made


def test_what_others_hold_is_beside_the_budget(sim: Any) -> None:
    model, batch = network(32, 4), a_batch(8192, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, mean_loss, batch, memory=100 * MIB)
    others = torch.ones(50 * MIB, dtype=torch.uint8)
    torch.accelerator.reset_peak_memory_stats()
    assert step(batch).attempts == 1
    assert peak_reserved() <= 150 * MIB + MIB
    assert bool((others == 1).all())


def test_a_budget_below_the_smallest_segments_is_refused(sim: Any) -> None:
    # rows enough that a number of each, rounded to 512 bytes, passes the segment
    model, batch = network(32, 1), a_batch(3072, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gf.BudgetInfeasible) as refusal:
        gf.fit(model, optimizer, mean_loss, batch, memory=MIB)
    least = refusal.value.min_bytes
    assert "segments of the device's allocator" in str(refusal.value)
    torch.accelerator.empty_cache()
    step = gf.fit(model, optimizer, mean_loss, batch, memory=least)
    others = bytes_of_others(model, optimizer, batch)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert step(batch).stepped
    assert peak_reserved() - others <= least


@pytest.mark.parametrize("at", [1, 40, 400])
def test_memory_that_runs_out_while_fit_measures_is_a_refusal(sim: Any, at: int) -> None:
    """There is less than the budget says, from the first allocation on, or from a later one."""
    model, batch = network(16, 1), a_batch(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def state() -> list[Any]:
        tensors = [*model.state_dict().values(), torch.sim.get_rng_state(0)]  # type: ignore[attr-defined]
        return [tensor.detach().cpu().clone() for tensor in tensors]

    before = state()
    sim.settings().fail_allocation(0, at, 1 << 40)
    try:
        with pytest.raises(gf.BudgetInfeasible, match="Memory ran out") as refusal:
            gf.fit(model, optimizer, mean_loss, batch, "256 MiB")
    finally:
        sim.settings().fail_allocation(0, -1, 0)
    assert refusal.value.min_bytes > 256 * MIB
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert gf.fit(model, optimizer, mean_loss, batch, "256 MiB")(batch).stepped
