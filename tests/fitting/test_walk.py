"""The walk of one batch through `fit` and `step` on the architecture page is the one that is
taken.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import gradfit as gf

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def listed() -> list[str]:
    section = (
        PAGE.read_text(encoding="utf-8")
        .split("### One batch, function by function")[1]
        .split("\n#")[0]
    )
    return re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)


def code_of(name: str) -> CodeType:
    """Of a function named from the package on: modules, perhaps a class, the function."""
    parts, depth = name.split("."), 2
    found: Any = importlib.import_module("gradfit." + ".".join(parts[:depth]))
    for part in parts[depth:]:
        found = getattr(found, part)
    code: CodeType = found.__code__
    return code


def test_a_batch_takes_the_walk_that_is_written_down() -> None:
    names = listed()
    assert len(names) == 15
    watched = {code_of(name): name for name in names}
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = watched.get(frame.f_code)
        if event == "call" and name is not None and name not in entered:
            entered.append(name)

    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 8)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    sys.setprofile(note)
    try:
        step = gf.fit(model, optimizer, loss_fn, batch, memory="1 MiB", micro_batch=8)
        in_fit = entered.copy()
        entered.clear()
        step(batch)
    finally:
        sys.setprofile(None)
    order = [name for name in names if name in in_fit]
    first_of_step = next(place for place, name in enumerate(names) if name.endswith("__call__"))
    assert [name for name in in_fit if name in names[:first_of_step]] == order[
        : len(names[:first_of_step])
    ]
    assert set(names[:first_of_step]) <= set(in_fit)
    assert [name for name in entered if name in names[first_of_step:]] == names[first_of_step:]
