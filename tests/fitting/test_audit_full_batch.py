"""An audit's second answer: how far the parts' gradient is from the whole batch's, with the same
random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.runs.builtin_jobs import masked_byte_loss
from gradfit.runs.builtin_networks import Transformer


def audited(
    model: nn.Module, loss_fn: Any, batch: Any, *, micro_batch: int = 3, split: Any = None
) -> gf.AuditReport:
    """The report on a plan that cuts the batch into unequal parts."""
    found = gf.profile(model, loss_fn, batch, split=split)
    plan = gf.plan(found, memory="1 GiB", batch_size=8, micro_batch=micro_batch, exact=False)
    assert plan.steps > 1
    return gf.audit(model, loss_fn, batch, plan=plan, split=split)


def network(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *extra, nn.Tanh(), nn.Linear(16, 6))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().mean()
    return result


def contrastive(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))


def counted(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = x[:, 0] > 0
    return (model(x)[chosen].square()).sum(), chosen.sum() * 6


def error_of(report: gf.AuditReport) -> float:
    assert report.full_batch is not None
    assert report.full_batch.error is not None, report.full_batch.reason
    return report.full_batch.error


def test_a_mean_over_rows_adds_up_with_dropout_on() -> None:
    torch.manual_seed(1)
    report = audited(network(nn.Dropout(0.5)), square, torch.randn(8, 6))
    assert report
    assert error_of(report) < 1e-6
    said = str(report).splitlines()
    assert said[0].startswith("replay: bit-identical (3 outputs, 4 gradients")
    assert said[1].startswith("against the full batch: relative error ")
    assert len(said) == 2


def test_a_transformer_whose_loss_draws_its_own_mask() -> None:
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=257, length=12, layers=2, width=24, heads=2, causal=False, dropout=0.3
    )
    report = audited(model, masked_byte_loss, torch.randint(0, 256, (8, 12)))
    assert error_of(report) < 1e-6
    assert report.full_batch is not None
    assert report.full_batch.weighted_by == "items"


def test_a_count_is_what_parts_are_weighted_by() -> None:
    torch.manual_seed(1)
    report = audited(network(), counted, torch.randn(8, 6))
    assert error_of(report) < 1e-6
    assert "(by items)" in str(report)


@pytest.mark.parametrize(
    ("extra", "loss_fn", "text"),
    [((), contrastive, "gf.chunked"), ((nn.BatchNorm1d(16),), square, "BatchNorm (1)")],
    ids=["contrastive", "batch norm"],
)
def test_what_does_not_add_up_is_not_called_the_same(extra: Any, loss_fn: Any, text: str) -> None:
    torch.manual_seed(1)
    report = audited(network(*extra), loss_fn, torch.randn(8, 6), micro_batch=2)
    assert report.identical  # what was rebuilt is what it was
    assert not report
    assert not report.exact
    assert error_of(report) > 0.01
    assert any(text in note for note in report.notes)
    assert f"relative error {error_of(report):.2g}" in str(report)
    assert gf.AuditReport.from_json(report.to_json()) == report


def test_in_one_piece_there_is_nothing_to_measure() -> None:
    report = gf.audit(network(nn.BatchNorm1d(16)), square, torch.randn(8, 6))
    assert report
    assert report.full_batch is None
    assert "in one piece" in str(report)


def test_a_batch_that_only_the_user_can_cut() -> None:
    torch.manual_seed(1)

    def columns(batch: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        yield from batch.split(size, dim=1)

    def over_time(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = F.dropout(model(x), 0.3).sum(0).square().mean()
        return result

    report = audited(network(), over_time, torch.randn(5, 8, 6), split=columns)
    assert (report.micro_batch, report.micro_batches) == (3, 3)
    assert error_of(report) < 1e-6


def test_draws_that_cannot_be_the_same_are_said() -> None:
    def drawn_twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (model(x).mean() * torch.rand(len(x), len(x)).mean()).square()
        return result

    report = audited(network(), drawn_twice, torch.randn(8, 6))
    assert report.full_batch is not None
    assert report.full_batch.error is None
    assert "(8, 8)" in report.full_batch.reason
    assert "against the full batch: not measured: " in str(report)
    assert not report
    assert gf.AuditReport.from_json(report.to_json()) == report


def test_gradients_that_are_not_finite_are_said() -> None:
    def infinite(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (1e30 * model(x)).exp().mean()
        return result

    report = audited(network(), infinite, torch.randn(8, 6))
    assert report.full_batch is not None
    assert report.full_batch.reason == "the gradients are not finite"
    assert gf.AuditReport.from_json(report.to_json()) == report


def test_nothing_stays_changed() -> None:
    torch.manual_seed(1)
    model, x = network(nn.BatchNorm1d(16), nn.Dropout(0.5)), torch.randn(8, 6)
    before, generator = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    audited(model, square, x)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


def test_arguments_in_another_order_are_named() -> None:
    with pytest.raises(gf.MisuseError, match=r"loss_fn=.*is a Tensor"):
        gf.audit(network(), torch.randn(8, 6), square)  # type: ignore[arg-type]


def test_a_padded_batch_is_weighted_by_what_its_loss_was_divided_by() -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 6, (8,))
    labels[1:6] = -100

    def padded(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    report = audited(network(nn.Dropout(0.3)), padded, {"x": torch.randn(8, 6), "y": labels})
    assert report
    assert error_of(report) < 1e-6
    assert "(by items)" in str(report)


def test_a_sum_is_added() -> None:
    torch.manual_seed(1)
    report = audited(network(), lambda model, x: model(x).square().sum(), torch.randn(8, 6))
    assert report
    assert "(by sum)" in str(report)
