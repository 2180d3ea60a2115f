"""Models of `transformers` as they are: tiled, the loss and every gradient are those of the untiled
run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradfit as gf
from gradfit.tiling.sum_rows import _SumWithGradients

pytest.importorskip("transformers")

from tiling_models import ENCODER_DECODER, EVERY, EXPERTS, MASKED, make_batch, make_model

FEW = ("llama", "gemma2", "bert", "bart")
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in EVERY]
# these losses begin with logits.float()
LABELS_IN_FLOAT32 = set(EVERY) - set(MASKED) - set(ENCODER_DECODER)


def run(model: Any, batch: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    torch.manual_seed(5)  # of dropout
    model.zero_grad()
    loss = model(**batch, **more).loss
    loss.backward()
    found = {
        name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None
    }
    return {"loss": loss.detach().double(), **found}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    assert found.keys() == expected.keys()
    difference = sum(
        float((found[name] - expected[name]).square().sum()) for name in expected if name != "loss"
    )
    return (
        difference
        / sum(float(expected[name].square().sum()) for name in expected if name != "loss")
    ) ** 0.5


def tiled(
    model: Any, batch: dict[str, Tensor], modules: list[str] | None = None, **more: Any
) -> dict[str, Tensor]:
    with gf.tile(model, size=7, modules=modules) as handle:
        found = run(model, batch, **more)
        assert [head.materialised for head in handle.heads.values() if head.says_so] == [""]
        assert all(head.reduced for head in handle.heads.values() if head.says_so)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_untiled_run(name: str) -> None:
    batch = make_batch()
    model = make_model(name)
    expected = run(model, batch)
    found = tiled(model, batch)
    assert error(found, expected) < 1e-12
    loss = abs(float(found["loss"] - expected["loss"])) / float(expected["loss"])
    assert loss < (2e-6 if name in LABELS_IN_FLOAT32 else 1e-12)
    again = tiled(model, batch)
    assert all(torch.equal(found[key], again[key]) for key in found)


@pytest.mark.parametrize("name", NAMES)
def test_narrower_types_are_no_further_from_float64(name: str) -> None:
    batch = make_batch()
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(name, dtype).eval()  # dropout draws other masks in another type
        plain, logits, modules = (
            run(model, batch),
            tiled(model, batch, modules=[]),
            tiled(model, batch),
        )
        exact = run(model.double(), batch)
        theirs = error(plain, exact)
        assert error(logits, exact) <= max(1.02 * theirs, 2e-6)
        # A tile's part of a module's gradient is rounded before it is added in float32: once more
        # than that of the whole.
        assert error(modules, exact) <= max(1.05 * theirs, 2e-6)


# Without dropout, so that another type draws no other masks in training mode either.
UNDROPPED = ("llama", "gemma2", "mistral", "qwen2", "qwen3", "gemma", "granite", "cohere", "t5")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in UNDROPPED],
)
def test_gradients_that_come_with_the_loss_are_no_further_from_float64(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = []
    own = _SumWithGradients._run
    monkeypatch.setattr(_SumWithGradients, "_run", lambda *args: sums.append(args) or own(*args))
    batch = make_batch()
    model = make_model(name, torch.float32)
    plain, found = run(model, batch), tiled(model, batch, modules=[])
    assert len(sums) == 1
    exact = run(model.double(), batch)
    assert error(found, exact) <= max(1.02 * error(plain, exact), 2e-6)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_run_in_tiles_after_their_router(name: str) -> None:
    batch = make_batch()
    model: Any = make_model(name)
    model.set_experts_implementation("eager")  # the grouped kernels of the others have no float64
    expected = run(model, batch)
    with gf.tile(model, size=7) as handle:
        found = run(model, batch)
        assert handle.modules == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert error(found, expected) < 1e-12


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_trainers_number_of_items(name: str) -> None:
    batch = make_batch()
    model = make_model(name)
    items = torch.tensor(77)
    expected = run(model, batch, num_items_in_batch=items)
    assert error(tiled(model, batch, num_items_in_batch=items), expected) < 1e-12


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_label_ignored(name: str) -> None:
    batch = make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = make_model(name)
    expected, found = run(model, batch), tiled(model, batch)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, equal_nan=True)


def test_generating_is_the_same() -> None:
    model = make_model("llama", torch.float32).eval()
    tokens = make_batch()["input_ids"]
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False)
    with gf.tile(model):
        assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), expected)
