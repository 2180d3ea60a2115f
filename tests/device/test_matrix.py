"""Real architectures on the simulated device, with dropout and with work that appears late:
whatever gradfit does is bit by bit what plain PyTorch does there, within the budget by the
device's own counter.

`make test-device` has one optimizer for each model, and one budget; all are slow tests.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reserved import bytes_of_others, peak_reserved
from torch import Tensor, nn

import gradfit as gf

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))

pytestmark = pytest.mark.on_device
STEPS, MIB = 2, 1 << 20

# So many times the four rows of its batch: no tensor is much larger than 1 MiB, so that segments
# are small and a budget can be held by them.
MODELS = {"gpt2": 24, "bert": 24, "t5": 16, "vit": 16, "resnet": 4, "mixtral": 12, "lstm": 16}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "scaled": lambda p: torch.optim.AdamW(p, lr=0.01),  # in float16, with a GradScaler
}
SAMPLE = dict(zip(MODELS, [*OPTIMIZERS, "SGD", "foreach"], strict=True))
PAIRS = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]


@pytest.fixture
def sim() -> Iterator[Any]:
    import simulated

    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    simulated.say_what_is_reserved(True)
    yield simulated
    simulated.set_delays()
    simulated.say_what_is_reserved(False)
    simulated.settings().set_cap(0, 1 << 62)


class Case:
    """A model, its batch and how it is trained."""

    def __init__(self, model: str, optimizer: str) -> None:
        import estimates
        from profiling_models import make, mixtral

        torch.manual_seed(0)
        if model == "lstm":
            self._model: nn.Module = estimates.Recurrent()
            batch, loss_fn = torch.randn(4, 12, 24), _square_loss
        else:
            self._model, batch, loss_fn = mixtral() if model == "mixtral" else make(model)
        for module in self._model.train().modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        self.batch = estimates._rows(batch, MODELS[model])
        self._loss_fn, self._optimizer = loss_fn, OPTIMIZERS[optimizer]
        self.is_scaled, self.follows_data = optimizer == "scaled", model == "mixtral"

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """A new model with the same weights, its optimizer and its scaler."""
        model = copy.deepcopy(self._model)
        scaler = torch.amp.GradScaler("sim", init_scale=256.0) if self.is_scaled else None
        return model, self._optimizer(model.parameters()), scaler

    def loss(self, model: nn.Module, batch: Any) -> Any:
        with torch.autocast("sim", torch.float16, enabled=self.is_scaled):
            return self._loss_fn(model, batch)

    def trained_by_hand(self, around: Callable[[], Any] = contextlib.nullcontext) -> list[Tensor]:
        """What a plain loop makes, with this around its forward passes."""
        model, optimizer, scaler = self.begin()
        for number in range(STEPS):
            torch.manual_seed(number)
            optimizer.zero_grad()
            with around():
                loss = self.loss(model, self.batch)
                if isinstance(loss, tuple):
                    loss = loss[0] / loss[1]
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return everything(model, optimizer)

    def trained_by_fit(self, memory: int, *, offload: bool = False) -> list[Tensor]:
        """What steps of `fit` make; the counter is asked whether they held their budget."""
        model, optimizer, scaler = self.begin()
        step = gf.fit(
            model, optimizer, self.loss, self.batch, memory, micro_batch="whole", scaler=scaler,
            offload=offload,
        )  # fmt: skip
        others = bytes_of_others(model, optimizer, self.batch)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        for number in range(STEPS):
            torch.manual_seed(number)
            result = step(self.batch)
            assert (result.stepped, result.micro_batches) == (True, 1)
            # which experts are asked changes with each update, and with that the operations
            assert result.attempts == 1 or self.follows_data
        assert peak_reserved() - others <= memory
        return everything(model, optimizer)

    def least_bytes(self, too_little: int) -> int:
        model, optimizer, scaler = self.begin()
        with pytest.raises(gf.BudgetInfeasible) as refusal:
            gf.fit(
                model, optimizer, self.loss, self.batch, too_little, micro_batch="whole",
                scaler=scaler,
            )  # fmt: skip
        return refusal.value.min_bytes


def _square_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers, the optimizer's state and the device's generator."""
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    made = [t.detach().cpu() for t in (*model.parameters(), *model.buffers(), *states)]
    return [*made, torch.sim.get_rng_state(0)]  # type: ignore[attr-defined]


def same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def clean_up() -> None:
    """What others hold in a segment counts as theirs, so that budgets are compared without them."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


def check(sim: Any, model: str, optimizer: str, budgets: int) -> None:
    case, seed = Case(model, optimizer), PAIRS.index((model, optimizer))
    clean_up()
    torch.accelerator.reset_peak_memory_stats()
    expected = case.trained_by_hand()
    most = peak_reserved()
    live = torch.accelerator.memory_stats()["requested_bytes.all.peak"]
    clean_up()
    # mixtral's forward depends on the data, so that no plan can say what will be reserved
    least = most if case.follows_data else case.least_bytes(1 << 16)

    def delayed(number: int) -> None:
        clean_up()
        sim.set_delays(seed * 16 + number, 0.02, 200)

    for number, around in enumerate(
        (
            lambda: gf.CheckpointScope("all"),
            lambda: gf.CheckpointManager(max_memory_mb=0.85 * live / MIB, auto_checkpoint=True),
        )
    ):
        delayed(number)
        assert same(case.trained_by_hand(around), expected)
    for number in range(budgets):
        delayed(2 + number)
        budget = least + (most - least) * number // max(1, budgets - 1)
        assert same(case.trained_by_fit(budget), expected), budget
    delayed(12)
    assert same(case.trained_by_fit((least + most) // 2, offload=True), expected)
    delayed(13)
    report = gf.audit(case.begin()[0], case.loss, case.batch)
    assert report.identical, str(report)


@pytest.mark.parametrize("model", MODELS)
def test_a_sample(sim: Any, model: str) -> None:
    check(sim, model, SAMPLE[model], budgets=1)


@pytest.mark.parametrize("enough_seconds", [0.0, 60.0], ids=["two sizes", "many sizes"])
def test_the_least_budget_and_those_above_it_are_enough(
    sim: Any, monkeypatch: pytest.MonkeyPatch, enough_seconds: float
) -> None:
    """Whatever sizes the clock lets be measured: segments need not be fewer where there are fewer
    bytes.
    """
    from gradfit.profiling import sampled_sizes

    monkeypatch.setattr(sampled_sizes, "_LONG_SECONDS", enough_seconds)
    monkeypatch.setattr(sampled_sizes, "_PLENTY_SECONDS", enough_seconds)
    case = Case("lstm", "foreach")
    clean_up()
    expected = case.trained_by_hand()
    clean_up()
    least = case.least_bytes(1 << 16)
    for more in (0, 11 * MIB // 8):  # the next segment is 2 MiB
        clean_up()
        assert same(case.trained_by_fit(least + more), expected), more


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_every_optimizer_at_ten_budgets(sim: Any, model: str, optimizer: str) -> None:
    check(sim, model, optimizer, budgets=10)
