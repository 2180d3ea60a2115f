"""One pool of processes per size for all tests of a module."""

from collections.abc import Iterator

import pytest
from distributed_pool import Pool


@pytest.fixture(scope="package")
def pair() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def four() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool
