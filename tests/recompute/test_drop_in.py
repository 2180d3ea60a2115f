"""`gf.checkpoint` in the place of `torch.utils.checkpoint.checkpoint`: same arguments, same
results.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from one_configuration import assert_same_bits
from recompute_models import build
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import gradfit as gf

Checkpoint = Callable[..., Any]


def torchs(*args: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("use_reentrant", False)
    return torch.utils.checkpoint.checkpoint(*args, **kwargs)


def same(program: Callable[[Checkpoint], list[torch.Tensor]]) -> None:
    """The same bits plainly, with torch's function and with gradfit's."""
    results = []
    for function in (lambda f, *a, **k: f(*a, **_functions_own(k)), torchs, gf.checkpoint):
        torch.manual_seed(0)
        results.append([*program(function), torch.get_rng_state()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def _functions_own(kwargs: dict[str, Any]) -> dict[str, Any]:
    torchs_own = {
        "use_reentrant",
        "preserve_rng_state",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
    }
    return {name: value for name, value in kwargs.items() if name not in torchs_own}


def test_a_chain_of_modules() -> None:
    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(3)]
        )
        h = torch.randn(4, 8)
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False)
        h.sum().backward()
        return [p.grad for p in layers.parameters()]

    same(program)


def test_keyword_arguments_and_things_that_are_no_tensors() -> None:
    def function(
        x: torch.Tensor, scale: float, *, mask: Any = None, names: tuple[str, ...] = ()
    ) -> Any:
        y = (x * scale).exp()
        if mask is not None:
            y = y.masked_fill(mask["where"], 0.0)
        return y.sin() * len(names)

    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        x = torch.randn(4, requires_grad=True)
        mask = {"where": torch.tensor([True, False, False, True])}
        y = checkpoint(function, x, 0.5, mask=mask, names=("a", "b"))
        return list(torch.autograd.grad(y.sum(), x))

    same(program)


def test_nested_outputs_and_none() -> None:
    def function(x: torch.Tensor) -> Any:
        h = x.exp()
        return {"a": h.sin(), "rest": (None, [h.cos(), "text"], 3)}

    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        x = torch.randn(4, requires_grad=True)
        found = checkpoint(function, x)
        assert found["rest"][0] is None
        assert found["rest"][1][1] == "text"
        return list(torch.autograd.grad((found["a"] * found["rest"][1][0]).sum(), x))

    same(program)


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_use_reentrant_is_taken_and_means_nothing(reentrant: bool | None) -> None:
    x = torch.randn(4, requires_grad=True)
    y = gf.checkpoint(lambda t: t.exp().sin(), x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_options_that_replaying_makes_moot() -> None:
    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        x = torch.randn(4, requires_grad=True)
        y = checkpoint(
            lambda t: torch.dropout(t.exp(), 0.5, True).sin(), x,
            preserve_rng_state=True, determinism_check="none", early_stop=False, debug=False,
        )  # fmt: skip
        return list(torch.autograd.grad(y.sum(), x))

    same(program)
    with pytest.raises(gf.MisuseError, match="determinism_check"):
        gf.checkpoint(torch.exp, torch.ones(1), determinism_check="perhaps")


@pytest.mark.parametrize("kind", ["list", "function", "boolean function"])
def test_selective_contexts(kind: str) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        save = op is torch.ops.aten.mm.default
        if kind == "boolean function":
            return save
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    argument: Any = [torch.ops.aten.mm.default] if kind == "list" else policy
    context = functools.partial(create_selective_checkpoint_contexts, argument)

    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        y = checkpoint(lambda a, b: ((a @ b).exp() @ b).sin(), x, w, context_fn=context)
        return list(torch.autograd.grad(y.sum(), (x, w)))

    same(program)

    names = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 4, requires_grad=True)
    y = gf.checkpoint(lambda a: (a @ a).exp().sin(), x, context_fn=context).sum()
    with Seen():
        y.backward()
    assert torch.ops.aten.exp.default in names
    assert names.count(torch.ops.aten.mm.default) == 2  # the derivative's two, and none replayed


def test_other_contexts_are_entered_around_the_forward_and_each_replay() -> None:
    entered = []

    @contextlib.contextmanager
    def noting(name: str) -> Any:
        entered.append(name)
        yield

    x = torch.randn(4, requires_grad=True)
    y = gf.checkpoint(
        lambda t: t.exp().sin(),
        x,
        context_fn=lambda: (noting("forward"), _Again("replay", entered)),
    )
    assert entered == ["forward"]
    y.sum().backward()
    assert set(entered[1:]) == {"replay"}


class _Again:
    def __init__(self, name: str, entered: list[str]) -> None:
        self.name, self.entered = name, entered

    def __enter__(self) -> None:
        self.entered.append(self.name)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_context_of_a_checkpoint_inside_a_scope_is_entered_too() -> None:
    entered: list[str] = []
    x = torch.randn(4, requires_grad=True)
    with gf.CheckpointScope("around"):
        h = x.tanh()
        y = gf.checkpoint(
            lambda t: t.exp().sin().exp(),
            h,
            context_fn=lambda: (contextlib.nullcontext(), _Again("replay", entered)),
        )
    y.sum().backward()
    assert "replay" in entered


def test_module_hooks_run_once() -> None:
    calls = []
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    x = torch.randn(2, 4, requires_grad=True)
    gf.checkpoint(layer, x).sum().backward()
    assert calls == ["hook"]


def test_checkpoint_inside_checkpoint() -> None:
    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        x = torch.randn(4, requires_grad=True)
        y = checkpoint(lambda t: checkpoint(lambda u: u.exp().sin(), t.cos()).tanh(), x)
        return list(torch.autograd.grad(y.sum(), x))

    same(program)


def test_a_function_that_raises() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        gf.checkpoint(fail, torch.ones(2, requires_grad=True))


def test_checkpoint_sequential() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(7)])
    x = torch.randn(3, 6)
    expected = torch.autograd.grad(chain(x).sum(), list(chain.parameters()))
    for segments in (1, 2, 3, 7):
        found = torch.autograd.grad(
            gf.checkpoint_sequential(chain, segments, x).sum(), list(chain.parameters())
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(gf.MisuseError, match="segments"):
        gf.checkpoint_sequential(chain, 8, x)
    with pytest.raises(gf.MisuseError, match="segments"):
        gf.checkpoint_sequential(chain, 0, x)


@pytest.mark.exact
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing_enable_of_transformers(name: str) -> None:
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return gf.checkpoint(*args, **kwargs)

    def run(patched: bool) -> dict[str, torch.Tensor]:
        model, loss_of, _ = build(name)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.use_cache = False  # as checkpointed layers run
        calls.clear()
        with mock.patch("transformers.modeling_utils.checkpoint", counting):
            if patched:
                model.gradient_checkpointing_enable()
            torch.manual_seed(1)
            loss = loss_of(model)
            loss.backward()
        assert bool(calls) is patched
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), "generator": torch.get_rng_state(), **gradients}

    assert_same_bits(lambda: run(False), lambda: run(True))


# ------------------------------------------------------------------------------------------ chunked
def info_nce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = nn.functional.normalize(a, dim=1), nn.functional.normalize(b, dim=1)
    return nn.functional.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))


def test_chunked_gives_the_full_batchs_gradient() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).double()
    left, right = torch.randn(24, 16).double(), torch.randn(24, 16).double()
    loss = info_nce(encoder(left), encoder(right))
    expected = torch.autograd.grad(loss, list(encoder.parameters()))
    for size in (1, 5, 24, 100):
        ours = info_nce(gf.chunked(encoder, left, size), gf.chunked(encoder, right, size))
        torch.testing.assert_close(ours, loss, rtol=1e-12, atol=1e-14)
        for a, b in zip(
            torch.autograd.grad(ours, list(encoder.parameters())), expected, strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_chunked_holds_one_chunks_activations() -> None:
    encoder = nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(8)]
    )
    x = torch.randn(1024, 32)
    peaks = []
    for encode in (encoder, lambda batch: gf.chunked(encoder, batch, 32)):
        with gf.meter() as meter:
            encode(x).square().mean().backward()
        peaks.append(meter.peak_bytes)
        encoder.zero_grad()
    assert peaks[1] < peaks[0] / 4


def test_chunked_takes_nests() -> None:
    batch = {"x": torch.randn(5, 3), "y": torch.randn(5, 3), "note": "same in every chunk"}
    out = gf.chunked(
        lambda part: {"sum": part["x"] + part["y"], "parts": (part["x"],)}, batch, size=2
    )
    assert torch.equal(out["sum"], batch["x"] + batch["y"])
    assert torch.equal(out["parts"][0], batch["x"])


def test_chunked_refuses_what_cannot_be_cut_or_joined() -> None:
    with pytest.raises(gf.MisuseError, match="size"):
        gf.chunked(torch.exp, torch.ones(4), size=0)
    with pytest.raises(gf.MisuseError, match="split"):
        gf.chunked(torch.exp, {"a": torch.ones(4), "b": torch.ones(3)}, size=2)
    with pytest.raises(gf.MisuseError, match="joined"):
        gf.chunked(lambda t: t.mean(), torch.ones(4), size=2)


def test_chunks_along_tokens_are_the_whole() -> None:
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3)).double()
    x = torch.randn(2, 10, 4, dtype=torch.float64, requires_grad=True)
    whole, found = [], []
    for out, gradients in ((mlp(x), whole), (gf.chunked(mlp, x, 3, dim=1), found)):
        assert out.is_contiguous()
        gradients += [
            out,
            *torch.autograd.grad((out * out.detach().roll(1, 1)).sum(), [x, *mlp.parameters()]),
        ]
    for one, other in zip(whole, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    nest = {"x": torch.ones(2, 5), "y": torch.zeros(2, 5, 3)}
    assert gf.chunked(lambda part: part["y"] + part["x"][..., None], nest, 2, dim=1).shape == (
        2,
        5,
        3,
    )
    with pytest.raises(
        gf.InvalidParameter, match=r"dim=2 is no dimension of a tensor of shape \(2, 5\)"
    ):
        gf.chunked(torch.exp, torch.ones(2, 5), 2, dim=2)


class _SavesItsSecond(torch.autograd.Function):
    given_back: torch.Tensor

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (_SavesItsSecond.given_back,) = ctx.saved_tensors
        return gradient, None


class _OfSomebody(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", ["tensor", "view", "whole numbers", "frozen", "subclass"])
def test_what_a_function_saves_of_its_inputs_comes_back_as_itself(kind: str) -> None:
    saved = {
        "tensor": torch.ones(3),
        "view": torch.ones(5)[1:4],
        "whole numbers": torch.arange(3),
        "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
        "subclass": torch.ones(3).as_subclass(_OfSomebody),
    }[kind]
    x = torch.ones(3, requires_grad=True)
    gf.checkpoint(_SavesItsSecond.apply, x, saved).sum().backward()
    assert _SavesItsSecond.given_back is saved


def test_what_was_saved_comes_back_also_if_its_tensor_has_moved_or_died() -> None:
    x, moved = torch.ones(3, requires_grad=True), torch.arange(3.0)
    y = gf.checkpoint(_SavesItsSecond.apply, x, moved)
    moved.data = torch.zeros(3)
    y.sum().backward()
    assert torch.equal(_SavesItsSecond.given_back, torch.arange(3.0))
    y = gf.checkpoint(_SavesItsSecond.apply, x, torch.arange(3.0))
    y.sum().backward()
    assert torch.equal(_SavesItsSecond.given_back, torch.arange(3.0))


def test_what_a_function_has_saved_is_not_held_by_itself() -> None:
    """Written to with its own result, it has a graph that holds what was saved."""
    x, state = torch.ones(3, requires_grad=True), torch.ones(3)
    with gf.CheckpointScope("step"):
        y = x * state
    node = y.grad_fn
    node.metadata["watched"] = watched = torch.nn.Identity()
    died = weakref.ref(watched)
    state.copy_(y)
    del y, state, node, watched
    gc.collect()
    assert died() is None


@pytest.mark.parametrize("way", ["trace", "script"])
def test_a_module_that_torchscript_has_made(way: str) -> None:
    """torch's own checkpoint cannot: it stops early by an exception, inside of the interpreter."""

    def run(checkpoint: Checkpoint) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, requires_grad=True)
        made = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        made = torch.jit.trace(made, x) if way == "trace" else torch.jit.script(made)
        checkpoint(made, x).exp().sum().backward()
        return [x.grad, *(p.grad for p in made.parameters())]  # type: ignore[list-item]

    def plain(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    run(plain)  # from its second call on TorchScript runs another graph, for all of one kind
    for a, b in zip(run(plain), run(gf.checkpoint), strict=True):
        assert torch.equal(a, b)
