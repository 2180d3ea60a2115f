"""Whether an optimizer's step that failed has written to anything, where there is no copy of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.utils._python_dispatch import TorchDispatchMode

from gradfit.errors import StateError
from gradfit.fitting.update_rollback import UpdateSnapshot


class Passing(TorchDispatchMode):
    """Runs everything as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PastTheCounters(torch.optim.SGD):
    """Writes to parameters as many optimizers of other libraries do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)
        raise RuntimeError("half-way")


def failing(function: Callable[..., Any], call: int, *, before: bool) -> Callable[..., Any]:
    """`function`, which fails in one of its calls."""
    calls = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and before:
            raise RuntimeError("half-way")
        out = function(*args, **kwargs)
        if calls == call:
            raise RuntimeError("half-way")
        return out

    return run


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    tensors = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    for one in tensors:
        one.grad = torch.randn(3)
    return tensors


WAYS: dict[str, tuple[dict[str, Any], Any, str, int, bool]] = {
    # options, and what fails: owner, name, in which call, before or after it has run
    "one by one": ({"foreach": False}, torch.Tensor, "addcdiv_", 2, True),
    "by lists": ({"foreach": True}, torch, "_foreach_addcdiv_", 1, True),
    "fused": ({"fused": True}, torch, "_fused_adamw_", 1, False),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passing])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_half_happened_is_not_taken_for_none(
    way: str, mode: Callable[[], Any], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the counters, and under a mode, where torch does not count writes to lists. Fused kernels
    are never counted, and in a first step nothing else is that was there before.
    """
    options, owner, name, call, before = WAYS[way]
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors, **options)
    if not first:
        optimizer.step()
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), call, before=before))
    with (
        mode(),
        pytest.raises(StateError, match="changed some parameters"),
        UpdateSnapshot(tensors, optimizer, taken=False),
    ):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_fails_before_it_writes_is_taken_back(kind: Any) -> None:
    tensors = parameters()
    optimizer = kind(tensors, lr=0.1)
    before = [one.detach().clone() for one in tensors]
    with (
        pytest.raises(RuntimeError, match="not yet"),
        UpdateSnapshot(tensors, optimizer, taken=False),
    ):
        raise RuntimeError("not yet")
    assert all(map(torch.equal, tensors, before))


def with_a_hook(tensors: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A hook of the user's may do anything, such as averaging weights."""
    optimizer = torch.optim.SGD(tensors, lr=0.1)

    def average(*_: Any) -> None:
        tensors[0].data.mul_(0.5)
        raise RuntimeError("half-way")

    optimizer.register_step_pre_hook(average)
    return optimizer


@pytest.mark.parametrize("make", [lambda tensors: PastTheCounters(tensors, lr=0.1), with_a_hook])
def test_writes_past_the_counters_are_heard(make: Callable[[Any], Any]) -> None:
    tensors = parameters()
    optimizer = make(tensors)
    with (
        pytest.raises(StateError, match="changed some parameters"),
        UpdateSnapshot(tensors, optimizer, taken=False),
    ):
        optimizer.step()


def test_nobody_listens_to_torchs_own_steps() -> None:
    """Listening takes half as long again as a step of a few milliseconds."""
    tensors = parameters()
    with UpdateSnapshot(tensors, torch.optim.AdamW(tensors), taken=False):
        assert dispatch_modes() == 0
    with UpdateSnapshot(tensors, PastTheCounters(tensors, lr=0.1), taken=False):
        assert dispatch_modes() == 1
