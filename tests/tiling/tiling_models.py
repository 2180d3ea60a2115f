"""Small models of `transformers`, with random weights, whose losses are computed by their own
code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

WORDS = 300
_LLAMA = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_BERT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 80, "pad_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip

CAUSAL: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA), "gemma2": lambda:
    transformers.Gemma2Config(**_LLAMA, head_dim=8, final_logit_softcapping=2.0), "gpt2": lambda:
    transformers.GPT2Config( vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64,
    bos_token_id=1, eos_token_id=2 ), "mistral": lambda: transformers.MistralConfig(**_LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA), "qwen3": lambda:
    transformers.Qwen3Config(**_LLAMA, head_dim=8), "gemma": lambda:
    transformers.GemmaConfig(**_LLAMA, head_dim=8), "granite": lambda:
    transformers.GraniteConfig(**_LLAMA, logits_scaling=4.0), "cohere": lambda:
    transformers.CohereConfig(**_LLAMA), "gpt_neox": lambda: transformers.GPTNeoXConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, ), "opt":
    lambda: transformers.OPTConfig( vocab_size=WORDS, hidden_size=32, ffn_dim=48,
    num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=64,
    ), "bloom": lambda: transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2,
    n_head=4), "phi": lambda: transformers.PhiConfig(**_LLAMA), "olmo2": lambda:
    transformers.Olmo2Config(**_LLAMA),
}  # fmt: skip
MASKED: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**_BERT),
    "roberta": lambda: transformers.RobertaConfig(**_BERT),
    "electra": lambda: transformers.ElectraConfig(**_BERT, embedding_size=16),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=WORDS, dim=32, hidden_dim=48, n_layers=2, n_heads=4
    ),
}
ENCODER_DECODER: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5Config(
        vocab_size=WORDS,
        dropout_rate=0.0,  # a tiled module with dropout inside draws other masks
        d_model=32,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        decoder_start_token_id=0,
    ),
    "bart": lambda: transformers.BartConfig(**_BART),
    "pegasus": lambda: transformers.PegasusConfig(**_BART),
}
EXPERTS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(
        **_LLAMA, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}
EVERY = {**CAUSAL, **MASKED, **ENCODER_DECODER}


def make_model(name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """In training mode, always with the same weights."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM
    if name in CAUSAL or name in EXPERTS:
        auto = transformers.AutoModelForCausalLM
    elif name in MASKED:
        auto = transformers.AutoModelForMaskedLM
    return auto.from_config({**EVERY, **EXPERTS}[name]()).to(dtype).train()


def make_batch(rows: int = 2, length: int = 19) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, WORDS, (rows, length), generator=make)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}
