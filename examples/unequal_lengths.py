"""A causal language model on very unequal sequence lengths: the mean of means against the exact
gradient.

Micro-batches of two sequences hold between 3 and 110 tokens. The usual loop divides each mean loss
by the number of micro-batches, so every token of a short sequence counts many times what a token of
a long one does. Weighing each micro-batch by its tokens gives the gradient of the full padded
batch.

    python examples/unequal_lengths.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import gradfit as gf

logging.set_verbosity_error()
LENGTHS = [63, 49, 2, 3, 4, 2, 40, 7]
VOCABULARY = 101


def loss_sum(model: nn.Module, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
    """The summed loss of a padded batch, and how many tokens it is about: no sequence predicts its
    first one.
    """
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    logits = model(tokens[:, :longest], attention_mask=mask.long()).logits
    labels = tokens[:, 1:longest].masked_fill(~mask[:, 1:], -100)
    loss = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="sum"
    )
    return loss, int((labels != -100).sum())


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=64,
        vocab_size=VOCABULARY,
        n_positions=64,
        use_cache=False,
        **ends,
    )
    full = GPT2LMHeadModel(config).double().eval()
    naive, exact = copy.deepcopy(full), copy.deepcopy(full)
    tokens, lengths = (
        torch.randint(0, VOCABULARY, (len(LENGTHS), max(LENGTHS))),
        torch.tensor(LENGTHS),
    )
    micro_batches = list(zip(tokens.split(2), lengths.split(2), strict=True))

    total, count = loss_sum(full, tokens, lengths)
    (total / count).backward()

    for rows, sizes in micro_batches:
        part, items = loss_sum(naive, rows, sizes)
        (part / items / len(micro_batches)).backward()

    acc = gf.GradientAccumulator(steps=len(micro_batches), parameters=exact.parameters())
    for rows, sizes in micro_batches:
        part, items = loss_sum(exact, rows, sizes)
        acc.backward(part, weight=items, reduction="sum")
    assert acc.is_ready

    reference = gradient(full)
    print(
        f"{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, {len(micro_batches)}"
        " micro-batches"
    )
    print(f"{'gradient against the full batch':34} {'relative error':>15} {'cosine':>9}")
    for name, model in (
        ("mean of means (the usual loop)", naive),
        ("weighed by tokens (gradfit)", exact),
    ):
        got = gradient(model)
        error = ((got - reference).norm() / reference.norm()).item()
        print(f"  {name:32} {error:15.1e} {F.cosine_similarity(got, reference, dim=0).item():9.5f}")


if __name__ == "__main__":
    main()
