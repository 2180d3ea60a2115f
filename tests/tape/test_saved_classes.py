"""What autograd saves comes back as what it was: its class, its attributes; and who wrote over it
is told.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import gradfit as gf


class Marked(torch.Tensor):
    """A subclass without a dispatch of its own, with an attribute."""

    mark: str


def marked(tensor: torch.Tensor) -> Marked:
    result = tensor.as_subclass(Marked)
    result.mark = "here"
    return result


class Remember(torch.autograd.Function):
    """Notes what its saved tensor is when it comes back."""

    found: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Remember.found.append(ctx.saved_tensors[0])
        return gradient * 2, None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nn.Parameter(torch.arange(3.0), requires_grad=False),
        lambda x: marked(torch.arange(3.0)),
        lambda x: marked(x.detach().exp()),
        lambda x: nn.Buffer(torch.arange(3.0)),
    ],
    ids=["frozen parameter", "subclass", "rebuilt subclass", "buffer"],
)
def test_the_class_of_what_a_function_saves(make: Any) -> None:
    results = []
    for enabled in (False, True):
        x = torch.ones(3, requires_grad=True)
        Remember.found.clear()
        with gf.CheckpointScope("s", enabled=enabled):
            other = make(x)
            loss = Remember.apply(x.exp(), other).sum()
        del other
        loss.backward()
        (found,) = Remember.found
        results.append(
            (type(found), getattr(found, "mark", None), found.as_subclass(torch.Tensor), x.grad)
        )
    (kind, mark, content, gradient), ours = results
    assert ours[:2] == (kind, mark)
    assert torch.equal(ours[2], content)
    assert torch.equal(ours[3], gradient)


# -------------------------------------------------------------------------------------- overwritten


def test_the_error_names_operation_and_line() -> None:
    x, w = torch.randn(4), torch.randn(4, requires_grad=True)
    with gf.CheckpointScope("a"):
        y = x * w  # this line
    x.add_(1)
    with pytest.raises(
        gf.ActivationOverwritten, match="modified by an inplace operation"
    ) as caught:
        y.sum().backward()
    assert "MulBackward0" in str(caught.value)
    assert _line_of(y_line := "# this line") in str(caught.value), y_line
    assert "version 1, version 0 was expected" in str(caught.value)


def test_the_error_names_what_is_rebuilt_from() -> None:
    x, w = torch.randn(4), torch.randn(4, requires_grad=True)
    with gf.CheckpointScope("a"):
        y = (x.cos() * w).exp()  # a rebuilt line
    x.add_(1)
    with pytest.raises(
        gf.ActivationOverwritten, match="from which activations are rebuilt"
    ) as caught:
        y.sum().backward()
    assert "ExpBackward0" in str(caught.value)
    assert _line_of("# a rebuilt line") in str(caught.value)


def test_anomaly_mode_gives_the_line_where_none_was_noted() -> None:
    w = torch.randn(4, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), gf.CheckpointScope("a"):
        z = w * w  # an anomalous line
    with torch.no_grad():
        w.add_(1)
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(gf.ActivationOverwritten) as caught,
        torch.autograd.set_detect_anomaly(True),
    ):
        z.sum().backward()
    assert _line_of("# an anomalous line") in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_error_for_a_nested_tensor() -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    w = torch.randn(3, requires_grad=True)
    nested = torch.nested.nested_tensor(parts)
    with gf.CheckpointScope("a"):
        y = nested * torch.nested.nested_tensor(
            [w.expand(2, 3), w.expand(4, 3)], requires_grad=True
        )
    nested.mul_(2)
    with pytest.raises(gf.ActivationOverwritten, match="2 nested parts"):
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()


def _line_of(comment: str) -> str:
    with open(__file__) as source:
        number = next(
            at for at, line in enumerate(source, start=1) if line.rstrip().endswith(comment)
        )
    return f"test_saved_classes.py:{number}"


# -------------------------------------------------------------------------------------- gf.backward


class Failing(torch.autograd.Function):
    error: Exception

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Failing.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 20 MiB"),
        RuntimeError("of the user's"),
        KeyError("other"),
    ],
)
def test_a_failure_in_a_backward_is_passed_on(error: Exception) -> None:
    Failing.error = error
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(type(error)) as caught:
        gf.backward(Failing.apply(x).exp().sum())
    assert not isinstance(caught.value, gf.GraphError)
    loss = x.exp().sum()
    gf.backward(loss)
    with pytest.raises(gf.GraphError, match="already freed"):
        gf.backward(loss)
