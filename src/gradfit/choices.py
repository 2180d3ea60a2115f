"""What becomes of each result of an operation: plans say it, the tape does it."""

from __future__ import annotations

from enum import IntEnum


class Choice(IntEnum):
    """What becomes of one result. The first three are a plan's actions, by the same numbers."""

    KEEP = 0
    """Autograd has it, as without us."""
    REBUILD = 1
    """It dies when Python lets go of it, and is made again when the backward pass asks for it."""
    OFFLOAD = 2
    """It is moved out, and back."""
    HOLD = 3
    """Autograd has it until somebody needs the memory."""
    PACK = 4
    """The bits of a dropout mask are kept, and the mask is made of them."""


# Compared by `is`, hundreds of times in a step: a name of the module is found faster than one of a
# class.
KEEP, REBUILD, OFFLOAD, HOLD, PACK = Choice
