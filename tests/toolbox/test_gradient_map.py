"""Gradients as a value: against `.backward()`, and what goes in wrongly is told before anything
changes.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradfit as gf


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _loss(model: nn.Module, seed: int = 0, size: int = 5) -> torch.Tensor:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model(x).square().mean()


def test_equals_backward_bit_for_bit_and_touches_no_grad() -> None:
    model = _model()
    grads = gf.backward(_loss(model), model)
    assert all(p.grad is None for p in model.parameters())
    _loss(model).backward()
    assert list(grads) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(grads[name], p.grad)
        assert grads[p] is grads[name]
        assert grads.get(p) is grads[name]


def test_existing_grad_is_left_alone() -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.tensor([7.0, 7.0])
    gf.backward((w * 3).sum())
    assert torch.equal(w.grad, torch.tensor([7.0, 7.0]))


def test_without_inputs_it_finds_every_leaf() -> None:
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    grads = gf.backward((a * b).sum())
    assert a in grads
    assert b in grads
    assert c not in grads
    assert len(grads) == 2
    assert torch.equal(grads[a], b)
    assert {id(key) for key in grads} == {id(a), id(b)}


def test_a_leaf_loss_is_its_own_input() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    assert gf.backward(x)[x].item() == 1.0


@pytest.mark.parametrize("form", ["tensor", "list", "generator", "mapping", "pairs"])
def test_forms_of_inputs(form: str) -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    inputs = {
        "tensor": w,
        "list": [w],
        "generator": (t for t in [w]),
        "mapping": {"w": w},
        "pairs": [("w", w)],
    }[form]
    grads = gf.backward((w**2).sum(), inputs)
    assert torch.equal(grads[w], 2 * w)
    assert list(grads) == (["w"] if form in ("mapping", "pairs") else [w])


def test_intermediate_results_can_be_inputs() -> None:
    x = torch.randn(3, requires_grad=True)
    h = x * 2
    grads = gf.backward(h.square().sum(), {"h": h})
    assert torch.equal(grads["h"], 2 * h)


def test_unused_parameters_of_a_model_are_left_out() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["used"].bias.requires_grad_(False)
    grads = gf.backward(model["used"](torch.ones(1, 2)).sum(), model)
    assert list(grads) == ["used.weight"]


def test_create_graph_gives_second_derivatives() -> None:
    x = torch.randn(10, requires_grad=True)
    first = gf.backward((x**3).sum(), {"x": x}, create_graph=True)
    second = gf.backward(first["x"].sum(), {"x": x})
    torch.testing.assert_close(second["x"], 6 * x.detach())


def test_norm_is_differentiable_for_a_gradient_penalty() -> None:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    norm = gf.backward((x**2).sum() / 2, [x], create_graph=True).norm()
    assert norm.item() == 5.0
    torch.testing.assert_close(gf.backward(norm)[x], torch.tensor([0.6, 0.8]))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 1000))
def test_weighted_sum_over_micro_batches_is_the_full_batch(sizes: list[int], seed: int) -> None:
    model = _model()
    x = torch.randn(
        sum(sizes), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    full = gf.backward(model(x).square().mean(), model)
    total = gf.GradientMap()
    for micro in x.split(sizes):
        total.add_(gf.backward(model(micro).square().mean(), model), alpha=len(micro) / len(x))
    for name in full:
        torch.testing.assert_close(total[name], full[name], rtol=1e-12, atol=1e-14)


def test_seed_accumulation_loop_with_insert() -> None:
    model = _model()
    accumulated = gf.GradientMap()
    for step in range(4):
        grads = gf.backward(_loss(model, step) / 4, model)
        for key, grad in grads.items():
            if key in accumulated:
                accumulated.insert(key, accumulated[key].add(grad))
            else:
                accumulated.insert(key, grad.clone())
    reference = gf.backward(sum((_loss(model, s) for s in range(4)), torch.zeros(())) / 4, model)
    for key in reference:
        torch.testing.assert_close(accumulated[key], reference[key])


def test_add_copies_what_is_new_and_matches_by_name_and_by_tensor() -> None:
    w = torch.ones(2, requires_grad=True)
    named = gf.backward((w * 2).sum(), {"w": w})
    unnamed = gf.backward((w * 3).sum(), [w])
    total = gf.GradientMap().add_(named)
    total["w"].zero_()
    assert torch.equal(named["w"], torch.full((2,), 2.0))
    assert torch.equal(total.add_(named).add_(unnamed)["w"], torch.full((2,), 5.0))
    assert torch.equal(unnamed.add_(named)[w], torch.full((2,), 5.0))
    assert len(total) == len(unnamed) == 1
    total.assign()
    assert torch.equal(w.grad, torch.full((2,), 5.0))


def test_add_changes_nothing_if_one_shape_is_wrong() -> None:
    total = gf.GradientMap({"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(gf.MisuseError, match=r"'b' has shape \(3,\), expected \(2,\)"):
        total.add_({"a": torch.ones(2), "b": torch.ones(3)})
    assert torch.equal(total["a"], torch.ones(2))


def test_scale_clip_and_norm() -> None:
    grads = gf.GradientMap({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    assert grads.norm().item() == 5.0
    assert grads.norm(1).item() == 7.0
    assert grads.norm(math.inf).item() == 4.0
    assert grads.clip_(10.0).item() == 5.0
    assert torch.equal(grads["a"], torch.tensor([3.0]))  # below the bound: not a bit changes
    assert grads.clip_(1.0).item() == 5.0
    torch.testing.assert_close(grads.norm(), torch.tensor(1.0))
    assert grads.scale_(2.0) is grads
    torch.testing.assert_close(grads["a"], torch.tensor([1.2]))
    assert gf.GradientMap().norm().item() == 0.0
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(gf.MisuseError, match="max_norm"):
            grads.clip_(bad)
    with pytest.raises(gf.MisuseError, match="p=0 must be more than 0"):
        grads.norm(0)


def test_norm_of_float16_does_not_overflow() -> None:
    grads = gf.GradientMap({"w": torch.full((100,), 3e4, dtype=torch.float16)})
    assert grads.norm().item() == pytest.approx(3e5, rel=1e-3)
    grads.clip_(1.0)
    assert grads["w"].dtype == torch.float16
    assert grads.norm().item() == pytest.approx(1.0, rel=1e-2)


def test_nonfinite_is_named_and_clipping_refuses() -> None:
    grads = gf.GradientMap(
        {
            "good": torch.ones(2),
            "bad": torch.tensor([1.0, math.nan]),
            "inf": torch.tensor([math.inf]),
        }
    )
    assert grads.nonfinite() == ["bad", "inf"]
    with pytest.raises(
        gf.NonFiniteGradient, match=r"2 of 3 .*'bad' \(1 NaN, 0 Inf\), 'inf' \(0 NaN, 1 Inf\)"
    ):
        grads.clip_(1.0)
    assert torch.equal(grads["good"], torch.ones(2))


def test_stats() -> None:
    stats = gf.GradientMap({"w": torch.tensor([3.0, -4.0, 0.0, math.inf, math.nan])}).stats()["w"]
    assert (stats.elements, stats.norm, stats.min, stats.max) == (5, 5.0, -4.0, 3.0)
    assert (stats.zero_count, stats.nan_count, stats.inf_count, stats.is_finite) == (1, 1, 1, False)
    assert stats.mean == pytest.approx(-1 / 3)
    assert gf.GradientMap({"e": torch.ones(0)}).stats()["e"].norm == 0.0


def test_sparse_gradients() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    x = torch.tensor([1, 1, 3])
    grads = gf.backward(table(x).square().sum(), table)
    assert grads["weight"].is_sparse
    dense = (
        nn.functional.embedding(x, w := table.weight.detach().clone().requires_grad_())
        .square()
        .sum()
    )
    reference = gf.backward(dense)[w]
    torch.testing.assert_close(grads.norm(), reference.norm())
    assert grads.nonfinite() == []
    assert grads.stats()["weight"].zero_count == 16
    assert gf.inspect_gradients(grads).histogram.zero_count == 16
    grads.add_(grads.clone()).scale_(0.5)
    torch.testing.assert_close(grads["weight"].to_dense(), reference)


def test_assign_replaces_and_feeds_an_optimizer() -> None:
    model, reference = _model(), _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(3):
        gf.backward(_loss(model, step), model).assign()
        optimizer.step()
        expected.zero_grad()
        _loss(reference, step).backward()
        expected.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_assign_detaches_and_casts() -> None:
    x = torch.ones(2, requires_grad=True)
    grads = gf.backward((x**2).sum(), [x], create_graph=True)
    grads.assign()
    assert not x.grad.requires_grad
    y = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    gf.GradientMap({y: torch.ones(2)}).assign()
    assert y.grad.dtype == torch.bfloat16
    with pytest.raises(gf.MisuseError, match="by name, without its tensor"):
        gf.GradientMap({"w": torch.ones(1)}).assign()


def test_from_grads_shares_memory() -> None:
    model = _model()
    assert len(gf.GradientMap.from_grads(model)) == 0
    _loss(model).backward()
    gf.GradientMap.from_grads(model).scale_(0.0)
    assert all(not p.grad.any() for p in model.parameters())


def test_state_dict_round_trip() -> None:
    model = _model()
    grads = gf.backward(_loss(model), model)
    state = {name: value.clone() for name, value in grads.state_dict().items()}
    grads.scale_(0.0)
    grads.load_state_dict(state)
    fresh = gf.GradientMap()
    fresh.load_state_dict(state)
    for name in state:
        assert torch.equal(grads[name], state[name])
        assert torch.equal(fresh[name], state[name])
    state["0.weight"].zero_()
    assert grads["0.weight"].any()
    w = torch.ones(1, requires_grad=True)
    assert list(gf.backward(w.sum()).state_dict()) == ["0"]


def test_state_of_another_model_is_refused_before_any_change() -> None:
    grads = gf.GradientMap({"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(gf.StateError, match=r"missing \['b'\], unexpected \['c'\]"):
        grads.load_state_dict({"a": torch.zeros(2), "c": torch.zeros(2)})
    with pytest.raises(gf.StateError, match=r"'b' has shape \(3,\), expected \(2,\)"):
        grads.load_state_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert grads["a"].all()


def test_mapping_manners() -> None:
    w = torch.ones(2, requires_grad=True)
    grads = gf.backward(w.sum(), {"w": w})
    assert dict(grads.items())["w"] is grads["w"]
    assert grads.get("nothing") is None
    assert grads.tensor("w") is w
    assert "GradientMap(1 gradients, 2 elements: 'w')" in repr(grads)
    del grads[w]
    assert len(grads) == 0
    assert w not in grads
    with pytest.raises(KeyError):
        del grads["w"]
    assert grads != gf.GradientMap()


def test_a_name_that_does_not_exist_is_told_with_the_nearest() -> None:
    grads = gf.backward(_loss(_model_ := _model()), _model_)
    with pytest.raises(gf.UnknownName, match=r"key='0\.wieght'.*0\.weight"):
        grads["0.wieght"]
    with pytest.raises(KeyError):
        grads["nothing"]
    with pytest.raises(gf.MisuseError, match=r"no names\. Pass inputs=model"):
        gf.backward(_loss(_model_))["0.weight"]
    with pytest.raises(gf.UnknownName, match=r"this tensor of shape \(7,\)"):
        grads[torch.ones(7)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gf.backward(3.0), "loss=3.0 is a float"),
        (
            lambda: gf.backward(torch.ones(2, requires_grad=True) * 2),
            r"shape \(2,\), expected one number",
        ),
        (lambda: gf.backward(torch.ones(())), "loss has no graph"),
        (
            lambda: gf.backward(torch.ones((), requires_grad=True) * 2, [torch.ones(3)]),
            r"inputs\[0\], the tensor of shape",
        ),
        (
            lambda: gf.backward(
                torch.ones((), requires_grad=True) * 2, {"w": torch.ones(3, requires_grad=True)}
            ),
            r"inputs\[0\], 'w', has no gradient: the loss does not depend on it",
        ),
        (lambda: gf.backward(torch.ones((), requires_grad=True) * 2, []), "inputs holds no tensor"),
        (lambda: gf.backward(torch.ones((), requires_grad=True) * 2, 5), "inputs=5 is a int"),
        (lambda: gf.backward(torch.ones((), requires_grad=True) * 2, ["w"]), r"inputs\[0\] is str"),
        (
            lambda: gf.backward((x := torch.ones((), requires_grad=True)) * 2, [x, x]),
            r"inputs\[1\].*twice",
        ),
        (lambda: gf.GradientMap({torch.ones(2): torch.ones(3)}), r"shape \(3,\), expected \(2,\)"),
        (lambda: gf.GradientMap({"w": 3}), "is a int under 'w'"),
    ],
)
def test_bad_input(make, message: str) -> None:
    with pytest.raises(gf.MisuseError, match=message):
        make()


def test_a_freed_graph_names_the_operation() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = x.sigmoid().sum()
    gf.backward(loss)
    with pytest.raises(
        gf.GraphError, match=r"already freed: Sigmoid has given back.*create_graph=True"
    ) as caught:
        gf.backward(loss)
    assert isinstance(caught.value, RuntimeError)  # as torch's own, for code that catches that


def test_other_errors_of_the_engine_pass_through() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x.sigmoid()
    loss = y.sum()
    y.data.requires_grad_(False)
    y.detach().add_(1)  # bumps the version of what sigmoid saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gf.backward(loss)


def test_entries_are_found_by_the_id_of_their_tensor() -> None:
    x, y, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    plain = gf.backward((x * 2 + y * 3).sum())
    named = gf.backward((x * 2 + y * 3).sum(), {"x": x, "y": y})
    for grads in (plain, named):
        assert grads.get(id(x)) is grads[x]
        assert grads[id(y)] is grads[y]
        assert grads.get_mut(id(x)) is grads[x]
        assert id(x) in grads
        assert id(other) not in grads
        assert grads.get(id(other)) is None
        assert grads.get_mut(other) is None
        assert grads.tensor(id(x)) is x
        grads[id(x)] = torch.zeros(2)
        assert grads[x].tolist() == [0, 0]
        del grads[id(x)]
        assert x not in grads
        assert id(x) not in grads
        assert len(grads) == 1
        with pytest.raises(gf.MisuseError, match=r"key=.* Pass the tensor itself"):
            grads.insert(id(x), torch.zeros(2))
        with pytest.raises(KeyError):
            grads[id(x)]


def test_the_accumulation_loop_as_printed() -> None:
    x = torch.ones(2, requires_grad=True)
    accumulated_grads = gf.GradientMap()
    for factor in (1.0, 3.0):
        grads = gf.backward((x * factor).sum() * 0.5)
        for tensor_id, grad in grads.iter():
            acc_grad = accumulated_grads.get_mut(tensor_id)
            if acc_grad is not None:
                acc_grad.add_(grad)
            else:
                accumulated_grads.insert(tensor_id, grad.clone())
    assert accumulated_grads.get(id(x)).tolist() == [2.0, 2.0]


def test_unscaling_as_printed() -> None:
    x = torch.ones(2, requires_grad=True)
    grads = gf.backward((x * 3).sum() * 1024.0)
    for _, grad in grads.iter_mut():
        grad.mul_(1.0 / 1024.0)
    for key, grad in grads.iter_mut():
        grads[key] = grad * 2
    assert grads[x].tolist() == [6.0, 6.0]


def test_second_order_as_printed_names_create_graph() -> None:
    x = torch.randn(10, requires_grad=True)
    y = x.square().sum()
    with pytest.raises(gf.GraphError, match="create_graph=True"):
        gf.backward(gf.backward(y).get(x).sum())
    grads = gf.backward(x.square().sum(), create_graph=True)
    second_grads = gf.backward(grads.get(id(x)).sum())
    assert torch.equal(second_grads[x], torch.full((10,), 2.0))


def test_a_complex_loss_is_refused_in_words() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(gf.MisuseError, match=r"loss is torch.complex64.*Pass loss.abs\(\)"):
        gf.backward((x * 1j).sum())
