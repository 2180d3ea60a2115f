"""What happens off the paved road: wrapped optimizers, updates that fail, mixed losses, damaged
states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf


def parameter(size: int = 3, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((size,), value, dtype=torch.float64))


class Lookahead(torch.optim.Optimizer):
    """A wrapper as they are often written: a torch optimizer by name that never called its base's
    `__init__`.
    """

    def __init__(self, base: torch.optim.Optimizer, *, lazy: bool = False) -> None:
        self.optimizer, self.param_groups, self.lazy = base, base.param_groups, lazy
        self.state, self.defaults = base.state, base.defaults

    def step(self, closure: Any = None) -> None:
        if not self.lazy:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def accelerated(base: torch.optim.Optimizer) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(base)


def of_fabric(base: torch.optim.Optimizer) -> Any:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return fabric.setup(nn.ParameterList(base.param_groups[0]["params"]), base)[1]


@pytest.mark.parametrize("wrap", [Lookahead, accelerated, of_fabric])
def test_a_wrapped_optimizer_is_believed(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    w = parameter()
    acc = gf.GradientAccumulator(wrap(torch.optim.SGD([w], lr=1.0)), steps=2)
    results = []
    for x in (2.0, 4.0) * 2:
        acc.backward((w * x).sum(), weight=1)
        results.append(acc.step())
    assert [one.reason for one in results] == ["accumulating", "stepped"] * 2
    assert w.tolist() == [1 - 6.0] * 3


def test_a_wrapper_that_leaves_the_step_out_is_not() -> None:
    w = parameter()
    acc = gf.GradientAccumulator(Lookahead(torch.optim.SGD([w], lr=1.0), lazy=True), steps=1)
    acc.backward(w.sum())
    result = acc.step()
    assert (result.stepped, result.reason, w.tolist()) == (
        False,
        "left out by the optimizer",
        [1.0] * 3,
    )


class Failing(torch.optim.SGD):
    """Runs out of memory in its first step."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("no memory for the state")
        return super().step(closure)


SCALERS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    lambda: gf.LossScaler(1024.0),
]


@pytest.mark.parametrize("scaler", SCALERS, ids=["none", "GradScaler", "LossScaler"])
def test_a_hook_that_fails_after_an_update_leaves_the_next_one(scaler: Callable[[], Any]) -> None:
    """The update has happened; the scaler unscales the next one's gradients, too."""
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=1, scaler=scaler())

    def fail(*_: Any) -> None:
        raise ValueError("of the hook")

    handle = optimizer.register_step_post_hook(fail)
    acc.backward((w * 2).sum())
    with pytest.raises(ValueError, match="of the hook"):
        acc.step()
    handle.remove()
    acc.backward((w * 2).sum())
    assert acc.step().stepped
    assert w.item() == -4.0


@pytest.mark.parametrize("scaler", SCALERS, ids=["none", "GradScaler", "LossScaler"])
@pytest.mark.parametrize("then", ["step", "flush", "more", "reset"])
def test_an_update_that_fails_can_be_tried_again(scaler: Callable[[], Any], then: str) -> None:
    w = parameter()
    acc = gf.GradientAccumulator(Failing([w], lr=1.0), steps=2, scaler=scaler(), clip=100.0)
    acc.backward((w * 3).sum(), weight=1)
    acc.step()
    acc.backward((w * 9).sum(), weight=2)
    with pytest.raises(torch.OutOfMemoryError):
        acc.step()
    assert (acc.current_step, acc.windows, w.tolist()) == (2, 0, [1.0] * 3)
    expected = 7.0
    if then == "more":
        acc.backward((w * 5).sum(), weight=1)
        expected = 26 / 4
    elif then == "reset":
        acc.reset()
        acc.backward((w * 5).sum(), weight=1)
        acc.step()
        acc.backward((w * 5).sum(), weight=3)
        expected = 5.0
    result = acc.flush() if then == "flush" else acc.step()
    assert result.stepped
    assert result.grad_norm == pytest.approx(expected * 3**0.5)
    torch.testing.assert_close(w.detach(), torch.full((3,), 1 - expected, dtype=torch.float64))
    assert (acc.current_step, acc.windows) == (0, 1)


def test_a_clipper_that_refuses_leaves_the_window_normalised() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    acc = gf.GradientAccumulator(
        torch.optim.SGD(table.parameters(), lr=1.0), steps=2, clip=gf.GradientClipper(max_value=0.5)
    )
    for weight in (1, 3):
        acc.backward(table(torch.tensor([1])).mean(), weight=weight)
        if weight == 1:
            acc.step()
    for _ in range(2):
        with pytest.raises(gf.MisuseError, match="sparse"):
            acc.step()
        assert acc.current_step == 2
        torch.testing.assert_close(table.weight.grad.to_dense()[1], torch.full((2,), 0.5))


def test_a_non_finite_window_can_be_mended_and_stepped() -> None:
    w = parameter()
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2)
    for x in (float("nan"), 3.0):
        acc.backward((w * x).sum())
        if x != 3.0:
            acc.step()
    for _ in range(2):
        with pytest.raises(gf.NonFiniteGradient):
            acc.step()
    w.grad = torch.ones(3, dtype=torch.float64)
    assert acc.step().weight == 2
    assert acc.windows == 1


def test_a_skipped_window_without_an_optimizer_leaves_nothing_behind() -> None:
    w = parameter()
    acc = gf.GradientAccumulator(parameters=[w], steps=1, on_nonfinite="skip")
    acc.backward((w * float("nan")).sum())
    assert acc.step().reason == "non-finite gradient"
    assert w.grad is None
    acc.backward((w * 2).sum())
    assert acc.step().reason == "no optimizer"
    gradient: Any = w.grad  # there again
    assert gradient.tolist() == [2.0] * 3


def test_passes_into_different_parameters_are_one_micro_batch() -> None:
    """As many passes in a micro-batch as micro-batches in a window, each into a group of its
    own.
    """
    a, b = parameter(), parameter()
    acc = gf.GradientAccumulator(
        torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0), steps=2
    )
    stepped = []
    for _ in range(4):
        (a * 3).sum().backward()
        (b * 6).sum().backward()
        stepped.append(bool(acc.step()))
    assert stepped == [False, True] * 2
    assert (a.tolist(), b.tolist()) == ([1 - 2 * 3.0] * 3, [1 - 2 * 12.0] * 3)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("terms_first", [False, True])
@pytest.mark.parametrize("delimit", [False, True])
def test_a_loss_and_terms_are_one_micro_batch(
    isolate: bool, terms_first: bool, delimit: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    reference = copy.deepcopy(model)
    x = torch.randn(23, 4, dtype=torch.float64)
    acc = gf.GradientAccumulator(
        torch.optim.SGD(model.parameters(), lr=1.0), steps=2, isolate=isolate
    )
    result = None
    for _ in range(2):
        for part in x.split([9, 14]):
            kept = part[part[:, 0] > 0]
            losses = [
                lambda part=part: acc.backward(model(part).square().mean(), weight=len(part)),
                lambda kept=kept: acc.backward(terms={"aux": (model(kept).sum(), len(kept))}),
            ]
            for run in reversed(losses) if terms_first else losses:
                run()
            if delimit:
                result = acc.step()
                assert result.stepped == (len(part) == 14)
        if not delimit:
            assert acc.current_step == 2
            result = acc.step()
        assert result is not None
        assert (result.stepped, result.micro_batches, result.weight) == (True, 2, 23)
        reference.zero_grad()
        (reference(x).square().mean() + reference(x[x[:, 0] > 0]).mean()).backward()
        torch.optim.SGD(reference.parameters(), lr=1.0).step()
    for ours, full in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-12, atol=1e-14)


def test_nothing_to_differentiate_while_disabled() -> None:
    w = parameter()
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2)
    acc.enabled = False
    acc.backward(terms={"a": (w.sum(), 0)})
    acc.backward(None, weight=0)
    assert w.grad is None


def test_step_without_parameters_changes_nothing() -> None:
    acc = gf.GradientAccumulator(steps=2)
    with pytest.raises(gf.MisuseError, match="no parameters"):
        acc.step()
    assert (acc.current_step, acc.flush().reason) == (0, "empty window")


def test_isolate_must_be_a_flag() -> None:
    with pytest.raises(gf.MisuseError, match="isolate"):
        gf.GradientAccumulator(torch.optim.SGD([parameter()]), isolate="yes")  # type: ignore[arg-type]


def test_a_parameter_exchanged_in_its_group_is_followed() -> None:
    """As model surgery does it: no new group, the list's element is another tensor."""
    old, new = parameter(3), parameter(5)
    optimizer = torch.optim.SGD([old], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    acc.backward(old.sum(), weight=1)
    acc.step()
    acc.flush()
    optimizer.param_groups[0]["params"][0] = new
    for weight in (1, 2):
        acc.backward((new * weight).sum(), weight=weight)
        acc.step()
    torch.testing.assert_close(new.detach(), torch.full((5,), 1 - 5 / 3, dtype=torch.float64))


def test_a_parameter_added_in_the_middle_of_a_window_is_normalised_too() -> None:
    old, new = parameter(), parameter()
    optimizer = torch.optim.SGD([old], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    acc.backward((old * 2).sum(), weight=3)
    acc.step()
    optimizer.add_param_group({"params": [new]})
    acc.backward((old * 4 + new * 5).sum(), weight=1)
    assert acc.step()
    assert (old.tolist(), new.tolist()) == ([1 - 10 / 4] * 3, [1 - 5 / 4] * 3)


DAMAGE: list[tuple[str, Any]] = [
    ("weight", -1), ("weight", float("nan")), ("closed", "x"), ("open", -3), ("divisor", "a"),
    ("divisor", 0), ("scale", None), ("windows", "x"), ("terms", 3), ("version", 99), ("shapes",
    []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGE)
def test_a_state_with_damaged_numbers_is_refused(name: str, value: Any) -> None:
    w = parameter()
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=3)
    acc.backward((w * 2).sum(), weight=5)
    acc.step()
    state = acc.state_dict()
    state["window"][name] = value
    with pytest.raises(gf.StateError):
        acc.load_state_dict(state)
    assert (acc.current_step, acc.window.weight) == (1, 5)
    assert w.grad is not None


@pytest.mark.parametrize(
    "state", [None, 3, [], {}, {"window": {}}, {"tensors": {}, "window": None}]
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    acc = gf.GradientAccumulator(torch.optim.SGD([parameter()], lr=1.0), steps=3)
    with pytest.raises(gf.StateError):
        acc.load_state_dict(state)


@pytest.mark.parametrize("name", ["grad.-1", "grad.7", "junk"])
def test_a_state_with_a_gradient_of_no_parameter_is_refused(name: str) -> None:
    w = parameter()
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=3)
    acc.backward(w.sum())
    state = acc.state_dict()
    state["tensors"][name] = torch.ones(3)
    with pytest.raises(gf.StateError):
        acc.load_state_dict(state)


def test_norms_of_every_kind_of_gradient() -> None:
    """Squares that overflow, half precision, complex and sparse gradients, and none at all."""
    big = nn.Parameter(torch.ones(4))
    half = nn.Parameter(torch.ones(4, dtype=torch.float16))
    complex_ = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    table = nn.Embedding(5, 2, sparse=True)
    for tensor, loss, norm in (
        (big, lambda: (big * 1e30).sum(), 2e30),
        (half, lambda: (half * 60000).sum(), 120000.0),
        (complex_, lambda: (complex_.real * 3).sum(), 6.0),
        (table.weight, lambda: table(torch.tensor([1, 1])).sum(), 8**0.5),
        (nn.Parameter(torch.ones(2)), lambda: big.sum(), 0.0),
    ):
        acc = gf.GradientAccumulator(torch.optim.SGD([tensor], lr=0.0), steps=1)
        acc.backward(loss())
        assert acc.step().grad_norm == pytest.approx(norm, rel=1e-3)


def test_an_optimizers_own_zero_grad_is_called() -> None:
    """Only torch's own is stood in for, and then all of the optimizer's parameters are cleared, not
    just ours.
    """
    calls = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("own")
            super().zero_grad(set_to_none)

    def patched() -> None:
        calls.append("patched")

    w, other = parameter(), parameter()
    for optimizer in (
        Own([w, other], lr=0.0),
        torch.optim.SGD([w, other], lr=0.0),
        torch.optim.SGD([w], lr=0.0),
    ):
        if len(optimizer.param_groups[0]["params"]) == 1:
            optimizer.zero_grad = patched  # type: ignore[method-assign, assignment]
        acc = gf.GradientAccumulator(optimizer, steps=1, parameters=[w])
        other.grad = torch.ones(3, dtype=torch.float64)
        acc.backward(w.sum())
        assert acc.step()
        if not calls or calls == ["own"]:
            assert w.grad is None
            assert other.grad is None
    assert calls == ["own", "patched"]
