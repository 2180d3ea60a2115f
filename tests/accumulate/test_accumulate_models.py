"""Real models: a causal language model with very unequal lengths, and what a micro-batch costs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf


def test_causal_language_model_with_unequal_lengths() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=64, attn_pdrop=0, embd_pdrop=0
    )
    model = GPT2LMHeadModel(config).double().eval()
    reference = copy.deepcopy(model)
    lengths = [60, 2, 3, 41, 1, 7, 2, 2]
    tokens, mask = torch.randint(0, 61, (8, 60)), torch.arange(60) < torch.tensor(lengths)[:, None]
    labels = tokens.masked_fill(~mask, -100)

    def loss_sum(net: nn.Module, rows: slice) -> tuple[torch.Tensor, int]:
        longest = int(mask[rows].sum(1).max())
        logits = net(tokens[rows, :longest], attention_mask=mask[rows, :longest].long()).logits
        wanted = labels[rows, 1:longest]  # the first token is predicted from nothing
        total = F.cross_entropy(
            logits[:, :-1].transpose(1, 2), wanted, reduction="sum", ignore_index=-100
        )
        return total, int((wanted != -100).sum())

    acc = gf.GradientAccumulator(steps=4, parameters=model.parameters())
    naive = copy.deepcopy(model)
    for at in range(0, 8, 2):
        total, count = loss_sum(model, slice(at, at + 2))
        acc.backward(total, weight=count, reduction="sum")
        total, count = loss_sum(naive, slice(at, at + 2))
        (total / count / 4).backward()
    assert acc.is_ready
    total, count = loss_sum(reference, slice(0, 8))
    (total / count).backward()
    exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in naive.parameters()])
    assert (ours - exact).norm() / exact.norm() < 1e-12
    assert (theirs - exact).norm() / exact.norm() > 0.1


class Allocations(TorchDispatchMode):
    """Bytes of every new tensor that operations make, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else [result]:
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
                self.bytes += out.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("weight", [1, 8])
def test_no_tensor_bytes_beyond_the_backward_pass(weight: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = gf.GradientAccumulator(optimizer, steps=50)
    x = torch.randn(8, 32)

    def measure(run) -> int:  # type: ignore[no-untyped-def]
        loss = model(x).square().mean()
        with Allocations() as allocations:
            run(loss)
        return allocations.bytes

    def ours(loss: torch.Tensor) -> None:
        acc.backward(loss, weight=weight)
        acc.step()

    measure(ours)
    accumulated = [measure(ours) for _ in range(5)]
    acc.reset()
    acc.disable_accumulation()
    measure(lambda loss: (loss / 50).backward())
    plain = measure(lambda loss: loss.backward())
    assert max(accumulated) <= plain


def test_tied_weights_and_dropout() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(11, 5)
    head = nn.Linear(5, 11, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Tanh(), head).double()
    reference = copy.deepcopy(model)
    acc = gf.GradientAccumulator(torch.optim.Adam(model.parameters(), lr=0.1), steps=2, clip=0.1)
    rows, labels = torch.randint(0, 11, (9,)), torch.randint(0, 11, (9,))
    for part in torch.arange(9).split([2, 7]):
        acc.backward(F.cross_entropy(model(rows[part]), labels[part]), weight=len(part))
        acc.step()
    F.cross_entropy(reference(rows), labels).backward()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    torch.testing.assert_close(model[0].weight, reference[0].weight, rtol=1e-6, atol=1e-9)
    assert len(acc.window.tensors) == 1


def test_schedulers_step_with_the_optimizer() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    acc = gf.GradientAccumulator(optimizer, steps=3)
    for _ in range(6):
        acc.backward(model(torch.randn(2, 2)).mean(), weight=2)
        if acc.step():
            scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for size in (3, 5):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = model(torch.randn(size, 8)).mean()
        acc.backward(loss, weight=size)
        result = acc.step()
    assert result.stepped
