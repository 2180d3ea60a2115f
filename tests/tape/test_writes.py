"""Writes to what the tape has read: parameters, statistics, buffers of custom operators, tensors
without a counter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf


def both(program: Callable[[Any], list[Any]]) -> None:
    """Run a program with a scope and without: same bits, same RNG state afterwards."""
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        found = program(functools.partial(gf.CheckpointScope, "s", enabled=enabled))
        results.append([*found, torch.get_rng_state()])
    for number, (plain, ours) in enumerate(zip(*results, strict=True)):
        assert torch.equal(plain, ours), f"result {number}"


def test_an_embedding_that_renormalises_itself_at_each_use() -> None:
    def program(scope: Any) -> list[Any]:
        table = nn.Embedding(10, 4, max_norm=0.5)
        x = torch.randn(3, 4, requires_grad=True)
        with scope():
            h = (table(torch.tensor([1, 2, 3])) * x).exp().sin()
            loss = (table(torch.tensor([4, 2, 5])) * h).tanh().sum()
        return [*torch.autograd.grad(loss, [x, table.weight]), table.weight.detach()]

    both(program)


@pytest.mark.parametrize("way", ["no_grad", "data", "foreach", "copy_"])
def test_a_parameter_written_to_after_it_was_read(way: str) -> None:
    """torch itself does not need the old one, so neither may we."""

    def program(scope: Any) -> list[Any]:
        layer = nn.Linear(4, 4)
        x = torch.randn(3, 4)
        with scope():
            h = (layer(x) * layer.bias).sin()
            h = (h + layer.weight.t()[:3]).exp()
            with torch.no_grad():
                if way == "no_grad":
                    layer.weight.mul_(0.5)
                elif way == "data":
                    layer.weight.data.mul_(0.5)
                elif way == "foreach":
                    torch._foreach_mul_([layer.weight], 0.5)
                else:
                    layer.weight.view(-1)[3:7].copy_(torch.ones(4))
            loss = (h + layer.weight[:3]).tanh().sum()
        return [*torch.autograd.grad(loss, [layer.weight, layer.bias]), layer.weight.detach()]

    both(program)


def test_parameters_are_not_copied_for_a_graph_that_is_gone() -> None:
    layer = nn.Linear(256, 256)
    x = torch.randn(2, 256)
    with gf.meter() as meter, gf.CheckpointScope("s"):
        meter.watch(layer)
        layer(x).sin().sum().backward()
        before = meter.current_bytes
        with torch.no_grad():
            layer.weight.mul_(0.5)
        assert meter.current_bytes <= before


def test_a_frozen_parameter_that_gets_a_history() -> None:
    def program(scope: Any) -> list[Any]:
        slot = nn.Parameter(torch.ones(4), requires_grad=False)
        x = torch.randn(4, requires_grad=True)
        with scope():
            slot.copy_(x.sin())
            h = (slot + 2).sin()
            slot.add_(1)
            loss = (slot + h).exp().sum()
        return [*torch.autograd.grad(loss, [x]), slot.detach()]

    both(program)


@torch.library.custom_op("gradfit_tests::add_in", mutates_args=("total",))
def add_in(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x)


def test_a_custom_operator_that_writes() -> None:
    """torch changes the version counters of what it writes to before it runs, not after."""

    def program(scope: Any) -> list[Any]:
        x, total = torch.randn(4, requires_grad=True), torch.zeros(4)
        weight = nn.Parameter(torch.randn(4))
        with scope():
            h = (x + total + weight).exp().sin()
            with torch.no_grad():
                add_in(total, h.detach())
                add_in(weight.detach(), h.detach())
            h = (h + total + weight).exp()
            with torch.no_grad():
                add_in(total, h.detach())
            loss = (h + total).tanh().sum()
        return [*torch.autograd.grad(loss, [x, weight]), total, weight.detach()]

    both(program)


def test_another_thread_writes_right_after_a_recorded_write() -> None:
    def program(scope: Any) -> list[Any]:
        x = torch.randn(4, requires_grad=True)
        with scope():
            h = x.sin() * 2
            h.mul_(0.5)
            alias = h.detach()
            thread = threading.Thread(target=lambda: alias.add_(1))
            thread.start()
            thread.join()
            loss = (h * x).exp().sum()
        return [*torch.autograd.grad(loss, [x])]

    both(program)


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_running_statistics_updated_under_inference_mode(kind: str) -> None:
    """There composite operators are heard as a whole, and they too say nothing of what they write
    to.
    """

    def program(scope: Any) -> list[Any]:
        norm: Any = (
            nn.BatchNorm1d(4) if kind == "batch" else nn.InstanceNorm1d(4, track_running_stats=True)
        )
        x = torch.randn(3, 4, 5, requires_grad=True)
        with scope():
            with torch.inference_mode():
                teacher = F.rrelu(F.dropout(norm(x.detach()), 0.3), training=True)
            loss = (x.sin() * teacher.clone()).exp().sum()
        return [*torch.autograd.grad(loss, [x]), *norm.buffers()]

    both(program)


def test_parameters_made_under_inference_mode() -> None:
    def program(scope: Any) -> list[Any]:
        x = torch.randn(3, 4, requires_grad=True)
        with scope():
            with torch.inference_mode():
                teacher = nn.LSTM(4, 4, 2, dropout=0.5)(x.detach())[0]
            loss = (x.sin() * teacher.clone()).exp().sum()
        return list(torch.autograd.grad(loss, [x]))

    both(program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_made_from_activations() -> None:
    def program(scope: Any) -> list[Any]:
        a, b = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        layer = nn.Linear(4, 4)
        with scope():
            nested = torch.nested.as_nested_tensor([a.sin(), b.sin()])
            loss = torch.nested.to_padded_tensor(layer(nested).relu(), 0.0).exp().sum()
        return list(torch.autograd.grad(loss, [a, b, layer.weight]))

    both(program)
