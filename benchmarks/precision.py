"""How far bfloat16 gradients are from the truth after 64 micro-batches, with and without sums in
float32.

The truth is the float64 sum of the micro-batches' own bfloat16 gradients: what is measured is the
accumulation. The bar: the error with `dtype=torch.float32` is at least 100 times smaller than that
of native bfloat16 sums.

    python benchmarks/precision.py
"""

from __future__ import annotations

import copy
import datetime
from importlib.metadata import version

import torch
from torch import nn

import gradfit as gf

STEPS = 64


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    ).bfloat16()


def batches(sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 32, generator=generator).bfloat16() + 0.5 for size in sizes]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def truth(model: nn.Module, data: list[torch.Tensor]) -> torch.Tensor:
    """The weighted mean of the micro-batches' gradients, in float64."""
    total: torch.Tensor | float = 0.0
    for batch in data:
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        total = total + len(batch) * torch.cat([one.flatten() for one in gradients]).double()
    assert isinstance(total, torch.Tensor)
    return total / sum(map(len, data))


def accumulated(
    model: nn.Module, data: list[torch.Tensor], dtype: torch.dtype | None, isolate: bool
) -> torch.Tensor:
    model = copy.deepcopy(model)
    acc = gf.GradientAccumulator(
        steps=STEPS, parameters=model.parameters(), dtype=dtype, isolate=isolate
    )
    for batch in data:
        acc.backward(loss_of(model, batch), weight=len(batch))
    assert acc.is_ready
    return torch.cat(
        [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    ).double()


def hand_written(model: nn.Module, data: list[torch.Tensor]) -> torch.Tensor:
    model = copy.deepcopy(model)
    total = sum(map(len, data))
    for batch in data:
        (loss_of(model, batch) * (len(batch) / total)).backward()
    return torch.cat(
        [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    ).double()


def main() -> None:
    torch.set_num_threads(1)
    # its AMX kernels are illegal instructions on some virtual machines
    torch.backends.mkldnn.enabled = False
    print(
        f"{datetime.date.today()}, torch {version('torch')}, CPU, {STEPS} micro-batches, bfloat16"
        " parameters\n"
    )
    print(f"{'relative error of the gradient':44} {'equal sizes':>12} {'unequal sizes':>14}")
    columns = []
    for sizes in ([8] * STEPS, [1 + index % 13 for index in range(STEPS)]):
        model, data = small_model(), batches(sizes)
        exact = truth(model, data)
        rows = {
            "hand-written loop (bfloat16 sums)": hand_written(model, data),
            "gradfit, native (bfloat16 sums)": accumulated(model, data, None, False),
            "gradfit, dtype=torch.float32": accumulated(model, data, torch.float32, False),
            "gradfit, dtype=torch.float32, isolate=True": accumulated(
                model, data, torch.float32, True
            ),
        }
        columns.append(
            {name: ((got - exact).norm() / exact.norm()).item() for name, got in rows.items()}
        )
    equal, unequal = columns
    for name in equal:
        print(f"  {name:42} {equal[name]:12.1e} {unequal[name]:14.1e}")
    native, wide = "gradfit, native (bfloat16 sums)", "gradfit, dtype=torch.float32"
    ratios = [column[native] / column[wide] for column in columns]
    print(f"  {'times smaller in float32':42} {ratios[0]:12.0f} {ratios[1]:14.0f}")
    if min(ratios) < 100:
        raise SystemExit("The bar of 100 is missed.")


if __name__ == "__main__":
    main()
