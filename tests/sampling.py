"""Parametrisations of which `make test` runs a sample, and `make test-all` the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], quick: Callable[[Any], bool]) -> list[Any]:
    """All values; those that are not quick are marked slow. A tuple is the values of several
    arguments.
    """
    return [value if quick(value) else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
