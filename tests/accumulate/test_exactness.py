"""The law: accumulated gradients are the full batch's, for any split, any weights, any of torch's
optimizers.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gradfit as gf

splits = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def relative_error(model: nn.Module, reference: nn.Module) -> float:
    ours = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    theirs = torch.cat([p.grad.flatten().double() for p in reference.parameters()])
    return ((ours - theirs).norm() / theirs.norm()).item()


@settings(deadline=None, max_examples=60)
@given(
    splits,
    st.integers(0, 2**31),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([64, 32]),
    st.booleans(),
)
def test_any_split_equals_the_full_batch(
    sizes: list[int], seed: int, reduction: str, bits: int, isolate: bool
) -> None:
    torch.manual_seed(seed)
    dtype, tolerance = (torch.float64, 1e-12) if bits == 64 else (torch.float32, 1e-6)
    model = make_model(dtype)
    reference = copy.deepcopy(model).double()
    x, y = torch.randn(sum(sizes), 6, dtype=dtype), torch.randn(sum(sizes), 3, dtype=dtype)
    acc = gf.GradientAccumulator(steps=len(sizes), parameters=model.parameters(), isolate=isolate)
    for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
        loss = F.mse_loss(model(xs), ys, reduction="none").mean(1)
        acc.backward(
            loss.mean() if reduction == "mean" else loss.sum(), weight=len(xs), reduction=reduction
        )
    assert acc.is_ready
    F.mse_loss(reference(x.double()), y.double()).backward()
    assert relative_error(model, reference) < tolerance


@settings(deadline=None, max_examples=40)
@given(splits, st.integers(0, 2**31), st.floats(1e-3, 1e9))
def test_any_real_weights(sizes: list[int], seed: int, unit: float) -> None:
    """Weights need not be counts: only their ratios matter."""
    torch.manual_seed(seed)
    model = make_model()
    reference = copy.deepcopy(model)
    x = torch.randn(sum(sizes), 6).double()
    acc = gf.GradientAccumulator(steps=len(sizes), parameters=model.parameters())
    for xs in x.split(sizes):
        acc.backward(model(xs).square().mean(), weight=len(xs) * unit)
    assert acc.is_ready
    reference(x).square().mean().backward()
    assert relative_error(model, reference) < 1e-12


@settings(deadline=None, max_examples=30)
@given(
    splits,
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_terms_have_their_own_denominators(
    sizes: list[int], second: list[int], seed: int, isolate: bool
) -> None:
    torch.manual_seed(seed)
    model = make_model()
    reference = copy.deepcopy(model)
    x = torch.randn(sum(sizes), 6).double()
    acc = gf.GradientAccumulator(steps=len(sizes), parameters=model.parameters(), isolate=isolate)
    parts, numbers = [], []
    for xs, most in zip(x.split(sizes), second, strict=False):
        h = model(xs)
        m = min(most, len(xs))
        acc.backward(
            terms={"ce": (h.square().mean(1).sum(), len(xs)), "aux": (h[:m, 0].exp().sum(), m)}
        )
        parts.append(xs[:m])
        numbers.append(m)
    assert acc.is_ready
    loss = reference(x).square().mean(1).mean()
    if sum(numbers):
        loss = loss + reference(torch.cat(parts))[:, 0].exp().mean()
    loss.backward()
    assert relative_error(model, reference) < 1e-12


def test_terms_and_a_main_loss_in_one_window() -> None:
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2)
    acc.backward((w * 2).sum(), weight=3)
    acc.step()
    acc.backward(terms={"a": ((w * 5).sum(), 5), "b": ((w * 8).sum(), 2)})
    result = acc.step()
    assert result.stepped
    assert (result.weight, w.item()) == (3, 1 - (2 + 1 + 4))


def test_zero_weight_contributes_nothing() -> None:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=3)
    acc.backward((w * 2).sum(), weight=4)
    acc.step()
    acc.backward((w * math.nan).sum(), weight=0)
    acc.step()
    acc.backward(torch.zeros(()), weight=torch.tensor(0))  # an empty batch's loss has no graph
    result = acc.step()
    assert result.stepped
    assert (result.weight, result.micro_batches) == (4, 3)
    assert w.tolist() == [-1.0, -1.0]


def test_zero_weight_first_and_only() -> None:
    w = torch.ones(2, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2)
    acc.backward((w * 2).sum(), weight=0)
    acc.step()
    acc.backward((w * 3).sum(), weight=5, reduction="sum")
    assert acc.step()
    torch.testing.assert_close(w.detach(), torch.full((2,), 1 - 3 / 5))
    acc.backward((w * 2).sum(), weight=0)
    acc.step()
    acc.backward((w * 2).sum(), weight=0.0)
    result = acc.step()
    assert (result.stepped, result.reason) == (False, "no weight")
    torch.testing.assert_close(w.detach(), torch.full((2,), 1 - 3 / 5))


def test_the_tail_is_divided_by_what_it_holds() -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=4)
    for value, weight in ((3.0, 1), (6.0, 5)):
        acc.backward((w * value).sum(), weight=weight)
        assert not acc.step()
    result = acc.flush()
    assert (result.stepped, result.weight, result.micro_batches) == (True, 6, 2)
    assert w.item() == pytest.approx(-(3 + 30) / 6)


def test_weights_of_many_kinds() -> None:
    numpy = pytest.importorskip("numpy")
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=5)
    for weight in (
        2,
        2.0,
        torch.tensor(2),
        torch.tensor([2.0], dtype=torch.bfloat16),
        numpy.int64(2),
    ):
        acc.backward((w * 3).sum(), weight=weight)
        result = acc.step()
    assert result.weight == 10
    assert w.item() == pytest.approx(-3.0, rel=1e-15)


def test_huge_weights() -> None:
    for weight in (1e30, 2**80, 1e-30):
        w = torch.zeros(1, requires_grad=True)
        acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2)
        for value in (1.0, 3.0):
            acc.backward((w * value * 1e10).sum(), weight=weight)
            acc.step()
        assert w.item() == pytest.approx(-2e10)


def test_equal_micro_batches_are_bit_identical_to_a_hand_written_loop() -> None:
    torch.manual_seed(0)
    model = make_model(torch.float32)
    reference = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    acc = gf.GradientAccumulator(ours, steps=3)
    for at in range(12):
        x = torch.randn(4, 6)
        acc.backward(model(x).square().mean(), weight=4)
        acc.step()
        (reference(x).square().mean() / 3).backward()
        if at % 3 == 2:
            theirs.step()
            theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


OPTIMIZERS = [
    (name, options)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "RMSprop",
        "NAdam",
        "RAdam",
        "Adamax",
        "ASGD",
        "Rprop",
        "Adadelta",
    )
    for options in ({}, {"foreach": True}, {"foreach": False})
] + [
    ("SGD", {"fused": True, "momentum": 0.9}),
    ("Adam", {"fused": True}),
    ("AdamW", {"fused": True}),
]


@pytest.mark.parametrize(("name", "options"), [*OPTIMIZERS, ("Adafactor", {}), ("Muon", {})])
def test_every_optimizer(name: str, options: dict[str, object]) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 3, bias=False)
    ).double()
    reference = copy.deepcopy(model)
    ours, theirs = (
        getattr(torch.optim, name)(m.parameters(), lr=0.01, **options) for m in (model, reference)
    )
    acc = gf.GradientAccumulator(ours, steps=3)
    for _ in range(3):
        x = torch.randn(12, 6).double()
        for part in x.split([2, 7, 3]):
            acc.backward(model(part).square().mean(), weight=len(part))
            acc.step()
        reference(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    assert acc.windows == 3
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3 if name == "Muon" else 1e-8, atol=1e-10)


class Foreign:
    """An optimizer with `step` and `zero_grad`, and nothing else."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for p in self.parameters:
            p.data -= 0.1 * p.grad

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def test_a_foreign_optimizer() -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    acc = gf.GradientAccumulator(
        Foreign(list(model.parameters())), steps=2, parameters=model.parameters()
    )
    x = torch.randn(5, 6).double()
    for part in x.split([1, 4]):
        acc.backward(model(part).square().mean(), weight=len(part))
        result = acc.step()
    assert result.stepped
    reference(x).square().mean().backward()
    Foreign(list(reference.parameters())).step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_foreign_optimizer_that_is_stepped_by_hand(steps: int, weighted: bool) -> None:
    """Nobody hears of its steps, so a full window must be a mean already."""
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer = Foreign(list(model.parameters()))
    acc = gf.GradientAccumulator(optimizer, steps=steps, parameters=model.parameters())
    x = torch.randn(6, 6).double()
    for _ in range(2):
        for part in x.chunk(steps):
            loss = model(part).square().mean()
            acc.backward(loss, weight=len(part)) if weighted else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = Foreign(list(reference.parameters()))
    for _ in range(2):
        reference(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("isolate", [False, True])
def test_sparse_gradients(isolate: bool) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True).double()
    reference = copy.deepcopy(table)
    acc = gf.GradientAccumulator(
        torch.optim.SparseAdam(table.parameters(), lr=0.1), steps=3, isolate=isolate, clip=1e-3
    )
    rows = torch.randint(0, 20, (12,))
    for part in rows.split([1, 6, 5]):
        acc.backward(table(part).square().mean(), weight=len(part))
        result = acc.step()
    optimizer = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
    reference(rows).square().mean().backward()
    norm = reference.weight.grad.coalesce().values().norm().item()
    assert result.grad_norm == pytest.approx(norm)
    reference.weight.grad.mul_(1e-3 / norm)
    optimizer.step()
    torch.testing.assert_close(table.weight, reference.weight, rtol=1e-9, atol=1e-12)


def test_odd_parameters() -> None:
    """Complex, of size zero, frozen, unused, tied, and of no dimension."""
    torch.manual_seed(0)
    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    empty = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    frozen = torch.ones(2, dtype=torch.float64)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    scalar = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    tensors = [z, empty, frozen, unused, scalar]
    acc = gf.GradientAccumulator(steps=2, parameters=tensors)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (z.abs().square().sum() * x * scalar + empty.sum() + scalar * scalar * x).mean()

    x = torch.randn(5).double()
    for part in x.split([4, 1]):
        acc.backward(loss(part), weight=len(part))
    assert acc.is_ready
    expected = torch.autograd.grad(loss(x), [z, empty, scalar])
    for tensor, gradient in zip([z, empty, scalar], expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-14)
    assert unused.grad is None
    assert frozen.grad is None


def test_clip_once_on_the_normalised_gradient() -> None:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for clip in (1.0, gf.GradientClipper(max_norm=1.0)):
        w.data.zero_()
        acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2, clip=clip)
        acc.backward((w * torch.tensor([6.0, 0.0])).sum(), weight=1)
        acc.step()
        acc.backward((w * torch.tensor([2.0, 4.0])).sum(), weight=3)
        result = acc.step()
        assert result.grad_norm == pytest.approx(math.hypot(3, 3))
        torch.testing.assert_close(
            -w.detach(), torch.full((2,), math.sqrt(0.5)).double(), rtol=1e-6, atol=0
        )


def test_strategies_decide_when() -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), strategy=gf.FixedTargetBatch(10))
    stepped = []
    for weight in (4, 4, 4, 12, 1):
        acc.backward(w.sum() * weight, weight=weight)
        stepped.append(bool(acc.step()))
    assert stepped == [False, False, True, True, False]
    assert acc.progress == 0.1
    assert w.item() == pytest.approx(-(4 + 12))


def test_noise_scale_strategy_in_training() -> None:
    torch.manual_seed(0)
    strategy = gf.AdaptiveAccumulation(8, by="noise_scale", min_steps=2, max_steps=16)
    w = torch.zeros(50, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=0.0), strategy=strategy, isolate=True)
    for _ in range(400):
        x = 1 + 4 * torch.randn(4, 50)
        acc.backward((x @ w).mean(), weight=4)
        acc.step()
    assert strategy.noise_scale == pytest.approx(16, rel=0.3)
    with pytest.raises(gf.MisuseError, match="isolate=True"):
        gf.GradientAccumulator(torch.optim.SGD([w], lr=0.0), strategy=strategy)


def test_frozen_and_added_parameters() -> None:
    a, b, c = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(3))
    b.requires_grad_(False)
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=2)

    def window(loss_of: object) -> None:
        for factor in (1.0, 3.0):
            acc.backward(loss_of(factor), weight=1)
            result = acc.step()
        assert result.stepped

    window(lambda x: (a * x + b * x).sum())
    a.requires_grad_(False)
    b.requires_grad_(True)
    optimizer.add_param_group({"params": [c]})
    window(lambda x: (a * x + b * x + c * x).sum())
    assert (a.item(), b.item(), c.item()) == (-2.0, -2.0, -2.0)
    assert "parameters=3" in repr(acc)
    del optimizer.param_groups[1]
    window(lambda x: (b * x).sum())
    assert "parameters=2" in repr(acc)


def test_steps_change_between_windows() -> None:
    w = torch.zeros(1, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2)
    acc.accumulation_count = 1
    acc.backward(w.sum())
    assert acc.step()
    acc.accumulation_count = 2
    acc.backward(w.sum())
    acc.step()
    with pytest.raises(gf.MisuseError, match="middle of a window"):
        acc.accumulation_count = 3


def test_disabled_is_plain_torch() -> None:
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=4)
    acc.enabled = False
    acc.backward((w * 3).sum(), weight=10)
    assert w.grad.item() == 3.0
    assert acc.is_ready
    assert acc.step().stepped
    assert (w.item(), w.grad, acc.current_step) == (-3.0, None, 0)
    (w * 2).sum().backward()
    optimizer.step()
    assert w.item() == -5.0
    optimizer.zero_grad()
    acc.enabled = True
    acc.backward(w.sum())
    with pytest.raises(gf.MisuseError, match="middle of a window"):
        acc.enabled = False


def test_disable_accumulation_is_plain_torch_until_enabled_again() -> None:
    w = torch.zeros(1, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=4)
    acc.disable_accumulation()
    acc.backward((w * 3).sum(), weight=10)
    assert acc.step().stepped
    assert w.item() == -3.0
    acc.enable_accumulation([w])
    acc.backward((w * 3).sum(), weight=10)
    assert not acc.step()
