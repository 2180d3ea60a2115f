"""The trade-off as a picture: one panel per model, memory to the right, time upwards, both against
plain PyTorch.
"""

from __future__ import annotations

import re

Points = list[tuple[str, float, float]]  # (peer, memory, time), plain is (1, 1)

_COLOURS = {
    "gradfit": "#0b6e4f",
    "checkpoint": "#c1432e",
    "checkpoint_sequential": "#8a4fbf",
    "selective": "#b8860b",
    "plain": "#555555",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 330, 250, 55, 60
_HIGHEST = 1.6


def draw(panels: dict[str, Points]) -> str:
    """The picture as SVG."""
    columns = 2
    rows = -(-len(panels) // columns)
    width, height = columns * (_WIDTH + 70) + 20, _TOP + rows * (_HEIGHT + 70)
    body = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (peer, colour) in enumerate(_COLOURS.items()):
        x = 30 + number * 150
        body.append(
            f'<circle cx="{x}" cy="22" r="5" fill="{colour}"/><text x="{x + 10}"'
            f' y="26">{peer}</text>'
        )
    for number, (name, points) in enumerate(panels.items()):
        x, y = _LEFT + number % columns * (_WIDTH + 70), _TOP + number // columns * (_HEIGHT + 70)
        body += _panel(name, points, x, y)
    return "\n".join([*body, "</svg>"]) + "\n"


def read(table: str) -> dict[str, Points]:
    """The points of a table that `frontier.py` has printed."""
    panels: dict[str, Points] = {}
    points: Points = []
    for line in table.splitlines():
        if title := re.match(r"(\S+): plain [\d.]+ MB", line):
            points = panels[title[1]] = []
        elif row := re.match(r"  (\S+(?: \S+)*)\s.*?\s[\d.]+\s+([\d.]+)%\s+([+-][\d.]+)%", line):
            points.append((row[1], float(row[2]) / 100, 1 + float(row[3]) / 100))
    return panels


def _panel(name: str, points: Points, left: int, top: int) -> list[str]:
    def at(memory: float, seconds: float) -> tuple[float, float]:
        share = (min(seconds, _HIGHEST) - 0.95) / (_HIGHEST - 0.95)
        return left + memory * _WIDTH, top + _HEIGHT * (1 - max(0.0, share))

    body = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{name}</text>',
        (
            f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none"'
            ' stroke="#999"/>'
        ),
    ]
    for percent in (0, 25, 50, 75, 100):
        x, _ = at(percent / 100, 1)
        body.append(
            f'<text x="{x:.0f}" y="{top + _HEIGHT + 16}" text-anchor="middle">{percent} %</text>'
        )
    for percent in (0, 20, 40, 60):
        _, y = at(0, 1 + percent / 100)
        body.append(
            f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
        )
        body.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">+{percent} %</text>')
    body.append(
        f'<text x="{left + _WIDTH}" y="{top + _HEIGHT + 32}" text-anchor="end">activation'
        " memory</text>"
    )
    for peer, colour in _COLOURS.items():
        mine = sorted((memory, seconds) for who, memory, seconds in points if who == peer)
        places = [at(memory, seconds) for memory, seconds in mine]
        if peer in ("gradfit", "checkpoint") and len(places) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            body.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
    return body
