"""`FitTrainer` beside plain `Trainer` with the batch in one piece, whatever the head: the same
update to rounding.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hf_heads import FLOAT32_INSIDE, HEADS, NOT_CUT, ROWS

import gradfit as gf
from gradfit.integrations.transformers import FitTrainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
QUICK = ("gpt2", "bert_masked", "bert_rows", "t5")
SHARES = (0.6, 0.2)  # of what activations take in one piece


def trainer(kind: type, model: Any, rows: Any, out: Path, /, **options: Any) -> Any:
    """A trainer for one update of all rows, by a step whose size is the gradient's."""
    given = {
        name: options.pop(name)
        for name in ("gradient_accumulation_steps", "label_smoothing_factor")
        if name in options
    }
    steps = given.get("gradient_accumulation_steps", 1)
    arguments = hf.TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=ROWS // steps, max_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
        remove_unused_columns=False, max_grad_norm=0.0, **given,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(
            model, arguments, train_dataset=rows, optimizers=(optimizer, schedule), **options
        )


def made(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, rows = HEADS[name]()
    if name == "clip":
        rows = [{**row, "return_loss": True} for row in rows]
    return model.double(), rows


class Collated:
    """`return_loss=True` is an argument of CLIP's, not data."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        flag = rows[0].get("return_loss")
        batch = hf.default_data_collator(
            [{k: v for k, v in row.items() if k != "return_loss"} for row in rows]
        )
        return {**batch, "return_loss": flag} if flag else dict(batch)


def updated(plain: Any) -> dict[str, torch.Tensor]:
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    plain.train()
    return {name: before[name] - p.detach() for name, p in plain.model.named_parameters()}


def error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    difference = sum(float((one[name] - other[name]).square().sum()) for name in other) ** 0.5
    return difference / sum(float(part.square().sum()) for part in other.values()) ** 0.5


def bytes_in_one_piece(plain: Any) -> tuple[int, int]:
    """What is there whatever happens, and the peak with the activations of the whole batch."""
    batch = next(iter(plain.get_train_dataloader()))
    items = plain._get_num_items_in_batch([batch], torch.device("cpu"))
    with gf.meter(plain.model, batch) as live:
        plain.training_step(plain.model, batch, items)
        static = live.current_bytes
    return static, live.peak_bytes


def fitted(model: Any, rows: Any, out: Path, budget: int, **options: Any) -> Any:
    """With this budget, or with the smallest that can be held; that may be said anew when more rows
    are measured.
    """
    for _ in range(4):
        ours = trainer(FitTrainer, copy.deepcopy(model), rows, out, memory=budget, **options)
        try:
            return ours, updated(ours)
        except gf.BudgetInfeasible as smallest:
            budget = smallest.min_bytes
    raise AssertionError("no budget that was said to be enough is")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in HEADS]
)
def test_the_update_is_that_of_the_batch_in_one_piece(
    name: str, share: float, tmp_path: Path
) -> None:
    model, rows = made(name)
    plain = trainer(
        hf.Trainer, copy.deepcopy(model), rows, tmp_path / "plain", data_collator=Collated()
    )
    expected = updated(plain)
    static, peak = bytes_in_one_piece(plain)
    # Which plan is the fastest, the clock says: where parts are to be shown, they are asked for.
    is_cut = share < 0.5 and name not in NOT_CUT
    ours, found = fitted(
        model,
        rows,
        tmp_path / "ours",
        int(static + share * (peak - static)),
        data_collator=Collated(),
        micro_batch=5 if is_cut else None,
    )
    plan = ours._passes.plan(next(iter(ours.get_train_dataloader())))
    assert error(found, expected) < (1e-6 if name in FLOAT32_INSIDE else 1e-9)
    assert ours.state.log_history[0]["loss"] == pytest.approx(
        plain.state.log_history[0]["loss"], rel=1e-4
    )
    if name in NOT_CUT:
        assert plan.steps == 1
    elif is_cut:
        assert plan.steps > 1


def mean_by_hand(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Over the labels that count, and by nothing that it is told."""
    logits, kept = outputs["logits"].flatten(0, 1), labels.flatten() != -100
    return torch.nn.functional.cross_entropy(logits[kept], labels.flatten()[kept])


def share_of_all(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """By what it is told, where it is told anything."""
    logits = outputs["logits"].flatten(0, 1)
    if num_items_in_batch is None:
        return torch.nn.functional.cross_entropy(logits, labels.flatten())
    return (
        torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        / num_items_in_batch
    )


class Own:
    """A `compute_loss` of one's own, as a mixin."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = mean_by_hand(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class OwnTrainer(Own, hf.Trainer):
    pass


class OwnFitTrainer(Own, FitTrainer):
    pass


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "the model's own loss": ("gpt2", {}),
    "a loss that ignores the number of items": ("bert_masked", {}),
    "compute_loss_func, a mean": ("bert_tokens", {"compute_loss_func": mean_by_hand}),
    "compute_loss_func, a share": ("bert_tokens", {"compute_loss_func": share_of_all}),
    "label smoothing": ("bert_masked", {"label_smoothing_factor": 0.1}),
    "label smoothing, shifted": ("gpt2", {"label_smoothing_factor": 0.1}),
    "compute_loss": ("bert_tokens", {"own": True}),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            v, marks=() if v.startswith(("a loss", "compute_loss_func, a m")) else pytest.mark.slow
        )
        for v in VARIANTS
    ],
)
def test_ways_to_make_a_loss_and_batches_that_accumulate(
    variant: str, steps: int, tmp_path: Path
) -> None:
    """Over `gradient_accumulation_steps` as well, the update is that of all rows in one piece."""
    name, options = VARIANTS[variant]
    options = dict(options)
    plain_kind, kind = (
        (OwnTrainer, OwnFitTrainer) if options.pop("own", False) else (hf.Trainer, FitTrainer)
    )
    model, rows = made(name)
    plain = trainer(plain_kind, copy.deepcopy(model), rows, tmp_path / "plain", **options)
    expected = updated(plain)
    static, peak = bytes_in_one_piece(plain)
    budget = int(static + 0.2 * (peak - static))
    given = {**options, "gradient_accumulation_steps": steps, "memory": budget}
    ours = trainer(kind, copy.deepcopy(model), rows, tmp_path / "ours", **given)
    assert error(updated(ours), expected) < 1e-9
    assert ours.state.log_history[0]["loss"] == pytest.approx(
        plain.state.log_history[0]["loss"], rel=1e-4
    )
    if steps == 1:
        assert ours._passes.plan(next(iter(ours.get_train_dataloader()))).steps > 1


@pytest.mark.parametrize(("size", "steps"), [(5, 3), ("whole", 1)])
def test_the_micro_batch_can_be_said(size: Any, steps: int, tmp_path: Path) -> None:
    model, rows = made("gpt2")
    expected = updated(trainer(hf.Trainer, copy.deepcopy(model), rows, tmp_path / "plain"))
    ours = trainer(
        FitTrainer, copy.deepcopy(model), rows, tmp_path / "ours", memory="1 GiB", micro_batch=size
    )
    assert error(updated(ours), expected) < 1e-9
    assert ours._passes.plan(next(iter(ours.get_train_dataloader()))).steps == steps


@pytest.mark.filterwarnings("default::gradfit.ExactnessWarning")
def test_what_does_not_add_up_is_cut_only_if_asked_for(tmp_path: Path) -> None:
    model, rows = made("clip")
    given = {"memory": "1 GiB", "micro_batch": 4, "data_collator": Collated()}
    with pytest.raises(gf.MisuseError, match="does not add up"):
        trainer(FitTrainer, copy.deepcopy(model), rows, tmp_path, **given).train()
    plain = trainer(hf.Trainer, copy.deepcopy(model), rows, tmp_path, data_collator=Collated())
    expected = updated(plain)
    with pytest.warns(gf.ExactnessWarning, match="not that of the whole batch"):
        found = updated(
            trainer(FitTrainer, copy.deepcopy(model), rows, tmp_path, exact=False, **given)
        )
    # another loss, and of the same size: not added up three times
    assert 0.01 < error(found, expected) < 3
