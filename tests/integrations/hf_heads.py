"""Tiny models of `transformers`, one for each kind of head, with rows of unequal numbers of items;
dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

Rows = list[dict[str, Any]]
ROWS, LENGTH, WORDS = 12, 10, 40


def _draw(*shape: int, below: int = WORDS, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(seed))


def tokens(*, rows: int = ROWS, labels: Callable[[int, torch.Tensor, torch.Tensor], Any]) -> Rows:
    """Padded rows of very unequal lengths; `labels(number, ids, mask)` gives a row's labels."""
    found = []
    for number, ids in enumerate(_draw(rows, LENGTH)):
        end = 2 + (number * 7) % (LENGTH - 1)
        mask = (torch.arange(LENGTH) < end).long()
        entry = labels(number, ids, mask)
        entry = entry if isinstance(entry, dict) else {"labels": entry}
        found.append({"input_ids": ids * mask, "attention_mask": mask, **entry})
    return found


def _every_token(number: int, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask == 1, ids, -100)


def _some_tokens(number: int, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    chosen = (mask == 1) & ((ids + number) % 3 == 0)
    return torch.where(chosen, ids, -100)


def _token_classes(number: int, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask == 1, ids % 3, -100)


def _class(number: int, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tensor(number % 3)


def images(labels: Callable[[int], torch.Tensor], rows: int = ROWS) -> Rows:
    pixels = torch.randn(
        rows, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    return [{"pixel_values": one, "labels": labels(number)} for number, one in enumerate(pixels)]


def _bert(**options: Any) -> Any:
    return hf.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip


def _gpt2(**options: Any) -> Any:
    return hf.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip


def gpt2() -> tuple[Any, Rows]:
    return hf.GPT2LMHeadModel(_gpt2()), tokens(labels=_every_token)


def llama() -> tuple[Any, Rows]:
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config), tokens(labels=_every_token)


def gpt2_rows() -> tuple[Any, Rows]:
    return hf.GPT2ForSequenceClassification(_gpt2(num_labels=3)), tokens(labels=_class)


def bert_masked() -> tuple[Any, Rows]:
    return hf.BertForMaskedLM(_bert()), tokens(labels=_some_tokens)


def bert_rows() -> tuple[Any, Rows]:
    return hf.BertForSequenceClassification(_bert(num_labels=3)), tokens(labels=_class)


def bert_several_labels() -> tuple[Any, Rows]:
    model = hf.BertForSequenceClassification(
        _bert(num_labels=3, problem_type="multi_label_classification")
    )
    return model, tokens(labels=lambda n, ids, mask: torch.tensor([n % 2, n % 3 == 0, 1]).double())


def bert_regression() -> tuple[Any, Rows]:
    model = hf.BertForSequenceClassification(_bert(num_labels=1, problem_type="regression"))
    return model, tokens(labels=lambda n, ids, mask: torch.tensor(n / 7.0, dtype=torch.float64))


def bert_tokens() -> tuple[Any, Rows]:
    return hf.BertForTokenClassification(_bert(num_labels=3)), tokens(labels=_token_classes)


def bert_spans() -> tuple[Any, Rows]:
    """Two cross-entropies, each with its own ignored rows."""
    rows = tokens(
        labels=lambda n, ids, mask: {
            "start_positions": n % 4,
            "end_positions": LENGTH if n % 4 == 3 else 5,
        }
    )
    return hf.BertForQuestionAnswering(_bert()), rows


def bert_choices() -> tuple[Any, Rows]:
    ids = _draw(ROWS, 2, LENGTH)
    rows = [{"input_ids": one, "labels": torch.tensor(n % 2)} for n, one in enumerate(ids)]
    return hf.BertForMultipleChoice(_bert()), rows


def bert_pretraining() -> tuple[Any, Rows]:
    """The sum of a mean over masked tokens and a mean over rows: no one weight is right for
    both.
    """
    rows = tokens(
        labels=lambda n, ids, mask: {
            "labels": _some_tokens(n, ids, mask),
            "next_sentence_label": torch.tensor(n % 2),
        }
    )
    return hf.BertForPreTraining(_bert()), rows


def distilbert_masked() -> tuple[Any, Rows]:
    config = hf.DistilBertConfig(
        vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return hf.DistilBertForMaskedLM(config), tokens(labels=_some_tokens)


def t5() -> tuple[Any, Rows]:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), tokens(labels=_every_token)


def bart() -> tuple[Any, Rows]:
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=16, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=2,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config), tokens(labels=_every_token)


def vit() -> tuple[Any, Rows]:
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=3,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), images(lambda n: torch.tensor(n % 3))


def segformer() -> tuple[Any, Rows]:
    """A class for each pixel, 255 for those that do not count; BatchNorm in its head, so it is not
    cut.
    """
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        num_attention_heads=[1, 2], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip

    def labels(number: int) -> torch.Tensor:
        drawn = _draw(16, 16, below=3, seed=number)
        drawn[: number % 16] = 255
        return drawn

    return hf.SegformerForSemanticSegmentation(config), images(labels)


def resnet() -> tuple[Any, Rows]:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return hf.ResNetForImageClassification(config), images(lambda n: torch.tensor(n % 3))


def clip() -> tuple[Any, Rows]:
    """Contrastive: each row's loss depends on all others."""
    text = {
        "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size":
        32, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    rows = [
        {**row, "pixel_values": image["pixel_values"]}
        for row, image in zip(tokens(labels=lambda *_: {}), images(torch.tensor), strict=True)
    ]
    return model, rows


def mixtral() -> tuple[Any, Rows]:
    """With the loss that balances the load of experts, a product of two means over the batch."""
    config = hf.MixtralConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=16, output_router_logits=True, router_aux_loss_coef=0.5,
        pad_token_id=0,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the grouped product has no float64
    return hf.MixtralForCausalLM(config), tokens(labels=_every_token)


HEADS: dict[str, Callable[[], tuple[Any, Rows]]] = {
    make.__name__: make
    for make in (
        gpt2,
        llama,
        gpt2_rows,
        bert_masked,
        bert_rows,
        bert_several_labels,
        bert_regression,
        bert_tokens,
        bert_spans,
        bert_choices,
        bert_pretraining,
        distilbert_masked,
        t5,
        bart,
        vit,
        segformer,
        resnet,
        clip,
        mixtral,
    )
}
NOT_CUT = {"segformer", "resnet", "clip", "mixtral"}
# their norms are computed in float32, whatever the parameters' type
FLOAT32_INSIDE = {"llama", "mixtral", "t5"}
