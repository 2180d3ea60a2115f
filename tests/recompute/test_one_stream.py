"""A profile and a plan number operations alike: a forward never leaves a plan made from its
profile.

See `one_stream_programs`.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from one_stream_programs import EXTRA, judge
from torch import nn

import gradfit as gf

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what random programs do
SAMPLED, WHOLE, CHILD = 40, 4000, 100


class Pooled(nn.Module):
    """torch pools without a gradient by another operator than under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool1d(x[:, None], 3, 1, 1)[:, 0]
        return torch.tanh(self.layer(y)).sin().cos()


class AddsSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.layer(x) * 2
        z.add_(torch.ones_like(z).to_sparse())
        return torch.tanh(z).sin().cos()


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("kind", [Pooled, AddsSparse])
def test_a_plan_fits_its_own_profile(kind: type[nn.Module]) -> None:
    """In `apply`, in `audit`, which looks at every result, and in the steps of `fit`."""
    torch.manual_seed(0)
    model, batch = kind(), torch.randn(16, 8)
    profile = gf.profile(model, square, batch)
    plan = gf.frontier(profile, points=2)[-1]
    assert not plan.keeps_everything
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with gf.meter(model), gf.apply(model, plan):
                loss = square(model, batch)
            loss.backward()
        report = gf.audit(model, square, batch, plan=plan)
    assert report.identical
    assert not report.notes


def test_profiles_are_not_made_under_a_dispatch_mode() -> None:
    """There torch pools by an operator that finds indices, which nobody asks for without a
    gradient.
    """
    profile = gf.profile(Pooled(), square, torch.randn(16, 8))
    assert "aten.max_pool2d_with_indices.default" not in [
        operation.name for operation in profile.operations
    ]


@pytest.mark.parametrize("name", sorted(EXTRA))
def test_programs_of_what_is_numbered_differently_elsewhere(name: str) -> None:
    verdicts = [judge(seed, [name, name, "tanh", "mul_"]) for seed in range(6)]
    assert set(verdicts) <= {"equal", "refused"}, verdicts
    assert "equal" in verdicts


@pytest.mark.parametrize("first", range(0, SAMPLED, 10))
def test_random_programs_follow_plans_from_their_own_profile(first: int) -> None:
    verdicts = {seed: judge(seed) for seed in range(first, first + 10)}
    assert not {
        seed: verdict for seed, verdict in verdicts.items() if verdict not in ("equal", "refused")
    }


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLED, WHOLE, CHILD))
def test_all_random_programs_follow_plans_from_their_own_profile(first: int) -> None:
    verdicts = {seed: judge(seed) for seed in range(first, first + CHILD)}
    assert not {
        seed: verdict for seed, verdict in verdicts.items() if verdict not in ("equal", "refused")
    }
