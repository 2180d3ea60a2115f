"""What goes wrong on one rank, and what users do to their models: the others go on, hear of it, and
nothing is off.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from typing import Any

import pytest
import torch
from distributed_jobs import Net, largest_difference, wrap
from distributed_pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gradfit as gf


def models(how: str, size: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    inner = Net().double()
    reference = copy.deepcopy(inner)
    return wrap(inner, how, size, **options), reference


def rows(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def fail_in(model: nn.Module, where: str) -> None:
    """Let the next pass fail in the middle of the second block, as if memory had run out."""
    norm = getattr(model, "module", model).blocks[1].norm

    def fail(*_: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("as if")

    def fail_later(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        handle.remove()
        output.register_hook(fail)

    handle = norm.register_forward_hook(fail if where == "forward" else fail_later)


# -- one rank fails, and goes on -----------------------------------------------------------------


def taken_back(rank: int, size: int, how: str, where: str) -> Any:
    """Rank 1's second micro-batch fails half-way, is taken back and repeated; rank 0 has fewer, and
    waits already.
    """
    model, reference = models(how, size)
    acc = gf.GradientAccumulator(
        torch.optim.SGD(model.parameters(), lr=0.1), steps=100, isolate=True
    )
    data = [[rows(10 * r + i, 1 + i) for i in range(2 + 2 * r)] for r in range(size)]
    for number, batch in enumerate(data[rank]):
        if (rank, number) == (1, 1):
            fail_in(model, where)
            with pytest.raises(torch.OutOfMemoryError), acc.micro_batch():
                acc.backward(loss(model, batch), weight=len(batch))
        with acc.micro_batch():
            acc.backward(loss(model, batch), weight=len(batch))
    result = acc.flush()
    loss(reference, torch.cat([batch for mine in data for batch in mine])).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return result.micro_batches, largest_difference(model, reference)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_micro_batch_that_fails_on_one_rank_is_taken_back(
    pair: Pool, how: str, where: str
) -> None:
    for count, difference in pair.run(taken_back, how, where):
        assert count == 6
        assert difference < 1e-10


def repeated(rank: int, size: int, how: str, where: str) -> Any:
    """Memory runs out on rank 1 in the middle of its second step."""
    model, reference = models(how, size)
    optimizer, alone = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    data = [rows(r, 40 + 8 * r) for r in range(size)]
    step = gf.fit(model, optimizer, loss, data[rank], memory="100 KiB")
    attempts = []
    for number in range(3):
        if (rank, number) == (1, 1):
            fail_in(model, where)
        attempts.append(step(data[rank]).attempts)
        alone.zero_grad()
        loss(reference, torch.cat(data)).backward()
        alone.step()
    return attempts, largest_difference(model, reference)


@pytest.mark.parametrize(
    ("how", "where"), [("ddp", "forward"), ("fsdp", "forward"), ("fsdp", "backward")]
)
def test_out_of_memory_on_one_rank_repeats_the_step_there(pair: Pool, how: str, where: str) -> None:
    (first, apart), (second, _) = pair.run(repeated, how, where)
    assert first == [1, 1, 1]
    assert second == [1, 2, 1]
    assert apart < 1e-10


def too_small_on_one(rank: int, size: int, how: str) -> Any:
    """Rank 1 has longer rows, and cannot hold the budget."""
    model, _ = models(how, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(gf.GradfitError) as caught:
        gf.fit(
            model,
            optimizer,
            loss,
            rows(rank, 8) if rank == 0 else rows(1, 8)[:, None].expand(-1, 999, -1),
            "90 KiB",
        )
    # the model is as it was, and the ranks are together
    acc = gf.GradientAccumulator(optimizer, steps=1)
    acc.backward(loss(model, rows(rank, 2)))
    return type(caught.value).__name__, str(caught.value), acc.step().stepped


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_budget_that_one_rank_cannot_hold_stops_all(pair: Pool, how: str) -> None:
    (name, text, again), (other, _, again_there) = pair.run(too_small_on_one, how)
    assert (name, other) == ("RankFailed", "BudgetInfeasible")
    assert "rank 1 raised BudgetInfeasible: Smallest feasible peak is" in text
    assert again
    assert again_there


def nan_on_one(rank: int, size: int, how: str) -> Any:
    model, _ = models(how, size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    acc.backward(loss(model, rows(rank, 2) / (1 - rank)))
    with pytest.raises(gf.NonFiniteGradient) as caught:
        acc.step()
    acc.reset()
    acc.backward(loss(model, rows(rank, 2)))
    return str(caught.value), acc.step().stepped


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_raises_on_all(pair: Pool, how: str) -> None:
    (first, again), (second, again_there) = pair.run(nan_on_one, how)
    assert "not finite" in first
    assert "not finite" in second
    assert again
    assert again_there


# -- one rank fails, and is gone -----------------------------------------------------------------


def gone(rank: int, size: int, how: str, where: str) -> Any:
    """Rank 1 fails for good: in the model, or in code that is not ours, as the interpreter would
    end it.
    """
    model, _ = models(how, size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    if rank == 1 and where == "forward":
        fail_in(model, where)
    try:
        for number in range(2):
            if (rank, number, where) == (1, 1, "elsewhere"):
                raise FileNotFoundError("no such row")
            acc.backward(loss(model, rows(number, 2)))
            acc.step()
    except Exception as error:
        if where == "elsewhere" and rank == 1:
            with contextlib.redirect_stderr(io.StringIO()):
                sys.excepthook(type(error), error, error.__traceback__)
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("forward", "OutOfMemoryError: as if"),
        pytest.param("elsewhere", "no such row", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_in_a_gather_is_named(where: str, says: str) -> None:
    with Pool(2, timeout_seconds=3) as pool:
        (name, text), _ = pool.run(gone, "fsdp", where)
    assert name == "RankFailed"
    assert "rank 1 raised" in text
    assert says in text


# -- what users do to their models ---------------------------------------------------------------


def odd(
    rank: int, size: int, how: str, options: dict[str, Any], frozen: bool, clipper: dict[str, Any]
) -> float:
    """Three windows with unequal ranks, and an evaluation after each."""
    torch.manual_seed(7)
    inner = Net().double()
    inner.first.requires_grad_(not frozen)
    inner.blocks[0].up.requires_grad_(not frozen)
    reference = copy.deepcopy(inner)
    model = wrap(inner, how, size, **options)
    clip = gf.GradientClipper(**clipper) if clipper else None
    optimizer, alone = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
        for m in (model, reference)
    )
    acc = gf.GradientAccumulator(optimizer, steps=100, clip=clip)
    for window in range(3):
        data = [
            [rows(100 * window + 10 * r + i, 1 + i) for i in range((r + window) % 3)]
            for r in range(size)
        ]
        for batch in data[rank]:
            acc.backward(loss(model, batch), weight=len(batch))
        acc.flush()
        alone.zero_grad()
        loss(reference, torch.cat([batch for mine in data for batch in mine])).backward()
        if clip is not None:
            clip.clip_grads([p for p in reference.parameters() if p.requires_grad])
        alone.step()
        with torch.no_grad():
            model.eval()(rows(5, 3))
        model.train()
    return largest_difference(model, reference)


@pytest.mark.parametrize(
    ("how", "options", "frozen", "clipper"),
    [
        ("ddp", {"static_graph": True}, False, {}),
        ("ddp", {"find_unused_parameters": True}, True, {}),
        ("ddp", {"gradient_as_bucket_view": True}, False, {"max_value": 0.01}),
        (
            "fsdp",
            {"reshard_after_forward": False},
            False,
            {"max_norm": 0.05, "per_parameter": True},
        ),
        ("fsdp", {}, True, {"max_norm": 0.05, "max_value": 0.01}),
    ],
)
def test_wrappers_options(
    pair: Pool, how: str, options: dict[str, Any], frozen: bool, clipper: dict[str, Any]
) -> None:
    for difference in pair.run(odd, how, options, frozen, clipper):
        assert difference < 1e-10


def two_optimizers(rank: int, size: int, how: str) -> Any:
    """Two optimizers with an accumulator each for two parts of one model, on ranks with unequal
    micro-batches.
    """
    model, reference = models(how, size)
    both = []
    for m in (model, reference):
        parts = [
            [p for name, p in m.named_parameters() if ("blocks" in name) == inner]
            for inner in (True, False)
        ]
        both.append([torch.optim.SGD(part, lr=0.1 * (1 + at)) for at, part in enumerate(parts)])
    accumulators = [gf.GradientAccumulator(optimizer, steps=100) for optimizer in both[0]]
    data = [[rows(10 * r + i, 2) for i in range(2 + 2 * r)] for r in range(size)]
    for batch in data[rank]:
        loss(model, batch).backward()
    stepped = [acc.flush().stepped for acc in accumulators]
    torch.stack([loss(reference, batch) for mine in data for batch in mine]).mean().backward()
    for optimizer in both[1]:
        optimizer.step()
    return stepped, largest_difference(model, reference)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_optimizers_of_one_model(pair: Pool, how: str) -> None:
    for stepped, difference in pair.run(two_optimizers, how):
        assert stepped == [True, True]
        assert difference < 1e-10


def flags_after_an_error(rank: int, size: int) -> Any:
    model, _ = models("ddp", size)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    seen = []
    for outside in (contextlib.nullcontext(), model.no_sync()):
        with outside:
            fail_in(model, "forward")
            with pytest.raises(torch.OutOfMemoryError):
                model(rows(0, 2))
            seen.append(model.require_backward_grad_sync)
        seen.append(model.require_backward_grad_sync)
    acc.reset()
    return seen


def test_flags_are_restored_after_a_failed_forward(pair: Pool) -> None:
    for seen in pair.run(flags_after_an_error):
        assert seen == [True, True, False, True]


def a_hook_of_the_users(rank: int, size: int) -> Any:
    model, reference = models("ddp", size)
    called: list[Any] = []
    model.register_comm_hook(None, lambda _, bucket: called.append(bucket))  # type: ignore[operator]
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            acc.backward(loss(model, rows(rank, 2)))
            acc.step()
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        alone.zero_grad()
        loss(reference, torch.cat([rows(r, 2) for r in range(size)])).backward()
        alone.step()
    return [str(one.message) for one in said], len(called), largest_difference(model, reference)


def test_a_communication_hook_that_is_not_called_is_named_once(pair: Pool) -> None:
    for said, calls, difference in pair.run(a_hook_of_the_users):
        assert calls == 0
        assert difference < 1e-10
        (text,) = said
        assert "communication hook <lambda> is not called" in text


def refused(rank: int, size: int, what: str) -> str:
    torch.manual_seed(7)
    model: nn.Module = Net().double()
    around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if what == "flat":
        warnings.filterwarnings("ignore", message=".*FullyShardedDataParallel")
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif what == "tensor parallel":
        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:  # type: ignore[union-attr]
            parallelize_module(block, mesh, {"up": ColwiseParallel()})
    else:
        model = wrap(model, "ddp", size)
        around = model.join()  # type: ignore[operator]
    try:
        with around:
            acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
            acc.backward(loss(model, rows(rank, 1 + rank)), weight=1 + rank)
    except gf.MisuseError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("flat", "torch.distributed.fsdp.fully_shard"),
        ("tensor parallel", "tensor parallelism alone"),
        ("joined", r"accumulator.flush(), called once by each rank"),
    ],
)
def test_what_would_add_up_otherwise_is_refused(pair: Pool, what: str, says: str) -> None:
    for text in pair.run(refused, what):
        assert says in text


def without_rows(rank: int, size: int, how: str) -> Any:
    """The last rank's second batch is empty."""
    model, reference = models(how, size)
    optimizer, alone = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    step = gf.fit(model, optimizer, loss, rows(rank, 16), memory="100 KiB")
    results = []
    for number in range(3):
        data = [rows(10 * number + r, 16) for r in range(size)]
        if number == 1:
            data[-1] = data[-1][:0]
        results.append(step(data[rank]).stepped)
        alone.zero_grad()
        loss(reference, torch.cat(data)).backward()
        alone.step()
    return results, largest_difference(model, reference)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_rank_without_rows_takes_part_in_a_step(pair: Pool, how: str) -> None:
    for stepped, difference in pair.run(without_rows, how):
        assert stepped == [True] * 3
        assert difference < 1e-10


def audited(rank: int, size: int) -> Any:
    model, _ = models("fsdp", size)
    return gf.audit(model, loss, rows(rank, 16)).identical


def test_an_audit_of_shards(pair: Pool) -> None:
    assert pair.run(audited) == [True, True]
