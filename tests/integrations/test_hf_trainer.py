"""`FitTrainer` beside the plain `Trainer`: the same training, below a budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import gradfit as gf
from gradfit.fitting import recovery
from gradfit.integrations.transformers import FitTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def language_model() -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=4,
        vocab_size=50,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config).double()


def sentences(count: int = 48) -> list[dict[str, torch.Tensor]]:
    """Very unequal lengths, padded; padding is no label."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        ids = torch.randint(0, 50, (48,), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        end = 3 + (number * 17) % 45
        labels[end:], mask[end:] = -100, 0
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def classifier() -> Any:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    return hf.ViTForImageClassification(config).double()


def images(count: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    return [
        {"pixel_values": one, "labels": torch.tensor(number % 2)}
        for number, one in enumerate(pixels)
    ]


def arguments(out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }
    return hf.TrainingArguments(output_dir=str(out), **{**given, **options})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def peak_of(trainer: Any) -> int:
    """Of one batch's passes, with parameters, gradients and optimizer state."""
    batch = next(iter(trainer.get_train_dataloader()))
    items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    trainer.model.zero_grad()
    with gf.meter(trainer.model, trainer.optimizer.optimizer, batch) as live:
        trainer.training_step(trainer.model, batch, items)
    return live.peak_bytes


@pytest.mark.parametrize(("make", "data"), [(language_model, sentences), (classifier, images)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_training_in_less_memory(
    make: Any, data: Any, accumulation: int, tmp_path: Path
) -> None:
    plain = hf.Trainer(
        make(),
        arguments(tmp_path / "plain", gradient_accumulation_steps=accumulation),
        train_dataset=data(),
    )
    plain.train()
    needed = peak_of(plain)
    static = 4 * sum(p.nbytes for p in plain.model.parameters())
    budget = static + (needed - static) // 3
    ours = FitTrainer(
        make(),
        arguments(tmp_path / "ours", gradient_accumulation_steps=accumulation),
        train_dataset=data(),
        memory=budget,
    )
    ours.train()
    assert peak_of(ours) <= budget < needed
    assert losses(ours) == pytest.approx(losses(plain), abs=2e-4)  # they are logged rounded
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9


def test_the_smallest_budget_is_held_by_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(memory: int) -> Any:
        return FitTrainer(
            language_model(), arguments(tmp_path), train_dataset=sentences(), memory=memory
        )

    with pytest.raises(gf.BudgetInfeasible) as refused:
        trainer(10_000).train()
    monkeypatch.setattr(recovery, "WithinLimit", None)
    ours = trainer(refused.value.min_bytes)
    ours.train()
    assert peak_of(ours) <= refused.value.min_bytes
    plain = hf.Trainer(language_model(), arguments(tmp_path), train_dataset=sentences())
    plain.train()
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9


def test_a_budget_that_cannot_be_held_changes_nothing(tmp_path: Path) -> None:
    model = language_model()
    before = copy.deepcopy(model.state_dict())
    trainer = FitTrainer(model, arguments(tmp_path), train_dataset=sentences(), memory="10 KiB")
    with pytest.raises(gf.BudgetInfeasible):
        trainer.train()
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(gf.MisuseError, match="bananas"):
        FitTrainer(model, arguments(tmp_path), train_dataset=sentences(), memory="3 bananas")
