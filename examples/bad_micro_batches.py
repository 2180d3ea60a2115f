"""One NaN, one out-of-memory: each costs its own micro-batch, and nothing that was accumulated
before it.

python examples/bad_micro_batches.py
"""

from __future__ import annotations

import torch
from torch import nn

import gradfit as gf


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    acc = gf.GradientAccumulator(
        torch.optim.AdamW(model.parameters()),
        steps=4,
        isolate=True,
        on_nonfinite="skip",
        scaler=gf.LossScaler(1024.0),
    )
    micro_batches = list(torch.randn(20, 8).split(5))
    micro_batches[1] = micro_batches[1] * float("nan")

    for index, micro in enumerate(micro_batches):
        for part in (micro, *micro.split(3)):  # if the whole does not fit, its parts
            try:
                with acc.micro_batch(weight=len(part)):
                    if index == 2 and len(part) == 5:
                        raise torch.OutOfMemoryError("5 items do not fit")
                    acc.backward(model(part).square().mean())
            except torch.OutOfMemoryError as error:
                print(f"micro-batch {index}: {error}; taken back, once more in smaller parts")
                continue
            if len(part) == 5:
                break
    result = acc.flush()
    print(
        f"stepped: {result.stepped}, with {result.weight} items; {result.skipped} micro-batch was"
        " not finite"
    )


if __name__ == "__main__":
    main()
