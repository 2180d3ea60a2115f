"""Values that a model names are kept by name in scopes; gradients stay bit-identical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfit as gf

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = gf.name(self.qkv(x), "qkv").chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.down(gf.name(nn.functional.gelu(self.up(x)), "mlp"))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 6, WIDTH)


def gradients(network: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(network.parameters())))


def plain(network: nn.Module) -> list[Tensor]:
    return gradients(network, network(batch()).square().mean())


def in_scope(network: nn.Module, **options: Any) -> tuple[list[Tensor], gf.CheckpointScope]:
    with gf.CheckpointScope("model", **options) as scope:
        loss = network(batch()).square().mean()
    return gradients(network, loss), scope


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def test_a_name_returns_the_tensor_itself() -> None:
    tensor = torch.ones(3)
    assert gf.name(tensor, "x") is tensor
    with gf.CheckpointScope("scope", keep=["x"]):
        assert gf.name(tensor, "x") is tensor


def test_a_scope_keeps_what_it_names_and_rebuilds_the_rest() -> None:
    network = model()
    qkv_bytes = 2 * 4 * 6 * 3 * WIDTH * 4
    kept: dict[tuple[str, ...], int] = {}
    for names in [(), ("qkv",), ("mlp",), ("qkv", "mlp"), ("other",)]:
        ours, scope = in_scope(network, keep=names)
        assert same(ours, plain(network))
        kept[names] = scope.stats.kept_bytes
    without = in_scope(network)[1].stats.kept_bytes
    assert kept[()] == kept["other",] == without
    assert kept["qkv",] - without == qkv_bytes
    assert kept["qkv", "mlp"] - without == qkv_bytes + 2 * 4 * 6 * 4 * WIDTH * 4


def rebuilt(scope: gf.CheckpointScope) -> str:
    """The names of all operations that a backward pass may run again."""
    return " ".join(str(node.operation) for node in scope.nodes())


def test_what_is_kept_is_not_run_again() -> None:
    network = model()

    def linear_layers_run_again(keep: list[str]) -> int:
        with gf.CheckpointScope("model", keep=keep) as scope:
            loss = network(batch()).square().mean()
        layers = rebuilt(scope).count("addmm")
        gradients(network, loss)
        return layers

    assert linear_layers_run_again([]) - linear_layers_run_again(["qkv"]) == 2


def test_gf_checkpoint_takes_names() -> None:
    network = model()

    def run(**options: Any) -> list[Tensor]:
        x = batch()
        for block in network:
            x = gf.checkpoint(block, x, **options)
        return gradients(network, x.square().mean())

    assert same(run(keep=["qkv"]), plain(network))
    assert same(run(keep=lambda op, out: True), plain(network))


def test_an_argument_of_the_function_called_keep_is_the_functions() -> None:
    """As with torch's checkpoint, whose place gf.checkpoint takes."""
    seen = []

    def function(x: Tensor, keep: Any = None) -> Tensor:
        seen.append(keep)
        return x.exp()

    def open_ended(x: Tensor, **options: Any) -> Tensor:
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    gf.checkpoint(function, x, keep=["qkv"]).sum().backward()
    assert seen == [["qkv"]]
    with pytest.raises(gf.MisuseError, match="CheckpointScope"):
        gf.checkpoint(open_ended, x, keep=["qkv"])


@pytest.mark.parametrize(
    ("outer", "inner", "kept"),
    [
        ({"keep": ["qkv"]}, {}, True),  # the inner one has no opinion
        ({"keep": ["qkv"]}, {"keep": ["mlp"]}, False),
        ({}, {"keep": ["qkv"]}, True),
        ({"keep": lambda op, out: False}, {"keep": ["qkv"]}, True),
        ({"keep": ["qkv"]}, {"keep": lambda op, out: False}, False),
        ({"keep": ["qkv"]}, {"enabled": False}, True),
    ],
)
def test_of_nested_scopes_the_innermost_with_an_opinion_decides(
    outer: dict[str, Any], inner: dict[str, Any], kept: bool
) -> None:
    x = torch.ones(8, requires_grad=True)
    with gf.CheckpointScope("outer", **outer) as scope, gf.CheckpointScope("inner", **inner):
        loss = gf.name((x * 2).exp(), "qkv").sin().sum()
    assert ("exp" not in rebuilt(scope)) is kept
    loss.backward()
    assert x.grad is not None
    h = (torch.ones(8) * 2).exp()
    assert torch.equal(x.grad, h.cos() * h * 2)


def test_double_backward() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def second(keep: list[str] | None) -> list[Tensor]:
        x = torch.linspace(0, 1, 12).reshape(3, 4).requires_grad_()
        with gf.CheckpointScope("all", keep=keep, enabled=keep is not None):
            h = gf.name(torch.tanh(network[0](x)), "h")
            y = network[2](h).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), list(network.parameters())[:2]))

    assert same(second(["h"]), second(None))


def test_autocast() -> None:
    network = model()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        expected = plain(network)
        ours, _ = in_scope(network, keep=["qkv"])
    assert same(ours, expected)


def test_a_view_names_the_value_that_it_lies_in() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    with gf.CheckpointScope("scope", keep=["part"]) as scope:
        h = (x * 2).exp()
        gf.name(h[0, :2], "part")
        loss = h.sin().sum()
    assert scope.stats.kept_bytes == h.nbytes
    loss.backward()


def test_parameters_inputs_and_sparse_tensors_may_be_named() -> None:
    """They are there anyway."""
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    sparse = torch.eye(2).to_sparse()
    with gf.CheckpointScope("scope", keep=["w", "x", "s"]):
        gf.name(layer.weight, "w")
        gf.name(x, "x")
        gf.name(sparse, "s")
        loss = torch.sparse.mm(sparse, layer(x)).square().sum()
    expected = gradients(layer, torch.sparse.mm(sparse, layer(x)).square().sum())
    assert same(gradients(layer, loss), expected)


def test_what_is_written_after_it_was_named_is_another_value() -> None:
    x = torch.linspace(0, 1, 8, requires_grad=True)

    def run(keep: list[str] | None) -> Tensor:
        with gf.CheckpointScope("scope", keep=keep, enabled=keep is not None):
            h = gf.name(x * 2, "h")
            h.mul_(3)
            loss = h.sin().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    assert torch.equal(run(["h"]), run(None))
    assert torch.equal(run([]), run(None))


def test_several_backwards() -> None:
    network = model()
    with gf.CheckpointScope("model", keep=["qkv"]):
        loss = network(batch()).square().mean()
    parameters = list(network.parameters())
    first = list(torch.autograd.grad(loss, parameters, retain_graph=True))
    assert same(first, list(torch.autograd.grad(loss, parameters)))


def test_a_compiled_function_with_names_has_no_graph_break() -> None:
    def function(x: Tensor) -> Tensor:
        return gf.name(x.exp(), "h").sin()

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), function(x))


@pytest.mark.parametrize("keep", ["qkv", [3], [""], {"qkv": 1}, 3])
def test_what_is_no_list_of_names_is_refused(keep: Any) -> None:
    with pytest.raises(gf.MisuseError, match="keep"):
        gf.CheckpointScope("scope", keep=keep)


def test_a_bad_name_or_tensor_is_refused() -> None:
    with pytest.raises(gf.MisuseError, match="name"):
        gf.name(torch.ones(1), "")
    with pytest.raises(gf.MisuseError, match="tensor"):
        gf.name(3, "x")  # type: ignore[arg-type]
