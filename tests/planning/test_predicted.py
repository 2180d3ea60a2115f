"""What a plan predicts is what a step takes: the peak at the measured size, and at sizes that were
not measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import gradfit as gf
from gradfit.recompute.follow_plan import Script, recording
from gradfit.tree import repeat_rows, split_batch

sys.path.append(str(Path(__file__).parents[1] / "profiling"))
from profiling_models import make


def measured(name: str, plan: gf.Plan) -> int:
    """The peak of a step in the plan's micro-batches, without an optimizer."""
    model, batch, loss_fn = make(name)
    batch = repeat_rows(batch, plan.batch_size)
    with gf.meter(model, batch) as live:
        for part in split_batch(batch, plan.micro_batch):
            recorder, policy = recording(Script(plan))
            with recorder:
                result = loss_fn(model, part)
                loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            assert policy.diverged is None
            del loss, result
    return live.peak_bytes


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "vit", "resnet", "perceptron"])
def test_the_peak_is_predicted(name: str) -> None:
    model, batch, loss_fn = make(name)
    found = gf.profile(model, loss_fn, batch)
    plain = gf.plan(found, memory="1 GiB")
    smallest = gf.frontier(found, points=2)[-1]
    for plan in (
        plain,
        gf.plan(found, memory=(plain.peak_bytes + smallest.peak_bytes) // 2),
        smallest,
    ):
        assert measured(name, plan) == pytest.approx(plan.peak_bytes, rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "resnet"])
def test_the_peak_of_other_micro_batches_is_predicted(name: str) -> None:
    model, batch, loss_fn = make(name)
    found = gf.profile(model, loss_fn, batch)  # four rows and two
    for size in (2, 3, 7):
        plain = gf.plan(found, memory="1 GiB", batch_size=2 * size, micro_batch=size, exact=False)
        assert measured(name, plain) == pytest.approx(plain.peak_bytes, rel=0.05)


def test_a_prediction_beyond_what_was_measured() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    )

    def loss_fn(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()

    found = gf.profile(model, loss_fn, torch.randn(16, 64))
    for share in (1.0, 0.6):
        plain = gf.plan(found, memory="1 GiB", batch_size=256, micro_batch=256)
        plan = gf.plan(found, memory=int(plain.peak_bytes * share), batch_size=256, micro_batch=256)
        batch = torch.randn(256, 64)
        with gf.meter(model, batch) as live:
            with gf.apply(model, plan):
                loss = loss_fn(model, batch)
            loss.backward()
            del loss
        assert live.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
        model.zero_grad()
