"""Six small models with random weights and dropout: each with a batch, the loss of a batch, and the
plain step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

import gradfit as gf
from gradfit.tree import size_of_batch, split_batch

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Any]]

ROWS = 8
_VOCABULARY: dict[str, Any] = {
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokens(rows: int = ROWS, length: int = 12) -> torch.Tensor:
    return torch.randint(
        3, 64, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length)
    )


def images(rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 3, 16, 16, generator=generator), "y": torch.arange(rows) % 4}


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def image_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    pixels = batch["x"].to(next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(pixels).logits, batch["y"])


def gpt2() -> Case:
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **_VOCABULARY)
    )
    return model, tokens(), language_loss


def bert() -> Case:
    config = hf.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        **_VOCABULARY,
    )
    return hf.BertForMaskedLM(config), tokens(), language_loss


def t5() -> Case:
    config = hf.T5Config(
        num_layers=1,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_heads=2,
        decoder_start_token_id=0,
        vocab_size=64,
    )
    return hf.T5ForConditionalGeneration(config), tokens(), language_loss


def vit() -> Case:
    config = hf.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        num_labels=4,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), images(), image_loss


def resnet() -> Case:
    config = hf.ResNetConfig(
        depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8, layer_type="basic", num_labels=4
    )
    return hf.ResNetForImageClassification(config), images(), image_loss


def mixtral() -> Case:
    config = hf.MixtralConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32, attention_dropout=0.1,
        num_local_experts=4, num_experts_per_tok=2, **_VOCABULARY,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    # its operations depend on which expert the router chooses
    model.set_experts_implementation("eager")
    return model, tokens(), language_loss


MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make for make in (gpt2, bert, t5, vit, resnet, mixtral)
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=_eps()),
}


def _eps() -> float:
    """Torch's own on the CPU, where bits are compared. A gradient that is rounding alone (an
    attention's key bias) divided by itself would be as large as any.
    """
    return 1e-8 if torch.get_default_device().type == "cpu" else 1e-6


def make(name: str) -> Case:
    """A model in training mode with the same weights every time."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, loss_fn = MODELS[name]()
    return model.train(), batch, loss_fn


def plain_peak(name: str, optimizer: str) -> int:
    """Bytes of two plain steps, the optimizer's state and the batch included."""
    model, batch, loss_fn = make(name)
    made = OPTIMIZERS[optimizer](model.parameters())
    with gf.meter(model, made, batch) as live:
        for _ in range(2):
            loss_fn(model, batch).backward()
            made.step()
            made.zero_grad()
    return live.peak_bytes


def plain_steps(
    name: str, optimizer: str, batches: list[Any], micro_batches: list[int], *, seed: int = 7
) -> dict[str, torch.Tensor]:
    """The state after plain steps, each in micro-batches of the given size, with nothing
    recomputed.
    """
    model, _, loss_fn = make(name)
    accumulator = gf.GradientAccumulator(OPTIMIZERS[optimizer](model.parameters()))
    torch.manual_seed(seed)
    for batch, micro_batch in zip(batches, micro_batches, strict=True):
        parts = list(split_batch(batch, micro_batch))
        accumulator.accumulation_count = len(parts)
        for part in parts:
            accumulator.backward(loss_fn(model, part), weight=size_of_batch(part))
        accumulator.flush()
    return copy.deepcopy(model.state_dict())


def same_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    """Bit by bit; on an accelerator, where weights are read at the end of a step and its parts go
    in as sums, up to the rounding of these (tests/device compares whole batches bit by bit).
    """
    found = model.state_dict()
    same = torch.equal if torch.get_default_device().type == "cpu" else _same_but_for_rounding
    return found.keys() == expected.keys() and all(
        same(found[name], expected[name]) for name in found
    )


def _same_but_for_rounding(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6)
