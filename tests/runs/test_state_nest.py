"""Nests as JSON and named tensors: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradfit.errors import StateError
from gradfit.runs.state_codec import flatten, unflatten

_keys = st.one_of(st.integers(), st.text(max_size=4), st.just("$tuple"), st.just("a.b"))
_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.float64)),
)
_nests = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@settings(deadline=None, max_examples=200)
@given(_nests)
def test_any_nest_comes_back(nest: object) -> None:
    data, tensors = flatten(nest)
    assert same(unflatten(json.loads(json.dumps(data, allow_nan=False)), tensors), nest)


def test_nan_and_counters_come_back() -> None:
    data, tensors = flatten(
        {"loss": math.nan, "best": -math.inf, "milestones": collections.Counter({30: 1, 80: 2})}
    )
    back = unflatten(json.loads(json.dumps(data, allow_nan=False)), tensors)
    assert math.isnan(back["loss"])
    assert back["best"] == -math.inf
    assert back["milestones"] == collections.Counter({30: 1, 80: 2})
    assert type(back["milestones"]) is collections.Counter


def test_one_tensor_under_two_names_stays_one() -> None:
    shared = torch.ones(3)
    data, tensors = flatten({"a": shared, "b": shared, "view": shared[:2]})
    assert len(tensors) == 2
    back = unflatten(data, tensors)
    assert back["a"] is back["b"]
    assert torch.equal(back["view"], torch.ones(2))


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, {1, 2}, b"bytes", 1j, torch.eye(2).to_sparse()]
)
def test_what_a_file_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(StateError, match=r"opt\.hook"):
        flatten({"opt": {"hook": value}})


@pytest.mark.parametrize(
    "data",
    [
        {"$tensor": "missing"},
        {"$tensor": ["a"]},
        {"$float": "1e999"},
        {"$items": [[1]]},
        {"$items": [[[], 1]]},
        {"$code": "import os"},
        {"$tuple": 3},
    ],
)
def test_what_flatten_never_writes_is_refused(data: object) -> None:
    with pytest.raises(StateError):
        unflatten({"x": data}, {})


def test_depth_and_unused_tensors_are_refused() -> None:
    deep: object = 0
    for _ in range(100):
        deep = [deep]
    with pytest.raises(StateError, match="deep"):
        unflatten(deep, {})
    with pytest.raises(StateError, match="nothing refers to"):
        unflatten({}, {"stray": torch.ones(1)})
