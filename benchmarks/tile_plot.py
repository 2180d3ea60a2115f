"""Draws docs/images/tiles.svg: memory against time with tiles and without, beside what people do by
hand.

`python benchmarks/tile_plot.py benchmarks/results/tile_frontier.txt` reads what `tile.py` printed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

Point = tuple[str, float, float]  # name, MiB, seconds over plain's
Box = tuple[float, float, float, float]  # left, top, right, bottom

_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 70, 40
_LOWEST, _HIGHEST = -0.25, 1.0  # more time than this is drawn at the top
_LINES = {"gradfit": "#0b6e4f", "gradfit, tile=False": "#7aa89a"}
_HAND = "#c1432e"


def read(table: str) -> list[Point]:
    """The rows of a table: name, memory, time."""
    rows = re.findall(
        r"^(\S.*?)\s+(\d+) MiB\s+[+-]\d+%\s+[\d.]+ s\s+([+-]\d+)%", table, re.MULTILINE
    )
    return [(name, float(size), int(more) / 100) for name, size, more in rows]


def draw(points: list[Point]) -> str:
    """The picture as SVG."""
    largest = max(size for _, size, _ in points) * 1.05

    def place(size: float, more: float) -> tuple[float, float]:
        share = (min(more, _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
        return _LEFT + _WIDTH * size / largest, _TOP + _HEIGHT * (1 - share)

    width, height = _LEFT + _WIDTH + 30, _TOP + _HEIGHT + 60
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">time over plain PyTorch, against the peak of live tensors'
        " (MiB)</text>",
    ]
    for percent in (0, 25, 50, 75, 100):
        _, y = place(0, percent / 100)
        body.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
        )
        body.append(f'<text x="{_LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">+{percent} %</text>')
    for size in range(0, int(largest), 50):
        x, y = place(size, _LOWEST)
        body.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{size}</text>')
    taken: list[Box] = [_box(*place(size, more), "", 0) for _, size, more in points]
    for name, colour in _LINES.items():
        mine = sorted((size, more) for label, size, more in points if label.split(":")[0] == name)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*one) for one in mine))
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [_dot(*place(*one), colour) for one in mine]
        if mine:
            x, y = place(*mine[0])
            body.append(_label(x, y - 12, name, taken, fill=colour))
    for name, size, more in points:
        if not name.startswith("gradfit"):
            x, y = place(size, more)
            label = name + (f" ({more:+.0%})" if more > _HIGHEST else "")
            body += [_dot(x, y, _HAND), _label(x, y, label, taken)]
    return "\n".join([*body, "</svg>"]) + "\n"


def _box(x: float, y: float, label: str, shift: float) -> Box:
    """What a label takes to the right of a dot, or to its left where it would not fit; the dot
    itself if there is none.
    """
    if not label:
        return x - 5, y - 5, x + 5, y + 5
    width = 5.2 * len(label)
    left = x + 7 if x + 7 + width < _LEFT + _WIDTH + 30 else x - 7 - width
    return left, y + shift - 8, left + width, y + shift + 3


def _label(x: float, y: float, label: str, taken: list[Box], fill: str = "black") -> str:
    """A dot's name as near to it as there is room; the room is then `taken`."""
    shifts = sorted(range(-96, 97, 4), key=lambda shift: (abs(shift - 4), shift))
    boxes = [_box(x, y, label, shift) for shift in shifts]
    free = (box for box in boxes if not any(_overlap(box, other) for other in taken))
    box = next(free, boxes[0])
    taken.append(box)
    return (
        f'<text x="{box[0]:.0f}" y="{box[3] - 3:.0f}" font-size="10" fill="{fill}">{label}</text>'
    )


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "images" / "tiles.svg"
    target.write_text(draw(read(Path(sys.argv[1]).read_text())))
