"""The tests that the third document lists, by name (docs/seeds.md); and nodes and managers beyond
them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf


def mlp(width: int = 64, depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def train(
    model: nn.Module, blocks: list[nn.Module], x: torch.Tensor, scoped: bool, steps: int = 5
) -> Any:
    """Losses, parameters and peak bytes of a few steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    torch.manual_seed(1)
    with gf.meter(model, x) as meter:
        for _ in range(steps):
            h = x
            for number, block in enumerate(blocks):
                with gf.CheckpointScope(f"block {number}", enabled=scoped):
                    h = block(h)
            loss = h.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], meter.peak_bytes


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


# --------------------------------------------------------------------------------------- unit tests
def test_checkpoint_scope_creation_and_disposal() -> None:
    scope = gf.CheckpointScope("layer")
    assert (scope.name, scope.is_enabled, scope.use_recomputation) == ("layer", True, True)
    with scope as entered:
        assert entered is scope
    assert gf.CheckpointScope("off", enabled=False).is_enabled is False
    assert gf.CheckpointScope("off", False, use_recomputation=False).use_recomputation is False


def test_activation_saving_and_retrieval() -> None:
    node = gf.CheckpointNode(torch.ones(2), "exp")
    first, second = torch.ones(2), torch.zeros(3)
    assert node.saved_activations == []
    node.save_activations(first, second)
    assert node.saved_activations[0] is first
    assert node.saved_activations[1] is second
    assert node.recompute()[1] is second
    node.clear_saved_activations()
    assert node.saved_activations == []
    with pytest.raises(gf.MisuseError, match="tensors"):
        node.save_activations(3)  # type: ignore[arg-type]


def test_recomputation_function_execution() -> None:
    calls = []

    def make(name: str) -> Any:
        return lambda: calls.append(name) or [torch.ones(1) * len(calls)]

    node = gf.CheckpointNode(torch.ones(1), "op")
    with pytest.raises(gf.MisuseError, match="add_recompute_function"):
        node.recompute()
    node.add_recompute_function(make("a"))
    node.add_recompute_function(make("b"))
    assert len(node.recompute_functions) == 2
    assert [t.item() for t in node.recompute()] == [1, 2]
    assert calls == ["a", "b"]
    with pytest.raises(gf.MisuseError, match="callable"):
        node.add_recompute_function(3)  # type: ignore[arg-type]


def test_backward_pass_with_checkpoints() -> None:
    model, x = mlp(), torch.randn(4, 64)
    with gf.CheckpointScope("all") as scope:
        loss = model(x).square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert scope.stats.recomputed_seconds > 0


def test_memory_savings_calculation() -> None:
    x, model = torch.randn(128, 64), mlp(depth=4)
    with gf.CheckpointScope("all") as scope:
        y = model(x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        z = model(x)
    assert torch.equal(y, z)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    plain = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    activations = sum(size for key, size in plain.items() if key not in parameters)
    assert scope.stats.freed_bytes + scope.stats.kept_bytes == activations
    assert scope.stats.kept_bytes == x.nbytes


def test_auto_checkpoint_selection() -> None:
    x, model = torch.randn(32, 64), mlp()
    with gf.CheckpointScope("all") as scope:
        loss = model(x).sum()
    nodes = scope.nodes()
    manager = gf.CheckpointManager(max_memory_mb=4 * x.nbytes / 2**20, memory_threshold=0.8)
    chosen = manager.selective_checkpointing(nodes)
    assert len(chosen) == 3  # of four that would fit into all of it
    assert manager.checkpoint_bytes == 3 * x.nbytes
    positions = [nodes.index(node) for node in chosen]
    gaps = [b - a for a, b in itertools.pairwise(positions)]
    assert max(gaps) - min(gaps) <= 1
    loss.backward()


def test_multiple_checkpoints_in_sequence() -> None:
    model, x = mlp(), torch.randn(4, 64)
    h = x
    for number, layer in enumerate(model):
        if number % 3:
            with gf.CheckpointScope(f"layer {number}"):
                h = layer(h)
        else:
            h = layer(h)
    found = torch.autograd.grad(h.sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nested_checkpoints() -> None:
    model, x = mlp(), torch.randn(4, 64)
    with gf.CheckpointScope("outer"):
        h = model[:4](x)
        with gf.CheckpointScope("inner"):
            h = model[4:8](h)
            with gf.CheckpointScope("innermost"):
                h = model[8:12](h)
        h = model[12:](h)
    found = torch.autograd.grad(h.sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -------------------------------------------------------------------------------- integration tests
def test_train_model_with_checkpointing_reduces_memory() -> None:
    x = torch.randn(256, 64)
    peaks = []
    for scoped in (False, True):
        model = mlp(depth=16)
        blocks = [model[start : start + 8] for start in range(0, 32, 8)]
        peaks.append(train(model, blocks, x, scoped, steps=2)[2])
    assert peaks[1] < 0.6 * peaks[0]


def test_accuracy_with_and_without_checkpointing_matches() -> None:
    results = []
    for scoped in (False, True):
        model = mlp()
        results.append(
            train(
                model,
                [model[:8], model[8:]],
                torch.randn(4, 64, generator=torch.Generator()),
                scoped,
            )
        )
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_checkpointing_with_residual_networks() -> None:
    results = []
    for scoped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[Residual(16) for _ in range(4)])
        results.append(train(model, list(model), torch.randn(8, 16), scoped))
        results[-1] = (results[-1], [b.clone() for b in model.buffers()])
    (plain, plain_buffers), (ours, our_buffers) = results
    assert plain[0] == ours[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], ours[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain_buffers, our_buffers, strict=True))


def test_checkpointing_with_attention_layers() -> None:
    results = []
    for scoped in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
        )
        results.append(train(model, list(model), torch.randn(4, 6, 16), scoped))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_memory_savings_on_a_large_model() -> None:
    """24 blocks, one scope each: activations cut by at least 80 %."""
    x = torch.randn(64, 32, 32)
    live = []
    for scoped in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(
            [nn.TransformerEncoderLayer(32, 2, 128, batch_first=True) for _ in range(24)]
        )
        with gf.meter() as meter:
            h = x
            for block in model:
                with gf.CheckpointScope("block", enabled=scoped):
                    h = block(h)
            live.append(meter.current_bytes)
            loss = h.square().mean()
            meter.reset_peak()
            loss.backward()
    assert live[1] < 0.2 * live[0]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_recompute_overhead() -> None:
    """Every operator is replayed once at most, and a scope's last not at all; benchmarks/tape.py
    has the seconds.
    """
    model, h = mlp(depth=16), torch.randn(8, 64)
    for start in range(0, 32, 8):
        with gf.CheckpointScope("block"):
            h = model[start : start + 8](h)
    with Counting() as backward:
        h.square().mean().backward()
    assert 0 < backward.calls[torch.ops.aten.addmm.default] <= 16
    assert 0 < backward.calls[torch.ops.aten.gelu.default] <= 12


def test_the_three_usage_examples() -> None:
    layers = [nn.Linear(16, 16) for _ in range(5)]
    x = torch.randn(16, 16, requires_grad=True)
    with gf.CheckpointScope("layer1"):
        x1 = layers[0](x)
    x3 = layers[2](layers[1](x1))
    with gf.CheckpointScope("layer4"):
        x4 = layers[3](x3)
    layers[4](x4).sum().backward()
    assert x.grad is not None

    class CheckpointedLayer:
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            with gf.CheckpointScope("layer"):
                return layers[0](t).tanh()

    CheckpointedLayer().forward(x).sum().backward()


# -------------------------------------------------------------------------------------------- nodes
def test_nodes_of_a_scope() -> None:
    x = torch.randn(3, requires_grad=True)
    with gf.CheckpointScope("a") as scope:
        h = x.exp()
        with gf.CheckpointScope("b") as inner:
            y = (h.sin() * h).tanh()
        loss = y.sum()
    names = [str(node.operation) for node in scope.nodes()]
    assert names == ["aten.exp.default", "aten.sin.default", "aten.mul.Tensor", "aten.tanh.default"]
    assert [str(node.operation) for node in inner.nodes()] == names
    exp, sin, mul, tanh = scope.nodes()
    assert [str(child.operation) for child in mul.children] == [
        "aten.sin.default",
        "aten.exp.default",
    ]
    assert exp.children == ()
    assert exp.output is h
    assert sin.output is None
    assert torch.equal(sin.recompute()[0], x.detach().exp().sin())
    assert torch.equal(tanh.recompute()[0], y.detach())
    assert exp.nbytes == 12
    loss.backward()
    assert scope.nodes() == []
    with pytest.raises(gf.MisuseError, match="graph is gone"):
        sin.recompute()


def test_a_node_made_a_checkpoint_cuts_the_replay() -> None:
    x = torch.randn(3, requires_grad=True)
    with gf.CheckpointScope("a") as scope:
        h = x
        for _ in range(6):
            h = h.sin()
        loss = h.exp().sum()
        del h
    node = scope.nodes()[-2]
    assert not node.is_checkpoint
    node.is_checkpoint = True
    assert node.is_checkpoint
    node.is_checkpoint = False
    assert not node.is_checkpoint
    node.is_checkpoint = True
    loss.backward()
    expected = x.detach().clone().requires_grad_()
    h = expected
    for _ in range(6):
        h = h.sin()
    h.exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_nodes_hold_nothing_alive() -> None:
    x = torch.randn(1000, requires_grad=True)
    with gf.meter() as meter:
        with gf.CheckpointScope("a") as scope:
            loss = x.exp().sin().tanh().sum()
        nodes = scope.nodes()
        del loss
        assert meter.current_bytes == 0
    assert nodes[0].output is None


def test_children_must_be_nodes() -> None:
    child = gf.CheckpointNode(torch.ones(1), "a")
    assert gf.CheckpointNode(torch.ones(1), "b", child).children == (child,)
    with pytest.raises(gf.MisuseError, match="children"):
        gf.CheckpointNode(torch.ones(1), "b", "a")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ manager
def test_manager_properties() -> None:
    manager = gf.CheckpointManager()
    assert (manager.max_memory_mb, manager.auto_checkpoint, manager.memory_threshold) == (
        None,
        False,
        0.8,
    )
    manager = gf.CheckpointManager(max_memory_mb=1024, auto_checkpoint=True, memory_threshold=0.5)
    assert manager.limit_bytes == 512 << 20
    manager.max_memory_mb = 2
    assert manager.limit_bytes == 1 << 20
    with pytest.raises(gf.MisuseError, match="max_memory_mb"):
        gf.CheckpointManager(max_memory_mb=0)
    with pytest.raises(gf.MisuseError, match="memory_threshold"):
        manager.memory_threshold = 1.5
    with (
        pytest.raises(gf.MisuseError, match="max_memory_mb"),
        gf.CheckpointManager(auto_checkpoint=True),
    ):
        pass


def test_manager_registers_scopes() -> None:
    manager = gf.CheckpointManager()
    scope = gf.CheckpointScope("by hand")
    manager.register_scope(scope)
    manager.register_scope(scope)
    assert list(manager.scopes) == [scope]
    x = torch.ones(4, requires_grad=True)
    with manager, gf.CheckpointScope("by itself") as other:
        x.exp().sin()
    assert list(manager.scopes) == [scope, other]
    assert manager.stats.freed_bytes == other.stats.freed_bytes > 0
    with gf.CheckpointScope("afterwards"):
        pass
    assert list(manager.scopes) == [scope, other]
    manager.unregister_scope(scope)
    assert list(manager.scopes) == [other]
    with pytest.raises(gf.MisuseError, match="not registered"):
        manager.unregister_scope(scope)


def test_should_checkpoint() -> None:
    node = gf.CheckpointNode(torch.zeros(1 << 18), "a MiB")
    assert not gf.CheckpointManager().should_checkpoint(node)
    assert gf.CheckpointManager(max_memory_mb=2).should_checkpoint(node)
    assert not gf.CheckpointManager(max_memory_mb=1).should_checkpoint(node)
    node.is_checkpoint = True
    assert gf.CheckpointManager().should_checkpoint(node)


def test_selective_checkpointing_and_clearing() -> None:
    nodes = [gf.CheckpointNode(torch.zeros(4), f"op {number}") for number in range(9)]
    manager = gf.CheckpointManager()
    chosen = manager.selective_checkpointing(nodes)
    assert [nodes.index(node) for node in chosen] == [2, 5, 8]
    assert manager.checkpoint_bytes == 48
    nodes[2].save_activations(torch.zeros(4))
    manager.clear_all_checkpoints()
    assert not any(node.is_checkpoint for node in nodes)
    assert nodes[2].saved_activations == []
    assert manager.checkpoint_bytes == 0


def test_clearing_checkpoints_of_a_graph_keeps_gradients_right() -> None:
    x = torch.randn(5, requires_grad=True)
    manager = gf.CheckpointManager(max_memory_mb=1)
    with manager, gf.CheckpointScope("a") as scope:
        loss = x.exp().sin().tanh().exp().sum()
    assert manager.selective_checkpointing(scope.nodes())
    assert all(node.is_checkpoint for node in scope.nodes())
    manager.clear_all_checkpoints()
    assert not any(node.is_checkpoint for node in scope.nodes())
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().tanh().exp().sum(), x)[0])


# ---------------------------------------------------------------------------- disposal, start, stop
def freed_by(scope: gf.CheckpointScope, x: torch.Tensor, *, close: bool) -> int:
    with scope:
        h = x.exp().sin()
        if close:
            scope.close()
        loss = h.cos().tanh().sum()
    loss.backward()
    return scope.stats.freed_bytes


def test_closing_a_scope_ends_it_and_its_block_goes_on() -> None:
    gradients = []
    for close in (False, True):
        x = torch.linspace(0, 1, 256, requires_grad=True)
        assert freed_by(gf.CheckpointScope("a"), x, close=close) == (1024 if close else 3072)
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_closing_is_possible_at_any_time() -> None:
    scope = gf.CheckpointScope("a")
    scope.close()  # never entered
    with scope:
        pass
    scope.dispose()
    with scope, gf.CheckpointScope("b") as inner:
        scope.close()  # and what was entered inside it
        assert not inner.nodes()
    with scope, scope:
        scope.close()
    scope.__enter__()
    scope.close()
    with pytest.raises(gf.MisuseError, match="outside of an enabled CheckpointScope"):
        gf.mark_checkpoint(torch.ones(1))
    with pytest.raises(gf.MisuseError, match="was not entered"):
        gf.CheckpointScope("c").__exit__(None, None, None)


def test_a_scope_keeps_its_name() -> None:
    scope = gf.CheckpointScope("a")
    with pytest.raises(AttributeError):
        scope.name = "b"  # type: ignore[misc]
    assert scope.name == "a"


def test_checkpoint_nodes_are_graph_nodes() -> None:
    x = gf.GraphNode(torch.ones(256), "input")
    y = gf.CheckpointNode(torch.ones(256), "exp", x)
    assert isinstance(y, gf.GraphNode)
    assert (y.children, y.operation, y.nbytes, x.nbytes) == ((x,), "exp", 1024, 1024)
    assert repr(x) == "<GraphNode input, 0 children>"
    manager = gf.CheckpointManager(max_memory_mb=1)
    assert manager.should_checkpoint(x)
    assert manager.should_checkpoint(y)
    assert manager.selective_checkpointing([x, y]) == [y]
    with pytest.raises(gf.MisuseError, match=r"node=.* Pass one of scope.nodes"):
        manager.should_checkpoint("exp")  # type: ignore[arg-type]


def test_a_manager_is_started_and_stopped() -> None:
    model, x = mlp(), torch.randn(64, 64)
    results = []
    for start in (False, True):
        model.zero_grad()
        manager = gf.CheckpointManager()
        manager.auto_checkpoint, manager.max_memory_mb = start, 0.5
        with gf.meter(model, x) as meter:
            assert manager.start() is manager
            loss = model(x).square().mean()
            loss.backward()
            manager.stop()
        results.append((meter.peak_bytes, [p.grad for p in model.parameters()]))
    assert results[1][0] <= 0.5 * 0.8 * 2**20 < results[0][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))
    with pytest.raises(gf.MisuseError, match=r"not started. Call start\(\)"):
        manager.stop()
    with manager, pytest.raises(gf.MisuseError, match="entered already"):
        manager.start()


def test_a_manager_that_was_never_started_says_so_once() -> None:
    model, x = mlp(8, 2), torch.randn(4, 8)
    manager = gf.CheckpointManager(auto_checkpoint=True, max_memory_mb=1024, memory_threshold=0.8)
    with torch.no_grad():
        model(x)
    loss = model(x).sum()
    with pytest.warns(UserWarning, match=r"never started.*manager.start\(\)"):
        loss.backward()
    model(x).sum().backward()  # and not again
    assert repr(manager).startswith("<CheckpointManager: 0 scopes")


def test_a_manager_that_is_started_or_gone_says_nothing() -> None:
    model, x = mlp(8, 2), torch.randn(4, 8)
    manager = gf.CheckpointManager(auto_checkpoint=True, max_memory_mb=1024)
    with manager:
        model(x).sum().backward()
    model(x).sum().backward()
    gf.CheckpointManager(auto_checkpoint=True, max_memory_mb=1024)
    model(x).sum().backward()
    gf.CheckpointManager(max_memory_mb=1024)
    model(x).sum().backward()
    assert not torch.nn.modules.module._global_forward_hooks
