"""Passes in which gradients are compared, watched for a profile on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.snapshot import untouched
from gradfit.profiling.measure import additivity_within
from gradfit.profiling.meter import meter
from gradfit.profiling.room_for_rows import RoomForRows, WatchedPasses
from gradfit.profiling.sampled_sizes import MeasuredStep, SizeSampler
from gradfit.profiling.trace import Trace
from gradfit.tree import split_batch

ROWS, WORDS = 8, 11


class Words(nn.Module):
    """A model of words with its embedding as its head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = gf.name(h + self.dropout(torch.tanh(layer(h))), "h")
        logits: torch.Tensor = self.norm(h) @ self.embedding.weight.t()
        return logits


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)


def counted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    logits = model(batch["x"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(
        model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none"
    )
    weights = (batch["x"] % 3 + 1).flatten().float()
    return (losses * weights).sum() / weights.sum()


def in_two_terms(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["x"])
    second = F.mse_loss(logits[batch["x"] > 3], torch.zeros(()))
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) + second


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    noise = torch.randn(batch["x"].shape)[..., None]
    return (model(batch["x"]) + noise).square().mean()


def words(padded: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.randint(0, WORDS, (ROWS, 5))
    if padded:
        y[::2, 3:] = -100
    return {"x": torch.randint(0, WORDS, (ROWS, 5)), "y": y}


def split(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    starts = range(0, len(batch["x"]), size)
    return [{name: t[at : at + size] for name, t in batch.items()} for at in starts]


def shared(
    model: nn.Module, loss_fn: Any, batch: Any, memory: int = 1 << 30, cut: Any = None
) -> tuple[Additivity, dict[int, Trace]]:
    """What is measured of the loss, and of its passes."""
    room = RoomForRows(model, loss_fn, batch, cut, memory)
    passes = WatchedPasses(model, room, 1 << 20)
    with untouched(model) as before:
        found = additivity_within(model, loss_fn, batch, cut, room, before.rewind, passes)
    return found, passes.traces


def watched(model: nn.Module, loss_fn: Any, part: Any) -> Trace:
    """The same passes by themselves."""
    with untouched(model):
        sampler = SizeSampler(MeasuredStep(model, loss_fn, part, None, None), 2, 6 << 20, meter)
        return sampler.watch(part)


def said_of(trace: Trace) -> list[Any]:
    """All that a profile takes from a trace but seconds, places in memory and lines of code."""
    made = [value for value in trace.values if value.operation is not None]
    return [
        [(op.name, op.inputs, op.outputs, op.replayable, op.random) for op in trace.operations],
        [(op.module, op.workspace_bytes, op.overwrites) for op in trace.operations],
        [(v.nbytes, v.operation, v.storage, v.dies, v.overwritten) for v in made],
        [(n.name, n.needs, n.before_bytes, n.peak_bytes, n.after_bytes) for n in trace.nodes],
        [n.gradient_bytes for n in trace.nodes],
    ]


@pytest.mark.parametrize("loss_fn", [mean, counted, weighted])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cut", [None, split])
def test_they_say_what_passes_by_themselves_do(loss_fn: Any, padded: bool, cut: Any) -> None:
    torch.manual_seed(1)
    model, batch = Words(), words(padded and loss_fn is mean)
    found, traces = shared(model, loss_fn, batch, cut=cut)
    assert found.adds_up
    assert sorted(traces) == [2, 3]
    for rows, trace in traces.items():
        part = next(iter(split_batch(batch, rows)))
        assert said_of(trace) == said_of(watched(model, loss_fn, part))


@pytest.mark.parametrize(
    ("make", "loss_fn"), [(lambda: Words(dropout=0.1), mean), (Words, noisy)], ids=["mask", "noise"]
)
def test_passes_that_leave_out_what_is_random_are_not_watched(
    make: Callable[[], nn.Module], loss_fn: Any
) -> None:
    found, traces = shared(make(), loss_fn, words())
    assert found.adds_up
    assert traces == {}


def test_where_there_is_no_room_for_a_second_set_of_gradients_only_the_first_part_is_watched() -> (
    None
):
    torch.manual_seed(1)
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.rand(8, 64)
    static = sum(p.nbytes for p in model.parameters()) + batch.nbytes

    def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    found, traces = shared(model, square, batch, memory=int(2.6 * static))
    assert found.adds_up
    assert len(traces) == 1


def test_a_part_without_items_gives_no_trace_and_changes_nothing() -> None:
    model, batch = Words(), words()
    batch["y"][:2] = -100
    before = [p.detach().clone() for p in model.parameters()]
    found, traces = shared(model, mean, batch)
    assert all(trace.nodes for trace in traces.values())
    assert found == shared(model, mean, batch)[0]
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("make_loss", [mean, in_two_terms])
def test_what_is_measured_of_the_loss_is_the_same(make_loss: Any) -> None:
    model, batch = Words(), words()
    room = RoomForRows(model, make_loss, batch, None, 1 << 30)
    with untouched(model) as before:
        plain = additivity_within(model, make_loss, batch, None, room, before.rewind)
    assert shared(model, make_loss, batch)[0] == plain


def test_a_hook_that_clamps_is_found_all_the_same() -> None:
    model = Words()
    model.layers[1].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    assert not shared(model, mean, words())[0].adds_up


def test_fit_runs_no_rows_for_the_profile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfit.profiling import traced_seconds

    monkeypatch.setattr(traced_seconds, "_ENOUGH_SECONDS", 0.0)
    model, seen = Words(), []

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(batch["x"]))
        return mean(model, batch)

    step = gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), noted, words(), "64 MiB")
    assert step.plan.keeps_everything
    # room, values, gradients, and the whole batch tried out; the last few to see nothing is frozen
    assert seen[-9:] == [1, 4, 1, 1, 5, 2, 1, 3, ROWS]


def test_a_loss_that_runs_otherwise_where_gradients_are_compared_is_measured_by_itself() -> None:
    """It is not taken for one whose operations depend on the data."""

    def otherwise(model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch._C._len_torch_function_stack():
            batch = {"x": batch["x"].neg().neg(), "y": batch["y"]}
        return mean(model, batch)

    torch.manual_seed(1)
    model, batch = Words(), {name: tensor[:3] for name, tensor in words().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, otherwise, batch, "64 MiB", rebuild=("h",))
    assert not step.plan.online
    assert not step.plan.keeps_everything
