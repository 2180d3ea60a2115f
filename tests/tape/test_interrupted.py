"""What had stopped listening stays stopped; what could not be checked stays unchecked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf
from gradfit._torch_listen import listening
from gradfit.tape import storage_table
from gradfit.tape.operators import view_names


class Passing(TorchDispatchMode):
    """A mode of the user's that does what it is asked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_listener_that_rests_is_not_woken_by_one_inside() -> None:
    heard: list[Any] = []

    def ear(op: Any, args: Any, kwargs: Any) -> Any:
        heard.append(op)
        return op(*args, **kwargs)

    outer = listening(ear, view_names)
    with outer:
        torch.ones(2).exp()
        assert heard
        outer.rest()
        heard.clear()
        with (
            Passing(),
            listening(
                lambda op, args, kwargs: op(*args, **kwargs), view_names, lambda tensors: None
            ),
        ):
            torch.ones(2).sin()
        torch.ones(2).cos()
        assert heard == []


def test_a_constant_whose_check_failed_is_checked_at_its_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = [0]
    holds_only = storage_table.holds_only

    def failing(*args: Any) -> bool:
        checks[0] += 1
        if checks[0] == 1:
            raise MemoryError
        return holds_only(*args)

    monkeypatch.setattr(storage_table, "holds_only", failing)
    w = torch.ones(4, requires_grad=True)
    with gf.CheckpointScope("s"):
        zeros = torch.zeros(4)
        zeros.numpy()[:] = 5  # nobody sees it
        with pytest.raises(MemoryError):
            zeros.exp()
        loss = (zeros.sin() * w).sum()
    del zeros
    loss.backward()
    assert torch.equal(w.grad, torch.full((4,), 5.0).sin())
