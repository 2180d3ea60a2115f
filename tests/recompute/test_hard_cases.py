"""What users do inside and around scopes: several passes, escapes, modes, subclasses, threads, and
misuse.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf


def both(program: Callable[[Any], list[torch.Tensor]]) -> None:
    """Run a program with a scope and without: same bits, same RNG state afterwards."""
    results = []
    for scope in (
        lambda name="s", **k: gf.CheckpointScope(name, enabled=False),
        gf.CheckpointScope,
    ):
        torch.manual_seed(0)
        found = program(scope)
        results.append([*found, torch.get_rng_state()])
    plain, ours = results
    assert len(plain) == len(ours)
    for number, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(a, b), f"result {number}"


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def gradients(loss: torch.Tensor, *inputs: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, inputs, **options))


# ----------------------------------------------------------------------------------- several passes
def test_retain_graph() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(5, 5)
        with scope("a"):
            loss = F.dropout(x.sin().exp(), 0.5).tanh().sum()
        return [g for keep in (True, True, False) for g in gradients(loss, x, retain_graph=keep)]

    both(program)


def test_a_second_backward_without_retain_graph_is_refused() -> None:
    x = leaf(3)
    with gf.CheckpointScope("a"):
        loss = x.exp().sin().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x, w = leaf(4, 3), leaf(3, 3)
        with scope("a"):
            y = (x @ w).tanh().exp().sum()
        first = gradients(y, x, w, create_graph=True)
        return first + gradients(sum(g.square().sum() for g in first), x, w)

    both(program)


def test_third_derivative() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(4)
        with scope("a"):
            y = x.sin().exp().sum()
        for _ in range(3):
            (y,) = gradients(y.sum(), x, create_graph=True)
        return [y]

    both(program)


def test_a_penalty_computed_inside_the_scope() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x, w = leaf(4, 3), leaf(3, 3)
        with scope("a"):
            y = (x @ w).tanh()
            (slope,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
            loss = y.sum() + slope.square().sum()
        return gradients(loss, x, w)

    both(program)


def test_two_losses() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(6)
        with scope("trunk"):
            trunk = F.dropout(x.sin().exp(), 0.3)
            with scope("one"):
                one = trunk.tanh().square().sum()
            with scope("two"):
                two = trunk.cos().exp().sum()
        return gradients(one, x, retain_graph=True) + gradients(two, x)

    both(program)


def test_backward_called_inside_the_scope() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        w = leaf(4, 4)
        x = torch.randn(3, 4)
        with scope("a"):
            h = (x @ w).tanh()
            h.exp().sum().backward()
            step = w.grad * 2
            later = (x @ step).sin()
            loss = (later @ w).exp().sum()
        loss.backward()
        return [w.grad]

    both(program)


def test_part_of_the_graph() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x, y = leaf(4), leaf(4)
        with scope("a"):
            a = (x.sin() * y.cos()).exp()
            b = (a * y).tanh()
        return gradients(b.sum(), y, retain_graph=True) + gradients(a.sum(), x)

    both(program)


# ---------------------------------------------------------------------------- escaping, overwriting
def test_tensors_that_escape() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(4, 4)
        kept = {}
        with scope("a"):
            kept["h"] = x.exp()
            kept["view"] = kept["h"].t()[1:]
            y = kept["h"].sin().sum()
        loss = y + (kept["view"] * 2).tanh().sum() + kept["h"].square().sum()
        return [*gradients(loss, x), kept["h"].detach(), kept["view"].detach()]

    both(program)


def test_an_escaped_tensor_modified_afterwards_is_right() -> None:
    x = torch.linspace(0.1, 1, 6).requires_grad_()
    with gf.CheckpointScope("a"):
        h = x.exp()
        y = h.sin()
    h.detach().zero_()  # torch would refuse this backward
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_an_input_modified_afterwards_is_refused() -> None:
    x, w = torch.randn(4), leaf(4)
    with gf.CheckpointScope("a"):
        y = (x * w).exp().sin()
    x.add_(1)
    with pytest.raises(gf.ActivationOverwritten, match="in place"):
        y.sum().backward()


def test_a_parameter_modified_before_backward_is_refused_as_in_torch() -> None:
    for scope in (gf.CheckpointScope("off", enabled=False), gf.CheckpointScope("on")):
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        with scope:
            loss = layer(torch.ones(2, 3)).exp().sum()
        with torch.no_grad():
            layer[2].weight.add_(1)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            loss.backward()


def test_an_optimizer_step_between_two_passes_is_refused_as_in_torch() -> None:
    for scope in (gf.CheckpointScope("off", enabled=False), gf.CheckpointScope("on")):
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with scope:
            loss = layer(torch.ones(2, 3)).exp().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"in ?place"):
            loss.backward()


def test_a_saved_tensor_modified_by_a_backward_is_refused() -> None:
    class Rude(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            x.zero_()
            return grad * 2

    def program(scope: Any) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        with scope:
            h = x.exp()
            loss = (Rude.apply(h) + h.sin()).sum()
        loss.backward()
        return x.grad

    with pytest.raises(RuntimeError, match=r"in ?place"):
        program(gf.CheckpointScope("off", enabled=False))
    with pytest.raises(RuntimeError, match=r"in ?place"):
        program(gf.CheckpointScope("on"))


def test_running_statistics_read_before_they_are_updated() -> None:
    """native_batch_norm changes them without saying so; who read them before must get them as they
    were.
    """

    def program(scope: Any) -> list[torch.Tensor]:
        norm = nn.BatchNorm1d(4)
        x = leaf(8, 4)
        with scope("a"):
            y = (x + norm.running_mean).exp().sin()
            y = norm(y).tanh() + norm.running_var
            y = norm(y).exp()
        return [
            *gradients(y.square().sum(), x),
            norm.running_mean,
            norm.running_var,
            norm.num_batches_tracked,
        ]

    both(program)


def test_a_buffer_written_in_every_step_of_the_scope() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        cache = torch.zeros(4, 3)
        w = leaf(3, 3)
        with scope("a"), torch.no_grad():
            pass
        with scope("b"):
            h = torch.ones(1, 3)
            for row in range(4):
                h = (h @ w).tanh()
                cache[row] = h[0].detach()
                h = h + cache.sum(0, keepdim=True).exp()
        return [*gradients(h.sum(), w), cache]

    both(program)


def test_a_foreach_operation_on_views_is_refused() -> None:
    """torch itself returns a wrong gradient for it under any dispatch mode."""
    x = leaf(3, 4)
    with gf.CheckpointScope("a"):
        h = x * 1
        with pytest.raises(gf.UnsupportedOp, match="_foreach_mul_"):
            torch._foreach_mul_([h[:2]], 0.5)
        torch._foreach_mul_([h], 0.5)
    h.exp().sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x * 1).mul(0.5).exp().sum(), x)[0])


# --------------------------------------------------------------------------------- custom functions
class KeepsEverything(torch.autograd.Function):
    """Saves an input, an output, something in between; keeps a tensor and a number on its
    context.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: float) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x.exp()
        out = inner.sin()
        ctx.save_for_backward(x, inner, out)
        ctx.inner, ctx.power = inner * 2, power
        ctx.mark_non_differentiable(mask := x > 0)
        return out, mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, inner, out = ctx.saved_tensors
        return grad * (x + inner + out + ctx.inner) * ctx.power, None


class WritesUnseen(torch.autograd.Function):
    """Computes with numpy into memory that torch handed out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, filled: bool) -> torch.Tensor:
        out = torch.zeros(x.shape) if filled else torch.empty(x.shape)
        numpy.sin(x.numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


def test_custom_functions() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(4)
        with scope("a"):
            y, mask = KeepsEverything.apply(x.tanh(), 3.0)
            y = InPlace.apply(y.cos()) * mask
            y = WritesUnseen.apply(y.tanh(), False).exp()
            y = WritesUnseen.apply(y.tanh(), True).exp()
        return gradients(y.sum(), x)

    both(program)


def test_a_custom_operator_written_in_python_runs_once() -> None:
    calls = []

    @torch.library.custom_op("gradfit_tests::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * torch.rand(())

    noisy.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )

    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(4)
        with scope("a"):
            y = noisy(x.exp()).sin().exp()
        return gradients(y.sum(), x)

    both(program)
    assert len(calls) == 2  # one for each run


def test_python_runs_once() -> None:
    calls = []
    x = leaf(3)
    with gf.CheckpointScope("a"):
        calls.append("forward")
        y = x.exp().sin()
    y.sum().backward()
    assert calls == ["forward"]


# ------------------------------------------------------------------------------------- modes around
def test_autocast_and_its_cache() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        x = torch.randn(4, 8)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            with scope("a"):
                h = layer(x)
            with scope("b"):
                h = layer(h).tanh()
            loss = layer(h).float().square().sum()
        loss.backward()
        return [p.grad for p in layer.parameters()]

    both(program)


def test_backward_inside_autocast() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            with scope("a"):
                loss = layer(torch.randn(4, 8)).float().square().sum()
            loss.backward()
        return [p.grad for p in layer.parameters()]

    both(program)


def test_autocast_inside_a_scope() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        with scope("a"):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                h = layer(torch.randn(4, 8))
            loss = h.float().exp().square().sum()
        loss.backward()
        return [p.grad for p in layer.parameters()]

    both(program)


def test_generators_are_left_alone() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        own = torch.Generator().manual_seed(3)
        x = leaf(5)
        with scope("a"):
            y = (x * torch.rand(5, generator=own)).exp() * torch.rand_like(x)
            y = F.dropout(y.sin(), 0.5).exp()
        state = own.get_state()
        between = torch.rand(3)
        found = gradients(y.sum(), x)
        assert torch.equal(state, own.get_state())
        return [*found, between, torch.rand(3), own.get_state()]

    both(program)


def test_torch_func_inside_a_scope_is_refused() -> None:
    x = leaf(3)
    with pytest.raises(gf.UnsupportedOp, match=r"torch\.func"), gf.CheckpointScope("a"):
        torch.func.grad(lambda t: t.exp().sin().sum())(x.detach())


def test_a_scope_inside_torch_func_is_refused() -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        with gf.CheckpointScope("a"):
            return t.exp().sin().sum()

    with pytest.raises(gf.UnsupportedOp, match="transform"):
        torch.func.grad(function)(torch.ones(3))
    with pytest.raises(gf.UnsupportedOp, match="transform"):
        torch.func.vmap(function)(torch.ones(3, 2))


def test_vmap_inside_a_scope() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(3, 4)
        with scope("a"):
            y = torch.func.vmap(lambda row: (row * row.sum()).exp())(x.sin())
            y = y.tanh()
        return gradients(y.sum(), x)

    with contextlib.suppress(gf.UnsupportedOp):
        both(program)


def test_a_scope_without_gradients_records_nothing() -> None:
    with torch.no_grad(), gf.CheckpointScope("a") as scope:
        y = torch.ones(3).exp()
    assert torch.equal(y, torch.ones(3).exp())
    assert scope.stats.freed_bytes == scope.stats.kept_bytes == 0


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_inside() -> None:
    function = torch.compile(lambda t: (t.sin() * 2).exp(), backend="aot_eager")

    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(4)
        with scope("a"):
            y = function(x.tanh()).cos()
        return gradients(y.sum(), x)

    both(program)


# ------------------------------------------------------------------------------ layouts, subclasses
@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_and_tensors() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        table = nn.Embedding(10, 4, sparse=True)
        w = leaf(3, 4)
        matrix = torch.eye(3).to_sparse()
        with scope("a"):
            h = table(torch.tensor([1, 2, 1])).tanh()
            h = torch.sparse.mm(matrix, (h * w).exp())
            h = h.sin().exp()
        h.sum().backward()
        return [table.weight.grad.to_dense(), w.grad]

    both(program)


@pytest.mark.filterwarnings("ignore")
def test_a_learned_sparse_tensor() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        values, w = leaf(3), leaf(3, 4)
        with scope("a"):
            matrix = torch.sparse_coo_tensor(
                torch.tensor([[0, 1, 2], [1, 2, 0]]), values.exp(), (3, 3)
            )
            h = torch.sparse.mm(matrix, w.tanh()).exp()
        return gradients(h.sum(), values, w)

    both(program)


class Scaled(torch.Tensor):
    """A wrapper subclass: a tensor that lives inside, with operations of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Scaled) else a for a in args]
        out = func(*plain, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mul_, torch.ops.aten.add_):
            return args[0]
        return Scaled(out) if isinstance(out, torch.Tensor) else out


def test_a_wrapper_subclass() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = Scaled(torch.linspace(0, 1, 5)).requires_grad_()
        with scope("a"):
            y = ((x * 2).sin().exp() * x).tanh()
        (found,) = gradients(y.sum(), x)
        return [found.inner]

    both(program)


def test_a_write_through_a_wrapper_is_noticed() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        w = leaf(5)
        with scope("a"):
            base = torch.ones(5) * 3
            with torch.no_grad():
                Scaled(base).add_(1.0)
            y = (base * w).exp().sin()
        return gradients(y.sum(), w)

    both(program)


def test_a_plain_subclass() -> None:
    class Named(torch.Tensor):
        pass

    def program(scope: Any) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 5).as_subclass(Named).requires_grad_()
        with scope("a"):
            y = (x.sin().exp() * x).tanh()
        return [g.as_subclass(torch.Tensor) for g in gradients(y.sum(), x)]

    both(program)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors() -> None:
    def program(scope: Any) -> list[torch.Tensor]:
        x = leaf(5, 3)
        with scope("a"):
            h = x.exp()
            jagged = torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, 5]))
            y = (jagged * 2).sin().values().exp()
        return gradients(y.sum(), x)

    both(program)


# ------------------------------------------------------------------------------------------ threads
def test_scopes_in_several_threads() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
    x = torch.randn(16, 8)
    expected = [
        torch.autograd.grad(layer(x).exp().sum(), list(layer.parameters())) for layer in layers
    ]
    found: dict[int, Any] = {}
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        for _ in range(20):
            with gf.CheckpointScope(f"thread {number}"):
                loss = layers[number](x).exp().sum()
            found[number] = torch.autograd.grad(loss, list(layers[number].parameters()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert all(torch.equal(a, b) for a, b in zip(found[number], expected[number], strict=True))


def test_backward_in_another_thread() -> None:
    x = leaf(6)
    torch.manual_seed(0)
    with gf.CheckpointScope("a"):
        loss = F.dropout(x.sin().exp(), 0.5).tanh().sum()
    state = torch.get_rng_state()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(0)
    assert torch.equal(
        x.grad, torch.autograd.grad(F.dropout(x.sin().exp(), 0.5).tanh().sum(), x)[0]
    )


def test_a_replay_does_not_disturb_who_draws_at_the_same_time() -> None:
    """Dropout is replayed with a private generator: the default one is never rewound."""
    x = leaf(64)
    with gf.CheckpointScope("a"):
        loss = F.dropout(x.exp(), 0.5).sin().sum()
    states = []
    handle = x.register_hook(lambda grad: states.append(torch.get_rng_state()))
    before = torch.get_rng_state()
    loss.backward()
    handle.remove()
    assert torch.equal(states[0], before)


# ------------------------------------------------------------------------------------- using scopes
def test_decorator_and_reuse() -> None:
    scope = gf.CheckpointScope("layer")

    @scope
    def layer(t: torch.Tensor) -> torch.Tensor:
        """Documented."""
        return t.sin().exp()

    assert layer.__doc__ == "Documented."
    x = leaf(4)
    layer(layer(x)).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)[0])
    freed = scope.stats.freed_bytes
    assert freed > 0
    layer(x)
    assert scope.stats.freed_bytes > freed


def test_a_scope_inside_itself() -> None:
    scope = gf.CheckpointScope("same")
    x = leaf(4)
    with scope:
        h = x.sin()
        with scope:
            y = h.exp().tanh()
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().tanh().sum(), x)[0])


def test_a_disabled_scope_keeps_everything() -> None:
    x = leaf(4)
    scope = gf.CheckpointScope("off", enabled=False)
    with scope:
        y = x.exp().sin()
    y.sum().backward()
    assert scope.stats.freed_bytes == 0
    assert scope.stats.recomputed_seconds == 0
    assert scope.is_enabled is False
    scope.is_enabled = True
    with scope:
        y = x.exp().sin()
    assert scope.stats.freed_bytes > 0


def test_a_disabled_scope_inside_an_enabled_one_changes_nothing() -> None:
    x = leaf(4)
    with gf.CheckpointScope("on") as outer, gf.CheckpointScope("off", enabled=False):
        y = x.exp().sin()
    y.sum().backward()
    assert outer.stats.freed_bytes > 0


def test_a_scope_that_does_not_recompute_keeps() -> None:
    x = leaf(4)
    with gf.CheckpointScope("outer") as outer:
        h = x.exp()
        with gf.CheckpointScope("kept", use_recomputation=False) as kept:
            y = h.sin().exp()
    y.sum().backward()
    assert outer.stats.freed_bytes > 0
    assert kept.stats.freed_bytes == 0
    assert kept.stats.kept_bytes > 0


def test_leaving_out_of_order_is_refused() -> None:
    def steps(scope: gf.CheckpointScope) -> Iterator[None]:
        with scope:
            yield

    outer, inner = steps(gf.CheckpointScope("outer")), steps(gf.CheckpointScope("inner"))
    next(outer)
    next(inner)
    with pytest.raises(gf.MisuseError, match=r"'outer'.*'inner'"):
        next(outer, None)
    next(inner, None)
    x = leaf(3)
    with gf.CheckpointScope("afterwards"):
        y = x.exp().sin()
    y.sum().backward()


def test_leaving_without_entering_is_refused() -> None:
    with pytest.raises(gf.MisuseError, match="not entered"):
        gf.CheckpointScope("never").__exit__(None, None, None)


def test_a_keep_policy_decides_per_operation() -> None:
    x = leaf(4, 4)
    seen = []

    def keep(op: Any, output: torch.Tensor) -> bool:
        seen.append((str(op), tuple(output.shape)))
        return op is torch.ops.aten.mm.default

    with gf.CheckpointScope("a", keep=keep) as scope:
        y = (x @ x).exp().sin()
    y.sum().backward()
    assert ("aten.mm.default", (4, 4)) in seen
    assert ("aten.exp.default", (4, 4)) in seen
    assert scope.stats.freed_bytes > 0
    assert torch.equal(x.grad, torch.autograd.grad((x @ x).exp().sin().sum(), x)[0])


def test_a_keep_policy_that_raises_says_so_and_leaves_nothing_open() -> None:
    x = leaf(4)

    def keep(op: Any, output: torch.Tensor) -> bool:
        raise ZeroDivisionError("policy")

    with pytest.raises(ZeroDivisionError, match="policy"), gf.CheckpointScope("a", keep=keep):
        x.exp()
    with gf.CheckpointScope("b"):
        y = x.exp().sin()
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_a_keep_policy_must_be_callable() -> None:
    with pytest.raises(gf.MisuseError, match="keep="):
        gf.CheckpointScope("a", keep=3)  # type: ignore[arg-type]


def test_marks() -> None:
    x = leaf(4)
    with gf.CheckpointScope("a") as scope:
        h = gf.mark_checkpoint(x.exp().sin())
        y = h.cos().exp()
    assert gf.is_checkpoint(h)
    assert gf.is_checkpoint(h[1:])
    assert not gf.is_checkpoint(y)
    assert scope.stats.kept_bytes == h.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().cos().exp().sum(), x)[0])


def test_a_mark_is_where_recomputation_starts() -> None:
    x = leaf(4)
    with gf.CheckpointScope("a"):
        h = x.exp()
        for _ in range(10):
            h = h.sin()
        h = gf.mark_checkpoint(h)
        loss = h.cos().exp().sum()
    names = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.autograd.grad(loss, h)
    assert "aten.cos.default" in names
    assert names.count("aten.sin.default") <= 1  # the derivative of cos, not the chain


def test_a_mark_outside_of_a_scope_is_refused() -> None:
    with pytest.raises(gf.MisuseError, match="outside"):
        gf.mark_checkpoint(torch.ones(3))
    assert not gf.is_checkpoint(torch.ones(3))
    assert not gf.is_checkpoint(torch.eye(3).to_sparse())


def test_stats_and_repr() -> None:
    x = leaf(256)
    with gf.CheckpointScope("named") as scope:
        y = x.exp().sin().sum()
    assert scope.name == "named"
    assert scope.stats.freed_bytes == 1024
    y.backward()
    assert scope.stats.recomputed_seconds > 0
    assert "named" in repr(scope)
    assert "1 KiB" in repr(scope) or "1.0 KiB" in repr(scope) or "1.00 KiB" in repr(scope)
