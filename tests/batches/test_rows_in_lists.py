"""Lists with a tensor for each row: never cut by themselves, and said so, whatever the tensors'
own rows are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    rows = nn.utils.rnn.pad_sequence(batch["rows"], batch_first=True)
    return F.cross_entropy(model(rows).mean(1), batch["y"])


def batch_of(lengths: list[int]) -> dict[str, Any]:
    rows = [torch.randn(length, 4) for length in lengths]
    return {"rows": rows, "y": torch.arange(len(lengths)) % 3}


def fit(lengths: list[int], **settings: Any) -> gf.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings.setdefault("memory", None)
    return gf.fit(model, optimizer, loss_fn, batch_of(lengths), **settings)


def by_items(batch: dict[str, Any], size: int) -> Any:
    for start in range(0, len(batch["y"]), size):
        yield {name: value[start : start + size] for name, value in batch.items()}


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [4, 5, 6, 7], [4, 4, 4, 3], [2]])
def test_only_split_is_suggested_for_lists_with_a_tensor_for_each_row(lengths: list[int]) -> None:
    with pytest.raises(gf.MisuseError, match=r"\['rows'\] is a list of \d.*split=") as refused:
        fit(lengths)
    assert "gf.whole" not in str(refused.value)
    assert fit(lengths, split=by_items)(batch_of(lengths)).stepped


def test_an_entry_of_another_length_may_still_be_whole() -> None:
    model = nn.Linear(2, 1)
    batch = {"x": torch.randn(4, 2), "tables": [torch.randn(3), torch.randn(3)]}
    with pytest.raises(gf.MisuseError, match=r"gf\.whole\(…\) as \['tables'\]\[0\]"):
        gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 8},
        {"batch_size": 2},
        {"batch_size": 8, "micro_batch": "whole"},
        {"micro_batch": 2, "exact": False},
        {"micro_batch": 2},
    ],
)
def test_lists_of_as_many_tensors_as_these_have_rows_are_refused_in_words(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(gf.MisuseError, match=r"\['rows'\] is a list of 4.*split=") as refused:
        fit([4] * 4, **settings)
    assert "exact=False" not in str(refused.value)
    assert fit([4] * 4, split=by_items, **settings)(batch_of([4] * 8)).stepped


def test_such_a_batch_is_run_whole_as_it_is() -> None:
    assert fit([4] * 4)(batch_of([4] * 4)).micro_batches == 1
    with pytest.raises(gf.BudgetInfeasible, match=r"it adds up by items of lists") as refused:
        fit([4] * 4, memory=600)
    assert "exact=False" not in str(refused.value)


def test_a_loss_for_one_size_alone_is_refused_in_words() -> None:
    def of_four(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).view(2, 2).square().mean()

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gf.MisuseError, match=r"8 rows were made of a batch of 4.*sample_batch"):
        gf.fit(model, optimizer, of_four, torch.randn(4, 3), None, batch_size=8)
