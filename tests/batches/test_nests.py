"""Batches as nests: large ones and deep ones are walked once, without recursion."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradfit as gf
from gradfit import meter, tree
from gradfit.errors import MisuseError
from gradfit.tree import (
    leaves,
    map_tensors,
    repeat_rows,
    size_of_batch,
    split_batch,
    take_rows,
    unmarked,
    whole,
)

_DEEP = 5000  # more than the interpreter's limit of recursion


def _deep(inner: Any) -> Any:
    for level in range(_DEEP):
        inner = [inner] if level % 2 else {"in": inner}
    return inner


def test_a_deep_nest_is_walked_cut_and_made_again() -> None:
    batch = _deep({"x": torch.arange(6), "text": list("abcdef"), "all": whole(torch.ones(2))})
    assert size_of_batch(batch) == 6
    parts = list(split_batch(batch, 4))
    assert [next(leaves(part)).tolist() for part in parts] == [[0, 1, 2, 3], [4, 5]]
    assert next(leaves(map_tensors(batch, lambda tensor: tensor + 1))).tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert next(leaves(repeat_rows(batch, 8))).tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    inner = unmarked(batch)
    for level in reversed(range(_DEEP)):
        inner = inner[0] if level % 2 else inner["in"]
    assert inner["all"].tolist() == [1, 1]


def test_a_nest_that_holds_itself_is_refused() -> None:
    circle: list[Any] = [torch.ones(2)]
    circle.append(circle)
    with pytest.raises(MisuseError, match="holds itself"):
        list(leaves(circle))
    shared = [torch.ones(2)]
    assert len(list(leaves([shared, shared]))) == 2


@pytest.mark.parametrize(
    "walk", [lambda b: list(leaves(b)), size_of_batch, unmarked, lambda b: list(split_batch(b, 1))]
)
def test_a_list_of_strings_is_not_looked_into_item_by_item(
    walk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its length, and however many parts are cut from it."""
    looked = []
    items = tree._items
    monkeypatch.setattr(tree, "_items", lambda nest: looked.append(nest) or items(nest))
    counts = []
    for rows in (10, 1000):
        looked.clear()
        walk({"x": torch.zeros(rows), "text": ["a"] * rows})
        counts.append(len(looked))
    assert counts[0] == counts[1] <= 4


@dataclasses.dataclass
class _Record:
    x: Any
    rest: Any


class _Named(NamedTuple):
    a: Any
    b: Any


def _row_nests(rows: int) -> st.SearchStrategy[Any]:
    entries = st.one_of(
        st.builds(lambda: torch.arange(rows)),
        st.builds(lambda: np.arange(rows)),
        st.builds(lambda: [str(row) for row in range(rows)]),
        st.builds(lambda: tuple(range(rows))),
        st.builds(lambda: [torch.arange(rows), torch.ones(rows, 2)]),
        st.builds(lambda: [torch.arange(rows), "name", torch.tensor(2.0)]),
        st.builds(lambda: torch.tensor(1.0)),
        st.builds(lambda: whole(["all", torch.ones(1)])),
        st.sampled_from(["name", 3, None, 2.5]),
    )
    return st.recursive(
        entries,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(OrderedDict),
            st.builds(_Record, inner, inner),
            st.builds(_Named, inner, inner),
        ),
        max_leaves=6,
    )


def _plain(nest: Any) -> Any:
    """As nested lists, with types, to compare."""
    if isinstance(nest, torch.Tensor | np.ndarray):
        return (type(nest).__name__, nest.tolist())
    if isinstance(nest, dict):
        return (type(nest).__name__, [(key, _plain(item)) for key, item in nest.items()])
    if isinstance(nest, _Record):
        return ("record", _plain(nest.x), _plain(nest.rest))
    if isinstance(nest, tree.Whole):
        return ("whole", _plain(nest.content))
    if isinstance(nest, list | tuple):
        return (type(nest).__name__, [_plain(item) for item in nest])
    return nest


def _cut(nest: Any, rows: slice) -> Any:
    """What taking rows means, by recursion."""
    if isinstance(nest, torch.Tensor | np.ndarray):
        return nest[rows] if nest.ndim else nest
    if isinstance(nest, dict):
        return type(nest)({key: _cut(item, rows) for key, item in nest.items()})
    if isinstance(nest, _Record):
        return _Record(_cut(nest.x, rows), _cut(nest.rest, rows))
    if isinstance(nest, _Named):
        return _Named(*(_cut(item, rows) for item in nest))
    if isinstance(nest, list) and isinstance(nest[0], torch.Tensor):
        return [_cut(item, rows) for item in nest]
    return nest[rows] if isinstance(nest, list | tuple) else nest


@given(
    st.integers(1, 5).flatmap(lambda rows: st.tuples(st.just(rows), _row_nests(rows))),
    st.integers(1, 3),
)
def test_parts_are_those_of_the_definition(drawn: tuple[int, Any], size: int) -> None:
    rows, nest = drawn
    batch = {"x": torch.arange(rows), "nest": nest}
    assert size_of_batch(batch) == rows
    expected = [_cut(batch, slice(start, start + size)) for start in range(0, rows, size)]
    assert [_plain(part) for part in split_batch(batch, size)] == [
        _plain(part) for part in expected
    ]
    assert _plain(take_rows(batch, slice(0, size))) == _plain(expected[0])


def test_what_goes_into_every_part_may_be_sparse() -> None:
    table = torch.eye(3).to_sparse()
    parts = list(split_batch({"x": torch.arange(2), "table": whole(table)}, 1))
    assert unmarked(parts[1])["table"] is table
    with pytest.raises(MisuseError, match="sparse"):
        size_of_batch({"x": torch.arange(3), "table": table})


def test_the_place_of_a_wrong_length_is_said() -> None:
    batch = {
        "x": torch.zeros(3),
        "rest": [_Record(torch.zeros(3), {"names": ["a", "b"]}), torch.zeros(3)],
    }
    with pytest.raises(
        MisuseError, match=r"\['rest'\]\[0\]\.rest\['names'\] has length 2, \['x'\] has 3 rows"
    ):
        size_of_batch(batch)


def test_a_deep_nest_is_metered() -> None:
    batch = _deep([torch.ones(6), torch.ones(2)])
    with meter(batch) as live:
        assert live.current_bytes == 4 * 8


def test_a_meter_refuses_what_holds_itself() -> None:
    circle: dict[str, Any] = {"x": torch.ones(2)}
    circle["in"] = [circle]
    with pytest.raises(MisuseError, match="a dict that holds itself"):
        meter(circle)


def test_a_model_of_modules_deeper_than_torch_can_walk_is_refused() -> None:
    model: nn.Module = nn.Linear(2, 2)
    parameters = list(model.parameters())
    for _ in range(sys.getrecursionlimit()):
        model = nn.Sequential(model)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(MisuseError, match="setrecursionlimit"):
        gf.fit(model, optimizer, lambda model, x: model(x).mean(), torch.ones(2, 2), memory=10**6)


def test_a_batch_of_tensors_alone_is_read_and_cut_without_a_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nearly all are, and in every step: it is the same as what the walk gives."""
    x, y, scale = torch.arange(6).view(3, 2), torch.arange(3), torch.tensor(2.0)
    plain = {"x": x, "scale": scale, "y": y}
    walked = OrderedDict(plain)
    parts = list(tree.split_batch(walked, 2, 3))
    monkeypatch.setattr(tree, "_NestWalk", None)
    for batch in (plain, [*plain.values()], tuple(plain.values())):
        assert list(map(id, tree.leaves(batch))) == [id(x), id(scale), id(y)]
        assert tree.size_of_batch(batch) == 3
        assert tree.unmarked_with_leaves(batch)[0] is batch
    for part, other in zip(tree.split_batch(plain, 2, 3), parts, strict=True):
        assert list(part) == list(other)
        assert type(part) is dict
        assert all(torch.equal(part[key], other[key]) for key in part)
        assert part["scale"] is scale
