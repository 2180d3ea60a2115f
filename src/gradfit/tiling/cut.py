"""Where rows are cut: into tiles of so many, or into so many tiles."""

from __future__ import annotations

from dataclasses import dataclass

# a tile of fewer rows makes matrix products too thin; a larger one takes more memory for no time
DEFAULT_SIZE = 256

MODULE_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """How many rows a tile has.

    With `parts` their number is the same whatever the rows are: a plan, which is made for a list of
    operations, holds for every micro-batch then. Tiles may be empty.
    """

    size: int = DEFAULT_SIZE
    parts: int | None = None

    def bounds(self, rows: int) -> list[tuple[int, int]]:
        """Where each tile begins and ends; at least one.

        >>> Cut(size=4).bounds(10), Cut(parts=3).bounds(10)
        ([(0, 4), (4, 8), (8, 10)], [(0, 4), (4, 8), (8, 10)])
        """
        size = max(1, self.size if self.parts is None else -(-rows // self.parts))
        count = max(1, -(-rows // size)) if self.parts is None else self.parts
        return [(min(rows, n * size), min(rows, (n + 1) * size)) for n in range(count)]
