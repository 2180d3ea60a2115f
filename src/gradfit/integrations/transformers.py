"""Hugging Face `transformers`: exact checkpointing of its models, and a `Trainer` that holds a
budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from gradfit.batches.additivity_record import Additivity
from gradfit.batches.loss import PartLoss
from gradfit.batches.weights import Weight
from gradfit.errors import MisuseError
from gradfit.fitting.other_trainers import MeanInProgress, Passes
from gradfit.fitting.trained_optimizer import unwrap_optimizer
from gradfit.recompute.function import checkpoint
from gradfit.tree import size_of_batch
from gradfit.units import parse_bytes


def enable_checkpointing(model: Any, *, every_n_layers: int = 1) -> None:
    """`model.gradient_checkpointing_enable()`, with gradfit's tape in the place of torch's
    checkpoint.

    Layers run once, so BatchNorm is updated once. `model.gradient_checkpointing_disable()` undoes
    it.

    While they train, checkpointed layers fill no key-value cache (transformers decides so, and logs
    it at the first forward): loss and gradients are, bit by bit, those of the plain model with
    `use_cache=False`.

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
            f"{type(model).__name__} does not support gradient checkpointing. Put `with"
            " gf.CheckpointScope(...)` around the parts of its forward, or use gf.fit, which needs"
            " no support."
        )
    options = {} if every_n_layers == 1 else {"every_n_layers": every_n_layers}
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}, **options
    )
    ours = functools.partial(checkpoint, use_reentrant=False)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = ours


class FitTrainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose steps stay below `memory`, whatever the batch size.

    Each batch of `per_device_train_batch_size` rows is run in micro-batches with recomputation, as
    planned for its shape; everything else is the Trainer's. The update is the one that the Trainer
    makes of the batch in one piece, whatever the head, `compute_loss`, `compute_loss_func` or label
    smoothing: what a micro-batch's loss was divided by is read from its graph, and a loss whose
    parts do not make the whole is not cut. Over `gradient_accumulation_steps` the mean is over all
    items, never a mean of means.

    Args:
        args: The Trainer's.
        memory: The budget for all tensors of a step, as bytes or text such as "8 GiB".
        micro_batch: Rows that run at once, or "whole" never to cut a batch; None chooses.
        exact: False cuts a loss that does not add up all the same, with a warning that says the
            measured error.
        tile: Where memory is short, cut along tokens, too, as `gf.tile` does; False leaves that
            out.
        kwargs: The Trainer's.

    Raises:
        MisuseError: `memory` is no size, or there is more than one device.
    """

    def __init__(
        self,
        *args: Any,
        memory: int | float | str,
        micro_batch: int | str | None = None,
        exact: bool = True,
        tile: bool = True,
        **kwargs: Any,
    ) -> None:
        self._memory = parse_bytes(memory)
        self._cutting: dict[str, Any] = {"micro_batch": micro_batch, "exact": exact, "tile": tile}
        self._passes: Passes | None = None
        self._items: Any = None
        self._window: MeanInProgress | None = None  # of the batches since the last update
        super().__init__(*args, **kwargs)
        ranks = max(self.args.world_size, self.args.n_gpu)
        if ranks > 1:
            raise MisuseError(
                f"FitTrainer runs on one device, not {ranks}. Use gf.fit with DDP or fully_shard."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        self._window = None  # of a run that was left in the middle of an update
        return super().train(*args, **kwargs)

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One batch's forward and backward; returns its share of the update's loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        self._items = num_items_in_batch
        if self._passes is None:
            self._passes = self._make_passes(model)
        is_whole = self._passes.plan(inputs).steps == 1
        if _has_its_scale(self._passes.additivity, is_whole=is_whole):
            return self._run_as_it_is(self._passes, inputs)
        return self._run_as_mean(self._passes, model, inputs)

    def _make_passes(self, model: torch.nn.Module) -> Passes:
        # While batches accumulate, this one's gradients lie beside those of the others.
        beside = 0
        if self.args.gradient_accumulation_steps > 1:
            beside = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        return Passes(
            model,
            unwrap_optimizer(self.optimizer),
            self._loss_of,
            self._memory,
            reserved_bytes=beside,
            **self._cutting,
        )

    def _run_as_mean(self, passes: Passes, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """Of a loss that is a mean over its items: the mean over all items of the batches of one
        update.
        """
        if self._window is None:
            self._window = MeanInProgress()
        window, batches, rows = (
            self._window,
            self.current_gradient_accumulation_steps,
            size_of_batch(inputs),
        )
        before = window.mean

        def backward(part: PartLoss, weight: Weight) -> None:
            share = window.add(part.loss, weight, parts=batches * rows / part.rows)
            if share is not None:
                self.accelerator.backward(share)

        window.mark()
        passes.run(inputs, backward, window.rewind)
        if self.accelerator.sync_gradients:  # the last batch of the update
            self._window = None
            window.finish(model.parameters())
        # The Trainer adds up what batches return: the differences of running means add up to the
        # mean.
        done = torch.as_tensor(window.mean, device=self.args.device)
        return done if math.isnan(float(before)) else done - before

    def _run_as_it_is(self, passes: Passes, inputs: Any) -> torch.Tensor:
        """Of a loss that has its scale already, or whose batch is not cut: as the Trainer has
        it.
        """
        steps = 1 if self._is_scaled() else self.current_gradient_accumulation_steps
        total = torch.zeros((), device=self.args.device)

        def begin() -> None:
            nonlocal total
            total = torch.zeros((), device=self.args.device)

        def backward(part: PartLoss, weight: Weight) -> None:
            nonlocal total
            share = part.loss / steps if steps > 1 else part.loss
            total = total + share.detach()
            self.accelerator.backward(share)

        passes.run(inputs, backward, begin)
        return total

    def _loss_of(self, model: torch.nn.Module, part: Any) -> torch.Tensor:
        with self.compute_loss_context_manager():
            # a copy: labels may be taken out of it
            inputs = dict(part) if isinstance(part, Mapping) else part
            loss: torch.Tensor = self.compute_loss(model, inputs, num_items_in_batch=self._items)
        return loss

    def _is_scaled(self) -> bool:
        """Whether the Trainer takes a batch's loss as its share of the whole update already."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        by_model = self.model_accepts_loss_kwargs and self._items is not None
        return bool(by_model) or self.compute_loss_func is not None


def _has_its_scale(additivity: Additivity | None, *, is_whole: bool) -> bool:
    """Whether a batch's loss is as the Trainer wants it: the sum of its parts', or never cut."""
    over = None if additivity is None else additivity.over
    return over == "sum" or (over is None and is_whole)
