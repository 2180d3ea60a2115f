"""Plain backward passes count by themselves: once each, whatever they touch."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfit as gf
from gradfit.accumulate.accumulator import BareAccumulator


def two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)


def watching(*tensors: torch.Tensor, steps: int = 4) -> gf.GradientAccumulator:
    return gf.GradientAccumulator(steps=steps, parameters=tensors)


def test_a_pass_over_many_parameters_counts_once() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    acc = watching(*model.parameters())
    for count in range(1, 4):
        model(torch.randn(2, 4)).sum().backward()
        assert acc.current_step == count


def test_a_pass_over_some_parameters_counts_once() -> None:
    a, b = two()
    acc = watching(a, b)
    a.sum().backward()
    b.sum().backward()
    (a + b).sum().backward()
    assert acc.current_step == 3


def test_a_pass_over_other_parameters_does_not_count() -> None:
    a, b = two()
    acc = watching(a)
    b.sum().backward()
    torch.autograd.grad(a.sum(), a)
    gf.backward((a * b).sum())
    assert acc.current_step == 0


def test_two_losses_of_one_forward_are_one_micro_batch() -> None:
    a, _ = two()
    acc = watching(a, steps=2)
    for count in (1, 2):
        h = a * 2
        first, second = h.sum(), (h * h).sum()
        first.backward(retain_graph=True)
        second.backward()
        assert acc.current_step == count
        assert acc.is_ready == (count == 2)
    # (2 + 8): the mean over two micro-batches of the sum of both losses
    assert a.grad.tolist() == [10.0] * 3


def test_one_loss_differentiated_again_counts_again() -> None:
    a, _ = two()
    acc = watching(a, steps=3)
    loss = (a * 2).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert acc.current_step == 3


def test_keeping_every_graph_does_not_stop_the_count() -> None:
    a, _ = two()
    acc = watching(a, steps=3)
    ready = []
    for x in (1.0, 2.0, 3.0):
        (a * x).sum().backward(retain_graph=True)
        ready.append(acc.is_ready)
    assert ready == [False, False, True]


@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_kept_graphs_of_several_forwards_are_several_micro_batches(option: str) -> None:
    """Also where nobody asks between the passes, as in a closure."""
    a, _ = two()
    acc = watching(a, steps=4)
    for x in (1.0, 2.0, 3.0, 6.0):
        (a * x).sum().backward(**{option: True})
    assert acc.is_ready
    assert a.grad.tolist() == [3.0] * 3


def test_three_losses_of_one_forward_are_one_micro_batch() -> None:
    """Also those that are made when the first was differentiated already."""
    a, _ = two()
    acc = watching(a, steps=1)
    h = a * 2
    h.sum().backward(retain_graph=True)
    (h * 2).tanh().sum().backward(retain_graph=True)
    (h * 3).sum().backward()
    assert acc.current_step == 1


def test_a_long_chain_that_is_kept() -> None:
    """Nodes that Python has seen are freed inside of each other: thirty thousand of them end the
    process.
    """
    a, _ = two()
    acc = watching(a, steps=2)
    for _ in range(2):
        h = a
        for _ in range(40_000):
            h = h * 1.0
        h.sum().backward(retain_graph=True)
    del h
    assert acc.is_ready
    assert a.grad.tolist() == [1.0] * 3


def test_step_makes_all_passes_before_it_one_micro_batch() -> None:
    a, b = two()
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=3)
    stepped = []
    for _ in range(6):
        (a * 3).sum().backward()
        (b * 6).sum().backward()
        stepped.append(bool(acc.step()))
    assert stepped == [False, False, True] * 2
    assert a.tolist() == [1 - 2 * 3] * 3
    assert b.tolist() == [1 - 2 * 12] * 3


def test_step_when_ready() -> None:
    """`if acc.is_ready: acc.step()`, and one `step()` after a loop of passes."""
    a, _ = two()
    acc = gf.GradientAccumulator(torch.optim.SGD([a], lr=1.0), steps=3)
    for _ in range(6):
        (a * 2).sum().backward()
        if acc.is_ready:
            assert acc.step()
    assert a.tolist() == [-3.0] * 3
    for _ in range(3):
        (a * 2).sum().backward()
    result = acc.step()
    assert (result.stepped, result.micro_batches, result.weight) == (True, 3, 3)
    for weight in (1, 2, 3):
        acc.backward((a * 2).sum(), weight=weight)
    assert acc.step().weight == 6


def test_flush_after_plain_passes() -> None:
    a, _ = two()
    acc = gf.GradientAccumulator(torch.optim.SGD([a], lr=1.0), steps=8)
    for x in (1.0, 5.0):
        (a * x).sum().backward()
    result = acc.flush()
    assert (result.weight, result.micro_batches, a.tolist()) == (2, 2, [-2.0] * 3)


def test_plain_and_weighted_passes_in_one_window() -> None:
    a, _ = two()
    acc = watching(a, steps=3)
    (a * 2).sum().backward()
    acc.backward((a * 4).sum(), weight=3)
    (a * 6).sum().backward()
    assert acc.is_ready
    assert a.grad.tolist() == [4.0] * 3
    acc.reset()
    acc.backward((a * 2).sum())
    (a * 4).sum().backward()
    acc.backward((a * 9).sum())
    assert acc.is_ready
    assert a.grad.tolist() == [5.0] * 3


def test_a_plain_pass_weighs_1_among_others() -> None:
    """Whatever the sums are divided by meanwhile: its gradients are multiplied as they come in."""
    a, _ = two()
    acc = watching(a, steps=4)
    acc.backward((a * 2).sum(), weight=8)
    (a * 11).sum().backward()
    acc.backward((a * 5).sum(), weight=100)
    (a * 3).sum().backward()
    assert acc.is_ready
    torch.testing.assert_close(a.grad, torch.full((3,), (16 + 11 + 500 + 3) / 110))


@pytest.mark.parametrize("all_inside", [False, True])
def test_reentrant_checkpointing_counts_once(all_inside: bool) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    acc = watching(*layers.parameters())
    for count in (1, 2, 3):
        h = torch.randn(2, 4, requires_grad=True)
        for at, layer in enumerate(layers):
            h = checkpoint(layer, h, use_reentrant=True) if all_inside or at < 2 else layer(h)
        loss = h.sum()
        loss.backward()
        assert acc.current_step == count


def test_a_foreign_optimizer_in_the_seeds_loop() -> None:
    a, _ = two()
    acc = watching(a, steps=2)
    for _ in range(4):
        (a * 3).sum().backward()
        if acc.is_ready:
            with torch.no_grad():
                a -= a.grad
            a.grad = None
    assert a.tolist() == [1 - 6.0] * 3


def test_zero_grad_by_filling_starts_a_new_window() -> None:
    a, _ = two()
    acc = watching(a, steps=2)
    for _ in range(2):
        for _ in range(2):
            (a * 3).sum().backward()
        assert acc.is_ready
        assert a.grad.tolist() == [3.0] * 3
        a.grad.zero_()


def test_a_full_window_that_nobody_used() -> None:
    a, _ = two()
    acc = watching(a, steps=2)
    for _ in range(2):
        (a * 3).sum().backward()
    assert acc.is_ready
    with pytest.raises(gf.MisuseError, match="neither a step nor zero_grad"):
        (a * 3).sum().backward()
    acc.reset()
    for x in (3.0, 5.0):
        acc.backward((a * x).sum())
    assert acc.is_ready
    acc.backward((a * 10).sum())  # weighed by us, so the window can be taken up again
    assert acc.is_ready
    torch.testing.assert_close(a.grad, torch.full((3,), 6.0))


def test_more_than_full_without_looking() -> None:
    a, _ = two()
    acc = gf.GradientAccumulator(torch.optim.SGD([a], lr=1.0), steps=2)
    for x in (1.0, 2.0, 6.0):
        (a * x).sum().backward()
    assert acc.flush().weight == 3
    assert a.tolist() == [-2.0] * 3


def test_optimizer_stepped_by_hand_without_looking() -> None:
    """A modulo loop that never asks: the optimizer still sees normalised gradients, and the count
    starts again.
    """
    a, b = two()
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.Adam([b], lr=0.1)
    acc = watching(a, b, steps=2)
    for step in range(4):
        (a * 3 + b).sum().backward()
        if step % 2:
            for optimizer in (first, second):
                optimizer.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
            assert acc.current_step == 0
    assert a.tolist() == [1 - 6.0] * 3
    assert acc.windows == 2


def test_a_pass_that_died_half_way() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("half-way")

    a, b = two()
    acc = watching(a, b)
    a.sum().backward()
    with pytest.raises(RuntimeError, match="half-way"):
        (Bad.apply(a * 1) * b).sum().backward()
    with pytest.raises(gf.MisuseError, match="failed half-way"):
        acc.step()
    with pytest.raises(gf.MisuseError, match="failed half-way"):
        _ = acc.is_ready
    (a.sum() + b.sum()).backward()
    with pytest.raises(gf.MisuseError, match="failed half-way"):
        acc.step()
    acc.reset()
    a.sum().backward()
    assert acc.current_step == 1
    with pytest.raises(RuntimeError, match="half-way"):
        acc.backward((Bad.apply(a * 1) * b).sum())
    with pytest.raises(gf.MisuseError, match="failed half-way"):
        acc.step()


def test_accumulators_are_not_kept_alive() -> None:
    a, _ = two()
    acc = watching(a)
    a.sum().backward()
    reference = weakref.ref(acc), weakref.ref(acc.window), weakref.ref(acc.window.plain)
    del acc
    gc.collect()
    assert [one() for one in reference] == [None] * 3
    a.sum().backward()


def test_several_accumulators_on_one_tensor() -> None:
    """The one that was made or used last counts plain passes; none can begin in the middle of
    another's window.
    """
    a, _ = two()
    one, other = watching(a, steps=2), watching(a, steps=3)
    a.sum().backward()
    assert (one.current_step, other.current_step) == (0, 1)
    with pytest.raises(
        gf.MisuseError, match=r"another accumulator's window.* Call flush\(\) or reset\(\)"
    ):
        one.backward(a.sum())
    with pytest.raises(gf.MisuseError, match="another accumulator's window"):
        one.step()
    with pytest.raises(gf.MisuseError, match="another accumulator's window"):
        watching(a)
    assert a.grad.tolist() == [1.0] * 3
    other.reset()
    one.backward(a.sum())
    a.sum().backward()
    assert (one.current_step, other.current_step) == (2, 0)
    one.reset()
    del one
    gc.collect()
    a.sum().backward()
    assert other.current_step == 1


def test_deep_copies_of_models_are_free() -> None:
    model = nn.Linear(2, 2)
    acc = watching(*model.parameters())
    copy.deepcopy(model)(torch.ones(1, 2)).sum().backward()
    assert acc.current_step == 0


def test_a_bare_window_is_out_of_reach() -> None:
    """Plain passes, and other windows' own, are nobody's micro-batches: only its owner puts
    anything in.
    """
    a, _ = two()
    bare = BareAccumulator(torch.optim.SGD([a], lr=1.0), steps=2)
    for _ in range(3):
        (a * 7).sum().backward()
    assert bare.current_step == 0
    a.grad = None
    watcher = watching(a, steps=2)
    bare.backward((a * 2).sum())
    bare.step()
    bare.backward((a * 4).sum())
    assert bare.step().micro_batches == 2
    assert (a.tolist(), watcher.current_step) == ([1 - 3.0] * 3, 0)
