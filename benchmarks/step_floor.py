"""The least that a step of `fit` can cost with what it promises: the same pieces one after the
other, with nothing between them, beside the loop by hand and the step itself.

    python benchmarks/step_floor.py [seconds for each shape]

The floor takes a snapshot to go back to, counts what autograd saves, reads what the loss was
divided by, takes the gradients' norm, copies what the optimizer changes, and steps. It finds no
plan, asks nothing, and mends nothing. So what a step costs above it is the code between the
promises, and what it costs above the loop by hand is the promises themselves.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable

import step as steps
import torch
from two_trees import by_hand, measure, print_table

import gradfit as gf
from gradfit._torch import run_backward
from gradfit.accumulate.scaling import gradient_norm, gradients_of
from gradfit.batches.model_tree import ModelTree
from gradfit.batches.runner import run_part
from gradfit.batches.snapshot import Snapshot
from gradfit.fitting.tensor_copies import CopyLayout
from gradfit.fitting.update_rollback import UpdateSnapshot
from gradfit.recompute.follow_plan import Unrecorded

SHAPES = [(2, 64, 4, 32), (2, 96, 6, 48), (4, 128, 8, 96)]


def floor(shape: tuple[int, int, int, int]) -> Callable[[], float]:
    """A step of the promises alone, of a mean that is not cut."""
    model, optimizer, ids, loss_fn = steps.setup(*shape)
    tree, layout, one = ModelTree(model), CopyLayout(), torch.ones(())
    parameters: list[torch.Tensor] = [*model.parameters()]

    def run() -> float:
        tree.renew()
        before = Snapshot(model, parameters, tree=tree)
        with Unrecorded(2**40):
            part = run_part(loss_fn, model, ids, len(ids))
        assert part.denominator is not None
        value = float(part.loss.detach())
        run_backward(part.loss, one, False)
        del part
        norm = gradient_norm(gradients_of(parameters))
        with UpdateSnapshot(before.tensors, optimizer, taken=True, layout=layout):
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return value + 0 * norm

    return run


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    kind = "native" if gf.native_core().used else "Python"
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, {kind} core,"
        f" load {os.getloadavg()[0]:.1f}"
    )
    for shape in SHAPES:
        model, optimizer, ids, loss_fn = steps.setup(*shape)
        step = gf.fit(model, optimizer, loss_fn, ids, memory="4 GiB")
        steps.SHAPES["this"] = shape
        works: dict[str, Callable[[], object]] = {
            "hand-written loop": by_hand("this"),
            "the same once more": by_hand("this"),
            "the promises alone": floor(shape),
            "step": lambda step=step, ids=ids: step(ids),  # type: ignore[misc]
        }
        print_table(str(shape), measure(works, seconds))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
