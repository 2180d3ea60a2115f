"""Trainers below one row's logits: with tiles they train, without them they say what tiles give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradfit as gf
from gradfit.integrations.lightning import Fit
from gradfit.integrations.transformers import FitTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
WORDS, WIDTH, LENGTH = 4000, 16, 256
SHORT = 4 * 2 * WORDS * WIDTH * 4 + 2 * LENGTH * WORDS * 4  # two rows' logits beside what stays


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        logits = self.head(x + self.mlp(x)).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, labels.flatten())}


def rows() -> Tensor:
    return torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Words()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0], batch[0])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_lightning(out: Path, callbacks: list[Any]) -> nn.Module:
    module = Module()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(rows()), batch_size=2))
    return module.net


def with_transformers(out: Path, options: dict[str, Any]) -> nn.Module:
    given = hf.TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.1, seed=3,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows()]
    kind: Any = FitTrainer if options else hf.Trainer
    trainer = kind(Words(), given, train_dataset=data, **options)
    trainer.train()
    return trainer.model  # type: ignore[no-any-return]


def are_close(ours: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_lightning_trains_below_one_row(tmp_path: Path) -> None:
    with pytest.raises(gf.BudgetInfeasible, match="With tile=True"):
        with_lightning(tmp_path, [Fit(SHORT, tile=False)])
    are_close(with_lightning(tmp_path, [Fit(SHORT)]), with_lightning(tmp_path, []))


def test_fit_trainer_trains_below_one_row(tmp_path: Path) -> None:
    with pytest.raises(gf.BudgetInfeasible, match="With tile=True"):
        with_transformers(tmp_path, {"memory": SHORT, "tile": False})
    ours = with_transformers(tmp_path, {"memory": SHORT})
    are_close(ours, with_transformers(tmp_path, {}))
