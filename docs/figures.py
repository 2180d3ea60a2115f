"""Draws docs/images/timeline.svg: live tensor bytes over one training step, plain and under three
budgets.

Run it with `make figures`. The curves are measured by `gf.meter(timeline=True)` on this machine's
CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import gradfit as gf

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 860, 380, 64, 46, 34
_COLOURS = ("#6b7280", "#2563eb", "#059669", "#d97706")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def run(model: nn.Module, batch: torch.Tensor, plan: gf.Plan | None) -> list[tuple[float, int]]:
    """The timeline of one step, at the second time, when nothing is new any more."""
    for _ in range(2):
        model.zero_grad()
        with gf.meter(model, batch, timeline=True) as live:
            if plan is None:
                loss = model(batch).square().mean()
            else:
                with gf.apply(model, plan):
                    loss = model(batch).square().mean()
            loss.backward()
            del loss
    return live.timeline or []


def svg(curves: list[tuple[str, list[tuple[float, int]]]]) -> str:
    """The curves as a picture; each is drawn over its own duration, so that the phases line up."""
    highest = max(size for _, line in curves for _, size in line)
    unit = 2**20
    step = max(1, round(highest / unit / 5 / 50)) * 50

    def x(share: float) -> float:
        return _LEFT + share * (_WIDTH - _LEFT - 20)

    def y(size: float) -> float:
        return _HEIGHT - _BOTTOM - size / highest * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">'
        ),
        "<title>Live tensor bytes of one training step, plain and under three budgets</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
    ]
    parts += [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(tick * unit):.1f}" y2="{y(tick * unit):.1f}"'
        f' stroke="#e5e7eb"/><text x="{_LEFT - 8}" y="{y(tick * unit) + 4:.1f}" text-anchor="end"'
        f' fill="#374151">{tick}</text>'
        for tick in range(0, int(highest / unit) + 1, step)
    ]
    parts.append('<text x="12" y="20" fill="#374151">MiB of live tensors</text>')
    parts.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 14}" fill="#374151">forward</text><text x="{_WIDTH - 20}"'
        f' y="{_HEIGHT - 14}" text-anchor="end" fill="#374151">backward, each step over its own'
        " duration</text>"
    )
    for number, (name, line) in enumerate(curves):
        end = line[-1][0] or 1.0
        points: list[str] = []
        last = None
        for seconds, size in line:
            column = round(x(seconds / end))
            if column != last or size == max(s for _, s in line):
                points.append(f"{x(seconds / end):.1f},{y(size):.1f}")
                last = column
        colour = _COLOURS[number]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"'
            ' stroke-width="2"/>'
        )
        peak = max(size for _, size in line)
        column = 250 + 150 * number
        parts.append(
            f'<rect x="{column}" y="11" width="12" height="12" rx="2" fill="{colour}"/>'
            f'<text x="{column + 18}" y="21" fill="#111827">{name}, {peak / unit:.0f} MiB</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = nn.Sequential(*(Block(256, 4) for _ in range(12)))
    batch = torch.randn(8, 128, 256)
    found = gf.profile(model, lambda m, b: m(b).square().mean(), batch)
    plain = run(model, batch, None)
    peak = max(size for _, size in plain)
    curves = [("plain", plain)]
    for share in (0.75, 0.5, 0.3):
        plan = gf.plan(found, memory=int(peak * share))
        curves.append((f"{share:.0%}", run(model, batch, plan)))
    target = Path(__file__).parent / "images" / "timeline.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(svg(curves))
    for name, line in curves:
        print(
            f"{name:>6}: peak {max(size for _, size in line) / 2**20:.0f} MiB in"
            f" {line[-1][0]:.2f} s"
        )


if __name__ == "__main__":
    main()
