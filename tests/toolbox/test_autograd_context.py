"""`AutogradContext`: bytes against the meter, entries against the program, and no trace left
behind.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradfit as gf
from gradfit._torch import FakeTensorMode
from gradfit.toolbox import autograd_context
from gradfit.toolbox.saved_by_autograd import live_results


@pytest.fixture(autouse=True)
def _no_graph_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the class it speaks of every graph of the process. Some live for ever, as where a hook of
    another test has packed a result as itself, which is a circle through C++.
    """
    gc.collect()
    left = {id(tensor): tensor for tensor in live_results()}
    monkeypatch.setattr(
        autograd_context,
        "live_results",
        lambda: [tensor for tensor in live_results() if id(tensor) not in left],
    )


def _gpt2() -> tuple[nn.Module, Tensor, Callable[[], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=256,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model, ids = GPT2LMHeadModel(config), torch.randint(0, 256, (4, 64))
    return (
        model,
        ids,
        lambda: nn.functional.cross_entropy(
            model(input_ids=ids).logits.flatten(0, 1), ids.flatten()
        ),
    )


def _resnet() -> tuple[nn.Module, Tensor, Callable[[], Tensor]]:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    )
    model, images = ResNetModel(config), torch.randn(4, 3, 64, 64)
    return model, images, lambda: model(pixel_values=images).pooler_output.square().mean()


def _mixtral() -> tuple[nn.Module, Tensor, Callable[[], Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=256, max_position_embeddings=64,
        use_cache=False,
    )  # fmt: skip
    model, ids = MixtralForCausalLM(config), torch.randint(0, 256, (4, 32))
    return (
        model,
        ids,
        lambda: nn.functional.cross_entropy(
            model(input_ids=ids).logits.flatten(0, 1), ids.flatten()
        ),
    )


@pytest.mark.parametrize("make", [_gpt2, _resnet, _mixtral])
@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "recomputed"])
def test_agrees_with_the_meter_on_real_models(make, recomputed: bool) -> None:
    torch.manual_seed(0)
    model, batch, run = make()
    model.train()
    with gf.meter(model, batch) as meter:
        before = meter.current_bytes
        with gf.AutogradContext() as context, gf.CheckpointScope("all", enabled=recomputed):
            loss = run()
        gc.collect()
        live = meter.current_bytes - before
        stats = context.memory_stats()
        assert stats.saved_bytes == pytest.approx(live - loss.nbytes, rel=0.02, abs=64)
        assert stats.saved_memory_mb == stats.saved_bytes / 2**20
        for by in (stats.by_module, stats.by_operation, stats.by_source_line):
            assert sum(by.values()) == stats.saved_bytes
            assert list(by.values()) == sorted(by.values(), reverse=True)
        if not recomputed:
            assert all(held.rebuild_seconds is not None for held in stats.tensors)
            context.clear()
            assert gf.AutogradContext.memory_stats().saved_bytes == 0
            assert meter.current_bytes - before < 0.02 * live  # clear() really gave the memory back
            with pytest.raises(gf.GraphError, match=r"AutogradContext\.clear"):
                loss.backward()


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_exact_bytes_modules_operations_and_lines() -> None:
    model, x = _network(), torch.randn(16, 4)
    with gf.AutogradContext() as context:
        hidden = model(x)
        loss = hidden.sigmoid().sum()
    stats = context.memory_stats()
    # ReLU's result (shared by the second layer, counted once) and sigmoid's; the batch was there
    # before.
    assert stats.by_module == {"1": 16 * 8 * 4, "": 16 * 4}
    assert stats.by_operation == {"Relu": 512, "Sigmoid": 64}
    assert all(line.rpartition(":")[0] == __file__ for line in stats.by_source_line)
    assert len(stats.by_source_line) == 2
    assert stats.saved_bytes == 576
    assert gf.MemoryStats.from_json(stats.to_json()) == stats
    assert "autograd holds 576 B in 2 storages" in str(stats)
    del loss, hidden
    assert context.memory_stats().saved_bytes == 0  # the context keeps nothing alive


def test_on_the_class_it_speaks_of_every_live_graph() -> None:
    assert gf.AutogradContext.memory_stats().saved_memory_mb == 0
    w = torch.randn(256, 1024, requires_grad=True)
    y = (w + 1).exp()
    assert gf.AutogradContext.memory_stats().saved_memory_mb == 1.0
    assert gf.AutogradContext.memory_stats().by_operation == {"Exp": 2**20}
    loss = y.sum()
    loss.backward()
    assert gf.AutogradContext.memory_stats().saved_memory_mb == 0


def test_parameters_and_buffers_are_never_counted() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].requires_grad_(False)  # frozen: its weight is saved all the same
    with gf.AutogradContext() as context:
        loss = model(torch.zeros(2, 64, requires_grad=True)).square().sum()
    held = context.memory_stats()
    assert all(one.nbytes < 64 * 64 * 4 for one in held.tensors)
    assert all(one.nbytes < 64 * 64 * 4 for one in gf.AutogradContext.memory_stats().tensors)
    entries = context.graph(loss)
    assert any(saved.is_parameter for entry in entries for saved in entry.saved_tensors)


def test_cost_of_rebuilding_reaches_back_to_what_is_held() -> None:
    x = torch.randn(200, 200, requires_grad=True)
    with gf.AutogradContext() as context:
        y = torch.linalg.matrix_power(x.detach(), 16)  # expensive, and not saved itself
        loss = (x * (y + 1)).sum()  # y + 1 is cheap to add, but needs y
    (held,) = context.memory_stats().tensors
    with gf.AutogradContext() as cheap:
        kept = (x * (y + 1)).sum()
    (near,) = cheap.memory_stats().tensors
    assert held.rebuild_seconds > 2 * near.rebuild_seconds > 0
    assert loss.requires_grad
    assert kept.requires_grad


def test_recomputed_activations_are_not_held() -> None:
    model, x = _network(), torch.randn(512, 4)
    with gf.AutogradContext() as plain:
        loss = model(x).sum()
    full = plain.memory_stats().saved_bytes
    del loss
    with gf.AutogradContext() as context, gf.CheckpointScope("model"):
        loss = model(x).sum()
    assert context.memory_stats().saved_bytes < 0.2 * full
    loss.backward()


def test_a_context_inside_a_scope_does_not_switch_recomputation_off() -> None:
    model, x = _network(), torch.randn(512, 4)
    with gf.CheckpointScope("model") as scope, gf.AutogradContext() as context:
        loss = model(x).sum()
    loss.backward()
    assert scope.stats.freed_bytes > 0
    assert context.memory_stats().saved_bytes == 0


def test_gradients_are_the_same_under_a_context() -> None:
    model, x = _network(), torch.randn(16, 4)
    plain = gf.backward(model(x).sum(), model)
    with gf.AutogradContext():
        watched = gf.backward(model(x).sum(), model)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_no_grad_as_a_block_and_a_decorator() -> None:
    x = torch.randn(3, requires_grad=True)
    with gf.AutogradContext.no_grad():
        assert not (x * 2).requires_grad
    with gf.AutogradContext().no_grad():
        assert not (x * 2).requires_grad
    assert gf.AutogradContext.no_grad()(lambda: x * 2)().requires_grad is False
    assert (x * 2).requires_grad


def test_clear_on_the_class_frees_a_kept_loss() -> None:
    x = torch.randn(1000, requires_grad=True)
    y = x.exp()
    storage = weakref.ref(y.untyped_storage())
    losses = [y.sum()]
    del y
    assert gf.AutogradContext.memory_stats().saved_bytes == 4000
    gf.AutogradContext.clear()
    assert storage() is None
    assert losses[0].item() == losses[0].item()
    with pytest.raises(gf.GraphError, match=r"Exp cannot run backward.*clear\(\)"):
        gf.backward(losses[0])
    gf.AutogradContext.clear()  # twice is as good as once
    loss = x.exp().sum()
    assert torch.equal(gf.backward(loss)[x], x.detach().exp())  # new graphs are not affected


def test_on_the_class_shapes_without_memory_are_not_counted() -> None:
    """`torch.compile` and `torch.cond` keep the graphs of such tensors for good."""
    weight = torch.ones(1000, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kept = weight.exp().exp()
    assert kept.grad_fn is not None
    assert gf.AutogradContext.memory_stats().saved_bytes == 0


def test_graph_of_the_seed_example() -> None:
    x, w = torch.randn(10, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    b = torch.zeros(3, requires_grad=True)
    loss = (x.matmul(w) + b).sum()
    graph = gf.AutogradContext.graph(loss)
    assert [entry.op for entry in graph] == ["Mm", "Add", "Sum"]
    assert [entry.operation for entry in graph] == ["Mm", "Add", "Sum"]
    assert len(graph.leaves) == 3
    matmul, add, total = graph
    by_shape = {leaf.shape: leaf.value for leaf in graph.leaves}
    assert set(matmul.inputs) == {by_shape[10, 5], by_shape[5, 3]}
    assert set(add.inputs) == {matmul.output, by_shape[(3,)]}
    assert total.inputs == (add.output,)
    assert {(s.name, s.shape, s.nbytes) for s in matmul.saved_tensors} == {
        ("self", (10, 5), 200),
        ("mat2", (5, 3), 60),
    }
    assert matmul.saved_bytes == 0  # both are leaves
    assert (matmul.module, matmul.source) == ("", "")


def test_graph_is_topological_and_shows_modules_names_and_lines() -> None:
    model, x = _network(), torch.randn(16, 4)
    with gf.AutogradContext() as context:
        parts = model[:2](x).split(4, dim=1)
        loss = (parts[0] * parts[1]).sum()
    graph = context.graph(loss)
    known = {leaf.value for leaf in graph.leaves}
    for entry in graph:
        assert set(entry.inputs) <= known
        known |= set(entry.outputs)
    split = next(entry for entry in graph if entry.op.startswith("Split"))
    assert len(split.outputs) == 2
    assert split.shapes == ((16, 4), (16, 4))
    assert split.source.startswith(__file__ + ":")
    assert [entry.module for entry in graph if entry.op in ("Addmm", "Relu")] == ["0", "1"]
    assert {leaf.name for leaf in graph.leaves} == {"0.weight", "0.bias"}
    assert graph.saved_bytes == context.memory_stats().saved_bytes + x.numel() * 4


def test_graph_as_table_json_and_dot() -> None:
    model = _network()
    with gf.AutogradContext() as context:
        loss = model(torch.randn(16, 4)).sum()
    graph = context.graph(loss)
    table = str(graph)
    assert table == graph.to_table()
    assert len(table.splitlines()) == len(graph) + 1
    assert "0.weight" in table
    assert gf.AutogradGraph.from_json(graph.to_json()) == graph
    assert json.loads(graph.to_json())["entries"][-1]["op"] == "Sum"
    dot = graph.to_dot()
    assert dot.startswith("digraph autograd {")
    assert dot.endswith("}")
    assert dot.count("->") == sum(len(entry.inputs) for entry in graph)
    assert dot.count("{") == dot.count("}")


def test_in_place_operations_keep_their_line_and_module() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with gf.AutogradContext() as context:
        y = x * 2
        y /= y.sum(-1, keepdim=True)
        y[0] = 1.0
        loss = y.sum()
    graph = context.graph(loss)
    lines = [
        int(entry.source.rpartition(":")[2])
        for entry in graph
        if entry.op in ("Mul", "Div", "CopySlices")
    ]
    first = lines[0]
    assert lines == [first, first + 1, first + 2]


def test_custom_functions_show_their_name_and_what_they_keep() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 3)
            ctx.secret = x + 1
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * 2

    x = torch.randn(100, requires_grad=True)
    with gf.AutogradContext() as context:
        loss = Keeps.apply(x).sum()
    entry = context.graph(loss)[0]
    assert entry.op == "Keeps"
    assert {saved.name for saved in entry.saved_tensors} == {"tensors", "secret"}
    assert context.memory_stats().saved_bytes == 800
    assert entry.source.startswith(__file__)


def test_an_exception_in_a_module_leaves_no_hook_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    before = [len(kind) for kind in hooks]
    context = gf.AutogradContext()
    with pytest.raises(ZeroDivisionError), context:
        nn.Sequential(nn.Identity(), Fails())(torch.ones(1))
    assert [len(kind) for kind in hooks] == before
    model = _network()
    with context:
        loss = model(torch.ones(2, 4)).sum()
    assert context.graph(loss)[-1].module == ""
    assert context.memory_stats().by_module.keys() == {"0", "1"}


def test_wrong_use() -> None:
    context = gf.AutogradContext()
    with context:
        with pytest.raises(gf.MisuseError, match="entered already"):
            context.__enter__()
        with pytest.raises(gf.MisuseError, match="inside the block"):
            context.clear()
    with pytest.raises(gf.GraphError, match="loss has no graph"):
        gf.AutogradContext.graph(torch.ones(1))
    caught = []

    def elsewhere() -> None:
        try:
            context.__enter__()
        except gf.MisuseError as error:
            caught.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "in each thread anew" in caught[0]


def test_a_leaf_alone_is_an_empty_graph() -> None:
    assert len(gf.AutogradContext.graph(torch.ones(1, requires_grad=True))) == 0


def test_a_deep_graph_does_not_overflow_the_stack() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(5000):
        y = y * 1.0
    assert len(gf.AutogradContext.graph(y.sum())) == 5001


def test_clear_leaves_a_leaf_that_was_written_to_and_goes_on() -> None:
    """torch does not let go of it: it raised its own error, and the rest was not freed."""
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    kept = torch.exp(x * 2).sum()
    written = (w * w).sum()
    w.requires_grad_(False)
    w.mul_(x)
    gf.AutogradContext.clear()
    with pytest.raises(gf.GraphError, match="cannot run backward"):
        kept.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.backward()


def test_clear_inside_its_block_is_refused_and_clears_nothing() -> None:
    w = torch.ones(3, requires_grad=True)
    with gf.AutogradContext() as context:
        loss = (w.exp() * w).sum()
        held = context.memory_stats().saved_bytes
        with pytest.raises(gf.MisuseError, match="after the block"):
            context.clear()
        assert context.memory_stats().saved_bytes == held
    loss.backward()
    assert torch.equal(w.grad, w.detach().exp() * 2)


def test_topological_sort() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    h = model(x)
    graph = gf.AutogradContext.graph((h + model(h)).sum())
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        entries = [graph[i] for i in torch.randperm(len(graph), generator=generator).tolist()]
        order = gf.topological_sort(entries)
        assert sorted(order) == list(range(len(entries)))
        place = {
            value: order.index(at) for at, entry in enumerate(entries) for value in entry.outputs
        }
        for at, entry in enumerate(entries):
            assert all(place[value] > order.index(at) for value in entry.inputs if value in place)
    assert gf.topological_sort([]) == []
    assert len(gf.topological_sort(graph)) == len(graph)
    circle = [
        gf.GradientEntry("A", (1,), (0,), ((),), ()),
        gf.GradientEntry("B", (0,), (1,), ((),), ()),
    ]
    with pytest.raises(gf.GraphError, match="circle: "):
        gf.topological_sort(circle)
    with pytest.raises(gf.MisuseError, match="both have the output 0"):
        gf.topological_sort([circle[0], circle[0]])
    with pytest.raises(gf.MisuseError, match=r"entries\[0\]"):
        gf.topological_sort(["A"])
