"""Lightning: a callback that makes each training step hold a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from gradfit.batches.loss import Loss, PartLoss
from gradfit.batches.weights import Weight
from gradfit.errors import MisuseError
from gradfit.fitting.other_trainers import MeanInProgress, Passes
from gradfit.integrations.lightning_logs import BatchLogs
from gradfit.tree import size_of_batch
from gradfit.units import parse_bytes


class Fit(Callback):  # type: ignore[misc]
    """Runs every batch in micro-batches with recomputation, so that all tensors of a step stay
    below `memory`.

        Trainer(callbacks=[Fit(memory="8 GiB")])

    For automatic optimization on one device. `training_step` is called once for each part of a
    batch. What its loss was divided by is read from its graph, so that the update is that of the
    batch in one piece; a loss whose parts do not make the whole is not cut. What it logs is logged
    once for each batch, with the mean over its items. Of what else it returns, tensors are joined
    along their rows, and other things come as a list with one entry for each part.

    Args:
        memory: The budget for all tensors of a step, as bytes or text such as "8 GiB".
        count: Says of how many items a part's loss is the mean, where that cannot be read:
            `count(part) -> int`.
        micro_batch: Rows that run at once, or "whole" never to cut a batch; None chooses.
        exact: False cuts a loss that does not add up all the same, with a warning that says the
            measured error.
        tile: Where memory is short, cut along tokens, too, as `gf.tile` does; False leaves that
            out.
    """

    def __init__(
        self,
        memory: int | float | str,
        *,
        count: Callable[[Any], int] | None = None,
        micro_batch: int | str | None = None,
        exact: bool = True,
        tile: bool = True,
    ) -> None:
        self._memory, self._count = parse_bytes(memory), count
        self._cutting: dict[str, Any] = {"micro_batch": micro_batch, "exact": exact, "tile": tile}
        self._passes: Passes | None = None
        self._whole: Any = None  # the module's own training_step
        self._logs: BatchLogs | None = None
        self._is_trial = False
        self._rest: tuple[Any, ...] = ()
        self._output: dict[str, Any] = {}  # what the last part returned beside its loss

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the training step's place."""
        if stage != "fit":
            return
        _check_trainer(trainer, pl_module)
        self._whole = pl_module.training_step
        self._logs = logs = BatchLogs(pl_module.log)
        pl_module.training_step = lambda batch, *rest: self._step(
            trainer, pl_module, logs, batch, rest
        )

        def log(*args: Any, **kwargs: Any) -> None:
            if not self._is_trial:
                logs.take(*args, **kwargs)

        pl_module.log = log  # `log_dict` goes through it

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give it back."""
        if self._whole is not None:
            del pl_module.training_step, pl_module.log
            self._whole = self._passes = self._logs = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same: Lightning tears nothing down then."""
        self.teardown(trainer, pl_module, "fit")

    def _step(
        self, trainer: Any, module: Any, logs: BatchLogs, batch: Any, rest: tuple[Any, ...]
    ) -> Any:
        self._rest = rest
        parameters = [p for p in module.parameters() if p.requires_grad]
        accumulates = trainer.accumulate_grad_batches > 1
        if self._passes is None:
            # While batches accumulate, this one's gradients lie beside those of the others.
            beside = sum(p.nbytes for p in parameters) if accumulates else 0
            self._passes = self._make_passes(module, trainer.optimizers[0], beside)
        if not accumulates:
            module.zero_grad()  # Lightning would only do so after the passes, and hold both
        with _set_aside(parameters) as gradients:
            with self._trial():
                self._passes.plan(batch)
            mean, outputs = self._run(self._passes, logs, batch)
            loss = torch.as_tensor(mean.finish(parameters), device=module.device)
            gradients += [(p, p.grad) for p in parameters if p.grad is not None]
        logs.log_all()
        self._output = {}
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        later = _Later.apply(loss, anchor, gradients)  # type: ignore[no-untyped-call]
        return {**_joined(outputs), "loss": later}

    def _make_passes(self, module: Any, optimizer: Any, reserved_bytes: int) -> Passes:
        return Passes(
            module,
            optimizer,
            self._loss_of,
            self._memory,
            reserved_bytes=reserved_bytes,
            **self._cutting,
        )

    def _run(
        self, passes: Passes, logs: BatchLogs, batch: Any
    ) -> tuple[MeanInProgress, list[dict[str, Any]]]:
        """Both passes over all parts: their mean, and what they returned beside their losses."""
        mean, rows = MeanInProgress(), size_of_batch(batch)
        outputs: list[dict[str, Any]] = []
        additivity = passes.additivity
        adds = additivity is not None and additivity.over == "sum"

        def backward(part: PartLoss, weight: Weight) -> None:
            logs.end_part(float(weight.number), adds=adds)
            outputs.append(self._output)
            share = mean.add(part.loss, weight, parts=rows / part.rows)
            if share is not None:
                share.backward()  # type: ignore[no-untyped-call]

        def begin() -> None:
            mean.rewind()
            outputs.clear()
            logs.drop_all()

        passes.run(batch, backward, begin)
        return mean, outputs

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False

    def _loss_of(self, module: Any, part: Any) -> Any:
        if self._logs is not None:
            self._logs.drop_part()  # of a forward that left its plan, and is run again
        loss, self._output = _loss_and_others(self._whole(part, *self._rest))
        if loss is None:
            raise MisuseError(
                "training_step returned no loss. Fit cannot skip a part of a batch: return one."
            )
        if self._count is None:
            return loss
        items = self._count(part)
        return Loss(sum=loss * items, count=items)


def _check_trainer(trainer: Any, module: Any) -> None:
    ranks = trainer.num_devices * trainer.num_nodes
    if ranks != 1:
        raise MisuseError(
            f"Fit runs on one device, not {ranks}. Use gf.fit with DDP or fully_shard."
        )
    if not module.automatic_optimization:
        raise MisuseError(
            "Fit needs automatic optimization. In manual optimization call the step that gf.fit"
            " returns: gf.fit(self, self.optimizers(), loss_fn, batch, memory=…)."
        )
    if str(trainer.precision) == "16-mixed":
        raise MisuseError(
            "Fit scales gradients after the backward, too late for precision='16-mixed'. Use bf16."
        )


def _loss_and_others(returned: Any) -> tuple[Any, dict[str, Any]]:
    """What a training step returned, apart: its loss, and what else is in a dict."""
    if not isinstance(returned, Mapping):
        return returned, {}
    others = {name: item for name, item in returned.items() if name != "loss"}
    return returned.get("loss"), others


def _joined(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the parts returned beside their losses, as of the whole batch."""
    if len(outputs) < 2:
        return outputs[0] if outputs else {}
    return {
        name: _joined_items([part[name] for part in outputs if name in part]) for name in outputs[0]
    }


def _joined_items(items: list[Any]) -> Any:
    """Tensors with rows as one; anything else as a list."""
    if all(map(_has_rows, items)):
        return torch.cat([item.detach() for item in items])
    return items


def _has_rows(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() > 0


class _Later(torch.autograd.Function):
    """A loss whose backward is done: it puts the gradients that are there into `.grad`.

    Lightning zeroes gradients between the training step and the backward, and divides the loss in
    between.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, gradients: list[Any]
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        with torch.no_grad():
            for parameter, gradient in ctx.gradients:
                gradient.mul_(outer[0].to(gradient.dtype))
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )
        ctx.gradients.clear()
        return None, torch.zeros_like(outer[0]), None


@contextlib.contextmanager
def _set_aside(parameters: list[torch.Tensor]) -> Iterator[list[Any]]:
    """Without gradients inside, and with those of before afterwards."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield []
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
