"""What a few rows and parts of them say about a loss, and that nothing is left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf
from gradfit.batches.additivity import measure_additivity
from gradfit.batches.additivity_verdict import judge
from gradfit.batches.compared_runs import Comparison, Run

ROWS = 12


def network(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 3))


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def functional_dropout(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(F.dropout(model(batch[0]), 0.5), torch.ones(len(batch[0]), 3))


def noisy(model: nn.Module, batch: Any) -> Tensor:
    noise = torch.randn_like(batch[0]) + torch.normal(
        0.0, 2.0, (len(batch[0]), 4), device=batch[0].device
    )
    return model(batch[0] + noise * torch.rand(len(batch[0]), 1)).square().mean()


def time_steps(model: nn.Module, batch: Any) -> Tensor:
    steps = torch.randint(1, 100, (len(batch[0]), 1))
    return (model(batch[0]) * steps).square().mean()


def attention(model: nn.Module, batch: Any) -> Tensor:
    states = batch[0][:, None].expand(-1, 3, -1)
    return (
        model(F.scaled_dot_product_attention(states, states, states, dropout_p=0.5)).square().mean()
    )


@pytest.mark.parametrize("loss_fn", [entropy, functional_dropout, noisy, time_steps, attention])
def test_randomness_does_not_hide_that_a_loss_adds_up(loss_fn: Callable[..., Tensor]) -> None:
    found = measure_additivity(network(), loss_fn, rows())
    assert (found.over, found.roles) == ("divisor", ("adds",))
    assert found.error < 1e-6


def test_nothing_stays_changed() -> None:
    model = network()
    before, mode = (
        copy.deepcopy(model.state_dict()),
        [module.training for module in model.modules()],
    )
    versions = [parameter.grad for parameter in model.parameters()]
    measure_additivity(model, entropy, rows())
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True)
    )
    assert [module.training for module in model.modules()] == mode
    assert [parameter.grad for parameter in model.parameters()] == versions


def test_a_loss_that_only_seems_to_add_up_where_the_model_is_now() -> None:
    """All outputs are 0, so that the largest is each one's: the second look, elsewhere, sees the
    maximum.
    """
    model = network(0.0)
    nn.init.zeros_(model[3].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[3].bias)  # type: ignore[arg-type]

    def worst(model: nn.Module, batch: Any) -> Tensor:
        return (1 + model(batch[0]).sum(1) * batch[0].sum(1)).max()

    assert measure_additivity(model, worst, rows()).over is None


class Experts(nn.Module):
    """Each row goes to the expert that its first number says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.out = nn.Linear(4, 2).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.gate(x).softmax(-1)
        share_of_rows = F.one_hot((x[:, 0] > 0).long(), 2).double().mean(0)
        return self.out(x), (chances.mean(0) * share_of_rows).sum()


def balanced(model: nn.Module, batch: Any) -> Tensor:
    out, balance = model(batch)
    return out.square().mean() + 0.01 * balance


def test_a_balance_of_experts_is_measured_on_all_of_a_small_sample() -> None:
    """Of rows that all go to one expert it is a mean, and couples nothing."""
    x = torch.rand(7, 4, dtype=torch.float64)
    assert measure_additivity(Experts(), balanced, x).over == "divisor"
    x[5, 0] = -1
    assert measure_additivity(Experts(), balanced, x).over is None


class GoesOn(nn.Module):
    """A recurrent net that begins where it was, if there are as many rows again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.hidden = nn.GRUCell(4, 4).double(), torch.zeros(0, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        before = self.hidden if len(self.hidden) == len(x) else torch.zeros_like(x)
        out: Tensor = self.cell(x, before)
        self.hidden = out.detach()
        return out


def test_what_only_a_part_of_as_many_rows_reads_is_found() -> None:
    model = GoesOn()
    found = measure_additivity(
        model,
        lambda m, b: m(b).square().mean(),
        torch.randn(7, 4, dtype=torch.float64),
        rewind=lambda: setattr(model, "hidden", torch.zeros(0, 4).double()),
    )
    assert found.over is None
    assert "a forward changes what the next one reads (its own attributes)" in found.reason


def test_a_loss_that_changes_from_call_to_call() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return entropy(model, batch) * len(calls)

    found = measure_additivity(network(), counted, rows())
    assert found.over is None
    assert "each time it is called" in found.reason


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "is nan"), (0.0, "is 0")])
def test_from_nan_and_zero_nothing_can_be_told(value: float, text: str) -> None:
    found = measure_additivity(network(), lambda m, b: entropy(m, b) * value, rows())
    assert found.over is None
    assert text in found.reason


def counted_entropy(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return loss, (batch[1] >= 0).sum()


def compared(model: nn.Module, batch: Any) -> Tensor:
    """It couples rows, and is over those with a label."""
    scores = model(batch[0]) @ model(batch[0]).T
    return F.cross_entropy(scores, torch.where(batch[1] < 0, -100, torch.arange(len(scores))))


@pytest.mark.parametrize(
    ("loss_fn", "over"), [(entropy, "divisor"), (counted_entropy, "items"), (compared, None)]
)
def test_where_the_first_rows_are_padding_others_are_measured(
    loss_fn: Callable[..., Any], over: str | None
) -> None:
    x, y = rows()
    y[:6] = -100
    found = measure_additivity(network().double(), loss_fn, (x.double(), y))
    assert found.over == over
    assert over or "depends on rows together" in found.reason


def test_from_a_count_of_0_nothing_can_be_told() -> None:
    found = measure_additivity(network(), lambda m, b: (m(b[0]).sum(), 0), rows())
    assert found.over is None
    assert "a count of 0, so nothing can be told. Pass a sample with items" in found.reason


def test_a_sample_of_one_row_is_measured_too() -> None:
    x, y = rows()
    assert measure_additivity(network(), entropy, (x[:1], y[:1])).over == "divisor"
    assert (
        measure_additivity(network(), lambda m, b: m(b[0]).softmax(0).max(), (x[:1], y[:1])).over
        is None
    )


def test_a_mean_with_a_count_is_an_error() -> None:
    with pytest.raises(gf.MisuseError, match=r"nll_loss over 5: a mean.*loss \* count"):
        measure_additivity(network(), lambda m, b: (entropy(m, b), len(b[1])), rows())


def test_a_count_that_does_not_add_up_is_no_count() -> None:
    def counted_once(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), ROWS

    assert measure_additivity(network(), counted_once, rows()).over is None


def test_activations_are_not_kept() -> None:
    model = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(5, 64)
    kept = 20 * x.nbytes
    with gf.meter(model, x) as live:
        before = live.current_bytes
        measure_additivity(model, lambda m, b: m(b).square().mean(), x, gradient_rows=0)
    copies = sum(p.nbytes for p in model.parameters()) / 16 + max(
        p.nbytes for p in model.parameters()
    )
    assert live.peak_bytes - before < kept / 2 + copies


def runs(*values: tuple[float, int, float | None, tuple[float, ...] | None]) -> list[Run]:
    return [Run(*value) for value in values]


def test_the_first_way_that_holds_is_taken() -> None:
    whole, a, b = runs((2.0, 4, None, (8.0,)), (1.0, 1, None, (2.0,)), (7 / 3, 3, None, (6.0,)))
    assert judge([Comparison(whole, (a, b))], 1e-6).over == "divisor"
    whole, a, b = runs((2.0, 4, None, None), (5.0, 1, None, None), (1.0, 3, None, None))
    assert judge([Comparison(whole, (a, b))], 1e-6).over == "rows"
    whole, a, b = runs((6.0, 4, None, (1.0,)), (5.0, 1, None, (1.0,)), (1.0, 3, None, (1.0,)))
    assert judge([Comparison(whole, (a, b))], 1e-6).over == "sum"
    whole, a, b = runs((6.0, 4, 9, None), (5.0, 1, 4, None), (1.0, 3, 5, None))
    assert judge([Comparison(whole, (a, b))], 1e-6).over == "items"
    whole, a, b = runs((6.0, 4, None, None), (5.0, 1, None, None), (1.5, 3, None, None))
    refused = judge([Comparison(whole, (a, b))], 1e-6)
    assert refused.over is None
    assert refused.error == pytest.approx((6 - 9.5 / 4) / 6)


def test_a_part_that_was_divided_by_nothing_and_is_not_nothing_is_lost() -> None:
    whole, a, b = runs(
        (2.0, 4, None, (8.0,)), (2.0, 3, None, (8.0,)), (float("inf"), 1, None, (0.0,))
    )
    assert judge([Comparison(whole, (a, b))], 1e-6).over is None
    whole, a, b = runs(
        (2.0, 4, None, (8.0,)), (2.0, 3, None, (8.0,)), (float("nan"), 1, None, (0.0,))
    )
    assert judge([Comparison(whole, (a, b))], 1e-6).over == "divisor"


def test_a_profile_says_it_and_a_plan_obeys() -> None:
    model, batch = network(0.0), rows()
    found = gf.profile(model, lambda m, b: entropy(m, b) + m(b[0]).softmax(0).max(), batch)
    assert found.additivity is not None
    assert not found.additivity.adds_up
    assert gf.Profile.from_json(found.to_json()) == found
    plain = gf.plan(found, memory="1 GiB", batch_size=ROWS)
    assert plain.steps == 1
    with pytest.raises(gf.BudgetInfeasible, match="cannot be split"):
        gf.plan(found, memory=gf.plan(found, memory="1 GiB").peak_bytes // 2, batch_size=ROWS)
    with pytest.raises(gf.MisuseError, match="does not add up"):
        gf.plan(found, memory="1 GiB", batch_size=ROWS, micro_batch=2)
