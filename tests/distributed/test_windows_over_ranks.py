"""What ranks decide together: windows of different lengths, skips, flushes, failures; and what they
send.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from distributed_jobs import CountCalls, Net, full, largest_difference, wrap
from distributed_pool import Pool
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import gradfit as gf
from gradfit._torch_fsdp import param_groups


def models(how: str, size: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    inner = Net().double()
    reference = copy.deepcopy(inner)
    return wrap(inner, how, size), reference


def rows(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- how many windows ----------------------------------------------------------------------------


def uneven_epoch(rank: int, size: int, how: str) -> Any:
    """Rank r has 3 + 2r micro-batches and windows of 2; the scheduler must be the same for those
    that have run out.
    """
    model, reference = models(how, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    data = [[rows(10 * r + i, 1 + (r + i) % 3) for i in range(3 + 2 * r)] for r in range(size)]
    for part in data[rank]:
        acc.backward(model(part).square().mean(), weight=len(part))
        if acc.step():
            scheduler.step()
    acc.flush()
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    updates = max((3 + 2 * r + 1) // 2 for r in range(size))
    for number in range(updates):
        batch = torch.cat([part for mine in data for part in mine[2 * number : 2 * number + 2]])
        alone.zero_grad()
        reference(batch).square().mean().backward()
        alone.step()
        for group in alone.param_groups:
            group["lr"] *= 0.5
    return largest_difference(model, reference), acc.windows, updates


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ranks_with_less_data_take_part_until_all_flush(pair: Pool, how: str) -> None:
    for difference, windows, updates in pair.run(uneven_epoch, how):
        assert difference < 1e-10
        assert windows == updates


def closures(rank: int, size: int, how: str) -> float:
    """The windows come in when the optimizer's steps have begun."""
    model, reference = models(how, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    for number in range(2):
        parts = [[rows(10 * r + 2 * number + i, 2 + r + i) for i in range(2)] for r in range(size)]

        def closure(mine: list[torch.Tensor] = parts[rank]) -> float:
            optimizer.zero_grad()
            for part in mine:
                acc.backward(model(part).square().mean(), weight=len(part))
            return 0.0

        optimizer.step(closure)
        alone.zero_grad()
        batch = torch.cat([part for mine in parts for part in mine])
        reference(batch).square().mean().backward()
        alone.step()
    return largest_difference(model, reference)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_windows_in_closures_are_those_of_all_ranks(pair: Pool, how: str) -> None:
    for difference in pair.run(closures, how):
        assert difference < 1e-10


def stepped_by_hand(rank: int, size: int, how: str, clears_early: bool) -> float:
    """That a window is over is seen when its gradients are cleared, as late as after the forward of
    the next one.
    """
    model, reference = models(how, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    acc = gf.GradientAccumulator(parameters=model.parameters(), steps=2)
    for number in range(6):
        parts = [rows(10 * r + number, 3) for r in range(size)]
        loss = model(parts[rank]).square().mean()
        if not (number % 2 or clears_early):
            optimizer.zero_grad()
            assert acc.current_step == 0
        loss.backward()
        sum(reference(part).square().mean() / (2 * size) for part in parts).backward()  # type: ignore[union-attr]
        if acc.is_ready:
            optimizer.step()
            alone.step()
            alone.zero_grad()
            if clears_early:
                optimizer.zero_grad()
    return largest_difference(model, reference)


@pytest.mark.parametrize("clears_early", [True, False])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_windows_of_an_optimizer_that_is_not_known(
    pair: Pool, how: str, clears_early: bool
) -> None:
    for difference in pair.run(stepped_by_hand, how, clears_early):
        assert difference < 1e-10


def nothing_anywhere(rank: int, size: int) -> Any:
    model, _ = models("ddp", size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    return acc.flush().reason


def test_a_flush_of_nothing(pair: Pool) -> None:
    assert pair.run(nothing_anywhere) == ["empty window"] * 2


# -- what is sent --------------------------------------------------------------------------------


def traffic(rank: int, size: int, how: str, micro_batches: int) -> dict[str, int]:
    model, _ = models(how, size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=micro_batches)
    with CountCalls() as counts:
        for number in range(micro_batches):
            acc.backward(model(rows(number, 2)).square().mean(), weight=2)
            acc.step()
    assert acc.windows == 1
    return counts


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_all_reduce_per_window(pair: Pool, micro_batches: int) -> None:
    for counts in pair.run(traffic, "ddp", micro_batches):
        assert counts["all_reduce"] == 1
        assert counts["reduce_scatter_tensor"] == counts["reduce_scatter_single"] == 0


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_reduce_scatter_per_unit_and_window(pair: Pool, micro_batches: int) -> None:
    for counts in pair.run(traffic, "fsdp", micro_batches):
        # two blocks and the root
        assert counts["reduce_scatter_tensor"] + counts["reduce_scatter_single"] == 3
        assert counts["all_reduce"] == 1  # the norm


# -- what is skipped -----------------------------------------------------------------------------


def one_bad_micro_batch(rank: int, size: int, how: str, isolate: bool, scaler: bool) -> Any:
    model, reference = models(how, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaler else None
    acc = gf.GradientAccumulator(
        optimizer, steps=2, isolate=isolate, on_nonfinite="skip", scaler=loss_scaler
    )
    before = [full(p).clone() for p in model.parameters()]
    for number in range(2):
        part = rows(10 * rank + number, 3)
        if rank == 1 and number == 0:
            part[0, 0] = float("nan")
        acc.backward(model(part).square().mean(), weight=3)
        result = acc.step()
    unchanged = all(
        torch.equal(a, full(b)) for a, b in zip(before, model.parameters(), strict=True)
    )
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(torch.cat([rows(0, 3), rows(1, 3), rows(11, 3)])).square().mean().backward()
    alone.step()
    scale = loss_scaler.get_scale() if loss_scaler is not None else 0.0
    return result, unchanged, largest_difference(model, reference), scale


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_costs_the_window_on_all(pair: Pool, how: str, scaler: bool) -> None:
    answers = pair.run(one_bad_micro_batch, how, False, scaler)
    for result, unchanged, _, scale in answers:
        assert (result.stepped, result.reason) == (False, "non-finite gradient")
        assert unchanged
        assert scale == (2.0**7 if scaler else 0.0)


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_isolated_it_costs_one_micro_batch(pair: Pool, how: str, scaler: bool) -> None:
    for result, _, difference, scale in pair.run(one_bad_micro_batch, how, True, scaler):
        assert (result.stepped, result.weight, result.skipped, result.micro_batches) == (
            True,
            9,
            1,
            3,
        )
        assert difference < 1e-10
        assert scale == (2.0**7 if scaler else 0.0)


# -- who waits for whom --------------------------------------------------------------------------


def one_rank_raises(rank: int, size: int, where: str) -> Any:
    model, _ = models("ddp", size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    try:
        loss = (
            model(rows(0, 2) if rank == 0 or where != "forward" else rows(0, 2)[:, :3])
            .square()
            .mean()
        )
        if rank == 1 and where == "backward":
            loss.register_hook(_refuse)
        acc.backward(loss)
        acc.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _refuse(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("no gradient today")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        pytest.param("forward", "mat1 and mat2", marks=pytest.mark.slow),
        ("backward", "no gradient today"),
    ],
)
def test_the_others_hear_which_rank_failed_and_why(where: str, says: str) -> None:
    with Pool(2, timeout_seconds=3) as pool:
        (name, text), (other, _) = pool.run(one_rank_raises, where)
    assert name == "RankFailed"
    assert "rank 1 raised" in text
    assert says in text
    assert other in ("RuntimeError", "ValueError")


def half_a_pass(rank: int, size: int) -> Any:
    """A pass that died half-way is found out at the end of the window, by all ranks, without
    waiting.
    """
    model, _ = models("ddp", size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    loss = model(rows(rank, 2)).square().mean()
    if rank == 1:
        handle = next(model.parameters()).register_hook(_refuse)
        with pytest.raises(ValueError, match="today"):
            acc.backward(loss)
        handle.remove()
    else:
        acc.backward(loss)
    with pytest.raises(gf.GradfitError) as caught:
        acc.flush()
    acc.reset()
    acc.backward(model(rows(rank, 2)).square().mean())
    return type(caught.value).__name__, str(caught.value), acc.flush().stepped


def test_half_a_micro_batch_stops_all_ranks_at_once(pair: Pool) -> None:
    (waiting, text, again), (failed, _, again_there) = pair.run(half_a_pass)
    assert (waiting, failed) == ("RankFailed", "MisuseError")
    assert "On rank 1" in text
    assert (again, again_there) == (True, True)


# -- flags ---------------------------------------------------------------------------------------


def flags(rank: int, size: int) -> Any:
    ddp, _ = models("ddp", size)
    acc = gf.GradientAccumulator(torch.optim.SGD(ddp.parameters(), lr=0.1), steps=2)
    seen = []
    inside = []
    ddp.module.register_forward_hook(lambda *_: inside.append(ddp.require_backward_grad_sync))
    for number in range(2):
        acc.backward(ddp(rows(number, 2)).square().mean())
        seen.append(ddp.require_backward_grad_sync)
        acc.step()
    with ddp.no_sync():
        acc.backward(ddp(rows(5, 2)).square().mean())
        seen.append(not ddp.require_backward_grad_sync)
    acc.flush()
    acc.disable_accumulation()
    with CountCalls() as counts:
        ddp(rows(rank, 2)).square().mean().backward()  # DDP by itself again: averaged
    gradients = [p.grad.clone() for p in ddp.parameters()]
    torch.distributed.all_reduce(total := gradients[0].clone())
    sharded, _ = models("fsdp", size)
    acc = gf.GradientAccumulator(torch.optim.SGD(sharded.parameters(), lr=0.1), steps=2)
    units = [m for m in sharded.modules() if isinstance(m, FSDPModule)]
    # what the user has set stays
    param_groups(units[0])[0].reduce_grads = False
    before = [param_groups(unit)[0].reduce_grads for unit in units]
    acc.backward(sharded(rows(0, 2)).square().mean())
    middle = [param_groups(unit)[0].reduce_grads for unit in units]
    acc.flush()
    after = [param_groups(unit)[0].reduce_grads for unit in units]
    same = torch.allclose(total / size, gradients[0])
    return seen, inside[:2], same, counts["all_reduce"], middle, before == after


def test_flags_are_what_the_user_set(pair: Pool) -> None:
    for seen, inside, averaged, _, middle, restored in pair.run(flags):
        assert all(seen)
        assert inside == [False, False]
        assert averaged
        assert not any(middle)
        assert restored


# -- DDP's own options ---------------------------------------------------------------------------


class Odd(nn.Module):
    """A parameter that only some inputs use, running statistics, a frozen weight, a sparse
    embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
        self.always.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.words(torch.arange(len(x)) % 5)
        return self.sometimes(x) if x.shape[0] == 3 else self.always(self.norm(x))


def odd_model(rank: int, size: int, options: dict[str, bool]) -> Any:
    torch.manual_seed(1)
    inner = Odd().double()
    model = DistributedDataParallel(inner, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    for number in range(4):
        acc.backward(model(rows(number, 3 if rank else 2)).square().mean(), weight=2)
        acc.step()
    return [full(p) for p in inner.parameters()], [b.clone() for b in inner.buffers()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
)
def test_unused_parameters_sparse_gradients_and_buffers(
    pair: Pool, options: dict[str, bool]
) -> None:
    (first, buffers), (second, other) = pair.run(odd_model, options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, other, strict=True))
    assert buffers[2].item() == 4  # batches that the norm has seen on rank 0


def not_all_wrapped(rank: int, size: int) -> str:
    model, _ = models("ddp", size)
    extra = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1)
    with pytest.raises(gf.MisuseError) as caught:
        gf.GradientAccumulator(optimizer, steps=2)
    return str(caught.value)


def test_a_parameter_outside_the_wrapper_is_named(pair: Pool) -> None:
    for text in pair.run(not_all_wrapped):
        assert "shape (2, 2)" in text
        assert "Wrap" in text


def wrapped_too_late(rank: int, size: int, plain: bool) -> str:
    torch.manual_seed(0)
    inner = Net().double()
    acc = gf.GradientAccumulator(torch.optim.SGD(inner.parameters(), lr=0.1), steps=2)
    model = DistributedDataParallel(inner)
    loss = model(rows(rank, 2)).square().mean()
    run = loss.backward if plain else functools.partial(acc.backward, loss)
    with pytest.raises(gf.MisuseError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize("plain", [False, True])
def test_a_model_wrapped_after_the_accumulator_was_made_is_refused(pair: Pool, plain: bool) -> None:
    for text in pair.run(wrapped_too_late, plain):
        assert "Make the accumulator after" in text
