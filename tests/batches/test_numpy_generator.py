"""NumPy's generator is read as NumPy itself says it, whatever was drawn before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradfit.batches import numpy_generator
from gradfit.batches.numpy_generator import numpy_state

DRAWS = {
    "nothing": lambda: None,
    "uniform": np.random.rand,
    "normal": np.random.randn,
    "pair": lambda: np.random.randn(2),
    "many": lambda: np.random.rand(700),
    "seed": lambda: np.random.seed(3),
    "set": lambda: np.random.set_state(np.random.get_state()),
}


def same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_the_state_is_what_numpy_says(draws: list[str]) -> None:
    np.random.seed(0)
    for draw in draws:
        DRAWS[draw]()
        assert same(numpy_state(), np.random.get_state())  # type: ignore[arg-type]


def test_where_a_normal_number_waits_is_told() -> None:
    """Else nothing would be reused, and every step take longer."""
    assert numpy_generator._waiting is not None


def test_the_same_numbers_with_a_normal_number_that_waits_and_without() -> None:
    np.random.seed(0)
    np.random.randn(2)
    assert same(numpy_state(), np.random.get_state())  # type: ignore[arg-type]
    np.random.seed(0)
    np.random.randn()  # its generator stands where it stood
    assert same(numpy_state(), np.random.get_state())  # type: ignore[arg-type]


def test_a_state_that_was_read_is_not_changed_by_later_draws() -> None:
    np.random.seed(0)
    state = numpy_state()
    drawn = np.random.rand(5)
    np.random.set_state(state)
    assert np.array_equal(np.random.rand(5), drawn)


def test_another_bit_generator() -> None:
    numpy: Any = np.random
    before = numpy.get_bit_generator()
    try:
        numpy.set_bit_generator(np.random.PCG64(1))
        with pytest.warns(RuntimeWarning, match="legacy"):
            expected = np.random.get_state()
        with pytest.warns(RuntimeWarning, match="legacy"):
            assert numpy_state() == expected
        drawn = np.random.rand()
        np.random.set_state(expected)
        assert np.random.rand() == drawn
    finally:
        numpy.set_bit_generator(before)
