"""The copy to go back to: whatever an optimizer does to its tensors, entries and numbers."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradfit.fitting import tensor_copies
from gradfit.fitting.tensor_copies import CopyLayout, TensorCopies
from gradfit.fitting.update_rollback import UpdateSnapshot

KINDS = [
    torch.randn(3, 4),
    torch.randn(4, 3).t(),
    torch.zeros(()),
    torch.zeros(0, 2),
    torch.randn(5, dtype=torch.float64),
    torch.randn(2, 2).bfloat16(),
    torch.arange(4),
    torch.tensor([True, False]),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.tensor([1.0, 0.0, -2.0], device="cpu").to_sparse(),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    nn.Parameter(torch.randn(2)),
]


@pytest.mark.parametrize("chosen", [KINDS, KINDS[:1], KINDS[:4], [*KINDS, *KINDS[4:7]], []])
def test_copies_of_every_kind(chosen: list[torch.Tensor]) -> None:
    tensors = [one.detach().clone() for one in chosen]
    copies = TensorCopies(tensors)
    for one in tensors:
        one.zero_()
    contents = copies.contents()
    assert len(contents) == len(chosen)
    for content, before in zip(contents, chosen, strict=True):
        assert content.dtype == before.dtype
        torch.testing.assert_close(content, before.detach(), rtol=0, atol=0, equal_nan=True)


def changed(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    tensor.data = data
    return tensor


def test_how_tensors_are_copied_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, worked_out = CopyLayout(), []
    monkeypatch.setattr(
        tensor_copies, "_positions_by", lambda kinds: worked_out.append(kinds) or original(kinds)
    )
    tensors = [torch.randn(2, 3), torch.arange(4), torch.tensor([True])]
    for _ in range(3):
        tensors[0].add_(1)
        assert_same(TensorCopies(tensors, layout).contents(), tensors)
    assert len(worked_out) == 1


original = tensor_copies._positions_by


def test_known_tensors_are_asked_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What type and shape each has: in every step, of some four tensors for each parameter."""
    layout, asked = CopyLayout(), []
    form_of = tensor_copies.form_of
    monkeypatch.setattr(tensor_copies, "form_of", lambda one: asked.append(one) or form_of(one))
    tensors = [torch.randn(2, 3), torch.arange(4), torch.zeros(())]
    for _ in range(3):
        assert_same(TensorCopies(tensors, layout).contents(), tensors)
    assert len(asked) == len(tensors)


def test_a_tensor_in_the_place_of_one_that_has_died_is_another() -> None:
    layout, tensors = CopyLayout(), [torch.randn(2, 3)]
    for _ in range(20):  # its address, and with it its id, is often the one of the last
        tensors[:] = []
        tensors.append(torch.randn(2, 3))
        copies = TensorCopies(tensors, layout)
        assert copies.tensors[0]() is tensors[0]


def assert_same(contents: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for content, tensor in zip(contents, tensors, strict=True):
        assert (content.dtype, content.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(content, tensor)


CHANGES: dict[str, Any] = {
    "another tensor": lambda one, two: (torch.randn(2, 3), two),
    "type": lambda one, two: (changed(one, one.data.double()), two),
    "whole numbers": lambda one, two: (changed(one, torch.full((2, 3), 2**30 + 1)), two),
    "shape": lambda one, two: (changed(one, torch.randn(3, 2)), two),
    "shapes that add up to the same": lambda one, two: (
        changed(one, torch.randn(4)),
        changed(two, torch.randn(6)),
    ),
    "order": lambda one, two: (two, one),
    "fewer": lambda one, two: (one,),
    "more": lambda one, two: (one, two, torch.ones(2, dtype=torch.bool)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_the_last_copy(change: str) -> None:
    layout = CopyLayout()
    before = [torch.randn(2, 3), torch.randn(4)]
    TensorCopies(before, layout)
    tensors = [*CHANGES[change](*before)]
    assert_same(TensorCopies(tensors, layout).contents(), tensors)


@pytest.mark.parametrize("change", CHANGES)
def test_another_torch_asks_each_for_itself(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    test_what_has_changed_since_the_last_copy(change)


def test_a_layout_holds_no_tensor() -> None:
    layout, tensors = CopyLayout(), [torch.randn(2)]
    TensorCopies(tensors, layout)
    gone = weakref.ref(tensors.pop())
    assert gone() is None


class Odd(torch.optim.Optimizer):
    """Writes to tensors, replaces some, and has lists, numbers and nests beside them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "betas": [0.1, 0.2]})
        self.count = 3
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "written": torch.ones(2),
                    "replaced": torch.ones(3),
                    "resized": torch.ones(2),
                    "nest": {"inner": torch.ones(1), "number": 4},
                    "list": [1, 2],
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.0
            for p in group["params"]:
                state = self.state[p]
                p.zero_()
                state["written"].zero_()
                state["replaced"] = torch.zeros(3)
                state["resized"].resize_(5)
                state["nest"]["inner"].zero_()
                state["nest"]["number"] = 5
                state["new"] = torch.zeros(1)
                state["list"].append(3)
        raise RuntimeError("half-way")


def test_an_optimizer_that_fails_half_way_is_as_before() -> None:
    parameters = [nn.Parameter(torch.randn(2, 2)) for _ in range(3)]
    optimizer = Odd(parameters)
    before = copy.deepcopy((optimizer.state_dict(), [*map(torch.Tensor.tolist, parameters)]))
    written = optimizer.state[parameters[0]]["written"]
    with (
        pytest.raises(RuntimeError, match="half-way"),
        UpdateSnapshot(parameters, optimizer, taken=True),
    ):
        optimizer.step()
    after = optimizer.state_dict()
    assert [*map(torch.Tensor.tolist, parameters)] == before[1]
    assert str(after) == str(before[0])
    assert optimizer.count == 3
    assert optimizer.state[parameters[0]]["written"] is written


def test_tensors_that_the_optimizer_replaces_are_let_go() -> None:
    """The budget has room for a copy of its state, not for the old one beside it."""
    parameter = nn.Parameter(torch.randn(2))
    optimizer = Odd([parameter])
    old = weakref.ref(optimizer.state[parameter]["replaced"])
    with UpdateSnapshot([parameter], optimizer, taken=True):
        optimizer.state[parameter]["replaced"] = torch.zeros(3)
        assert old() is None


def test_many_tensors_are_copied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """One large piece is cleared by the system and given back to it in each step."""
    monkeypatch.setattr(tensor_copies, "PIECE_BYTES", 4 * 10)
    sizes = (4, 6, 1, 9, 1, 25, 0, 10, 11, 3)
    tensors = [torch.randn(size) for size in sizes] + [torch.arange(7), torch.arange(2)]
    layout = CopyLayout()
    assert_same(TensorCopies(tensors, layout).contents(), tensors)
    pieces = [[tensors[place].nbytes for place in places] for places in layout.together]
    assert pieces == [[16, 24], [4, 36], [4], [100], [0, 40], [44], [12], [56], [16]]
