"""Small models with random weights: each with a batch of four rows and the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Any]]

_VOCABULARY: dict[str, Any] = {
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32, **_VOCABULARY,
}  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.arange(48).reshape(4, 12) % 61 + 3


def images() -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(7)),
        "y": torch.arange(4),
    }


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def image_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).logits, batch["y"])


def masked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """A sum over what is not padding, and how much that is: reads the mask in Python."""
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["ids"].flatten(), reduction="none"
    )
    return (losses * batch["mask"].flatten()).sum(), batch["mask"].sum().item()


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
    mask = torch.ones_like(tokens())
    mask[:, 8:] = 0
    return hf.BertForMaskedLM(config), {"ids": tokens(), "mask": mask}, masked_loss


def t5() -> Case:
    config = hf.T5Config(
        num_layers=2,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_heads=2,
        decoder_start_token_id=0,
        vocab_size=64,
    )
    return hf.T5ForConditionalGeneration(config), tokens(), language_loss


def llama() -> Case:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)), tokens(), language_loss


def mixtral() -> Case:
    model = hf.MixtralForCausalLM(
        hf.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_LLAMA)
    )
    model.set_experts_implementation("eager")
    return model, tokens(), language_loss


def vit() -> Case:
    config = hf.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        image_size=32, patch_size=8, num_labels=10,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), images(), image_loss


def resnet() -> Case:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=10)
    return hf.ResNetForImageClassification(config), images(), image_loss


def perceptron() -> Case:
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.BatchNorm1d(64),
        nn.Linear(64, 1),
    )
    return model, torch.randn(4, 16, generator=torch.Generator().manual_seed(7)), square_loss


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


MODELS: dict[str, Callable[[], Case]] = {
    "perceptron": perceptron, "gpt2": gpt2, "bert": bert, "t5": t5, "llama": llama, "vit": vit,
    "resnet": resnet,
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


def make(name: str) -> Case:
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()
    model.train()
    return model, batch, loss_fn
