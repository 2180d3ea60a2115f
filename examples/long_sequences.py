"""A row whose logits alone are more than the budget: lazy logits, by hand and chosen by `fit`.

python examples/long_sequences.py
"""

import torch
import torch.nn.functional as F

import gradfit as gf

WORDS, WIDTH, LENGTH = 4_000, 16, 512


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 128), torch.nn.GELU(), torch.nn.Linear(128, WIDTH)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = self.mix(x)
        x = x + F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return self.head(x + self.mlp(x))


def loss_fn(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def peak(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[int, torch.Tensor]:
    model.zero_grad()
    with gf.meter(model, tokens) as live:
        loss_fn(model, tokens).backward()
    return live.peak_bytes, torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


torch.manual_seed(0)
model = Decoder()
tokens = torch.randint(0, WORDS, (1, LENGTH))
print(f"the logits of one row: {LENGTH * WORDS * 4 / 2**20:.1f} MiB")

plain_bytes, expected = peak(model, tokens)
with gf.tile(model, size=128):
    tiled_bytes, found = peak(model, tokens)
error = float((found - expected).norm() / expected.norm())
print(
    f"plain {plain_bytes / 2**20:.1f} MiB, tiled {tiled_bytes / 2**20:.1f} MiB, gradients differ by"
    f" {error:.1e}"
)
assert tiled_bytes < plain_bytes / 4
assert error < 2e-6

optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
step = gf.fit(model, optimizer, loss_fn, tokens, memory="5 MiB")
losses = [step(tokens).loss for _ in range(3)]
print(f"fit at 5 MiB: {step.plan.tiles}; losses {losses[0]:.3f} … {losses[-1]:.3f}")
assert step.plan.tiles is not None
assert losses[-1] < losses[0]
