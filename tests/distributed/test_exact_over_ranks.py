"""Several ranks with unequal micro-batches against one rank with the full batch, ten updates,
float64.
"""

from __future__ import annotations

import dataclasses

import pytest
from distributed_jobs import Setting, against_one_rank, narrow_sums
from distributed_pool import Pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = {
    "plain sums": Setting(),
    "clipped": Setting(clip=0.05, optimizer="sgd"),
    "scaled": Setting(scaler=True, clip=0.05),
    "isolated": Setting(isolate=True, scaler=True),
    "terms": Setting(terms=True, optimizer="sgd"),
    "plain backward": Setting(plain=True),
    "a scope around the model": Setting(recompute="scope"),
}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(pair: Pool, case: str, how: str) -> None:
    setting = dataclasses.replace(CASES[case], how=how, seed=len(case))
    for answer in pair.run(against_one_rank, setting):
        assert answer["difference"] < 1e-10


def test_a_sharded_model_on_one_rank() -> None:
    with Pool(1) as pool:
        for setting in (Setting(how="fsdp", clip=0.05), Setting(how="fsdp", terms=True)):
            assert pool.run(against_one_rank, setting)[0]["difference"] < 1e-10


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp, no mesh", "hsdp"])
def test_four_ranks(four: Pool, how: str) -> None:
    for answer in four.run(against_one_rank, Setting(how=how, clip=0.05, scaler=True, seed=4)):
        assert answer["difference"] < 1e-10


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp, its own policy"])
def test_narrow_parameters_add_up_in_float32(pair: Pool, how: str) -> None:
    """Against the same bfloat16 gradients added up in float64 and rounded once, and beside a
    bfloat16 sum.
    """
    for ours, native in pair.run(narrow_sums, how):
        assert ours["gradient"] < 1e-6
        assert native["gradient"] > 1000 * ours["gradient"]
        # so many of them are not the float64 result, rounded once: ties
        assert ours["parameters"] < 0.001
        assert native["parameters"] > 0.02


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    how=st.sampled_from(["ddp", "fsdp"]),
    clip=st.sampled_from([None, 0.05]),
    scaler=st.booleans(),
    isolate=st.booleans(),
    terms=st.booleans(),
)
def test_whatever_the_micro_batches(
    pair: Pool, seed: int, how: str, clip: float | None, scaler: bool, isolate: bool, terms: bool
) -> None:
    setting = Setting(how=how, clip=clip, scaler=scaler, isolate=isolate, terms=terms, seed=seed)
    for answer in pair.run(against_one_rank, setting):
        assert answer["difference"] < 1e-10
