"""What may be done to logits that are not there, and with the model they come from: right, or
refused by name.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import gradfit as gf
from gradfit.tiling.lazy import LazyLogits

WORDS, WIDTH = 50, 8
TOKENS = torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


def make(*, tiled: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model().double()
    return model, gf.tile(model, size=3) if tiled else None


def loss_of(logits: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), TOKENS.view(-1))


def update(model: nn.Module, logits: Any) -> None:
    loss_of(logits).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), 1.0).step()


# -------------------------------------------------------------------- what they are made of changes

LATER: dict[str, Callable[[Any], Any]] = {
    "asked": lambda x: x.argmax(-1),
    "without a graph": lambda x: x.detach(),
    "cast": lambda x: x.float().logsumexp(-1),
    "indexed": lambda x: x[:, -1],
    "printed": repr,
    "all numbers": lambda x: x.cumsum(-1),
}


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize("how", LATER)
@pytest.mark.parametrize("grad", [True, False])
def test_logits_of_before_the_step_are_refused_after_it(how: str, grad: bool) -> None:
    model, _ = make(tiled=True)
    logits = model(TOKENS)
    update(model, logits)
    with torch.set_grad_enabled(grad), pytest.raises(gf.ActivationOverwritten, match=r"step\(\)"):
        LATER[how](logits)


def test_other_weights_in_the_place_of_the_old_are_noticed() -> None:
    model, _ = make(tiled=True)
    logits = model(TOKENS)
    model.head.weight.data = torch.zeros_like(model.head.weight)
    with pytest.raises(gf.ActivationOverwritten, match="weights of the projection"):
        loss_of(logits)
    model, _ = make(tiled=True)
    logits = model(TOKENS)
    expected = loss_of(logits).detach()
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))  # the old are still there
    assert torch.equal(loss_of(logits), expected)


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize("shape", [(), (WORDS,), (2, 7, 1)])
@pytest.mark.parametrize("end", [loss_of, lambda x: x.cumsum(-1), lambda x: x.detach()])
def test_what_they_were_combined_with_is_written_to(shape: Any, end: Any) -> None:
    model, _ = make(tiled=True)
    scale = torch.full(shape, 2.0, dtype=torch.float64)
    scaled = model(TOKENS) * scale
    scale.fill_(9)
    with pytest.raises(gf.ActivationOverwritten, match=r"combined with it.*tensor.clone\(\)"):
        end(scaled)


# -------------------------------------------------------------------------- gradients of the logits


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
def test_hooks_before_the_loss_are_called() -> None:
    found = []
    for tiled in (False, True):
        model, _ = make(tiled=tiled)
        logits = model(TOKENS)
        flat = logits.view(-1, WORDS)
        flat.register_hook(lambda gradient: 3 * gradient)
        logits.retain_grad()
        F.cross_entropy(flat, TOKENS.view(-1)).backward()
        found.append([logits.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


ASKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "register_hook": lambda x, loss: x.register_hook(lambda gradient: 3 * gradient),
    "retain_grad": lambda x, loss: x.retain_grad(),
    "grad": lambda x, loss: torch.autograd.grad(loss, [x]),
}


@pytest.mark.parametrize("how", ASKS)
def test_a_gradient_that_goes_past_the_logits_is_refused(how: str) -> None:
    """The hook would never be called, and `.grad` stay None."""
    model, _ = make(tiled=True)
    logits = model(TOKENS)
    loss = loss_of(logits)
    with pytest.raises(gf.MisuseError, match=rf"{how} asks.*retain_grad\(\) before.*\['head'\]"):
        ASKS[how](logits, loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize("how", ["method", "attribute"])
def test_logits_as_leaves(how: str) -> None:
    found = []
    for tiled in (False, True):
        model, _ = make(tiled=tiled)
        leaf = model(TOKENS).detach()
        if how == "method":
            leaf.requires_grad_()
        else:
            leaf.requires_grad = True
        assert leaf.requires_grad
        assert leaf.is_leaf
        loss_of(leaf).backward()  # type: ignore[no-untyped-call]
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0])


# ---------------------------------------------------------------------------------- other machinery


def of_parameters(model: Any) -> Callable[[Any], Tensor]:
    return lambda given: loss_of(torch.func.functional_call(model, given, (TOKENS,)))


def directional(model: Any) -> Tensor:
    with forward_ad.dual_level():
        hidden = torch.ones(2, 7, WIDTH, dtype=torch.float64)
        logits = model.head(forward_ad.make_dual(hidden, hidden.clone()))
        tangent: Any = forward_ad.unpack_dual(logits.logsumexp(-1).sum()).tangent
        return tangent  # type: ignore[no-any-return]


MACHINERY: dict[str, Callable[[Any], Any]] = {
    "func.grad": lambda m: torch.func.grad(of_parameters(m))(dict(m.named_parameters())),
    "vmap": lambda m: torch.vmap(m)(TOKENS),
    "forward mode": directional,
    "jit.trace": lambda m: loss_of(torch.jit.trace(m, (TOKENS,), check_trace=False)(TOKENS)),
    "compile": lambda m: loss_of(torch.compile(m, backend="eager")(TOKENS)),
    "a loop of evaluation": lambda m: [evaluated(m) for _ in range(3)],
    "inference mode": lambda m: torch.inference_mode()(evaluated)(m),
    "no tokens": lambda m: m(TOKENS[:0]).sum() + m(TOKENS[:, :0]).logsumexp(-1).sum(),
    "one token": lambda m: F.cross_entropy(m(TOKENS[0, 0]), TOKENS[0, 1]),
    "a forward hook": lambda m: (m.head.register_forward_hook(lambda *a: a[2] * 2), m(TOKENS) + 0),
}


def evaluated(model: Any) -> Any:
    with torch.no_grad():
        logits = model.eval()(TOKENS)
        right = (logits.argmax(-1) == TOKENS).double().mean()
        return loss_of(logits), right, logits.softmax(-1).topk(3).values


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which a compiler asks of all tensors
@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize("how", MACHINERY)
def test_other_machinery_gets_what_the_plain_model_gives(how: str) -> None:
    found = [MACHINERY[how](make(tiled=tiled)[0]) for tiled in (True, False)]
    ours, theirs = (_tensors(each) for each in found)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def _tensors(nest: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(nest)
    return [
        (each.whole() if isinstance(each, LazyLogits) else each).detach()
        for each in leaves
        if isinstance(each, Tensor)
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: torch.save(m, io.BytesIO())])
def test_the_model_is_not_copied_while_it_is_tiled(copied: Any) -> None:
    with pytest.raises(gf.MisuseError, match=r"Call remove\(\)"):
        copied(make(tiled=True)[0])


def test_copies_say_that_they_need_the_numbers() -> None:
    for copied in (copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with torch.no_grad(), pytest.warns(gf.LogitsMaterialised):
            copied(make(tiled=True)[0](TOKENS))


def test_printing_makes_the_corners_alone() -> None:
    model = nn.Sequential(nn.Embedding(2000, 8), nn.Linear(8, 2000))
    tokens = torch.arange(600)
    with gf.tile(model) as tiles:
        logits = model(tokens)
        with gf.meter(model, tokens) as live:
            text = f"{logits}{logits}"
        loss = F.cross_entropy(logits, tokens)
    assert text.count("lazy logits of shape (600, 2000)") == 2
    assert live.peak_bytes < 600 * 2000 * 4 / 4
    loss.backward()
    assert not tiles.heads["1"].materialised


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize(
    "function", [torch.softmax, torch.logsumexp, torch.sum], ids=lambda f: str(f.__name__)
)
def test_out_is_written(function: Any) -> None:
    with torch.no_grad():
        logits = make(tiled=True)[0](TOKENS)
        expected = function(make(tiled=False)[0](TOKENS), -1)
        out = torch.empty_like(expected)
        assert function(logits, -1, out=out) is out
    torch.testing.assert_close(out, expected)


# ------------------------------------------------------------------------------------------ indices

_numbers = st.integers(-2, 1)
_slices = st.builds(slice, st.none() | st.integers(-3, 3), st.none() | st.integers(-3, 5))
_tensors_of = st.lists(_numbers, min_size=1, max_size=2).map(torch.tensor)
_masks = st.sampled_from([torch.tensor([True, False]), TOKENS > 20, torch.ones(2, 7).bool()])
_one = st.one_of(
    _numbers, _slices, _tensors_of, _masks, st.none(), st.just(...), st.lists(_numbers, max_size=2)
)


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@settings(max_examples=150, deadline=None)
@given(st.lists(_one, max_size=5).map(tuple) | _one)
def test_any_index(index: Any) -> None:
    def indexed(logits: Any) -> Any:
        try:
            found = logits[index]
            return found.shape, found.logsumexp(-1) if found.dim() else found
        except (IndexError, RuntimeError, ValueError, TypeError) as error:
            return type(error), None

    plain, tiled = (indexed(make(tiled=tiled)[0](TOKENS)) for tiled in (False, True))
    assert plain[0] == tiled[0]
    if plain[1] is not None:
        torch.testing.assert_close(plain[1], tiled[1] + 0)
