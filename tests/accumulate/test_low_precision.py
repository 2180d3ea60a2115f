"""Parameters in bfloat16 and float16, sums in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradfit as gf


def gradients_of(
    dtype: torch.dtype | None, low: torch.dtype, weights: list[int], **options: object
) -> torch.Tensor:
    """The accumulated gradient of one parameter over many micro-batches whose own gradients are
    known.
    """
    torch.manual_seed(0)
    w = torch.zeros(200, dtype=low, requires_grad=True)
    acc = gf.GradientAccumulator(steps=len(weights), parameters=[w], dtype=dtype, **options)
    for weight in weights:
        acc.backward((w * torch.randn(200).to(low)).sum(), weight=weight)
    assert acc.is_ready
    return w.grad.double()


def exact(low: torch.dtype, weights: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    sums = sum(weight * torch.randn(200).to(low).double() for weight in weights)
    return sums / sum(weights)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [[1] * 64, [7] * 64, list(range(1, 65)), [100_003, 3, 50_000]])
@pytest.mark.parametrize("isolate", [False, True])
def test_float32_sums_are_far_closer(low: torch.dtype, weights: list[int], isolate: bool) -> None:
    reference = exact(low, weights)
    native = (gradients_of(None, low, weights) - reference).norm() / reference.norm()
    wide = (
        gradients_of(torch.float32, low, weights, isolate=isolate) - reference
    ).norm() / reference.norm()
    assert wide < 1e-6
    if len(weights) > 3:
        assert wide * 100 < native


def test_finite_gradients_whose_squares_overflow_are_stepped_with() -> None:
    """In double precision nothing is wider, so it was said that 0 of 1 gradients are not finite."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    acc = gf.GradientAccumulator(torch.optim.SGD([weight], lr=1e-200))
    acc.backward((weight * 3e200).sum(), weight=1)
    assert acc.step().grad_norm == pytest.approx(3e200 * 2**0.5)
    assert weight.tolist() == [-3.0, -3.0]


def test_float16_does_not_overflow() -> None:
    """Raw sums over 64 micro-batches of 1000 items would be beyond 65504."""
    for dtype in (None, torch.float32):
        w = torch.zeros(3, dtype=torch.float16, requires_grad=True)
        acc = gf.GradientAccumulator(steps=64, parameters=[w], dtype=dtype)
        for _ in range(64):
            acc.backward((w * 2000).sum(), weight=1000)
        assert acc.is_ready
        assert w.grad.tolist() == ([2000.0] * 3 if dtype else pytest.approx([2000.0] * 3, rel=0.01))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_optimizer_sees_the_float32_sum(name: str, by_hand: bool) -> None:
    """The first update is that of a float32 parameter with the same gradient, rounded once."""
    torch.manual_seed(0)
    w = torch.randn(4, 5).bfloat16().requires_grad_()
    wide = w.detach().float().requires_grad_()
    optimizer = OPTIMIZERS[name]([w])
    acc = gf.GradientAccumulator(optimizer, steps=3, dtype=torch.float32)
    storage = w.data_ptr()
    factors = [torch.randn(4, 5).bfloat16() for _ in range(3)]
    for factor in factors:
        acc.backward((w * factor).sum())
        if by_hand:
            if acc.is_ready:
                optimizer.step()
                optimizer.zero_grad()
        else:
            acc.step()
    assert acc.windows == 1
    wide.grad = sum(f.float() for f in factors) / 3
    OPTIMIZERS[name]([wide]).step()
    torch.testing.assert_close(w.detach().float(), wide.detach(), rtol=2**-8, atol=0)
    # a last bit of the mean may tip one rounding
    assert (w.detach() != wide.detach().bfloat16()).sum() <= 1
    assert w.dtype == torch.bfloat16
    assert w.data_ptr() == storage
    for value in optimizer.state[w].values():
        if isinstance(value, torch.Tensor) and value.dim():
            assert value.dtype == torch.bfloat16


def test_training_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).bfloat16()
    start = copy.deepcopy(model)
    acc = gf.GradientAccumulator(
        torch.optim.AdamW(model.parameters(), lr=0.03), steps=4, dtype=torch.float32, clip=1.0
    )
    x = torch.randn(64, 8).bfloat16()
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(10):
        for rows in torch.arange(64).split(16):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            acc.backward(loss, weight=len(rows))
            acc.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert not torch.equal(model[0].weight, start[0].weight)


def test_a_failing_step_by_hand_leaves_the_parameters_narrow() -> None:
    w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("no")

    optimizer = Failing([w], lr=0.1)
    acc = gf.GradientAccumulator(steps=1, parameters=[w], dtype=torch.float32)
    w.sum().backward()
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    acc.reset()
    assert w.dtype == torch.bfloat16


def test_disable_gives_the_precision_back() -> None:
    w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    acc = gf.GradientAccumulator(steps=2, parameters=[w], dtype=torch.float32)
    w.sum().backward()
    assert w.grad.dtype == torch.float32
    acc.disable_accumulation()
    w.sum().backward()
    assert w.grad.dtype == torch.bfloat16


def test_wider_parameters_stay_as_they_are() -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    z = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    acc = gf.GradientAccumulator(steps=1, parameters=[w, z], dtype=torch.float32)
    acc.backward((w * z.abs()).sum())
    assert (w.grad.dtype, z.grad.dtype) == (torch.float64, torch.complex64)


def test_sparse_bfloat16() -> None:
    table = nn.Embedding(10, 3, sparse=True, dtype=torch.bfloat16)
    with torch.no_grad():
        table.weight.fill_(1.0)
    acc = gf.GradientAccumulator(
        torch.optim.SGD(table.parameters(), lr=1.0), steps=2, dtype=torch.float32
    )
    for rows in ([1, 1, 2], [2]):
        acc.backward(table(torch.tensor(rows)).sum(), weight=len(rows), reduction="sum")
        acc.step()
    assert table.weight[:, 0].tolist() == [1, 0.5, 0.5] + [1] * 7
