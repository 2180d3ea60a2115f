"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import math
import re

from gradfit.errors import MisuseError

NO_BUDGET = 1 << 60  # bytes: more than any machine has, and a number that plans can reckon with
_FACTORS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _FACTORS[_letter] = _FACTORS[f"{_letter}ib"] = 1024**_power
    _FACTORS[f"{_letter}b"] = 1000**_power


def parse_bytes(value: int | float | str, *, name: str = "memory") -> int:
    """Read a number of bytes: an int, or text such as "1.5 GiB", "800 MB", "512k".

    >>> parse_bytes("1.5 GiB"), parse_bytes("800 MB"), parse_bytes(4096)
    (1610612736, 800000000, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise MisuseError(
            f"{name}={value!r} is not a number of bytes. Pass an int or text such as '1.5 GiB'."
        )
    number = _parse_text(value, name) if isinstance(value, str) else _as_float(value)
    if not math.isfinite(number) or number < 1:
        raise MisuseError(
            f"{name}={value!r} must be at least one byte, and finite. Pass for example '1 GiB'."
        )
    return int(number)


def _as_float(value: int | float) -> float:
    return float(value) if abs(value) < 2**63 else math.inf


_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse_text(value: str, name: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(value)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise MisuseError(
            f"{name}={value!r} is not a number of bytes. Write a number and a unit: B, kB, MB,"
            " GB, KiB, MiB, GiB."
        )
    return float(match.group(1)) * factor


def format_bytes(count: int | float) -> str:
    """Write a number of bytes with three digits.

    >>> format_bytes(1536 * 1024), format_bytes(17), format_bytes(-2048)
    ('1.5 MiB', '17 B', '-2 KiB')
    """
    size, unit = _in_unit(abs(float(count)))
    sign = "-" if count < 0 else ""
    text = f"{size:.0f}" if unit == "B" or size >= 100 else f"{size:.3g}"
    return f"{sign}{text} {unit}"


def _in_unit(size: float) -> tuple[float, str]:
    """A number of bytes in the largest unit of which there is one."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return size, unit


def format_seconds(seconds: float) -> str:
    """Write a duration in the unit that suits it.

    >>> format_seconds(0.00042), format_seconds(1.5), format_seconds(150)
    ('420 µs', '1.5 s', '2 min 30 s')
    """
    size = abs(seconds)
    if size >= 120:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    if size >= 1 or size == 0:
        return f"{seconds:.3g} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
