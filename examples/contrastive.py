"""A contrastive loss over a large batch in the activation memory of one chunk: `gf.chunked`."""

import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf

BATCH, CHUNK = 1024, 32

torch.manual_seed(0)
encoder = nn.Sequential(
    *[nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(12)]
)
left, right = torch.randn(BATCH, 128), torch.randn(BATCH, 128)


def info_nce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t() / 0.07
    return F.cross_entropy(logits, torch.arange(len(logits)))


def measure(encode) -> tuple[float, int, torch.Tensor]:
    with gf.meter() as meter:
        loss = info_nce(encode(left), encode(right))
        gradients = torch.autograd.grad(loss, list(encoder.parameters()))
    return loss.item(), meter.peak_bytes, torch.cat([g.flatten() for g in gradients])


plain_loss, plain_peak, expected = measure(encoder)
loss, peak, gradient = measure(lambda batch: gf.chunked(encoder, batch, CHUNK))
print(f"full batch   loss {plain_loss:.6f}   peak {plain_peak / 2**20:7.1f} MiB")
print(f"chunks of {CHUNK} loss {loss:.6f}   peak {peak / 2**20:7.1f} MiB ({peak / plain_peak:.0%})")
print(
    "relative difference of the gradients:"
    f" {((gradient - expected).norm() / expected.norm()).item():.1e}"
)
