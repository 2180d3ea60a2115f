"""Hugging Face `transformers`: exact checkpointing of its models, and a `Trainer` that holds a budget."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from gradfit.errors import MisuseError
from gradfit.recompute.function import checkpoint
from gradfit.train.passes import Passes
from gradfit.tree import size_of_batch
from gradfit.units import parse_bytes


def enable_checkpointing(model: Any, *, every_n_layers: int = 1) -> None:
    """`model.gradient_checkpointing_enable()`, with gradfit's tape in the place of torch's checkpoint.

    Layers run once, so BatchNorm is updated once. `model.gradient_checkpointing_disable()` undoes it.

    While they train, checkpointed layers fill no key-value cache (transformers decides so, and logs it at the first
    forward): loss and gradients are, bit by bit, those of the plain model with `use_cache=False`.

    Args:
        model: any model of `transformers` that supports gradient checkpointing.
        every_n_layers: checkpoint one layer of so many.

    Raises:
        MisuseError: the model does not support gradient checkpointing.

    >>> config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16)
    >>> enable_checkpointing(transformers.GPT2LMHeadModel(config))
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise MisuseError(
            f"{type(model).__name__} does not support gradient checkpointing. Put `with gf.CheckpointScope(...)` "
            "around the parts of its forward, or use gf.fit, which needs no support."
        )
    options = {} if every_n_layers == 1 else {"every_n_layers": every_n_layers}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, **options)
    ours = functools.partial(checkpoint, use_reentrant=False)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = ours


class FitTrainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose steps stay below `memory`, whatever the batch size.

    Each batch of `per_device_train_batch_size` rows is run in micro-batches with recomputation, as planned for its
    shape; everything else is the Trainer's. Losses that the model normalises by `num_items_in_batch` add up; others
    are means over rows, and are weighted by rows.
    """

    def __init__(self, *args: Any, memory: int | float | str, **kwargs: Any) -> None:
        self._memory = parse_bytes(memory)
        self._passes: Passes | None = None
        self._items: Any = None
        super().__init__(*args, **kwargs)
        ranks = max(self.args.world_size, self.args.n_gpu)
        if ranks > 1:
            raise MisuseError(f"FitTrainer runs on one device, not {ranks}. Use gf.fit with DDP or fully_shard.")

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One batch's forward and backward; returns its loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        rows, self._items = size_of_batch(inputs), num_items_in_batch
        if self._passes is None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper
            self._passes = Passes(model, optimizer, self._loss_of, self._memory)
        adds_up = self._adds_up(num_items_in_batch)

        def backward(loss: torch.Tensor, part: Any) -> torch.Tensor:
            if not adds_up:
                loss = loss * (size_of_batch(part) / rows / self.current_gradient_accumulation_steps)
            self.accelerator.backward(loss)
            return loss

        return self._passes.run(inputs, backward)

    def _loss_of(self, model: torch.nn.Module, part: Any) -> torch.Tensor:
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(model, dict(part), num_items_in_batch=self._items)
        return loss

    def _adds_up(self, items: Any) -> bool:
        """Whether a part's loss is its share of the whole already; as Trainer decides it."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return bool(self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
