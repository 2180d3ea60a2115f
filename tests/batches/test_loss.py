"""What a loss_fn returns, read; and everything else refused with what to return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gradfit as gf
from gradfit.batches.loss import read_loss


def graph() -> torch.Tensor:
    return torch.ones(4, requires_grad=True).sum()


def test_a_mean() -> None:
    loss = graph()
    part = read_loss(loss, 4)
    assert part.loss is loss
    assert part.count is None
    assert part.rows == 4


@pytest.mark.parametrize(
    "count", [3, np.int64(3), torch.tensor(3), torch.tensor([3], dtype=torch.int32)]
)
def test_a_sum_and_its_count(count: Any) -> None:
    part = read_loss((graph(), count), 4)
    assert part.count is not None
    assert int(part.count) == 3


def test_a_count_on_a_device_stays_there() -> None:
    count = torch.tensor(3)
    part = read_loss((graph(), count), 4)
    assert isinstance(part.count, torch.Tensor)


def test_a_loss_and_logs() -> None:
    part = read_loss(
        (graph(), {"accuracy": 0.5, "tensor": torch.tensor(2.0), "numpy": np.float32(1)}), 4
    )
    assert part.count is None
    assert set(part.logs) == {"accuracy", "tensor", "numpy"}


def test_a_record() -> None:
    part = read_loss(gf.Loss(sum=graph(), count=7, logs={"accuracy": 0.5}), 4)
    assert (part.count, dict(part.logs)) == (7, {"accuracy": 0.5})


WRONG = {
    "a float beside it": (
        lambda: (graph(), 0.9),
        r"\(loss_sum, count\).*\(loss, \{\"accuracy\": value\}\)",
    ),
    "a float tensor beside it": (lambda: (graph(), torch.tensor(0.9)), r"float32.*whole number"),
    "a bool": (lambda: (graph(), True), "whole number"),
    "a negative count": (lambda: (graph(), -1), "0 or more"),
    "a mask, not its sum": (lambda: (graph(), torch.ones(4, dtype=torch.long)), r"mask.sum\(\)"),
    "a string": (lambda: (graph(), "3"), "a str"),
    "three": (lambda: (graph(), 3, {}), "a tuple of 3"),
    "a number": (lambda: 3.0, "returned a float"),
    "nothing": (lambda: None, "NoneType"),
    "a list": (lambda: [graph(), 3], "returned a list"),
    "a model's output": (lambda: SimpleNamespace(loss=graph()), "Return its .loss"),
    "a loss per row": (lambda: torch.ones(4, requires_grad=True) * 1, r"shape \(4,\)"),
    "detached": (lambda: graph().detach(), "no graph"),
    "logs that are lists": (lambda: (graph(), {"x": [1, 2]}), r"logs\['x'\] is a list"),
    "logs that are tensors": (lambda: (graph(), {"x": torch.ones(3)}), r"logs\['x'\]"),
    "a record with a float": (lambda: gf.Loss(sum=graph(), count=0.5), "whole number"),  # type: ignore[arg-type]
    "a record without logs": (lambda: gf.Loss(sum=graph(), count=1, logs=[1]), "logs is a list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", WRONG)
def test_everything_else_is_refused_by_name(kind: str) -> None:
    make, message = WRONG[kind]
    with pytest.raises(gf.MisuseError, match=message):
        read_loss(make(), 4)


def test_tokens_are_counted_as_a_causal_loss_counts_them() -> None:
    labels = torch.tensor([[1, 2, -100, -100], [-100, 2, 3, 4]])
    assert gf.count_tokens(labels).item() == 4
    assert gf.count_tokens(labels, shift=False).item() == 5
    assert gf.count_tokens(labels, ignore_index=2).item() == 4
    assert gf.count_tokens(labels).dtype is torch.int64


class _Head(torch.nn.Module):
    """A head as those of transformers: it takes labels and returns a record with a mean loss."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.shift = shift
        self.table = torch.nn.Embedding(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.table(input_ids)
        if self.shift:
            scores, labels = scores[:, :-1], labels[:, 1:]
        return SimpleNamespace(
            loss=torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        )


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm", "seq2seq_lm", "classification"])
def test_ready_losses_are_the_sum_over_the_items_that_the_head_averages_over(name: str) -> None:
    torch.manual_seed(0)
    shift = name == "causal_lm"
    model, ids = _Head(shift), torch.randint(0, 8, (5, 6))
    labels = ids.masked_fill(torch.rand(5, 6) < 0.4, -100)
    batch = {"input_ids": ids, "labels": labels}
    loss = getattr(gf.losses, name)(model, batch)
    parts = [
        getattr(gf.losses, name)(model, {k: v[rows] for k, v in batch.items()})
        for rows in (slice(2), slice(2, 5))
    ]
    mean = model(**batch).loss
    torch.testing.assert_close(loss.sum / loss.count, mean)
    torch.testing.assert_close(sum(p.sum for p in parts) / sum(p.count for p in parts), mean)


def test_ready_losses_of_floating_point_labels_count_elements() -> None:
    class Regression(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return SimpleNamespace(loss=torch.nn.functional.mse_loss(super().forward(x), labels))

    loss = gf.losses.classification(
        Regression(3, 2), {"x": torch.ones(4, 3), "labels": torch.ones(4, 2)}
    )
    assert int(loss.count) == 8


def test_ready_losses_need_labels_and_a_head() -> None:
    with pytest.raises(gf.MisuseError, match="labels"):
        gf.losses.masked_lm(_Head(False), {"input_ids": torch.ones(1, 2)})
    headless = torch.nn.Identity()
    headless.forward = lambda **batch: batch["labels"]  # type: ignore[method-assign, assignment]
    with pytest.raises(gf.MisuseError, match="no loss"):
        gf.losses.causal_lm(headless, {"labels": torch.ones(1, 2, dtype=torch.int64)})
