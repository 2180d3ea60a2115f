"""NumPy's global random generator, read in a microsecond where nobody has drawn from it.

NumPy takes 30 µs to say its state. The 2,500 bytes of its generator can be read at an address that
NumPy tells. A normal number is drawn as one of a pair, and the second one waits elsewhere: in the
`RandomState`, at an offset that is found by trying (`RandomState._aug_state` in
numpy/random/mtrand.pyx, NumPy 2.4). While all these bytes are the same, the state is.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

_numpy: Any = np.random  # whose types do not know all of it
_BYTES = 624 * 4 + 4  # of MT19937: its numbers, and the position among them
_FLAG = struct.Struct("i4x")  # whether a normal number waits; it stands before the number
_Numbers, _Waiting = ctypes.c_char * _BYTES, ctypes.c_char * (_FLAG.size + 8)


def _find_waiting() -> int | None:
    """Where in a `RandomState` a normal number waits; None if that cannot be told."""
    probe = np.random.RandomState(0)
    probe.randn()
    with_number = _memory_of(probe)
    number = struct.pack("d", probe.get_state()[4])  # type: ignore[index]
    at = with_number.find(number) - _FLAG.size
    if at < 0 or with_number.count(number) != 1:
        return None
    probe.randn()  # takes it
    flags = [_FLAG.unpack_from(memory, at)[0] for memory in (with_number, _memory_of(probe))]
    return at if flags == [1, 0] else None


def _memory_of(generator: Any) -> bytes:
    return ctypes.string_at(id(generator), type(generator).__basicsize__)


_waiting = _find_waiting()
_known: tuple[Any, Any, Any] = None, None, None  # a generator, and the two pieces of memory
_last: tuple[bytes, Any] = b"", None


def numpy_state() -> Any:
    """As `np.random.get_state()`."""
    global _known, _last
    generator = _numpy.get_bit_generator()
    if _waiting is None or type(generator) is not np.random.MT19937:
        return _numpy.get_state()
    if generator is not _known[0]:
        normal = id(_numpy.mtrand._rand) + _waiting
        numbers = _Numbers.from_address(generator.ctypes.state_address)
        _known = generator, numbers, _Waiting.from_address(normal)
    now = _known[1].raw + _known[2].raw
    before, state = _last
    if now != before:
        state = _numpy.get_state()
        _last = now, state
    return state
