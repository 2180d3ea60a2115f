"""Logs of batches that are cut, parameters that are replaced after `fit`, and losses that cannot be
trained on or read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf

Batch = dict[str, Any]


def batch() -> Batch:
    """The second micro-batch of 3 has no label, and the third is masked."""
    torch.manual_seed(1)
    labels = torch.randint(0, 3, (12,))
    labels[3:6] = -100
    mask = (torch.rand(12) < 0.7).double()
    mask[6:9] = 0
    return {"x": torch.randn(12, 6).double(), "y": labels, "mask": mask}


def fitted(loss_fn: Callable[..., Any], sample: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sample = batch() if sample is None else sample
    options = {"micro_batch": 3, "memory": "64 MiB", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gf.ExactnessWarning)
        return model, gf.fit(model, optimizer, loss_fn, sample, **options)


def logs(out: Tensor, b: Batch) -> dict[str, Any]:
    kept = b["y"] >= 0
    return {
        "accuracy": (out.argmax(1) == b["y"])[kept].double().mean(),  # NaN without a label
        "labels": kept.sum(),
        "rows": len(out),
        "rate": 0.1,
    }


def read(model: nn.Module, b: Batch) -> Any:
    out = model(b["x"])
    return F.cross_entropy(out, b["y"]), logs(out, b)


def counted(model: nn.Module, b: Batch) -> gf.Loss:
    out = model(b["x"])
    total = F.cross_entropy(out, b["y"], reduction="sum") + 1e-3 * out.sum()
    return gf.Loss(sum=total, count=(b["y"] >= 0).sum(), logs=logs(out, b))


def two_terms(model: nn.Module, b: Batch) -> Any:
    out = model(b["x"])
    masked = (out.square().mean(1) * b["mask"]).sum() / b["mask"].sum()
    return F.cross_entropy(out, b["y"]) + masked, logs(out, b)


@pytest.mark.parametrize("loss_fn", [read, counted, two_terms])
def test_logs_are_those_of_the_whole_batch(loss_fn: Callable[..., Any]) -> None:
    model, step = fitted(loss_fn)
    result = step(batch())
    assert result.micro_batches == 4
    expected = logs(model(batch()["x"]), batch())
    assert result.logs == pytest.approx({name: float(one) for name, one in expected.items()})


def test_a_masked_log_of_a_clamped_count() -> None:
    def loss_fn(model: nn.Module, b: Batch) -> Any:
        losses = model(b["x"]).square().mean(1)
        total = (losses * b["mask"]).sum()
        return total / b["mask"].sum().clamp(min=1), {"loss": total / b["mask"].sum()}

    _, step = fitted(loss_fn)
    result = step(batch())
    assert result.logs["loss"] == pytest.approx(result.loss)


def test_replaced_parameters_are_refused_before_anything_is_run() -> None:
    model, step = fitted(read)
    state = copy.deepcopy(model.state_dict())
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    step(batch())
    calls.clear()
    model.load_state_dict(state, assign=True)
    with pytest.raises(gf.MisuseError, match=r"'weight' for one.*Call gf\.fit again"):
        step(batch())
    assert not calls
    assert all(p.grad is None for p in model.parameters())


def test_loading_in_place_and_new_parameters_of_the_optimizer_are_fine() -> None:
    model, step = fitted(read)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert step(batch()).stepped
    step.optimizer.param_groups[0]["lr"] = 0.1
    assert step(batch()).stepped


def test_a_complex_loss_is_refused() -> None:
    def loss_fn(model: nn.Module, b: Batch) -> Tensor:
        return torch.view_as_complex(model(b["x"])[:, :2].contiguous()).sum()

    with pytest.raises(gf.MisuseError, match=r"complex.*\.real"):
        fitted(loss_fn)


def test_a_gradient_that_is_not_finite_names_what_a_step_has() -> None:
    _, step = fitted(read)
    bad = batch()
    bad["x"][0] = torch.inf
    with pytest.raises(gf.NonFiniteGradient, match="on_nonfinite='skip'") as raised:
        step(bad)
    assert "reset()" not in str(raised.value)


def test_a_list_of_samples_is_cut_by_split() -> None:
    samples = [{"x": torch.randn(6).double(), "y": torch.tensor(n % 3)} for n in range(12)]

    def loss_fn(model: nn.Module, rows: list[Batch]) -> Tensor:
        x, y = (torch.stack([row[name] for row in rows]) for name in ("x", "y"))
        return F.cross_entropy(model(x), y)

    def split(rows: list[Batch], size: int) -> Iterator[list[Batch]]:
        return (rows[start : start + size] for start in range(0, len(rows), size))

    with pytest.raises(gf.MisuseError, match=r"list of 12 samples.*split=lambda batch, size"):
        fitted(loss_fn, samples)
    _, step = fitted(loss_fn, samples, split=split)
    assert step(samples).micro_batches == 4


@pytest.mark.parametrize(
    "weighted",
    [lambda a, b: torch.einsum("n,n->", a, b), torch.vdot, torch.inner],
    ids=["einsum", "vdot", "inner"],
)
def test_products_that_are_sums(weighted: Callable[..., Tensor]) -> None:
    def loss_fn(model: nn.Module, b: Batch) -> Tensor:
        return weighted(model(b["x"]).square().mean(1), 1 + b["mask"])

    model, step = fitted(loss_fn)
    rows = {name: value[:10] for name, value in batch().items()}  # the last part has one row
    result = step(rows)
    assert result.micro_batches == 4
    assert result.loss == pytest.approx(float(loss_fn(model, rows).detach()))


@pytest.mark.parametrize("seed", range(4))
def test_what_bends_a_mean_is_found_on_other_rows(seed: int) -> None:
    """The first rows alone are on one side of the bend, others of the sample on the other."""
    torch.manual_seed(seed)
    rows = batch()
    rows["x"] = torch.rand(12, 6).double() * torch.where(torch.arange(12) < 6, 1.0, -4.0)[:, None]

    def size(model: nn.Module, b: Batch) -> Tensor:
        return (b["x"].sum(1) + 0 * model(b["x"]).sum(1)).mean().abs()

    def clamped(model: nn.Module, b: Batch) -> Tensor:
        return (b["x"].square().mean(1) + model(b["x"]).square().mean(1)).mean().clamp(max=2.0)

    for loss_fn in (size, clamped):
        with pytest.raises(gf.MisuseError, match="does not add up"):
            fitted(loss_fn, rows)
