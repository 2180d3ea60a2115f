"""What a module logs under `Fit` is what it logs without: each batch once, with the mean over its
items.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradfit as gf
from gradfit.integrations.lightning import Fit

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


class Lines(Logger):
    """Every number that reaches a logger, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append({name: value for name, value in metrics.items() if name != "epoch"})


class Masked(L.LightningModule):
    """A mean over targets that are not ignored; batches and parts hold very unequal numbers of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)
        )
        self.net.double()
        self.returned: list[Any] = []

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y), logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        kept = batch[1] != -100
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log(
            "accuracy",
            (logits.argmax(1) == batch[1])[kept].double().mean(),
            on_step=True,
            on_epoch=True,
        )
        self.log("rows", float(len(batch[1])), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log(
            "largest", logits.detach().abs().max(), on_step=True, on_epoch=True, reduce_fx="max"
        )
        self.log(
            "by_rows", batch[0][:, 0].mean(), on_step=True, on_epoch=True, batch_size=len(batch[1])
        )
        self.log_dict({"twice": 2 * loss.detach()}, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits, "where": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (200,), generator=generator)
    y[torch.rand(200, generator=generator) < torch.linspace(0, 0.95, 200)] = -100  # ever fewer
    y[-1] = 1
    return DataLoader(TensorDataset(x, y), batch_size=64)  # the last batch has 8 rows


def train(module: Any, out: Path, *callbacks: Any) -> Lines:
    lines = Lines()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=lines, enable_checkpointing=False,
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=out, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, loader())
    return lines


def budget_for(module: nn.Module, rows: int) -> int:
    """Room for gradients and parameters, and the activations of so many of the 64 rows."""
    return 3 * sum(p.nbytes for p in module.parameters()) + 64 * 80 + rows * 8 * (4 * 256 + 16)


def test_each_batch_is_logged_once_as_without(tmp_path: Path) -> None:
    plain, ours = Masked(), Masked()
    expected, found = (
        train(plain, tmp_path),
        train(ours, tmp_path, Fit(budget_for(ours, 24), micro_batch=24)),
    )
    assert len(found.lines) == len(expected.lines)
    for one, other in zip(found.lines, expected.lines, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12
    for one, other in zip(ours.returned, plain.returned, strict=True):
        assert torch.allclose(one["loss"].detach(), other["loss"].detach(), rtol=1e-12)
        assert torch.allclose(one["logits"], other["logits"].detach(), rtol=1e-9)
    assert isinstance(ours.returned[0]["where"], list)  # it was cut
    assert len(ours.returned[0]["where"]) > 1


class Summed(Masked):
    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="sum") / 64, logits


def test_a_sum_is_logged_as_a_sum(tmp_path: Path) -> None:
    plain, ours = Summed(), Summed()
    expected, found = (
        train(plain, tmp_path),
        train(ours, tmp_path, Fit(budget_for(ours, 24), micro_batch=24)),
    )
    assert [line["loss_step"] for line in found.lines if "loss_step" in line] == pytest.approx(
        [line["loss_step"] for line in expected.lines if "loss_step" in line], rel=1e-9
    )
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12
    assert isinstance(ours.returned[0]["where"], list)


class Coupled(Masked):
    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        z = F.normalize(self.net(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z))), z


def test_a_loss_that_couples_rows_is_not_cut(tmp_path: Path) -> None:
    plain, ours = Coupled(), Coupled()
    train(plain, tmp_path)
    with pytest.raises(gf.BudgetInfeasible) as refused:
        train(Coupled(), tmp_path, Fit("10 KiB"))
    train(ours, tmp_path, Fit(refused.value.min_bytes))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert ours.returned[0]["where"] == 0
