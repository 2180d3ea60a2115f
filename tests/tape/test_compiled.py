"""Functions compiled by torch.compile, with inductor, where something is recorded, measured or
planned: a compiled graph is one operation.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf
from gradfit import _torch_compile, _torch_listen
from gradfit.tape import process_settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",  # the compiler asks for it
    "ignore:`torch.jit.script:DeprecationWarning",  # torch's own, when inductor is imported
)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many graphs were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """But for one that the compiler causes by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The .grad attribute")
        yield


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.wide(self.norm(x)))
        return x + self.dropout(self.narrow(hidden))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Blocks that are compiled one by one, or as they are."""

    def __init__(self, blocks: int = 3, *, compiled: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        for block in self.blocks if compiled else ():
            block.compile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 16), "y": torch.randint(0, 4, (rows,))}


def compiled_as(way: str, block: Block) -> Callable[[torch.Tensor], torch.Tensor]:
    if way == "module":
        return torch.compile(block)  # type: ignore[return-value]
    if way == "in place":
        block.compile()
        return block
    return torch.compile(lambda x: block(x))  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- scopes


@pytest.mark.parametrize(
    ("first", "way"),
    [
        ("plain", "module"),
        ("scope", "in place"),
        ("plain", "function"),
        pytest.param("scope", "module", marks=pytest.mark.slow),
        pytest.param("plain", "in place", marks=pytest.mark.slow),
        pytest.param("scope", "function", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_graph_is_rebuilt_by_calling_it_again(way: str, first: str) -> None:
    """Bit by bit, with its dropout; compiled once, whoever calls it first."""
    torch.manual_seed(0)
    block = Block()
    function = compiled_as(way, block)
    x = torch.randn(8, 16)
    freed: list[int] = []

    def run(scope: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        block.zero_grad()
        with gf.CheckpointScope("a") if scope else contextlib.nullcontext() as inside:
            y = function(x.sin())
        if inside is not None:
            freed.append(inside.stats.freed_bytes)
        y.sum().backward()
        found = [parameter.grad for parameter in block.parameters()]
        return [y.detach(), torch.get_rng_state(), *(g.clone() for g in found if g is not None)]

    before = graphs()
    with no_warnings():
        if first == "scope":
            run(scope=True)
        expected = run(scope=False)
        for _ in range(2):
            assert all(map(torch.equal, run(scope=True), expected))
    assert graphs() - before == 1
    wide = 8 * 64 * 4  # bytes of what GELU reads, which autograd would keep
    assert min(freed) > wide
    assert not _torch_listen.is_heard()
    assert not process_settings._recordings
    assert not _torch_compile._thread.calls


def test_a_graph_that_changes_its_inputs_is_run_once() -> None:
    """Running statistics move once; what it returns is kept."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.GELU())
    recorded = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.GELU())
    recorded.load_state_dict(plain.state_dict())
    x = torch.randn(8, 16)
    results = []
    for model, scope in ((plain, False), (recorded, True)):
        compiled = torch.compile(model)
        for _ in range(2):
            with gf.CheckpointScope("a") if scope else contextlib.nullcontext():
                y = compiled(x.sin())
            y.square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        results.append([y, *found, *model.buffers()])
    assert all(map(torch.equal, *results))
    assert int(recorded[1].num_batches_tracked) == 2  # type: ignore[arg-type]


def test_a_break_before_the_first_graph_runs_as_it_was_written() -> None:
    calls: list[bool] = []

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        calls.append(torch.compiler.is_compiling())
        return (x.sin() * 2).exp()

    x = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad((x.sin() * 2).exp().sum(), x)[0]
    function = torch.compile(broken)
    for compiled_before in (False, True):
        if compiled_before:
            function(x)
        for _ in range(2):
            with gf.CheckpointScope("a") as scope:
                y = function(x)
            # all of it is heard: the exponential's result, which autograd saves, can be rebuilt
            assert scope.stats.freed_bytes == x.nbytes
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert calls
    assert not _torch_listen.is_heard()


def test_an_error_in_a_compiled_function_leaves_everything_as_it_was() -> None:
    block = Block()
    function = torch.compile(block)
    with gf.CheckpointScope("a"):
        with pytest.raises(Exception, match=r"size|shape|dimension"):
            function(torch.randn(8, 5))
        assert _torch_listen.is_heard()
        assert not _torch_compile._thread.calls
    assert not _torch_listen.is_heard()
    assert not _torch_compile._originals


# ------------------------------------------------------------------------------------------- meters


def test_a_meter_counts_what_a_compiled_graph_makes_inside() -> None:
    weight = torch.randn(16, 256)

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).relu() @ weight.T

    x = torch.randn(32, 16)
    function = torch.compile(narrow)
    function(x)
    with gf.meter() as live:
        y = function(x)
    inside = 32 * 256 * 4
    assert inside + y.nbytes <= live.peak_bytes <= 2 * inside + y.nbytes
    assert live.current_bytes == y.nbytes


def test_a_profile_has_one_operation_for_a_graph() -> None:
    model = Stack(blocks=2)
    found = gf.profile(model, entropy, batch_of(8))
    ours = [op for op in found.operations if op.name == "compiled.graph"]
    assert [op.module for op in ours] == ["blocks.0", "blocks.1"]
    assert all(op.replayable for op in ours)


def test_a_profile_knows_that_a_compiled_backward_lets_go_of_what_it_has_read() -> None:
    """What is saved dies while gradients come: the most of both is not there at once."""
    torch.manual_seed(0)
    inner = Stack(blocks=3, compiled=False)
    model: Any = torch.compile(inner)
    batch = batch_of(256)
    found = gf.profile(model, entropy, batch, tile=False)
    with gf.meter() as live:
        live.watch(model, batch)
        entropy(model, batch).backward()
    inner.zero_grad()
    predicted = gf.plan(found, memory="1 GiB", batch_size=256, micro_batch=256)
    assert predicted.keeps_everything
    assert live.peak_bytes <= predicted.peak_bytes <= 1.001 * live.peak_bytes


def test_on_shapes_compiled_functions_run_as_they_were_written() -> None:
    """Dynamo is not asked: it would trace whoever looks on."""
    model: Any = torch.compile(Stack(blocks=2, compiled=False))
    batch = batch_of(8)
    entropy(model, batch)
    before = graphs()
    with no_warnings():
        found = gf.profile(model, entropy, batch, fake=True)
    assert graphs() == before
    assert "aten.gelu.default" in [op.name for op in found.operations]


def test_without_a_plan_compiled_graphs_are_evicted() -> None:
    torch.manual_seed(0)
    model, x = Stack(blocks=4), torch.randn(1024, 16)
    with gf.meter() as plain:
        plain.watch(model, x)
        torch.manual_seed(1)
        model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(1)
    manager = gf.CheckpointManager(
        max_memory_mb=0.85 * plain.peak_bytes / 2**20, auto_checkpoint=True
    )
    with manager, gf.meter() as live:
        live.watch(model, x)
        model(x).square().sum().backward()
    assert live.peak_bytes < plain.peak_bytes
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))


# ---------------------------------------------------------------------------------------------- fit


def test_fit_rebuilds_compiled_blocks() -> None:
    """Within the budget, with the gradients of the compiled model itself, and compiled no more."""
    torch.manual_seed(0)
    model, batch = Stack(blocks=4), batch_of(1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients: list[list[torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    )
    torch.manual_seed(1)
    with gf.meter() as plain:
        plain.watch(model, batch)
        entropy(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    budget = int(0.9 * plain.peak_bytes)
    with no_warnings():
        step = gf.fit(model, optimizer, entropy, batch, memory=budget, micro_batch="whole")
    gradients[1:] = []  # of trials
    before = graphs()
    for _ in range(2):
        torch.manual_seed(1)
        with gf.meter() as live:
            live.watch(model, optimizer, batch)
            result = step(batch)
        assert result.stepped
        assert live.peak_bytes <= budget
    assert graphs() == before
    assert "rebuild" in str(step.plan)
    assert all(map(torch.equal, gradients[-1], gradients[0]))
    assert gf.audit(model, entropy, batch, plan=step.plan).identical


@pytest.mark.slow
def test_fit_cuts_a_batch_for_a_model_that_is_compiled_whole() -> None:
    """As the same micro-batches by hand, up to the rounding of their sum."""
    torch.manual_seed(0)
    inner = Stack(blocks=2, compiled=False)
    for block in inner.blocks:
        block.dropout.p = 0.0  # type: ignore[union-attr, assignment]
    model: Any = torch.compile(inner)
    batch = batch_of(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients: list[list[torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in inner.parameters()])  # type: ignore[union-attr]
    )
    with gf.meter() as plain:
        plain.watch(model, batch)
        entropy(model, batch).backward()
    optimizer.zero_grad()
    budget = plain.peak_bytes // 2
    step = gf.fit(model, optimizer, entropy, batch, memory=budget)
    step(batch)
    before = graphs()
    for _ in range(3):
        with gf.meter() as live:
            live.watch(model, optimizer, batch)
            parts = step(batch).micro_batches
        assert live.peak_bytes <= budget
    assert graphs() == before
    assert parts > 1
    optimizer.zero_grad()
    rows = step.plan.micro_batch
    for x, y in zip(batch["x"].split(rows), batch["y"].split(rows), strict=True):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    for parameter, found in zip(inner.parameters(), gradients[-1], strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / 512, found, rtol=1e-5, atol=1e-7)


class WithLoss(Stack):
    """The loss is made inside, as models of transformers do it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("counts", [False, True])
def test_a_loss_inside_of_a_compiled_model_needs_its_count(counts: bool) -> None:
    """Without one it runs as it was written, is planned so, and that is said; with one, compiled.
    Some labels do not count, so that parts weigh more or less.
    """
    torch.manual_seed(0)
    inner = WithLoss(blocks=2, compiled=False)
    for block in inner.blocks:
        block.dropout.p = 0.0  # type: ignore[union-attr, assignment]
    model: Any = torch.compile(inner)
    made_by: list[str] = []

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = own_loss(model, batch)
        made_by.append("" if loss.grad_fn is None else loss.grad_fn.name())
        count = (batch["y"] != -100).sum()
        return gf.Loss(sum=loss * count, count=count) if counts else loss

    batch = batch_of(96)
    batch["y"][5:60:2] = -100
    with gf.meter() as plain:
        plain.watch(model, batch)
        own_loss(model, batch).backward()
    expected = [p.grad.clone() for p in inner.parameters() if p.grad is not None]
    inner.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients: list[list[torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in inner.parameters()])  # type: ignore[union-attr]
    )
    budget = plain.peak_bytes * 3 // 4
    with no_warnings() if counts else pytest.warns(UserWarning, match=r"gf\.losses"):
        step = gf.fit(model, optimizer, loss_fn, batch, memory=budget, micro_batch=32)
    made_by.clear()
    before = graphs()
    with no_warnings():
        for _ in range(3):
            result = step(batch)
            assert result.micro_batches == 3
            assert result.peak_bytes <= budget
    assert graphs() == before
    assert set(made_by) == {"CompiledFunctionBackward" if counts else "NllLossBackward0"}
    for one, other in zip(gradients[-1], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_flex_attention_trains_where_torch_lets_it() -> None:
    """Its backward on a CPU is refused in torch's words, which differ by version; a forward alone
    runs.
    """
    from torch.nn.attention.flex_attention import flex_attention

    attention: Any = torch.compile(flex_attention)
    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    with torch.no_grad(), gf.meter():
        torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-4, atol=1e-5)
    q.requires_grad_()
    words = []
    for there in (contextlib.nullcontext(), gf.CheckpointScope("a")):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError) as refused, there:
            attention(q, k, v).sum().backward()
        words.append((type(refused.value), str(refused.value).partition("\n")[0]))
    assert words[0] == words[1]
    assert not _torch_listen.is_heard()
