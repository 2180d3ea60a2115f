"""Stopped in the middle of a window and taken up again from files without a pickle: bit-identical.

python examples/resume_mid_window.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gradfit as gf

DATA = list(
    torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).split([7, 3, 9, 5, 6, 10])
)


def start() -> tuple[nn.Module, gf.GradientAccumulator]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return model, gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=3)


def train(model: nn.Module, acc: gf.GradientAccumulator, micro_batches: list[torch.Tensor]) -> None:
    for micro in micro_batches:
        acc.backward(model(micro).square().mean(), weight=len(micro))
        acc.step()


def main() -> None:
    whole, acc = start()
    train(whole, acc, DATA)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, acc = start()
        train(model, acc, DATA[:4])
        print(f"stopped: {acc}")
        state = acc.state_dict()
        save_file(state["tensors"], folder / "window.safetensors")
        (folder / "window.json").write_text(json.dumps(state["window"]))
        save_file(model.state_dict(), folder / "model.safetensors")

        model, acc = start()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        window = json.loads((folder / "window.json").read_text())
        acc.load_state_dict({"tensors": load_file(folder / "window.safetensors"), "window": window})
        train(model, acc, DATA[4:])

    same = all(
        torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True)
    )
    print(f"bit-identical to the run that was never stopped: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
