"""Python's generator is read as Python itself says it, whatever was drawn before."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradfit.batches import python_generator
from gradfit.batches.python_generator import python_state

DRAWS: dict[str, Any] = {
    "nothing": lambda: None,
    "uniform": random.random,
    "normal": lambda: random.gauss(0, 1),
    "many": lambda: [random.random() for _ in range(700)],
    "seed": lambda: random.seed(3),
    "set": lambda: random.setstate(random.getstate()),
}


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_the_state_is_what_python_says(draws: list[str]) -> None:
    random.seed(0)
    for draw in draws:
        DRAWS[draw]()
        assert python_state() == random.getstate()


def test_where_the_numbers_are_is_told() -> None:
    """Else nothing would be reused, and every step take longer."""
    assert python_generator._is_readable


def test_a_state_is_made_only_if_somebody_has_drawn() -> None:
    random.seed(0)
    assert python_state() is python_state()


def test_the_same_numbers_with_a_normal_number_that_waits_and_without() -> None:
    random.seed(0)
    random.gauss(0, 1)
    waiting, numbers = random.getstate(), python_state()
    assert numbers == waiting
    random.setstate((*waiting[:2], None))  # its numbers stand where they stood
    assert python_state() == random.getstate() != waiting


def test_another_generator_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(random.Random):
        pass

    for other in (Other(4), random.Random(5)):
        monkeypatch.setattr(random, "getstate", other.getstate)
        assert python_state() == other.getstate()
    monkeypatch.setattr(random, "getstate", lambda: "own")
    assert python_state() == "own"
