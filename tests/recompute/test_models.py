"""Real models in scopes: loss, gradients, buffers and RNG bit-identical to plain PyTorch, dropout
on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from recompute_models import MODELS, build
from torch import nn

import gradfit as gf

Result = dict[str, torch.Tensor]


def scoped(blocks: list[nn.Module], *, parts: bool) -> None:
    """Put a scope into every block, and with `parts` into every child of a block too."""
    for number, block in enumerate(blocks):
        if parts:
            for name, child in block.named_children():
                if not isinstance(child, nn.ModuleList):
                    child.forward = gf.CheckpointScope(f"{number}.{name}")(child.forward)
        block.forward = gf.CheckpointScope(str(number))(block.forward)


def run(name: str, kind: str, where: str) -> Result:
    dtype = torch.float64 if kind == "float64" else torch.float32
    model, loss_of, blocks = build(name, dtype)
    if where in ("blocks", "nested"):
        scoped(blocks, parts=where == "nested")
    whole: Any = (
        gf.CheckpointScope("all") if where in ("whole", "nested") else contextlib.nullcontext()
    )
    cast: Any = (
        torch.autocast(torch.get_default_device().type, torch.bfloat16)
        if kind == "autocast"
        else contextlib.nullcontext()
    )
    torch.manual_seed(1)
    with whole, cast:
        loss = loss_of(model)
    loss.backward()
    found = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b for n, b in model.named_buffers()}
    return found | {"loss": loss.detach(), "rng": torch.get_rng_state()}


def assert_same(a: Result, b: Result) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


def check(name: str, kind: str, where: str) -> None:
    if kind == "float64" and name == "mixtral":
        pytest.skip("its grouped matrix multiplication has no float64 in torch")
    try:
        plain = run(name, kind, "plain")
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"plain PyTorch cannot run it on this CPU either: {error}")
    assert_same(plain, run(name, kind, where))


@pytest.mark.exact
@pytest.mark.parametrize("name", MODELS)
def test_nested_scopes(name: str) -> None:
    check(name, "float32", "nested")


@pytest.mark.exact
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "lstm", "inplace"])
@pytest.mark.parametrize(("kind", "where"), [("autocast", "blocks"), ("float64", "whole")])
def test_dtypes(name: str, kind: str, where: str) -> None:
    check(name, kind, where)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["float32", "autocast", "float64"])
@pytest.mark.parametrize("where", ["whole", "blocks", "nested"])
def test_every_model_in_every_way(name: str, kind: str, where: str) -> None:
    check(name, kind, where)


def test_models_have_something_to_rebuild() -> None:
    """The comparison would be empty if the scopes dropped nothing."""
    for name in ("gpt2", "resnet", "inplace"):
        model, loss_of, _ = build(name)
        with gf.CheckpointScope("all") as scope:
            loss = loss_of(model)
        loss.backward()
        assert scope.stats.freed_bytes > 2 * scope.stats.kept_bytes
        assert scope.stats.recomputed_seconds > 0


def test_running_statistics_are_updated_once() -> None:
    layer = nn.BatchNorm1d(4)
    x = torch.randn(8, 4, requires_grad=True)
    with gf.CheckpointScope("norm"):
        y = layer(x).sin()
    before = (
        layer.running_mean.clone(),
        layer.running_var.clone(),
        layer.num_batches_tracked.clone(),
    )
    y.sum().backward()
    assert torch.equal(before[0], layer.running_mean)
    assert torch.equal(before[1], layer.running_var)
    assert torch.equal(before[2], layer.num_batches_tracked)
    assert layer.num_batches_tracked.item() == 1
