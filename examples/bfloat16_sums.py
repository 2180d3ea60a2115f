"""bfloat16 parameters, float32 sums: what 200 small gradients add up to.

python examples/bfloat16_sums.py
"""

from __future__ import annotations

import torch

import gradfit as gf


def main() -> None:
    for name, dtype in (("bfloat16 sums", None), ("float32 sums", torch.float32)):
        w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=200, dtype=dtype)
        for index in range(200):
            factor = 1.0 if index == 0 else 1 / 256  # one large gradient, then many small ones
            acc.backward((w * factor).sum())
            result = acc.step()
        exact = (1 + 199 / 256) / 200
        print(
            f"{name:14} gradient {result.grad_norm:.6f}, exact {exact:.6f}, parameter"
            f" {w.item():.6f} {w.dtype}"
        )


if __name__ == "__main__":
    main()
