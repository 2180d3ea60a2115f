"""Which versions of torch gradfit has been run with; it uses private parts of torch, which change
without notice.
"""

from __future__ import annotations

import re
import warnings

import torch

# The oldest and the newest, each with the whole test suite (`make test-torch TORCH=2.10.0`). The
# range in pyproject.toml is this one: a test compares them.
OLDEST, NEWEST = (2, 10), (2, 15)


def untested(version: str) -> str | None:
    """What to say of a version of torch that the tests have not been run with, or None.

    >>> untested("2.13.0+cpu")
    >>> print(untested("2.9.1"))
    gradfit is tested with torch 2.10 to 2.15, and this is torch 2.9.1: results may be wrong, ...
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return (
        f"gradfit is tested with torch {oldest} to {newest}, and this is torch {version}: results"
        f" may be wrong, or calls fail. Install a tested one (pip install 'torch=={newest}.*'), or"
        f" run gradfit's tests with this one (make test-torch TORCH={version.partition('+')[0]})."
    )


_text = untested(torch.__version__)
if _text is not None:
    warnings.warn(_text, stacklevel=3)  # at the line that imports gradfit
