"""A forward that writes to what nothing could put back.

Those are parameters, which one that averages a teacher's writes to, or clamps weights, and tensors
that modules hold without having registered them as buffers. Trials would change them, and each
micro-batch would; copies of them are what a budget has no room for. So one forward of few rows is
run in which such a write is refused before it happens. It stays below the budget, too: where one
row does not fit, what comes after its first operation without room is not looked at.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_operator
from gradfit._torch_listen import DispatchMode, eager_functions
from gradfit.batches.additivity import batch_norms
from gradfit.batches.held_state import held_tensors
from gradfit.batches.runner import MicroBatchRunner
from gradfit.batches.shares import run_without_activations
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.devices import counted_device
from gradfit.errors import MisuseError
from gradfit.fitting.trial import PastLimit, meter_below, refusing
from gradfit.fitting.write_watch import memory_of, written_by
from gradfit.tree import unmarked


class _Written(MisuseError):
    """What nothing could put back is about to be written to."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"A forward writes to {what}, so trials and each micro-batch would change it. Write to"
            " it after step(batch), as an optimizer does and torch.optim.swa_utils.AveragedModel,"
            " or register it as a buffer."
        )


class _RefuseWrites(DispatchMode):
    """Raises before an operator writes to one of these tensors; `named` says what they are."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {memory_of(tensor): name for name, tensor in named.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # what a higher-order operator writes to, the operators inside of it say
        for target in written_by(func, args, kwargs) if is_operator(func) else ():
            name = self._names.get(memory_of(target))
            if name is not None:
                raise _Written(name)
        return func(*args, **kwargs)


def refuse_forward_writes(
    runner: MicroBatchRunner, optimizer: Any, batch: Any, budget_bytes: int
) -> None:
    """Run a few rows, and refuse a forward that writes to what nothing could put back.

    Args:
        runner: the model and its loss.
        optimizer: whose state is there, too.
        batch: the rows are taken from its beginning.
        budget_bytes: of all tensors.

    Raises:
        MisuseError: there is such a write; it has not happened.
    """
    if distributed.is_running():  # where a forward alone would wait for others
        return
    named = {**_parameters(runner.model), **_unregistered(runner.model)}
    part = next(iter(runner.cut(batch, 2 if batch_norms(runner.model) else 1)))
    below = meter_below(budget_bytes)
    counted = below(runner.model, optimizer, batch, device=counted_device(runner.model))
    with (
        trials_end(),
        untouched(runner.model),
        eager_functions(),
        contextlib.suppress(PastLimit),
        refusing(0),
        counted,
    ):
        _run_refusing(runner, part, named)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{name!r}, a parameter": one for name, one in model.named_parameters()}


def _unregistered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the model that are not what a forward has computed, and lie in no parameter's and
    no buffer's memory.
    """
    registered = {memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    attributes = {name: vars(module) for name, module in model.named_modules()}
    return {
        f"{name!r}, a tensor of the model that is no buffer": tensor
        for name, tensor in held_tensors(attributes)
        if tensor.grad_fn is None and memory_of(tensor) not in registered
    }


def _run_refusing(runner: MicroBatchRunner, part: Any, named: dict[str, torch.Tensor]) -> None:
    before = {name: (memory_of(one), one.data) for name, one in named.items()}
    try:
        with _RefuseWrites(named), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about rows that nobody trains on
            run_without_activations(lambda: runner.loss_fn(runner.model, unmarked(part)))
    except _Written:
        raise
    except Exception:  # the user's code, on fewer rows than it may be made for
        return
    finally:
        replaced = [name for name, one in named.items() if memory_of(one) != before[name][0]]
        for name in replaced:  # by `.data =`
            named[name].data = before[name][1]
    if replaced:
        raise _Written(replaced[0])
