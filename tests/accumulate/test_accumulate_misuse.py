"""Bad input is named, with the call that would be right, before anything is changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradfit as gf

W = torch.ones(2, requires_grad=True)


def sgd(*tensors: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(tensors) or [W], lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": 2.5}, "steps=2.5 is not a whole number"),
        ({"steps": True}, "steps=True"),
        ({"optimizer": 4, "steps": 3}, "optimizer=4 is a number"),
        ({"optimizer": object()}, r"without step\(\)"),
        ({"parameters": []}, "parameters is empty"),
        ({"parameters": [W, W]}, "parameters: the tensor at 1, of shape .2,., is there twice"),
        ({"parameters": W}, "parameters is a Parameter|parameters is a Tensor"),
        ({"parameters": nn.Linear(2, 2)}, r"Pass model.parameters\(\)"),
        ({"parameters": [3]}, "parameters holds a int"),
        ({"parameters": [W * 2]}, "not a leaf"),
        ({"parameters": [torch.ones(2, dtype=torch.int64)]}, "torch.int64"),
        (
            {"optimizer": sgd(), "parameters": [torch.ones(3, requires_grad=True)]},
            "is not in the optimizer",
        ),
        ({"dtype": torch.int32}, "dtype=torch.int32"),
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"optimizer": sgd(), "scaler": 2.0}, "scaler is a float without scale"),
        ({"scaler": gf.LossScaler()}, "Pass optimizer="),
        ({"clip": 0}, "clip=0 must be more than 0"),
        ({"clip": math.nan}, "clip=nan"),
        ({"clip": "1"}, "clip='1'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'"),
        ({"strategy": 4}, "strategy is a int"),
        ({"strategy": gf.FixedStepCount(2), "steps": 3}, "steps=3 and strategy"),
    ],
)
def test_construction_misuse(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(gf.MisuseError, match=text) as error:
        gf.GradientAccumulator(**arguments)
    assert isinstance(error.value, ValueError)


def test_optimizers_that_need_a_closure() -> None:
    with pytest.raises(gf.MisuseError, match=r"LBFGS.step needs 'closure'"):
        gf.GradientAccumulator(torch.optim.LBFGS([W]), steps=2)


def test_foreign_optimizers_must_name_their_parameters() -> None:
    class Foreign:
        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

    with pytest.raises(gf.MisuseError, match=r"no param_groups.* Pass parameters="):
        gf.GradientAccumulator(Foreign(), steps=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loss": (W * 2).sum(), "weight": -1}, "weight=-1 must be 0 or more"),
        ({"loss": (W * 2).sum(), "weight": math.nan}, "weight=nan"),
        ({"loss": (W * 2).sum(), "weight": math.inf}, "weight=inf"),
        ({"loss": (W * 2).sum(), "weight": "3"}, "weight='3' is not a number"),
        ({"loss": (W * 2).sum(), "weight": None}, "weight=None is not a number"),
        ({"loss": (W * 2).sum(), "weight": True}, "weight=True"),
        ({"loss": (W * 2).sum(), "weight": torch.ones(2)}, r"weight has shape \(2,\)"),
        ({"loss": (W * 2).sum(), "weight": torch.tensor(math.nan)}, "weight=nan"),
        ({"loss": W * 2}, r"loss has shape \(2,\).* Pass loss.mean\(\)"),
        ({"loss": torch.ones(())}, "loss has no graph"),
        ({"loss": 3.0}, "loss is a float"),
        ({}, "loss is a NoneType"),
        ({"loss": (W * 2).sum(), "reduction": "max"}, "reduction='max'"),
        ({"terms": {}}, "holds no terms"),
        ({"terms": {"a": (W.sum(), -2)}}, r"terms\['a'\]\[1\]=-2"),
        ({"terms": {"a": (W, 2)}}, r"terms\['a'\]\[0\] has shape"),
        ({"terms": {"a": W.sum()}}, r"terms\['a'\] is not a pair"),
        ({"terms": {"a": (W.sum(), 2)}, "weight": 3}, "Pass it alone"),
        ({"terms": {"a": (W.sum(), 2)}, "loss": W.sum()}, "Pass it alone"),
        ({"terms": {3: (W.sum(), 2)}}, "3 is no name"),
    ],
)
@pytest.mark.parametrize("isolate", [False, True])
def test_backward_misuse_changes_nothing(
    arguments: dict[str, object], text: str, isolate: bool
) -> None:
    W.grad = None
    acc = gf.GradientAccumulator(sgd(), steps=2, isolate=isolate)
    with pytest.raises(gf.MisuseError, match=text):
        acc.backward(**arguments)
    assert W.grad is None
    assert acc.current_step == 0
    acc.backward((W * 2).sum(), weight=3)
    acc.reset()


def test_nothing_to_accumulate_into() -> None:
    acc = gf.GradientAccumulator(steps=4)
    for call in (lambda: acc.backward(W.sum()), acc.step):
        with pytest.raises(
            gf.MisuseError, match=r"Call enable_accumulation\(model.parameters\(\)\) first"
        ):
            call()
    with pytest.raises(gf.MisuseError, match="empty"):
        acc.enable_accumulation([])
    with pytest.raises(gf.MisuseError, match="there twice"):
        acc.enable_accumulation([W, W])
    acc.enable_accumulation([W])
    acc.enable_accumulation([W])
    assert "parameters=1" in repr(acc)


def test_apply_gradients_before_the_window_is_full() -> None:
    w = torch.ones(1, requires_grad=True)
    acc = gf.GradientAccumulator(steps=2, parameters=[w])
    acc.backward(w.sum())
    with pytest.raises(gf.MisuseError, match="1 of 2 micro-batches"):
        acc.apply_gradients(print)
    result = acc.flush()
    assert (result.stepped, result.reason) == (False, "no optimizer")
    seen = []
    acc.apply_gradients(seen.append)
    assert seen == [w]


def test_contexts_and_tensors() -> None:
    for steps in (0, -2, "3", 1.5):
        with pytest.raises(gf.MisuseError, match="target_steps"):
            gf.AccumulationContext(steps)
    context = gf.AccumulationContext(2)
    for bad in (3, W * 2, torch.ones(2, dtype=torch.int64)):
        with pytest.raises(gf.MisuseError, match="tensor"):
            context.register_tensor(bad)
        with pytest.raises(gf.MisuseError, match="tensor"):
            gf.enable_grad_accumulation(bad)
    context.register_tensor(W)
    with pytest.raises(gf.MisuseError, match="twice"):
        context.register_tensor(W)


def test_half_a_registration_is_none() -> None:
    a = torch.ones(1, requires_grad=True)
    acc = gf.GradientAccumulator(steps=2)
    with pytest.raises(gf.MisuseError):
        acc.enable_accumulation([a, a * 2])
    assert not gf.has_grad_accumulation(a)
