"""Lightning: a callback that makes each training step hold a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from gradfit._torch_listen import unseen
from gradfit.errors import MisuseError
from gradfit.train.passes import Passes
from gradfit.tree import size_of_batch
from gradfit.units import parse_bytes


class Fit(Callback):  # type: ignore[misc]
    """Runs every batch in micro-batches with recomputation, so that all tensors of a step stay below `memory`.

        Trainer(callbacks=[Fit(memory="8 GiB")])

    For automatic optimization on one device. `training_step` is called once for each part, and its loss is a mean
    over the part's rows, or over what `count(part)` counts. What it logs is logged part by part.
    """

    def __init__(self, memory: int | float | str, *, count: Callable[[Any], int | float] = size_of_batch) -> None:
        self._memory, self._count = parse_bytes(memory), count
        self._passes: Passes | None = None
        self._whole: Any = None  # the module's own training_step
        self._trying = False
        self._rest: tuple[Any, ...] = ()
        self._extra: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the training step's place."""
        if stage != "fit":
            return
        ranks = trainer.num_devices * trainer.num_nodes
        if ranks != 1:
            raise MisuseError(f"Fit runs on one device, not {ranks}. Use gf.fit with DDP or fully_shard.")
        if not pl_module.automatic_optimization:
            raise MisuseError(
                "Fit needs automatic optimization. In manual optimization call the step that gf.fit returns."
            )
        if str(trainer.precision) == "16-mixed":
            raise MisuseError("Fit scales gradients after the backward, too late for precision='16-mixed'. Use bf16.")
        self._whole = pl_module.training_step
        pl_module.training_step = lambda batch, *rest: self._step(trainer, pl_module, batch, rest)
        log = pl_module.log

        def log_once(*args: Any, **kwargs: Any) -> None:
            if not self._trying:
                with unseen():  # it copies what it is given, which is no operation of the plan's
                    log(*args, **kwargs)

        pl_module.log = log_once  # `log_dict` goes through it

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give it back."""
        if self._whole is not None:
            del pl_module.training_step, pl_module.log
            self._whole = self._passes = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same: Lightning tears nothing down then."""
        self.teardown(trainer, pl_module, "fit")

    def _step(self, trainer: Any, module: Any, batch: Any, rest: tuple[Any, ...]) -> Any:
        self._rest, self._extra = rest, {}
        parameters = [p for p in module.parameters() if p.requires_grad]
        accumulates = trainer.accumulate_grad_batches > 1
        if self._passes is None:
            # While batches accumulate, this one's gradients lie beside those of the others.
            beside = sum(p.nbytes for p in parameters) if accumulates else 0
            optimizer = trainer.optimizers[0]
            self._passes = Passes(module, optimizer, self._loss_of, self._memory, reserved_bytes=beside)
        if not accumulates:
            module.zero_grad()  # Lightning would only do so after the passes, and hold both
        with _set_aside(parameters) as gradients:
            with self._trials():
                self._passes.plan(batch)
            items = self._count(batch)

            def backward(loss: torch.Tensor, part: Any) -> torch.Tensor:
                share = loss * (self._count(part) / items)
                share.backward()  # type: ignore[no-untyped-call]
                return share

            loss = self._passes.run(batch, backward)
            gradients += [(p, p.grad) for p in parameters if p.grad is not None]
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return {**self._extra, "loss": _Later.apply(loss, anchor, gradients)}  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _trials(self) -> Iterator[None]:
        self._trying = True
        try:
            yield
        finally:
            self._trying = False

    def _loss_of(self, module: Any, part: Any) -> torch.Tensor:
        out = self._whole(part, *self._rest)
        if isinstance(out, Mapping):
            self._extra = {name: item for name, item in out.items() if name != "loss"}
            out = out.get("loss")
        if out is None:
            raise MisuseError("training_step returned no loss. Fit cannot skip a part of a batch: return one.")
        loss: torch.Tensor = out
        return loss


class _Later(torch.autograd.Function):
    """A loss whose backward is done: it puts the gradients that are there into `.grad`.

    Lightning zeroes gradients between the training step and the backward, and divides the loss in between.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, gradients: list[Any]) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        with torch.no_grad():
            for parameter, gradient in ctx.gradients:
                gradient.mul_(outer[0].to(gradient.dtype))
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
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
