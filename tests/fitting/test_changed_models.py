"""A model that is changed between two steps: what was measured of it is measured again before its
batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.fitting.other_trainers import Passes
from gradfit.fitting.step_profiles import StepProfiles

Change = Callable[[nn.Sequential], Any]


def clamped(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(one if one is None else one.clamp(-1e-4, 1e-4) for one in inputs)


def by_its_norm(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient / gradient.norm())
    return out


def put_in_batch_norm(model: nn.Sequential) -> None:
    model[1] = nn.BatchNorm1d(16, affine=False).double()


def replace_forward(model: nn.Sequential) -> None:
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) - inner(x).mean(0)  # type: ignore[method-assign]


COUPLE: dict[str, Change] = {
    "BatchNorm": put_in_batch_norm,
    "forward": replace_forward,
    "forward hook": lambda model: model[0].register_forward_hook(by_its_norm),
    "backward hook": lambda model: model[2].register_full_backward_hook(clamped),
    "all modules' hook": lambda model: nn.modules.module.register_module_full_backward_hook(
        clamped
    ),
    "parameter's hook": lambda model: model[0].weight.register_hook(lambda g: g.clamp(-1e-4, 1e-4)),
    "spectral norm": lambda model: nn.utils.parametrizations.spectral_norm(model[0]),
}
HARMLESS: dict[str, Change] = {
    "layer": lambda model: model.__setitem__(1, nn.ReLU()),
    "forward hook": lambda model: model[0].register_forward_hook(lambda m, a, out: out * 1.5),
    "parameter's hook": lambda model: model[0].weight.register_hook(lambda g: g * 1.5),
}


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(12, 6).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :1]).square().mean()


def update_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", COUPLE)
def test_what_no_longer_adds_up_is_not_cut(name: str) -> None:
    model, optimizer, x = make()
    step = gf.fit(model, optimizer, loss_of, x, memory="1 GiB", micro_batch=5)
    step(x)
    handle = COUPLE[name](model)
    before = parameters_of(model)
    try:
        with pytest.raises(gf.MisuseError, match="its loss does not add up"):
            step(x)
    finally:
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()
    assert all(map(torch.equal, before, parameters_of(model)))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_still_adds_up_is_cut_and_exact(name: str) -> None:
    runs = []
    for cut in (True, False):
        model, optimizer, x = make()
        step = gf.fit(model, optimizer, loss_of, x, memory="1 GiB", micro_batch=5) if cut else None
        for number in range(4):
            if number == 2:
                HARMLESS[name](model)
            if step is None:
                update_by_hand(model, optimizer, x)
            else:
                assert step(x).micro_batches == 3
        runs.append(parameters_of(model))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_same_hooks_again_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of one step in two, and hooks that a loop defines anew each time."""
    model, optimizer, x = make()
    step = gf.fit(model, optimizer, loss_of, x, memory="1 GiB", micro_batch=5)
    profiles = []
    monkeypatch.setattr(
        StepProfiles,
        "measure",
        lambda self, *args, _measure=StepProfiles.measure, **kwargs: (
            profiles.append(1),
            _measure(self, *args, **kwargs),
        )[1],
    )
    for number in range(8):
        handle = model[0].weight.register_hook(lambda g: g * 1.5) if number % 2 else None
        step(x)
        if handle is not None:
            handle.remove()
    assert len(profiles) == 1


def test_a_batch_that_is_whole_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, x = make()
    step = gf.fit(model, optimizer, loss_of, x, memory="1 GiB", micro_batch="whole")
    step(x)
    monkeypatch.setattr(StepProfiles, "measure", None)
    model[0].weight.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
    expected_model, expected_optimizer, _ = make()
    update_by_hand(expected_model, expected_optimizer, x)
    expected_model[0].weight.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
    step(x)
    update_by_hand(expected_model, expected_optimizer, x)
    assert all(map(torch.equal, parameters_of(model), parameters_of(expected_model)))


def test_what_is_cut_all_the_same_is_warned_of() -> None:
    model, optimizer, x = make()
    step = gf.fit(model, optimizer, loss_of, x, memory="1 GiB", micro_batch=5, exact=False)
    step(x)
    put_in_batch_norm(model)
    with pytest.warns(gf.ExactnessWarning, match=r"BatchNorm \(1\)"):
        step(x)
    assert step(x).micro_batches == 3  # and said once


def test_a_mean_that_becomes_a_sum_is_refused() -> None:
    model, optimizer, x = make()
    is_sum = False

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        squares = model(x).square()
        return squares.sum() if is_sum else squares.mean()

    step = gf.fit(model, optimizer, loss, x, memory="1 GiB", micro_batch=5)
    step(x)
    is_sum = True
    before = parameters_of(model)
    with pytest.raises(gf.MisuseError, match=r"loss is sum; the sample's was mean over"):
        step(x)
    assert all(map(torch.equal, before, parameters_of(model)))


def test_a_trainer_of_another_library_measures_again_too() -> None:
    model, optimizer, x = make()
    passes = Passes(model, optimizer, loss_of, memory="1 GiB", micro_batch=5)
    assert passes.plan(x).steps == 3
    put_in_batch_norm(model)
    ran: list[Any] = []
    with pytest.raises(gf.MisuseError, match="its loss does not add up"):
        passes.run(x, lambda part, weight: ran.append(part))
    assert not ran
