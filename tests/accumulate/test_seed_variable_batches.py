"""The tests that seed 001 lists, by their names there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import gradfit as gf


def test_accumulation_with_constant_batch_size() -> None:
    accumulator = gf.DynamicBatchAccumulator(steps=3)
    for value in (1.0, 2.0, 6.0):
        accumulator.accumulate(torch.full((2,), value), 4)
    assert accumulator.is_complete()
    assert accumulator.get_accumulated_gradient().tolist() == [3.0, 3.0]
    assert (
        accumulator.accumulated_batch_size,
        accumulator.current_step,
        accumulator.accumulation_count,
    ) == (12, 3, 3)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.integers(0, 2**31),
    st.sampled_from([64, 32]),
)
def test_accumulation_with_variable_batch_sizes(sizes: list[int], seed: int, bits: int) -> None:
    dtype, tolerance = (torch.float64, 1e-12) if bits == 64 else (torch.float32, 1e-6)
    torch.manual_seed(seed)
    items = torch.randn(max(1, sum(sizes)), 3, dtype=dtype)
    accumulator = gf.DynamicBatchAccumulator(target_batch_size=max(1, sum(sizes)))
    at = 0
    for size in sizes:
        part = items[at : at + size]
        accumulator.accumulate(part.mean(0), size)  # NaN for an empty one
        at += size
    if not sum(sizes):
        with pytest.raises(gf.MisuseError):
            accumulator.get_accumulated_gradient()
        return
    expected = items[: sum(sizes)].double().mean(0)
    got = accumulator.get_accumulated_gradient()
    assert got.dtype == dtype
    assert (got - expected).norm() <= tolerance * items.double().norm(dim=1).max()
    assert accumulator.get_progress() == 1.0


def test_scaling_and_normalization() -> None:
    gradient = torch.tensor([2.0, 4.0])
    scaling = gf.GradientScaling
    assert scaling.scale_by_batch_size(gradient, 4, 8).tolist() == [1.0, 2.0]
    assert scaling.average_accumulated(gradient, 16, 8).tolist() == [1.0, 2.0]
    assert scaling.normalize_batch_gradient(gradient, 4).tolist() == [0.5, 1.0]
    assert gradient.tolist() == [2.0, 4.0]
    for call in (
        lambda: scaling.scale_by_batch_size(gradient, 4, 0),
        lambda: scaling.average_accumulated(gradient, 0, 4),
        lambda: scaling.normalize_batch_gradient(gradient, -1),
    ):
        with pytest.raises(gf.MisuseError, match="_size"):
            call()


def test_fixed_target_batch_strategy() -> None:
    accumulator = gf.DynamicBatchAccumulator(strategy=gf.FixedTargetBatch(10))
    progress = []
    for size in (3, 3, 5):
        accumulator.accumulate(torch.ones(1) * size, size)
        progress.append((accumulator.get_progress(), accumulator.is_complete()))
    assert progress == [(0.3, False), (0.6, False), (1.0, True)]
    assert accumulator.target_batch_size == 10
    assert accumulator.get_accumulated_gradient().item() == pytest.approx((9 + 9 + 25) / 11)


def test_fixed_step_count_strategy() -> None:
    accumulator = gf.DynamicBatchAccumulator(strategy=gf.FixedStepCount(2))
    accumulator.accumulate(torch.ones(1), 100)
    assert not accumulator.is_complete()
    accumulator.accumulate(torch.ones(1) * 4, 50)
    assert accumulator.is_complete()
    assert accumulator.get_accumulated_gradient().item() == pytest.approx(2.0)


def steps_needed(strategy: gf.Strategy, sizes: list[int]) -> int:
    total = 0
    for step, size in enumerate(sizes, start=1):
        strategy.observe(size)
        total += size
        if strategy.is_complete(step, total):
            return step
    return len(sizes) + 1


def test_adaptive_accumulation() -> None:
    small = steps_needed(gf.AdaptiveAccumulation(64), [4] * 100)
    large = steps_needed(gf.AdaptiveAccumulation(64), [16] * 100)
    uneven = steps_needed(gf.AdaptiveAccumulation(64), [1, 31] * 50)
    assert (small, large) == (16, 4)
    assert uneven > large
    assert steps_needed(gf.AdaptiveAccumulation(64, min_steps=6), [64] * 10) == 6
    assert steps_needed(gf.AdaptiveAccumulation(64, max_steps=3), [1] * 10) == 3


def test_adaptive_accumulation_by_noise_scale() -> None:
    """Gradients of known signal and noise: the measured noise scale is noise variance over squared
    signal.
    """
    torch.manual_seed(0)
    signal, deviation, width = 1.0, 4.0, 400
    true_scale = deviation**2 * width / (signal**2 * width)
    strategy = gf.AdaptiveAccumulation(32, by="noise_scale", smoothing=0.95)
    accumulator = gf.DynamicBatchAccumulator(strategy=strategy)
    assert strategy.noise_scale is None
    for _ in range(300):
        while not accumulator.is_complete() or accumulator.current_step < 2:
            accumulator.accumulate(signal + deviation / math.sqrt(4) * torch.randn(width), 4)
        accumulator.reset()
    assert strategy.noise_scale == pytest.approx(true_scale, rel=0.15)
    assert strategy.required_batch_size == strategy.noise_scale


def test_buffer_resizing() -> None:
    buffer = gf.AccumulationBufferDynamic(
        gf.SymbolicShape(("items", 0, 1000), 3), max_size=1000, device=torch.get_default_device()
    )
    expected = torch.zeros(0, 3)
    for start in range(0, 1000, 10):
        gradient = torch.randn(10, 3)
        buffer.accumulate(gradient, start, 10)
        expected = torch.cat([expected, gradient])
        assert torch.equal(buffer.get_full(), expected)
    assert buffer.reallocations <= 10  # it doubles
    before = buffer.reallocations
    for size in (900, 1000, 950, 800, 999):
        buffer.resize(size)
    assert buffer.reallocations == before
    assert torch.equal(buffer.get_slice(0, 800), expected[:800])
    assert not buffer.get_slice(800, 199).any()
    buffer.resize(5)
    assert torch.equal(buffer.get_full(), expected[:5])
    assert buffer.buffer.untyped_storage().nbytes() <= 8 * 3 * 4
    assert (buffer.current_size, buffer.max_size) == (5, 1000)


def test_buffer_shapes() -> None:
    here = torch.get_default_device()
    buffer = gf.AccumulationBufferDynamic((4, 2), max_size=8, device=here)
    assert buffer.buffer.shape == (4, 2)
    buffer.accumulate(torch.ones(2, 2), 1, 2)
    buffer.accumulate(torch.ones(2, 2), 2, 2)
    assert buffer.get_full().tolist() == [[0, 0], [1, 1], [2, 2], [1, 1]]
    late = gf.AccumulationBufferDynamic(
        gf.SymbolicShape("slots", ("width", 1, 4)), max_size=8, device=here
    )
    late.accumulate(torch.ones(1, 3), 0, 1)
    assert late.get_full().shape == (1, 3)
    for call, text in (
        (lambda: buffer.get_slice(3, 2), "reach slot 5 of 4"),
        (lambda: buffer.accumulate(torch.ones(2, 2), 7, 2), "room for 8"),
        (lambda: buffer.accumulate(torch.ones(2, 3), 0, 2), r"shape \(2, 3\), expected \(2, 2\)"),
        (lambda: buffer.accumulate(torch.ones(2, 2), -1, 2), "start_idx"),
        (lambda: buffer.resize(9), "new_size=9"),
        (lambda: buffer.resize(-1), "new_size=-1"),
        (lambda: late.accumulate(torch.ones(1, 4), 0, 1), "shape"),
        (lambda: gf.AccumulationBufferDynamic((3, 2), max_size=2), "max_size"),
        (lambda: gf.SymbolicShape(("n", 4, 2)), "upper bound of 'n'"),
        (lambda: gf.SymbolicShape(2.5), "dimensions.0.=2.5"),
    ):
        with pytest.raises(gf.MisuseError, match=text):
            call()


def test_gradient_validation() -> None:
    validator = gf.GradientAccumulationValidator()
    good, odd = torch.ones(2, 3), torch.ones(3, 2)
    assert validator.validate_accumulation([good, good], [4, 2])
    assert validator.explain() == []
    assert not validator.validate_accumulation([good, odd, good * float("inf")], [4, -1])
    problems = validator.explain()
    assert len(problems) == 4
    assert all(
        any(text in one for one in problems)
        for text in ("3 gradients", "[1]=-1", "(3, 2)", "infinite of 6")
    )
    assert validator.check_shape_compatibility(good, good)
    assert not validator.check_shape_compatibility(good, odd)
    assert validator.validate_accumulated_shape(good, [good, good])
    assert not validator.validate_accumulated_shape(good, [good, odd])
    assert not validator.validate_accumulation([], [])
    assert validator.explain([good], [0]) == [
        "batch_sizes are all 0: a mean over no items is not defined."
    ]


def test_edge_cases_empty_accumulation() -> None:
    accumulator = gf.DynamicBatchAccumulator(target_batch_size=4)
    assert accumulator.accumulated_gradient is None
    assert (accumulator.is_complete(), accumulator.get_progress()) == (False, 0.0)
    with pytest.raises(gf.MisuseError, match="Nothing was accumulated"):
        accumulator.get_accumulated_gradient()
    accumulator.accumulate(torch.full((2,), math.nan), 0)
    assert accumulator.accumulated_batch_size == 0
    accumulator.accumulate(torch.ones(2), 9)  # more than the target
    assert (
        accumulator.is_complete(),
        accumulator.get_progress(),
        accumulator.accumulated_batch_size,
    ) == (True, 1.0, 9)
    assert torch.equal(accumulator.accumulated_gradient, torch.ones(2))
    accumulator.reset()
    assert (accumulator.current_step, accumulator.accumulated_gradient) == (0, None)


def test_edge_cases_overflow() -> None:
    """Partial sums stay in the range of the mean, where a sum of products would overflow."""
    for dtype, value in ((torch.float16, 6e4), (torch.float32, 3e38)):
        accumulator = gf.DynamicBatchAccumulator(target_batch_size=4000)
        for _ in range(4):
            accumulator.accumulate(torch.tensor([value], dtype=dtype), 1000)
        assert accumulator.get_accumulated_gradient().item() == pytest.approx(value, rel=1e-3)
    huge = gf.DynamicBatchAccumulator(steps=2)
    huge.accumulate(torch.ones(1), 2**62)
    huge.accumulate(torch.ones(1) * 3, 2**62)
    assert huge.accumulated_batch_size == 2**63
    assert huge.get_accumulated_gradient().item() == 2.0


def test_gradient_maps_accumulate() -> None:
    model = torch.nn.Linear(3, 2).double()
    x = torch.randn(7, 3).double()
    accumulator = gf.DynamicBatchAccumulator(target_batch_size=7)
    for part in x.split([1, 4, 2]):
        accumulator.accumulate(gf.backward(model(part).square().mean(), model), len(part))
    mean, full = (
        accumulator.get_accumulated_gradient(),
        gf.backward(model(x).square().mean(), model),
    )
    assert isinstance(mean, gf.GradientMap)
    for name in full:
        torch.testing.assert_close(mean[name], full[name], rtol=1e-12, atol=1e-14)
    mean.assign()
    assert model.weight.grad is not None
    with pytest.raises(gf.MisuseError, match="same kind"):
        accumulator.accumulate(torch.ones(2), 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "none of target_batch_size"),
        ({"steps": 2, "target_batch_size": 4}, "target_batch_size and steps"),
        ({"steps": 0}, "steps=0"),
        ({"target_batch_size": 0}, "target_batch_size=0"),
        ({"strategy": 4}, "strategy is a int"),
    ],
)
def test_dynamic_misuse(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(gf.MisuseError, match=text):
        gf.DynamicBatchAccumulator(**arguments)


def test_shape_mismatch_changes_nothing() -> None:
    accumulator = gf.DynamicBatchAccumulator(steps=2)
    accumulator.accumulate(torch.ones(2), 3)
    for bad, size, text in (
        (torch.ones(3), 1, r"shape \(3,\), expected \(2,\)"),
        (torch.ones(2), -1, "batch_size=-1"),
        (torch.ones(2), math.nan, "batch_size=nan"),
        ([1.0], 1, "is a list"),
    ):
        with pytest.raises(gf.MisuseError, match=text):
            accumulator.accumulate(bad, size)
    assert (accumulator.current_step, accumulator.accumulated_batch_size) == (1, 3)


# -- the scheduler -------------------------------------------------------------------------------


def test_variable_batch_scheduler() -> None:
    scheduler = gf.VariableBatchScheduler([4, 8, 16, 32])
    assert (scheduler.total_steps, scheduler.effective_batch_size, scheduler.current_step) == (
        4,
        15,
        0,
    )
    assert scheduler.get_effective_batch_size(2) == 6
    sizes = []
    while scheduler.get_remaining_steps():
        sizes.append(scheduler.get_current_batch_size())
        scheduler.advance()
    assert sizes == scheduler.batch_schedule == [4, 8, 16, 32]
    for call in (scheduler.advance, scheduler.get_current_batch_size):
        with pytest.raises(gf.MisuseError, match="4 steps are over"):
            call()


@pytest.mark.parametrize("schedule", [[], [4, 0], [4, -1], [2.5], 4, "48", [True]])
def test_bad_schedules(schedule: object) -> None:
    with pytest.raises(gf.MisuseError, match="batch_schedule"):
        gf.VariableBatchScheduler(schedule)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 60))
def test_scheduled_batches_are_a_batch_sampler(schedule: list[int], length: int) -> None:
    sampler = gf.VariableBatchScheduler(schedule).batches(range(length))
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert [index for batch in batches for index in batch] == list(range(length))
    assert [len(batch) for batch in batches[:-1]] == [
        schedule[i % len(schedule)] for i in range(len(batches) - 1)
    ]


def test_data_loader_follows_the_schedule() -> None:
    data = TensorDataset(torch.arange(30))
    batches = gf.VariableBatchScheduler([2, 10]).batches(RandomSampler(data))
    loader = DataLoader(data, batch_sampler=batches)
    for _epoch in range(2):
        parts = [part for (part,) in loader]
        assert [len(part) for part in parts] == [2, 10, 2, 10, 2, 4]
        assert torch.cat(parts).sort().values.tolist() == list(range(30))


def test_a_buffer_of_real_numbers_takes_no_complex_ones() -> None:
    buffer = gf.AccumulationBufferDynamic((2,), 4)
    with pytest.raises(gf.MisuseError, match=r"buffer is torch\.float32\. Pass dtype=torch"):
        buffer.accumulate(torch.ones(2, dtype=torch.complex64, device="cpu"), 0, 2)
