"""Small models with random weights, each with a batch, and the blocks that a scope can be put
around.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Loss = Callable[[nn.Module], torch.Tensor]
Case = tuple[nn.Module, Loss, list[nn.Module]]

IDS = torch.arange(24).reshape(2, 12) % 50
_VOCABULARY: dict[str, Any] = {
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _cast(model: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(next(model.parameters()).dtype)


def _head(output: Any) -> torch.Tensor:
    return output.square().mean()


def gpt2() -> Case:
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **_VOCABULARY)
    model = hf.GPT2LMHeadModel(config)
    return model, lambda m: m(input_ids=IDS, labels=IDS).loss, list(model.transformer.h)


def bert() -> Case:
    config = hf.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        **_VOCABULARY,
    )
    model = hf.BertForMaskedLM(config)
    mask = torch.ones_like(IDS)
    mask[0, 8:] = 0
    return (
        model,
        lambda m: m(input_ids=IDS, attention_mask=mask, labels=IDS).loss,
        list(model.bert.encoder.layer),
    )


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
    model = hf.T5ForConditionalGeneration(config)
    return (
        model,
        lambda m: m(input_ids=IDS, labels=IDS).loss,
        [*model.encoder.block, *model.decoder.block],
    )


def _llama_sizes() -> dict[str, Any]:
    return {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads":
        2, "intermediate_size": 64, "max_position_embeddings": 32, "attention_dropout": 0.1,
        **_VOCABULARY,
    }  # fmt: skip


def llama() -> Case:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_llama_sizes()))
    return model, lambda m: m(input_ids=IDS, labels=IDS).loss, list(model.model.layers)


def mixtral() -> Case:
    config = hf.MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **_llama_sizes()
    )
    model = hf.MixtralForCausalLM(config)
    return model, lambda m: m(input_ids=IDS, labels=IDS).loss, list(model.model.layers)


def vit() -> Case:
    config = hf.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        num_labels=4,
    )  # fmt: skip
    model = hf.ViTForImageClassification(config)
    images = floats(2, 3, 16, 16)
    return (
        model,
        lambda m: _head(m(_cast(m, images)).logits),
        list(model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers),
    )


def swin() -> Case:
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=2,
        drop_path_rate=0.3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=4,
    )  # fmt: skip
    model = hf.SwinForImageClassification(config)
    images = floats(2, 3, 16, 16)
    blocks = [block for layer in model.swin.encoder.layers for block in layer.blocks]
    return model, lambda m: _head(m(_cast(m, images)).logits), blocks


def convnext() -> Case:
    config = hf.ConvNextConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        drop_path_rate=0.3,
        image_size=32,
        num_labels=4,
    )
    model = hf.ConvNextForImageClassification(config)
    images = floats(2, 3, 32, 32)
    return model, lambda m: _head(m(_cast(m, images)).logits), list(model.convnext.encoder.stages)


def resnet() -> Case:
    config = hf.ResNetConfig(
        depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8, layer_type="basic", num_labels=4
    )
    model = hf.ResNetForImageClassification(config)
    images = floats(4, 3, 32, 32)
    return model, lambda m: _head(m(_cast(m, images)).logits), list(model.resnet.encoder.stages)


def whisper() -> Case:
    config = hf.WhisperConfig(
        encoder_layers=1, decoder_layers=1, d_model=16, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, dropout=0.1, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, **_VOCABULARY,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)
    sound = floats(2, 8, 32)
    return (
        model,
        lambda m: m(input_features=_cast(m, sound), labels=IDS).loss,
        [*model.model.encoder.layers, *model.model.decoder.layers],
    )


def mamba() -> Case:
    config = hf.MambaConfig(
        num_hidden_layers=2, hidden_size=16, state_size=4, time_step_rank=4, **_VOCABULARY
    )
    model = hf.MambaForCausalLM(config)
    return model, lambda m: m(input_ids=IDS, labels=IDS).loss, list(model.backbone.layers)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


def lstm() -> Case:
    model = Recurrent()
    series = floats(3, 5, 8)
    return model, lambda m: _head(m(_cast(m, series))), [model.lstm, model.gru]


def transformer() -> Case:
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
    source, target = floats(2, 6, 16), floats(2, 5, 16)

    def loss(m: nn.Module) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=next(m.parameters()).dtype)
        return _head(m(_cast(m, source), _cast(m, target), tgt_mask=mask))

    return model, loss, [*model.encoder.layers, *model.decoder.layers]


def attention() -> Case:
    model = nn.ModuleList(
        [nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True) for _ in range(2)]
    )
    x = floats(2, 6, 16)

    def loss(m: Any) -> torch.Tensor:
        h, weights = m[0](
            _cast(m, x), _cast(m, x), _cast(m, x), need_weights=True, average_attn_weights=False
        )
        h, more = m[1](h, h, h, need_weights=True)
        return _head(h) + _head(weights) + _head(more)

    return model, loss, list(model)


def inplace() -> Case:
    def stage(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1), nn.Dropout2d(0.2, inplace=True), nn.GroupNorm(2, 8),
            nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(8, 8, 1), nn.SiLU(inplace=True),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ELU(inplace=True),
        )  # fmt: skip

    model = nn.Sequential(stage(3), stage(8), nn.Flatten(), nn.Linear(8 * 64, 3))
    images = floats(3, 3, 8, 8)
    return model, lambda m: _head(m(_cast(m, images))), [model[0], model[1]]


MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make for make in ( gpt2, bert, t5, llama, mixtral, vit, swin, convnext, resnet,
    whisper, mamba, lstm, transformer, attention, inplace, )
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """A model in training mode with the same weights every time."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss, blocks = MODELS[name]()
    return model.to(dtype).train(), loss, blocks
