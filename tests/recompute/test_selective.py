"""Contexts that torch's users pass to `checkpoint`: selective policies, and contexts of their
own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradfit as gf

aten = torch.ops.aten


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, x.shape[-1:])
    h = F.gelu(h @ w) @ v
    return torch.tanh((x + h) @ w) @ v


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in ((6, 8), (8, 12), (12, 8))]


class EverySecondProduct:
    """As torchtitan's policy: by the shapes of the arguments, and counting."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.products = 0

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self.asked.append(op)
        if op is aten.mm.default:
            if args[1].shape == (12, 8) and args[0].shape[0] > 100:
                return CheckpointPolicy.PREFER_RECOMPUTE
            self.products += 1
            if self.products % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def run(checkpoint: Any, **options: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Gradients, and the products of the backward pass."""
    given = inputs()
    loss = checkpoint(block, *given, **options).sum()
    with _Products() as products:
        loss.backward()
    return [tensor.grad for tensor in given if tensor.grad is not None], products.found


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.mm.default:
            self.found.append([tuple(argument.shape) for argument in args])
        return func(*args, **(kwargs or {}))


def test_a_policy_reads_arguments_and_is_asked_once_for_each_operation() -> None:
    theirs, ours = EverySecondProduct(), EverySecondProduct()
    expected, torchs_products = run(
        torchs_checkpoint,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(theirs),
    )
    gradients, products = run(
        gf.checkpoint, context_fn=lambda: create_selective_checkpoint_contexts(ours)
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    # torch 2.10 asks a policy once more when it recomputes, later versions do not
    assert ours.products == 4
    assert theirs.products in (4, 7)
    heavy = (aten.mm.default, aten.native_layer_norm.default, aten.gelu.default, aten.tanh.default)
    asked = [op for op in ours.asked if op in heavy]
    assert asked == [op for op in theirs.asked if op in heavy][: len(asked)]
    assert len(products) == len(torchs_products)  # the same ones are replayed


@pytest.mark.parametrize("written", [False, True])
def test_a_policy_is_asked_with_what_was_called(written: bool) -> None:
    """Also where something else is recorded (a mask without what it masks), and for writes."""
    asked: dict[str, Any] = {}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked[str(op)] = (args, kwargs, context.op_output)
        return False

    x = torch.ones(3, requires_grad=True)

    def function(t: torch.Tensor) -> torch.Tensor:
        h = t.exp()
        noise = torch.rand_like(h)
        return h.mul_(noise) if written else h * noise

    gf.checkpoint(
        function, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    ).sum()
    (like,), _, drawn = asked["aten.rand_like.default"]
    assert like.shape == drawn.shape == (3,)
    (h, noise), _, output = asked["aten.mul_.Tensor" if written else "aten.mul.Tensor"]
    assert noise.data_ptr() == drawn.data_ptr()
    assert (output.data_ptr() == h.data_ptr()) == written
    asked.clear()  # outputs hold their graph, which holds the policy


def test_a_policy_of_a_checkpoint_inside_a_scope() -> None:
    policy = EverySecondProduct()
    expected, _ = run(lambda f, *args: f(*args))
    with gf.CheckpointScope("around"):
        given = inputs()
        y = gf.checkpoint(
            block, *given, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        ).sum()
    y.backward()
    assert policy.products == 4
    assert all(torch.equal(tensor.grad, grad) for tensor, grad in zip(given, expected, strict=True))


# ----------------------------------------------------------------------------------------- contexts


def test_a_context_of_a_generator_is_entered_for_every_sweep() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def noting(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    def program(checkpoint: Any) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 4).requires_grad_()
        # Two results, of which backward needs one after it has passed through the other: two
        # sweeps.
        a, b = checkpoint(lambda t: (t.exp().sin().exp(), t.cos().tanh().cos()), x)
        return list(torch.autograd.grad((a.sin() * b.exp()).sum(), x))

    contexts = lambda: (noting("forward"), noting("replay"))  # noqa: E731
    ours = program(functools.partial(gf.checkpoint, context_fn=contexts))
    assert all(
        torch.equal(a, b) for a, b in zip(ours, program(lambda f, *args: f(*args)), strict=True)
    )
    assert entered[:2] == ["forward", "end of forward"]
    assert entered[2:] == ["replay", "end of replay"] * (len(entered) // 2 - 1)
    assert len(entered) > 4


@contextlib.contextmanager
def swallowing() -> Iterator[None]:
    with contextlib.suppress(ValueError, gf.ActivationOverwritten):
        yield


def test_a_context_that_swallows_an_error_of_the_function() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        gf.checkpoint(
            fail, torch.ones(2, requires_grad=True), context_fn=lambda: (swallowing(), swallowing())
        )


def test_a_context_that_swallows_an_error_of_a_replay() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    y = gf.checkpoint(
        lambda t, s: (t.exp() * s).sin(), x, w, context_fn=lambda: (swallowing(), swallowing())
    )
    w.add_(1)
    with pytest.raises(gf.ActivationOverwritten):
        y.sum().backward()
