"""Ready `loss_fn`s for models of `transformers`: the model's own loss, with the number of its
items.

Each takes `(model, batch)`, where the batch is the mapping of tensors that a data collator makes,
`labels` included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradfit.arguments import read_instance, read_mapping
from gradfit.batches.loss import Loss, count_tokens
from gradfit.errors import MisuseError


def causal_lm(model: torch.nn.Module, batch: Mapping[str, Any]) -> Loss:
    """The next token's cross-entropy, over all labels that are not −100 but the first of each row.

    Args:
        model: called as `model(**batch)`; its output has `loss`, a mean over the labels that count.
        batch: keyword arguments of the model, `labels` among them.
    """
    return _counted(model, batch, count_tokens(_labels(batch), shift=True))


def masked_lm(model: torch.nn.Module, batch: Mapping[str, Any]) -> Loss:
    """The masked tokens' cross-entropy, over all labels that are not −100.

    Args:
        model: called as `model(**batch)`; its output has `loss`, a mean over the labels that count.
        batch: keyword arguments of the model, `labels` among them.
    """
    return _counted(model, batch, count_tokens(_labels(batch), shift=False))


def seq2seq_lm(model: torch.nn.Module, batch: Mapping[str, Any]) -> Loss:
    """The decoder's cross-entropy; the model itself shifts its inputs, so every label that is not
    −100 counts.

    Args:
        model: called as `model(**batch)`; its output has `loss`, a mean over the labels that count.
        batch: keyword arguments of the model, `labels` among them.
    """
    return _counted(model, batch, count_tokens(_labels(batch), shift=False))


def classification(model: torch.nn.Module, batch: Mapping[str, Any]) -> Loss:
    """Of rows or tokens: labels that are whole numbers other than −100, or each element of floating
    point ones.

    Args:
        model: called as `model(**batch)`; its output has `loss`, a mean over the labels that count.
        batch: keyword arguments of the model, `labels` among them.
    """
    labels = _labels(batch)
    if labels.is_floating_point():  # several labels a row, or regression
        return _counted(model, batch, torch.tensor(labels.numel(), device=labels.device))
    return _counted(model, batch, count_tokens(labels, shift=False))


def _labels(batch: Mapping[str, Any]) -> torch.Tensor:
    labels = read_mapping(batch, "batch", "the mapping that a data collator makes").get("labels")
    if not isinstance(labels, torch.Tensor):
        raise MisuseError(
            "The batch has no tensor 'labels', whose items the loss averages over. Pass them in it."
        )
    return labels


def _counted(model: torch.nn.Module, batch: Mapping[str, Any], count: torch.Tensor) -> Loss:
    read_instance(model, "model", torch.nn.Module, "a model of transformers")
    loss = getattr(model(**batch), "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise MisuseError(
            f"model: {type(model).__name__} returned no loss. Pass a model with a head that has"
            " one."
        )
    return Loss(sum=loss * count, count=count)
