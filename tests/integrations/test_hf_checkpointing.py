"""`enable_checkpointing`: the models of `transformers` with gradfit's tape where torch's checkpoint
would be.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers as hf
from one_configuration import assert_same_bits

import gradfit as gf
from gradfit.integrations.transformers import enable_checkpointing


def tokens(rows: int = 4, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(0))


def causal(config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    return hf.AutoModelForCausalLM.from_config(config), {"input_ids": tokens(), "labels": tokens()}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    """A small model that fills no key-value cache, as its layers do not while they are
    checkpointed, and a batch.
    """
    torch.manual_seed(0)
    cache = {"use_cache": False}
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    if name == "gpt2":
        return causal(
            hf.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=60, n_positions=32, **cache)
        )
    if name == "llama":
        return causal(
            hf.LlamaConfig(
                **small, num_key_value_heads=2, vocab_size=60, attention_dropout=0.1, **cache
            )
        )
    if name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**small, vocab_size=60))
        return model, {"input_ids": tokens(), "labels": tokens()}
    if name == "t5":
        config = hf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=60,
            decoder_start_token_id=0,
            **cache,
        )
        return hf.T5ForConditionalGeneration(config), {
            "input_ids": tokens(),
            "labels": tokens(length=12),
        }
    config = hf.ViTConfig(**small, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return hf.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": torch.tensor([0, 1, 1, 0]),
    }


def run(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    torch.manual_seed(5)
    out = model(**batch)
    out.loss.backward()
    computed = {
        f"gradient of {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    computed |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return computed | {
        "loss": out.loss.detach(),
        "logits": out.logits.detach(),
        "rng": torch.get_rng_state(),
    }


def peak(model: Any, batch: dict[str, Any]) -> int:
    with gf.meter(model, batch) as live:
        run(model, batch)
    return live.peak_bytes


@pytest.mark.exact
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_not_a_bit_changes(name: str) -> None:
    model, batch = make(name)
    plain = copy.deepcopy(model)
    enable_checkpointing(model)
    assert_same_bits(lambda: run(plain, batch), lambda: run(model, batch))
    before = peak(plain, batch)
    assert peak(model, batch) < 0.9 * before
    model.gradient_checkpointing_disable()
    assert peak(model, batch) > 0.95 * before


def test_every_second_layer() -> None:
    model, batch = make("gpt2")
    half = copy.deepcopy(model)
    enable_checkpointing(model)
    enable_checkpointing(half, every_n_layers=2)
    assert_same_bits(lambda: run(model, batch), lambda: run(half, batch))
    assert peak(model, batch) < peak(half, batch)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_transformers_says_that_checkpointed_layers_fill_no_cache(
    name: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing it with a model that does would be comparing two configurations."""
    # trainers may have switched it off
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, batch = make(name)
    plain, batch["use_cache"] = copy.deepcopy(model), True
    enable_checkpointing(model)
    hf.utils.logging.warning_once.cache_clear()
    with (
        caplog.at_level(logging.WARNING, logger="transformers"),
        pytest.raises(AssertionError, match="two configurations"),
    ):
        assert_same_bits(lambda: run(plain, batch), lambda: run(model, batch))
    assert "`use_cache=False`" in caplog.text


def test_a_model_without_support_is_refused() -> None:
    with pytest.raises(gf.MisuseError, match="Linear does not support"):
        enable_checkpointing(torch.nn.Linear(2, 2))
