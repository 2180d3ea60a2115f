"""Storages that are written slice by slice, as RNN cells write their gates: only saved slices are
retained.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import gradfit as gf
from gradfit.tape.values import geometry_of
from gradfit.tape.written_slices import _are_apart, spread

ROWS, STEPS, WIDTH, HIDDEN = 8, 12, 16, 32
Run = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


def sequences() -> torch.Tensor:
    return torch.randn(ROWS, STEPS, WIDTH, generator=torch.Generator().manual_seed(0))


def packed() -> Any:
    return pack_padded_sequence(sequences(), [STEPS - row for row in range(ROWS)], batch_first=True)


CELLS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Any]]] = {
    "GRU": (lambda: torch.nn.GRU(WIDTH, HIDDEN, batch_first=True), sequences),
    "GRU, two layers, both ways": (
        lambda: torch.nn.GRU(WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=True),
        sequences,
    ),
    "packed GRU": (lambda: torch.nn.GRU(WIDTH, HIDDEN, batch_first=True), packed),
    "packed LSTM": (lambda: torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True), packed),
    "projected LSTM": (
        lambda: torch.nn.LSTM(WIDTH, HIDDEN, proj_size=8, batch_first=True),
        sequences,
    ),
}


def plainly(loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    return loss()


def in_a_scope(loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    with gf.CheckpointScope("cell"):
        return loss()


def by_torch(loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = checkpoint(loss, use_reentrant=False)
    return result


def measured(name: str, run: Run) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes held between forward and backward, the peak of both, and the gradients."""
    make, batch = CELLS[name]
    torch.manual_seed(0)
    model, x = make(), batch()

    def loss() -> torch.Tensor:
        out = model(x)[0]
        tensor: torch.Tensor = out if isinstance(out, torch.Tensor) else out.data
        return tensor.square().sum()

    with gf.meter(model) as meter:
        result = run(loss)
        held = meter.current_bytes
        result.backward()
    return held, meter.peak_bytes, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_takes_no_more_than_plain_or_torchs_checkpoint(name: str) -> None:
    plain_held, plain_peak, expected = measured(name, plainly)
    held, peak, gradients = measured(name, in_a_scope)
    _, torch_peak, _ = measured(name, by_torch)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert peak <= plain_peak
    assert peak <= torch_peak
    assert held < plain_held / 2


def test_slices_side_by_side_are_rebuilt_as_they_were() -> None:
    """Each with the strides that it had, and all of them with what they held when they were
    saved.
    """
    saved: list[tuple[Any, torch.Tensor]] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            saved.append((geometry_of(x)[:2], x.clone()))
            return 2 * x * gradient

    def run(scope: Any) -> list[Any]:
        saved.clear()
        torch.manual_seed(0)
        w = torch.randn(6, 6, requires_grad=True)
        with scope:
            base = w @ w
            first, second, third = base.unsafe_chunk(3, 1)
            first.sigmoid_()
            a = Square.apply(first)
            second.tanh_()
            b = Square.apply(second) + Square.apply(first)
            third.mul_(first)
            loss = (a + b + third).sum()
        loss.backward()
        return [*saved, w.grad]

    plain, ours = run(contextlib.nullcontext()), run(gf.CheckpointScope("s"))
    assert torch.equal(plain[-1], ours[-1])
    assert len(plain) == len(ours) == 4
    for (strides, content), (other_strides, other) in zip(plain[:-1], ours[:-1], strict=True):
        assert strides == other_strides
        assert torch.equal(content, other)


def test_a_write_through_a_chunk_is_seen_by_who_reads_another_view() -> None:
    """Chunks count their writes by themselves; the tape knows that all of them lie in one
    storage.
    """

    def run(scope: Any) -> torch.Tensor | None:
        torch.manual_seed(0)
        w = torch.randn(4, 4, requires_grad=True)
        with scope:
            base = w * 2
            left, right = base.unsafe_chunk(2, 1)
            left.sin_()
            right.add_(left)
            left.mul_(3)
            loss = ((left * right).sin() * base.detach()[:, :2]).sum()
        loss.backward()
        return w.grad

    plain, ours = run(contextlib.nullcontext()), run(gf.CheckpointScope("s"))
    assert plain is not None
    assert ours is not None
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ((slice(None), slice(0, 2)), (slice(None), slice(2, 4)), True),
        ((slice(None), slice(0, 3)), (slice(None), slice(2, 4)), False),
        ((slice(0, 2),), (slice(2, 6),), True),
        ((slice(0, 3),), (slice(2, 6),), False),
        ((slice(None), slice(1, 2)), (slice(None), slice(4, 6)), True),
        ((slice(0, 1),), (slice(None), slice(2, 3)), False),
        ((slice(0, 6, 2),), (slice(1, 6, 2),), True),
        (
            (slice(None), slice(0, 6, 2)),
            (slice(None), slice(1, 6, 2)),
            False,
        ),  # they are, but nobody looks so closely
    ],
)
def test_which_slices_are_apart(one: Any, other: Any, apart: bool) -> None:
    base = torch.arange(36.0).view(6, 6)
    a, b = base[one], base[other]
    shared = set(a.flatten().tolist()) & set(b.flatten().tolist())
    assert _are_apart(geometry_of(a), geometry_of(b)) is apart
    assert not (apart and shared)


def test_slices_that_are_apart_share_nothing() -> None:
    dice, found = random.Random(0), 0
    base = torch.arange(400.0)
    for _ in range(3000):
        slices = []
        for _ in range(2):
            size = [dice.randint(1, 4) for _ in range(dice.randint(1, 3))]
            slices.append(
                base.as_strided(
                    size, [dice.choice([1, 2, 5, 12, 24]) for _ in size], dice.randrange(40)
                )
            )
        if _are_apart(geometry_of(slices[0]), geometry_of(slices[1])):
            found += 1
            assert not set(slices[0].flatten().tolist()) & set(slices[1].flatten().tolist())
    assert found > 300


def test_a_part_is_spread_to_where_it_lay() -> None:
    base = torch.arange(200.0).view(10, 20)
    piece = base[2:8, 3:7]
    again = spread(piece.contiguous(), geometry_of(piece))
    assert torch.equal(again, piece)
    assert again.stride() == piece.stride()
    assert (again.data_ptr() - piece.data_ptr()) % 64 == (
        again.untyped_storage().data_ptr() - base.data_ptr()
    ) % 64
