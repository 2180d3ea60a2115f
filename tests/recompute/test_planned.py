"""A plan at work on a model: as a block, as hooks, offloading, from JSON; and without a trace when
removed.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import warnings

import pytest
import torch
from recompute_models import build
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfit as gf


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        for _ in range(6)
    ]
    return nn.Sequential(*blocks), torch.randn(64, 32)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@functools.cache
def bounds(host_bandwidth: float) -> tuple[gf.Profile, int, int]:
    """What `network` does, and the peaks of keeping everything and of the least."""
    model, batch = network()
    found = gf.profile(model, square, batch, host_bandwidth=host_bandwidth)
    plain, smallest = gf.plan(found, memory="1 GiB"), gf.frontier(found, points=2)[-1]
    return found, plain.peak_bytes, smallest.peak_bytes


def plan_for(share: float, *, host_bandwidth: float = 0.0) -> gf.Plan:
    """Of `network`, with this share of what is between the least and everything."""
    found, most, least = bounds(host_bandwidth)
    return gf.plan(found, memory=int(least + share * (most - least)))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def expected(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    square(plain, batch).backward()
    return gradients(plain)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("share", [0.8, 0.3, 0.0])
def test_as_a_block(share: float) -> None:
    model, batch = network()
    wanted, plan = expected(model, batch), plan_for(share)
    assert plan.kept_values < plan.saved_values
    torch.manual_seed(5)
    with gf.meter(model, batch) as live:
        with gf.apply(model, plan):
            loss = square(model, batch)
        loss.backward()
        del loss
    assert same(gradients(model), wanted)
    assert live.peak_bytes <= plan.peak_bytes


def test_as_hooks_until_removed() -> None:
    model, batch = network()
    wanted, plan = expected(model, batch), plan_for(0.6)
    before = (dict(model._forward_hooks), dict(model._forward_pre_hooks), model.__dict__.keys())
    handle = gf.apply(model, plan)
    assert "applied" in repr(handle)
    peaks = []
    for _ in range(2):
        torch.manual_seed(5)
        with gf.meter(model, batch) as live:
            square(model, batch).backward()
        assert same(gradients(model), wanted)
        peaks.append(live.peak_bytes)
        model.zero_grad()
    with torch.no_grad():
        square(model, batch)  # nothing to recompute
    handle.remove()
    handle.remove()
    assert "removed" in repr(handle)
    assert (
        dict(model._forward_hooks),
        dict(model._forward_pre_hooks),
        model.__dict__.keys(),
    ) == before
    torch.manual_seed(5)
    with gf.meter(model, batch) as live:
        square(model, batch).backward()
    assert same(gradients(model), wanted)
    assert max(peaks) < live.peak_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_inside_of_torchs_checkpoint_follows_no_plan(reentrant: bool) -> None:
    """It is called once more in the backward pass, where nothing is recorded."""
    model, batch = network()
    handle = gf.apply(model, plan_for(0.3))
    batch.requires_grad_()

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        batch.grad = None
        torch.manual_seed(5)

        def block(t: torch.Tensor) -> torch.Tensor:
            return model(t.sin()).cos() * t.exp()

        checkpoint(block, batch, use_reentrant=reentrant).sum().backward()
        return [leaf.grad.clone() for leaf in (batch, *model.parameters()) if leaf.grad is not None]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [run(), run()]
    handle.remove()
    wanted = run()
    assert same(found[0], wanted)
    assert same(found[1], wanted)


def test_an_error_in_the_forward_leaves_nothing_open() -> None:
    model, batch = network()
    wanted, plan = expected(model, batch), plan_for(0.6)
    handle = gf.apply(model, plan)
    with pytest.raises(RuntimeError, match="shapes"):
        model(batch[:, :7])
    torch.manual_seed(5)
    square(model, batch).backward()
    assert same(gradients(model), wanted)
    handle.remove()
    with pytest.raises(KeyError), gf.apply(model, plan):
        raise KeyError("inside the block")
    model.zero_grad()
    torch.manual_seed(5)
    square(model, batch).backward()
    assert same(gradients(model), wanted)


def test_another_computation_is_announced_and_exact() -> None:
    model, batch = network()
    plan = plan_for(0.6)
    longer = nn.Sequential(*model, nn.LayerNorm(32)).train()
    wanted = expected(longer, batch)
    torch.manual_seed(5)
    with (
        pytest.warns(UserWarning, match=r"no longer follows its plan: operation \d+ is"),
        gf.apply(longer, plan),
    ):
        loss = square(longer, batch)
    loss.backward()
    assert same(gradients(longer), wanted)


def test_a_plan_survives_json() -> None:
    model, batch = network()
    wanted, plan = expected(model, batch), plan_for(0.5)
    again = gf.Plan.from_json(plan.to_json())
    assert again == plan
    torch.manual_seed(5)
    with gf.apply(model, again):
        loss = square(model, batch)
    loss.backward()
    assert same(gradients(model), wanted)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_offloaded_values_come_back_and_their_file_is_closed() -> None:
    model, batch = network()
    wanted = expected(model, batch)
    plan = plan_for(0.5, host_bandwidth=1e13)  # so fast that it is always worth it
    assert "offload" in plan.actions
    gc.collect()
    before = open_files()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        torch.manual_seed(5)
        with gf.meter(model, batch) as live:
            with gf.apply(model, plan):
                loss = square(model, batch)
            assert open_files() == before + 1
            loss.backward()
            del loss
        assert same(gradients(model), wanted)
        assert live.peak_bytes <= plan.peak_bytes
        gc.collect()
        assert open_files() == before


def test_misuse() -> None:
    model, _ = network()
    plan = plan_for(0.6)
    with pytest.raises(gf.MisuseError, match=r"gf\.plan"):
        gf.apply(model, "plan")  # type: ignore[arg-type]
    with gf.apply(model, plan) as handle, pytest.raises(gf.MisuseError, match="entered already"):
        handle.__enter__()


@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.exact), "bert", "t5", "vit", "resnet"]
)
def test_real_models_between_the_least_and_everything(name: str) -> None:
    model, loss, _ = build(name)
    wanted_model = copy.deepcopy(model)
    torch.manual_seed(5)
    loss(wanted_model).backward()
    batch = torch.zeros(1)  # the models bring their own

    def loss_fn(m: nn.Module, _: torch.Tensor) -> torch.Tensor:
        return loss(m)

    found = gf.profile(model, loss_fn, batch)
    plain, smallest = gf.plan(found, memory="1 GiB"), gf.frontier(found, points=2)[-1]
    plan = gf.plan(found, memory=(plain.peak_bytes + smallest.peak_bytes) // 2)
    torch.manual_seed(5)
    with gf.apply(model, plan):
        result = loss(model)
    result.backward()
    assert same(gradients(model), gradients(wanted_model))
    for found_buffer, wanted in zip(model.buffers(), wanted_model.buffers(), strict=True):
        assert torch.equal(found_buffer, wanted)
