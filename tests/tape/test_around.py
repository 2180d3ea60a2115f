"""What else may be at work around or inside a recording: modes, fake tensors, subclasses, the
compiler, interrupts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf
from gradfit import _torch_listen
from gradfit._torch_listen import _KEY, _thread
from gradfit._torch_one_operation import OneOperation, telling
from gradfit.recompute.scope import inside_scope
from gradfit.tape import process_settings

aten = torch.ops.aten


def left_over() -> list[str]:
    """What a scope has set for the thread or the process, and not taken back."""
    found = {
        "included": torch._C._dispatch_tls_is_dispatch_key_included(_KEY),
        "excluded": torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY),
        "ear": _thread.innermost is not None,
        "modes": torch._C._len_torch_dispatch_stack() > 0,
        "scope": inside_scope(),
        "recordings": bool(process_settings._recordings),
        "below autograd": torch._C._dispatch_tls_is_dispatch_key_excluded(
            torch._C.DispatchKey.AutogradCPU
        ),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "tracing": torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None,
    }
    return [name for name, there in found.items() if there]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_over() == []


class Changing(TorchDispatchMode):
    """Does something else than it is asked for, in as many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.full((4, 4), 0.7)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.cos.default:
            return aten.exp.default(*args)  # another operator
        if func is aten.tanh.default:
            return func(args[0] * 0.5)  # other arguments
        if func is aten.sigmoid.default:
            return self.constant  # nothing at all
        out = func(*args, **kwargs)
        if func is aten.sin.default:
            return out * 2  # another result
        if func is aten.exp.default:
            out.mul_(0.5)  # a result changed in place
        return out


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = (x * w).sin().exp()
    h = h.cos().tanh() * w
    h = (h * h.sigmoid()).view(2, 8).mul_(2).view(4, 4)
    return nn.functional.dropout(h, 0.3).sin().exp()


@pytest.mark.parametrize(
    "where", ["outside", "around the backward too", "inside", "beside a meter"]
)
def test_a_mode_that_changes_results(where: str) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with contextlib.ExitStack() as around:
            if where != "inside":
                around.enter_context(Changing())
            if where == "beside a meter":
                around.enter_context(gf.meter())
            with (
                gf.CheckpointScope("s", enabled=enabled),
                Changing() if where == "inside" else contextlib.nullcontext(),
            ):
                loss = chain(x, w).sum()
            if where == "around the backward too":
                loss.backward()
        if where != "around the backward too":
            loss.backward()
        results.append((loss.detach(), x.grad, w.grad))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


class Observing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            aten.isnan.default(out)
        self.heard.append(func)
        return out


def test_a_mode_that_only_looks_costs_no_memory_and_sees_replays() -> None:
    freed, heard = [], []
    for looking in (False, True):
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with Observing() if looking else contextlib.nullcontext(), gf.CheckpointScope("s") as scope:
            loss = chain(x, w).sum()
        with Observing() as observer:
            loss.backward()
        freed.append(scope.stats.freed_bytes)
        heard.append(observer.heard.count(aten.sigmoid.default))
    assert freed[0] == freed[1] > 0
    assert heard == [1, 1]


def test_fake_tensors_inside_a_scope() -> None:
    x = torch.randn(3, requires_grad=True)
    with gf.CheckpointScope("s") as scope:
        with FakeTensorMode():
            # in no cache of torch's yet
            shape = nn.Linear(7, 11)(torch.empty(5, 7).erfinv()).lgamma().shape
        loss = (x.sin() * shape[1]).exp().sum()
    assert shape == (5, 11)
    assert scope.stats.freed_bytes > 0
    expected = torch.autograd.grad((x.sin() * 11).exp().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_the_meta_device_inside_a_scope() -> None:
    x = torch.randn(3, requires_grad=True)
    with gf.CheckpointScope("s"):
        with torch.device("meta"):
            layer = nn.Linear(3, 3)  # draws its weights
            torch.nn.functional.dropout(layer(torch.rand(2, 3)))
        loss = x.exp().sin().sum()
    loss.backward()


class Kernels(torch.Tensor):
    """Calls kernels on itself, below the key where subclasses live."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def test_a_subclass_that_runs_kernels_on_itself() -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        x = torch.randn(4, requires_grad=True)
        with gf.CheckpointScope("s", enabled=enabled):
            h = x.sin() * 2
            h.mul_(0.5)
            with torch.no_grad():
                # nobody hears this write, right after one that was heard
                h.detach().as_subclass(Kernels).add_(1)
            loss = (h * x).exp().sum()
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


def test_a_loop_operator_inside_a_scope() -> None:
    from torch._higher_order_ops import while_loop

    x = torch.randn(4, requires_grad=True)
    start = torch.zeros((), dtype=torch.int64)
    with gf.CheckpointScope("s"):
        _, h = while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t.sin()), (start, x.detach()))
        loss = (h * x).exp().sum()
    expected = torch.autograd.grad((x.detach().sin().sin().sin() * x).exp().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # the compiler asks for it
@pytest.mark.parametrize("way", ["with", "checkpoint", "decorator"])
def test_a_scope_inside_a_compiled_function(way: str) -> None:
    """It runs eagerly; what is around it is compiled."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    graphs: list[Any] = []
    freed: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def with_scope(h: torch.Tensor) -> torch.Tensor:
        with gf.CheckpointScope("s") as scope:
            h = layer(h).exp()
        freed.append(scope.stats.freed_bytes)
        return h

    decorated = gf.CheckpointScope("s")(lambda h: layer(h).exp())
    blocks: dict[str, Any] = {
        "with": with_scope,
        "checkpoint": lambda h: gf.checkpoint(lambda t: layer(t).exp(), h),
        "decorator": decorated,
    }

    def model(x: torch.Tensor, block: Any) -> torch.Tensor:
        return block(x.sin() * 2).cos().sum()

    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x, lambda h: layer(h).exp()), x)[0]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(torch.autograd.grad(compiled(x, blocks[way]), x)[0], expected)
        assert left_over() == []
    assert graphs
    assert all(size > 0 for size in freed)
    torch._dynamo.reset()


def test_interrupts_leave_nothing_behind() -> None:
    """One wherever Python looks for signals in a step: when a function is entered, and when one in
    C has returned.
    """
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    left = 0

    def step() -> None:
        with gf.CheckpointScope("outer"):
            h = layer(x)
            with gf.CheckpointScope("inner", keep=lambda op, out: op is aten.exp.default):
                h = layer(h * 2).exp()
        h.sum().backward()

    def interrupt(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        name = frame.f_code.co_name
        if (
            name in ("_works_when_sent", "_collector_goes_on")
            or f"{os.sep}gradfit{os.sep}" not in frame.f_code.co_filename
        ):
            return  # in a destructor: it comes afterwards (`test_interrupts.py`)
        # which is then not called: nobody can help
        if event == "c_return" or (event == "call" and name != "__exit__"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    step()
    for number in itertools.count(1):
        left = number
        sys.setprofile(interrupt)
        try:
            step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert left_over() == [], f"interrupt {number}"
        if left > 0:
            break
    assert number > 300
    torch.manual_seed(0)
    with gf.CheckpointScope("after"):
        loss = layer(x).exp().sum()
    ours = torch.autograd.grad(loss, list(layer.parameters()))
    torch.manual_seed(0)
    plain = torch.autograd.grad(layer(x).exp().sum(), list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_an_interrupt_that_keeps_an_inner_scope_open_is_not_hidden() -> None:
    inner = gf.CheckpointScope("inner")

    def run() -> None:
        with gf.CheckpointScope("outer"):
            inner.__enter__()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_write_that_fails_leaves_the_table_right() -> None:
    """What was read before the failed write is a copy by then, and its address may be another
    tensor's.
    """
    for _ in range(20):
        w = torch.randn(4, 6, requires_grad=True)
        gradients = []
        for scope in (False, True):
            torch.manual_seed(1)
            w.grad = None
            with gf.CheckpointScope("a", enabled=scope):
                given = torch.randn(4, 6)
                h = w + given
                with pytest.raises(RuntimeError):
                    given.index_add_(0, torch.tensor([0, 1]), given[:2])  # the two overlap
                del given
                loss = (h.t() @ h).tanh().exp().sum()
            loss.backward()
            gradients.append(w.grad)
        assert torch.equal(*gradients)


def test_a_mode_around_a_scope_sees_the_forwards_operations_alone() -> None:
    """Not the aliases that the tape makes of parameters."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    seen: list[str] = []
    with Names():
        layer(x)
    plain = list(seen)
    seen.clear()
    with Names(), gf.CheckpointScope("s"):
        layer(x)
    assert seen == plain


def test_what_listens_in_the_engine_is_not_freed_while_others_have_it() -> None:
    """torch 2.10 gives back a reference that it has not taken."""
    link = object()
    before = sys.getrefcount(link)
    for _ in range(3):
        _torch_listen._stash("gradfit.test", link)
        _torch_listen._stash("gradfit.test", None)
    assert sys.getrefcount(link) == before


class _OfParts(OneOperation):
    """One operation to whoever listens; who counts bytes is told of its parts."""

    def _run(self, x: torch.Tensor) -> list[torch.Tensor]:
        with telling():
            return [x + x]


def test_who_listens_in_the_engine_still_does_after_an_operation_of_parts() -> None:
    """The backward passes of an accelerator run there: whoever was entered last heard nothing of
    them after a loss in tiles.
    """

    def listeners() -> list[Any]:
        link, found = torch._C._get_obj_in_tls(_torch_listen._IN_ENGINE), []
        while link is not None:
            found.append(link.hear)
            link = link.outer
        return found

    with gf.meter() as outer, gf.meter() as inner:
        assert listeners() == [inner._observe, outer._observe]
        _OfParts()(torch.ones(2))
        assert listeners() == [inner._observe, outer._observe]


def test_a_mode_that_only_its_stack_holds_is_taken_away_safely() -> None:
    """torch 2.10 frees it before it has returned it; what is made next is then overwritten."""

    class Passes(_torch_listen.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    for _ in range(300):
        before = _torch_listen.ThreadState()
        Passes().__enter__()
        before.restore()
        assert all(type(one) is object for one in [object() for _ in range(100)])
    assert not left_over()


def test_hooks_that_are_left_later_than_the_scope_they_were_entered_in_stay() -> None:
    """As two hooks of a module, which run in the order in which they were registered."""
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    scope = gf.CheckpointScope("a")
    scope.__enter__()
    theirs.__enter__()
    scope.__exit__(None, None, None)
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert top[0] is theirs.pack_hook
    theirs.__exit__(None, None, None)
    assert not left_over()


def test_nothing_is_stashed_where_nobody_listens_in_the_engine() -> None:
    """torch copies what is stashed for each node of a graph, in every program that imports us."""
    with gf.CheckpointScope("s"):
        torch.ones(2, requires_grad=True).exp().sum()
    assert not torch._C._is_key_in_tls("gradfit.probe")
