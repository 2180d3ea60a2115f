"""How the recorder hears of operations: on a key of its own or as a mode, and what it may skip on
the way.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit._torch import _BINDINGS
from gradfit._torch_listen import listening, unseen
from gradfit.tape.operators import info_of, view_names

Calls = list[tuple[Any, Any, Any]]


def heard(program: Any) -> Calls:
    calls: Calls = []

    def ear(op: Any, args: Any, kwargs: Any) -> Any:
        calls.append((op, args, kwargs))
        return op(*args, **kwargs)

    with listening(ear, view_names):
        program()
    return calls


def names(calls: Calls) -> list[str]:
    return [str(op) for op, _, _ in calls]


def test_views_are_not_heard_and_everything_else_is() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    found = names(
        heard(
            lambda: (x.view(2, 12).t()[1:].transpose(0, 1).unsqueeze(0).expand(3, -1, -1) * 2).sum()
        )
    )
    assert found == ["aten.mul.Tensor", "aten.sum.default"]


def test_a_mode_hears_the_same_operations() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 5, 16)
    alone = names(heard(lambda: model(x).sum()))
    with gf.meter():
        beside = names(
            [call for call in heard(lambda: model(x).sum()) if not info_of(call[0]).view]
        )
    # Some of torch's own code writes in place only where no mode looks.
    assert [name.replace("_.", ".") for name in alone] == [
        name.replace("_.", ".") for name in beside
    ]


def test_what_the_ear_runs_is_not_heard_and_what_is_unseen_neither() -> None:
    def program() -> None:
        torch.ones(3).exp()
        with unseen():
            torch.ones(3).sin()

    assert names(heard(program)) == ["aten.ones.default", "aten.exp.default"]


def test_nothing_is_heard_after_an_error_inside() -> None:
    with pytest.raises(RuntimeError, match="size"):
        heard(lambda: torch.ones(3) + torch.ones(4))
    assert heard(lambda: None) == []
    assert names(heard(lambda: torch.ones(2).exp())) == ["aten.ones.default", "aten.exp.default"]


def test_another_thread_is_not_heard() -> None:
    def program() -> None:
        thread = threading.Thread(target=lambda: torch.ones(3).exp())
        thread.start()
        thread.join()

    assert heard(program) == []


def test_two_ears_hear_both() -> None:
    inner: Calls = []
    outer = heard(lambda: inner.extend(heard(lambda: torch.ones(3).exp())))
    assert names(inner) == names(outer) == ["aten.ones.default", "aten.exp.default"]


def test_a_compiled_function_runs_eagerly_in_a_scope_and_compiled_after_it() -> None:
    runs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append("compiled")
            return graph.forward(*args)

        return run

    function = torch.compile(lambda t: (t.sin() * 2).exp(), backend=backend)
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((x.sin() * 2).exp().sum(), x)[0]
    with gf.CheckpointScope("a") as scope:
        y = function(x).sum()
    assert runs == []
    assert scope.stats.freed_bytes > 0
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    function(x)
    assert runs == ["compiled"]


_x = torch.rand(4, 6)
_image = torch.randn(2, 4, 5, 5)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_log_softmax": (_x, -1, False),
    "_scaled_dot_product_flash_attention_for_cpu": (torch.randn(1, 2, 4, 8),) * 3,
    "_softmax": (_x, -1, False),
    "add.Tensor": (_x, _x),
    "add_.Tensor": (_x, 2.0),
    "addmm": (torch.randn(5), _x, torch.randn(6, 5)),
    "baddbmm": (torch.randn(2, 4, 5), torch.randn(2, 4, 6), torch.randn(2, 6, 5)),
    "bernoulli_.float": (_x, 0.5),
    "bmm": (torch.randn(2, 4, 6), torch.randn(2, 6, 5)),
    "cat": ([_x, _x], 1),
    "clone": (_x,),
    "convolution": (
        _image,
        torch.randn(3, 4, 3, 3),
        torch.randn(3),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    "div.Tensor": (_x, 3.0),
    "embedding": (_x, torch.tensor([1, 3])),
    "empty_like": (_x,),
    "mean.dim": (_x, [1], True),
    "mm": (_x, torch.randn(6, 5)),
    "mul.Tensor": (_x, 0.5),
    "mul_.Tensor": (_x, _x),
    "native_batch_norm": (
        _image,
        torch.ones(4),
        torch.zeros(4),
        torch.zeros(4),
        torch.ones(4),
        True,
        0.1,
        1e-5,
    ),
    "native_dropout": (_x, 0.5, True),
    "native_group_norm": (_image, torch.ones(4), torch.zeros(4), 2, 4, 25, 2, 1e-5),
    "native_layer_norm": (_x, [6], torch.ones(6), torch.zeros(6), 1e-5),
    "pow.Tensor_Scalar": (_x, 2.0),
    "sub.Tensor": (_x, _x),
    "sum.dim_IntList": (_x, [0], False),
    "where.self": (_x > 0, _x, _x * 2),
}


@pytest.mark.parametrize("name", sorted(_BINDINGS))
def test_a_binding_calls_its_operator(name: str) -> None:
    short = name.removeprefix("aten::")
    packet, _, overload = short.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert info_of(op).call is _BINDINGS[name]

    def fresh() -> list[Any]:
        return [
            a.clone() if isinstance(a, torch.Tensor) else a for a in _ARGUMENTS.get(short, (_x,))
        ]

    args = fresh()
    calls = heard(lambda: _BINDINGS[name](*args))
    assert [called for called, _, _ in calls] == [op]
    if "empty" in short:
        return
    results = []
    for function in (_BINDINGS[name], op):
        torch.manual_seed(0)
        out = function(*fresh())
        results.append([out] if isinstance(out, torch.Tensor) else list(out))
    for mine, its in zip(*results, strict=True):
        assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
