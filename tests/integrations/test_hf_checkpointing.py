"""`enable_checkpointing`: the models of `transformers` with gradfit's tape where torch's checkpoint would be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import gradfit as gf
from gradfit.integrations.transformers import enable_checkpointing


def tokens(rows: int = 4, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(0))


def causal(config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    return hf.AutoModelForCausalLM.from_config(config), {"input_ids": tokens(), "labels": tokens()}


def make(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "gpt2":
        return causal(hf.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=60, n_positions=32))
    if name == "llama":
        return causal(hf.LlamaConfig(**small, num_key_value_heads=2, vocab_size=60, attention_dropout=0.1))
    if name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**small, vocab_size=60))
        return model, {"input_ids": tokens(), "labels": tokens()}
    if name == "t5":
        config = hf.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=60, decoder_start_token_id=0
        )
        return hf.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(length=12)}
    config = hf.ViTConfig(**small, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return hf.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1, 0])}


def run(model: Any, batch: dict[str, torch.Tensor]) -> tuple[list[Any], int]:
    model.train()
    torch.manual_seed(5)
    with gf.meter(model, batch) as live:
        out = model(**batch)
        out.loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [out.loss.detach(), out.logits.detach(), torch.get_rng_state(), *gradients, *buffers], live.peak_bytes


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_not_a_bit_changes(name: str) -> None:
    model, batch = make(name)
    plain = copy.deepcopy(model)
    enable_checkpointing(model)
    expected, before = run(plain, batch)
    actual, after = run(model, batch)
    assert len(actual) == len(expected)
    assert all(a is b or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert after < 0.9 * before
    model.gradient_checkpointing_disable()
    model.zero_grad()
    _, again = run(model, batch)
    assert again > 0.95 * before


def test_every_second_layer() -> None:
    model, batch = make("gpt2")
    half = copy.deepcopy(model)
    enable_checkpointing(model)
    enable_checkpointing(half, every_n_layers=2)
    (expected, least), (actual, more) = run(model, batch), run(half, batch)
    assert all(a is b or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert least < more


def test_a_model_without_support_is_refused() -> None:
    with pytest.raises(gf.MisuseError, match="Linear does not support"):
        enable_checkpointing(torch.nn.Linear(2, 2))
