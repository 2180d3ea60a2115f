"""`gf.tile` on models: found, undone without a trace, refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf
from gradfit.tiling.lazy import LazyLogits

WORDS = 200


class LanguageModel(nn.Module):
    """An embedding, an MLP, and a projection to words, perhaps with the embedding's weights."""

    def __init__(self, *, tied: bool = False, heads: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.heads = nn.ModuleList(nn.Linear(16, WORDS) for _ in range(heads))
        if tied:
            self.heads[0].weight = self.embed.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.mlp(self.embed(tokens))
        results = [head(hidden) for head in self.heads]
        return results[0] if len(results) == 1 else results


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    results = model(tokens)
    results = results if isinstance(results, list) else [results]
    return sum(
        F.cross_entropy(each.transpose(1, 2), tokens.roll(-1 - at))
        for at, each in enumerate(results)
    )  # type: ignore[return-value]


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, WORDS, (3, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("tied", "heads"), [(False, 1), (True, 1), (False, 3)])
def test_projections_are_found_and_gradients_are_the_same(
    tokens: Tensor, tied: bool, heads: int
) -> None:
    torch.manual_seed(0)
    model = LanguageModel(tied=tied, heads=heads).double()
    expected = gradients(model, tokens)
    with gf.tile(model, size=16) as handle:
        found = gradients(model, tokens)
        assert sorted(name for name, head in handle.heads.items() if head.reduced) == [
            f"heads.{n}" for n in range(heads)
        ]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-12, name


def test_it_is_undone_without_a_trace(tokens: Tensor) -> None:
    model = LanguageModel()
    before = [dict(module.__dict__) for module in model.modules()]
    handle = gf.tile(model)
    assert isinstance(model(tokens), LazyLogits)
    handle.remove()
    handle.remove()
    after = [module.__dict__ for module in model.modules()]
    assert [sorted(each) for each in before] == [sorted(each) for each in after]
    assert type(model(tokens)) is Tensor
    copy.deepcopy(model)


def test_a_wide_layer_that_is_no_projection_to_words_is_left_alone_without_a_word(
    tokens: Tensor,
) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    with gf.tile(model) as handle:
        model(torch.ones(3, 4)).sum().backward()
        assert list(handle.heads) == ["0"]
        assert not handle.heads["0"].reduced
        first = handle.heads["0"].materialised
        model(torch.ones(3, 4))
        assert first.startswith("linear")


def test_parameters_get_their_gradient_once(tokens: Tensor) -> None:
    model = LanguageModel(tied=True)
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: calls.__setitem__(name, calls.get(name, 0) + 1)
        )
    with gf.tile(model, size=8):
        loss_of(model, tokens).backward()
    assert set(calls.values()) == {1}


def test_bad_values_are_refused_by_name(tokens: Tensor) -> None:
    model = LanguageModel()
    for size in (0, -1, 1.5, "many"):
        with pytest.raises(gf.InvalidParameter, match="size="):
            gf.tile(model, size=size)  # type: ignore[arg-type]
    with pytest.raises(gf.InvalidParameter, match="exclude='nothing' is not the name of a module"):
        gf.tile(model, exclude=["nothing"])
    with gf.tile(model, exclude=["heads.0"]) as handle:
        assert type(model(tokens)) is Tensor
        assert not handle.heads
    with gf.tile(model, size=10**9):  # above the tokens: one tile
        loss_of(model, tokens).backward()
    with gf.tile(model), pytest.raises(gf.MisuseError, match=r"tiled already. Call remove\(\)"):
        gf.tile(model)


def test_tiled_models_are_not_copied(tokens: Tensor) -> None:
    model = LanguageModel()
    with gf.tile(model) as handle:
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(gf.MisuseError, match=r"remove\(\).*copy the model, and tile both"):
                call(model)
            with pytest.raises(gf.MisuseError, match=r"remove\(\), copy the model"):
                call(handle)
        model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_backward_hooks_of_the_projection_get_all_numbers(tokens: Tensor) -> None:
    model, seen = LanguageModel(), []
    model.heads[0].register_full_backward_hook(
        lambda module, inputs, outputs: seen.append(outputs[0].shape)
    )
    with gf.tile(model):
        loss_of(model, tokens).backward()
    assert seen == [(3, 40, WORDS)]


class WithoutModule(nn.Module):
    """Its projection is a product with the embedding's weights, and no module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.embed(tokens)) @ self.embed.weight.T


def test_a_projection_that_is_no_module_is_left_as_it_is(tokens: Tensor) -> None:
    torch.manual_seed(0)
    model = WithoutModule()
    loss_of(model, tokens).backward()
    expected = model.embed.weight.grad
    model.zero_grad()
    with gf.tile(model) as handle:
        assert type(model(tokens)) is Tensor
        loss_of(model, tokens).backward()
    assert not handle.heads
    assert model.embed.weight.grad is not None
    assert expected is not None
    assert torch.equal(model.embed.weight.grad, expected)


def test_automatic_weights_are_those_of_plain_losses(tokens: Tensor) -> None:
    model = LanguageModel().double()
    labels = tokens.clone()
    labels[0, 5:] = -100

    def step(parts: list[slice]) -> dict[str, Tensor]:
        model.zero_grad()
        acc = gf.GradientAccumulator(parameters=model.parameters(), steps=len(parts))
        for part in parts:
            loss = F.cross_entropy(model(tokens[part]).transpose(1, 2), labels[part])
            acc.backward(loss, weight="auto")
        acc.flush()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = step([slice(0, 3)])
    with gf.tile(model, size=16):
        found = step([slice(0, 1), slice(1, 3)])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13)


def test_nothing_is_left_to_the_garbage_collector(tokens: Tensor) -> None:
    """A cycle would hold hidden states from one micro-batch to the next."""
    model = LanguageModel(heads=2)
    with gf.tile(model, size=16):
        loss_of(model, tokens).backward()  # finds the modules
        model.zero_grad()
        gc.collect()
        gc.disable()
        try:
            with gf.meter(model, tokens) as live:
                before = live.current_bytes
                loss_of(model, tokens).backward()
                model.zero_grad()
                assert live.current_bytes == before
        finally:
            gc.enable()
