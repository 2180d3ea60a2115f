"""NumPy's global random generator, read in a microsecond where nobody has drawn from it.

NumPy takes 30 µs to say its state. Its 2,500 bytes can be read at an address that NumPy tells, and
while they are the same nobody has drawn, with one exception: a normal number is drawn as one of a
pair, and the second one waits beside these bytes. So only a state without such a number is reused.
(Who saves a state with one, draws it, runs a step, and loads that state again before the next step
has one that is not seen; it matters if that step fails.)
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_numpy: Any = np.random  # whose types do not know all of it
_BYTES = 624 * 4 + 4  # of MT19937: its numbers, and the position among them
_HAS_GAUSS = 3  # where a state says that a normal number waits

_last: tuple[bytes, Any] = b"", None


def numpy_state() -> Any:
    """As `np.random.get_state()`."""
    global _last
    generator = _numpy.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return _numpy.get_state()
    now = ctypes.string_at(generator.ctypes.state_address, _BYTES)
    before, state = _last
    if now != before:
        state = _numpy.get_state()
        _last = (now, state) if not state[_HAS_GAUSS] else (b"", None)
    return state
