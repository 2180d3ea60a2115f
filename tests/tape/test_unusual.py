"""Layouts, modes and features that few use: right inside a scope, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf
from gradfit.tape import dropout_mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def same(program: Callable[[Any], torch.Tensor]) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        results.append(program(gf.CheckpointScope("s", enabled=enabled)))
    assert torch.equal(*results)


# ------------------------------------------------------------------------------------------ layouts

EYE = torch.eye(4)
WRITES: dict[str, Any] = {
    "coo mul_": lambda: EYE.to_sparse().coalesce().mul_(2),
    "coo add_": lambda: EYE.to_sparse().coalesce().add_(EYE.to_sparse()),
    "coo zero_": lambda: EYE.to_sparse().zero_(),
    "csr mul_": lambda: EYE.to_sparse_csr().mul_(2),
    "csr abs_": lambda: EYE.to_sparse_csr().abs_(),
    "bsr mul_": lambda: EYE.to_sparse_bsr((2, 2)).mul_(2),
    "mkldnn add_": lambda: EYE.to_mkldnn().add_(EYE.to_mkldnn()).relu_(),
    "csr zeros_like": lambda: torch.zeros_like(EYE.to_sparse_csr()),
    "bsr zeros_like": lambda: torch.zeros_like(EYE.to_sparse_bsr((2, 2))),
    "csr empty_like": lambda: torch.empty_like(EYE.to_sparse_csr()).zero_(),
    "values of a csr": lambda: _write_values(EYE.to_sparse_csr()),
}


def _write_values(tensor: torch.Tensor) -> torch.Tensor:
    before = tensor.values().exp()
    tensor.mul_(3)
    return torch.sparse_csr_tensor(
        tensor.crow_indices(), tensor.col_indices(), tensor.values() * before, (4, 4)
    )


@pytest.mark.parametrize("name", WRITES)
def test_layouts_without_a_storage(name: str) -> None:
    def program(scope: Any) -> torch.Tensor:
        w = torch.linspace(0, 1, 16).view(4, 4).requires_grad_()
        with scope:
            a = WRITES[name]()
            loss = (a.to_dense().exp() * w.exp()).exp().sum()
        (gradient,) = torch.autograd.grad(loss, w)
        return gradient

    same(program)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like])
def test_nested_tensors_like_others(make: Any) -> None:
    def program(scope: Any) -> torch.Tensor:
        w = torch.ones(2, 3, requires_grad=True)
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        with scope:
            zeros = make(nested).fill_(0)
            loss = (torch.nested.to_padded_tensor(zeros, 0.0)[0, :2].exp() * w).exp().sum()
        (gradient,) = torch.autograd.grad(loss, w)
        return gradient

    same(program)


def test_a_sparse_embedding_online() -> None:
    def program(scope: Any) -> torch.Tensor:
        embedding = nn.Embedding(16, 8, sparse=True)
        manager = (
            gf.CheckpointManager(max_memory_mb=10, auto_checkpoint=True)
            if scope.is_enabled
            else scope
        )
        with manager:
            embedding(torch.arange(8)).exp().sum().backward()
        return embedding.weight.grad.to_dense()

    same(program)


# --------------------------------------------------------------------------------------- transforms

BATCHED: dict[str, Any] = {
    "is_grads_batched": lambda y, x: torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)[
        0
    ],
    "vmap": lambda y, x: torch.func.vmap(
        lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0]
    )(torch.eye(4)),
}


@pytest.mark.parametrize("kind", BATCHED)
@pytest.mark.parametrize(
    "draw", [F.dropout, lambda h: h * torch.rand_like(h), lambda h: h * torch.rand(4)]
)
def test_random_operations_are_replayed_under_vmap(kind: str, draw: Any) -> None:
    def program(scope: Any) -> torch.Tensor:
        x = torch.linspace(0, 1, 4).requires_grad_()
        with scope:
            y = draw(draw(x.exp()).sin()).exp()
        result: torch.Tensor = BATCHED[kind](y, x)
        return result

    same(program)


@pytest.mark.parametrize(
    "function", [torch.autograd.functional.jacobian, torch.autograd.functional.hessian]
)
def test_vectorized_derivatives(function: Any) -> None:
    def program(scope: Any) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with scope:
                return F.dropout(x.exp().sin(), 0.5).exp().sum()

        result: torch.Tensor = function(loss, torch.linspace(0, 1, 4), vectorize=True)
        return result

    same(program)


def test_forward_mode_around_a_scope_is_refused_in_words() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with gf.CheckpointScope("inner"):
            return x.exp().sin()

    with pytest.raises(gf.UnsupportedOp, match=r"'inner'.*inside a torch.func transform"):
        torch.func.jacfwd(function)(torch.ones(3))


def test_cond() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(
            x.sum() > 0, lambda a: a.sin().exp(), lambda a: a.cos(), (x,)
        )
        return result

    w = torch.ones(4, requires_grad=True)
    with pytest.raises(gf.UnsupportedOp, match=r"torch\.cond"), gf.CheckpointScope("s"):
        program(w)
    with gf.CheckpointScope("s"):
        loss = (program(torch.ones(4)).exp() * w).exp().sum()
    (gradient,) = torch.autograd.grad(loss, w)
    expected = torch.autograd.grad((torch.ones(4).sin().exp().exp() * w).exp().sum(), w)[0]
    assert torch.equal(gradient, expected)
    program(w).sum().backward()  # outside of a scope it is differentiated


# ----------------------------------------------------------------------------------------- the rest


def test_swapped_tensors() -> None:
    def swap() -> None:
        x = torch.ones(3, requires_grad=True)
        with gf.CheckpointScope("s"):
            a, b = x.detach().exp(), x.detach().cos()
            (a.sin() * x).exp()
            torch.utils.swap_tensors(a, b)

    with pytest.raises(
        gf.UnsupportedOp, match=r"swap_tensors was called inside CheckpointScope\('s'\)"
    ):
        swap()


def test_an_operator_that_is_defined_after_the_first_scope() -> None:
    with gf.CheckpointScope("first"):
        torch.ones(2, requires_grad=True).exp()
    library = torch.library.Library("gradfit_late", "DEF")
    library.define("twice_sine(Tensor x) -> Tensor")
    library.impl("twice_sine", lambda x: x.sin() * 2, "CompositeExplicitAutograd")

    def program(scope: Any) -> torch.Tensor:
        x = torch.linspace(0, 1, 4).requires_grad_()
        with scope:
            drawn = torch.ops.gradfit_late.twice_sine(
                nn.Parameter(x.detach().exp(), requires_grad=False)
            )
            loss = (drawn.exp() * x).exp().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    same(program)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_function_under_a_limit() -> None:
    function = torch.jit.script(_scripted)
    x = torch.ones(1000, requires_grad=True)
    manager = gf.CheckpointManager(max_memory_mb=6000 / 2**20, auto_checkpoint=True)
    with pytest.raises(gf.BudgetInfeasible, match="the limit is") as caught, manager:
        function(function(x)).sum().backward()
    assert caught.value.min_bytes > 6000


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sin().exp()


def test_the_masks_table_is_on_the_cpu_whatever_the_default_device() -> None:
    expected = dropout_mask._all_words()
    with torch.device("meta"):
        words = dropout_mask._all_words()
    assert torch.equal(words, expected)
