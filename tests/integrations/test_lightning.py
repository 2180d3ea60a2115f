"""The `Fit` callback beside plain Lightning: the same training, below a budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradfit as gf
from gradfit.fitting import recovery
from gradfit.integrations.lightning import Fit

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


class Module(L.LightningModule):
    def __init__(self, *, as_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(8, 64)]
        for _ in range(4):
            layers += [nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64)]
        self.net = nn.Sequential(*layers, nn.Linear(64, 1)).double()
        self.as_dict = as_dict
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("train_loss", loss)
        self.seen.append(len(x))
        return {"loss": loss, "rows": len(x)} if self.as_dict else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1600, 8, generator=generator, dtype=torch.float64)
    # the last batch has 64 rows
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=512)


class Peak(L.Callback):
    """The largest peak of all steps."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.meter: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.meter = gf.meter(module, *trainer.optimizers, batch)
        if batch_idx:  # in the first one plans are made
            self.meter.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx:
            self.meter.__exit__(None, None, None)
            self.peak_bytes = max(self.peak_bytes, self.meter.peak_bytes)


def train(module: Module, out: Path, callbacks: list[Any], **options: Any) -> None:
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out,
        callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.fit(module, loader())


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}]
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_same_training_in_less_memory(
    options: dict[str, Any], as_dict: bool, tmp_path: Path
) -> None:
    plain, ours = Module(as_dict=as_dict), Module(as_dict=as_dict)
    before, after = Peak(), Peak()
    train(plain, tmp_path, [before], **options)
    static = 6 * sum(p.nbytes for p in plain.parameters())
    budget = static + (before.peak_bytes - static) // 2
    train(ours, tmp_path, [after, Fit(budget)], **options)
    assert after.peak_bytes <= budget < before.peak_bytes
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9
    assert "training_step" not in vars(ours)
    assert "log" not in vars(ours)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}]
)
def test_the_smallest_budget_is_held_by_its_plan(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(gf.BudgetInfeasible) as refused:
        train(Module(), tmp_path, [Fit("10 KiB")], **options)
    least = refused.value.min_bytes
    # what the forward logs is no reason to leave the plan
    monkeypatch.setattr(recovery, "WithinLimit", None)
    plain, ours, after = Module(), Module(), Peak()
    train(plain, tmp_path, [], **options)
    train(ours, tmp_path, [after, Fit(least)], **options)
    assert after.peak_bytes <= least
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9


def test_a_plan_that_is_left_holds_the_budget_too(tmp_path: Path) -> None:
    class Another(Module):
        """Does more in its real steps than it did while it was profiled."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            if self.global_step > 1:
                return (self.net(x).exp().log() - y).square().mean()
            return (self.net(x) - y).square().mean()

    plain, ours, before, after = Another(), Another(), Peak(), Peak()
    train(plain, tmp_path, [before])
    static = 6 * sum(p.nbytes for p in plain.parameters())
    budget = static + (before.peak_bytes - static) // 3
    train(ours, tmp_path, [after, Fit(budget)])
    assert after.peak_bytes <= budget
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9


def test_items_that_are_not_rows(tmp_path: Path) -> None:
    class Masked(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            chosen = x[:, 0] > 0
            return (self.net(x) - y)[chosen].square().sum() / chosen.sum()

    plain, ours = Masked(), Masked()
    needed = Peak()
    train(plain, tmp_path, [needed])
    static = 6 * sum(p.nbytes for p in plain.parameters())
    budget = static + (needed.peak_bytes - static) // 2
    train(ours, tmp_path, [Fit(budget, count=lambda part: int((part[0][:, 0] > 0).sum()))])
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9


def test_what_it_cannot_do_is_said_first(tmp_path: Path) -> None:
    module = Module()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(gf.BudgetInfeasible):
        train(module, tmp_path, [Fit("10 KiB")])
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    assert not {"training_step", "log"} & set(vars(module))
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(gf.MisuseError, match="automatic optimization"):
        train(manual, tmp_path, [Fit("1 MiB")])
    with pytest.raises(gf.MisuseError, match="one device, not 2"):
        Fit("1 MiB").setup(_two_devices(), Module(), "fit")


def _two_devices() -> Any:
    class Two:
        num_devices, num_nodes, precision = 2, 1, "32-true"

    return Two()
