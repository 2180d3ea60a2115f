"""Which optimizer a step works with: torch's own inside of wrappers, and what it holds of the
model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from gradfit._torch import hooks_after_accumulation
from gradfit.accumulate.optimizer_access import parameters_of
from gradfit.errors import MisuseError

_WRAP_FOR_THEIR_LOOPS = {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"}


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside of what training libraries put around it, or what was given if
    they have not.

    Wrappers of accelerate and Lightning leave steps out or want a closure, by rules of their own
    loops. A step of ours is exactly one step of the optimizer that they wrap. Any other object that
    holds an optimizer (a Lookahead, an average of the weights) has a step of its own, which is the
    one that is wanted.
    """
    inner = optimizer
    while _is_of_a_loop(inner) and (deeper := getattr(inner, "optimizer", None)) is not None:
        inner = deeper
    return inner


def _is_of_a_loop(optimizer: Any) -> bool:
    """Whether a training library's class is among an optimizer's."""
    modules = {one.__module__.partition(".")[0] for one in type(optimizer).__mro__}
    return not modules.isdisjoint(_WRAP_FOR_THEIR_LOOPS)


def count_step(optimizer: Any) -> None:
    """Let Lightning count a step that was made past its wrapper: `global_step` and checkpoints go
    by that.

    In manual optimization Lightning 2.x sets two functions on its wrappers while a training step
    runs:
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/loops/optimization/manual.py
    """
    functions = [
        getattr(optimizer, "__dict__", {}).get(name)
        for name in ("_on_before_step", "_on_after_step")
    ]
    for function in functions:
        if callable(function):
            function()


def check_members(model: torch.nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer that would train nothing of the model; say so if it leaves some of it
    out.

    Leaving parameters out is a way to freeze them, or to train them with another optimizer. A step
    clears their gradients, so that they do not pile up.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise MisuseError(
            "optimizer: SparseAdam steps with sparse gradients alone, whose bytes depend on the"
            " data, so no budget can be planned for. Use Adam, or GradientAccumulator(optimizer),"
            " which holds no budget."
        )
    ids = _ids_held_by(optimizer)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _refuse_hooks(trained)
    missing = [name for name, p in trained.items() if id(p) not in ids]
    if len(missing) == len(trained):
        raise MisuseError(
            f"The optimizer holds none of the model's {len(trained)} trained parameters; the first"
            f" is {missing[0]!r}, of shape {tuple(trained[missing[0]].shape)}. Make it from this"
            " model's, after the model was wrapped or sharded:"
            f" {type(optimizer).__name__}(model.parameters(), …)."
        )
    if missing:
        warnings.warn(
            f"The optimizer holds {len(trained) - len(missing)} of the model's {len(trained)}"
            f" trained parameters; {missing[0]!r} for one gets gradients and is never updated by"
            " it. Call requires_grad_(False) on what is frozen, which saves its gradients, or"
            " optimizer.add_param_group.",
            stacklevel=4,
        )


def _ids_held_by(optimizer: Any) -> set[int]:
    held = parameters_of(optimizer)
    if held is None:
        raise MisuseError(
            f"optimizer: a {type(optimizer).__name__} has no param_groups, so what it holds and"
            ' what its step takes is unknown. Give it param_groups = [{"params": [...]}], or use'
            " GradientAccumulator(optimizer, parameters=model.parameters()), which holds no"
            " budget."
        )
    return {id(tensor) for tensor in held}


def _refuse_hooks(trained: Mapping[str, torch.nn.Parameter]) -> None:
    hooked = [name for name, p in trained.items() if hooks_after_accumulation(p)]
    if hooked:
        raise MisuseError(
            f"{hooked[0]!r} has a hook of register_post_accumulate_grad_hook. It would run in each"
            " micro-batch, on a part of the gradient, and while plans are tried, where an optimizer"
            " that steps in it would train. Remove it; `clip=` clips the whole gradient, and"
            " step(batch) updates."
        )
