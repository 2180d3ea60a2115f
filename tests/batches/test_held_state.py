"""What modules hold in lists, dicts and sets, and what it takes to look at it in each step."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from gradfit.batches import held_state
from gradfit.batches.held_state import HeldState, HoldersByType, held_tensors

Pair = namedtuple("Pair", "left right")


class Config:
    """Holds what it likes: any object may, and stays as it is."""


def filled() -> dict[str, Any]:
    return {
        "list": [1, [2]],
        "dict": {"a": {"b": 1}},
        "defaultdict": defaultdict(list, a=[1]),
        "counter": Counter("aab"),
        "ordered": OrderedDict(a=1, b=2),
        "set": {1, 2},
        "deque": deque([1, 2], maxlen=3),
        "pair": Pair([1], {"a": 1}),
        "config": Config(),
    }


def test_contents_come_back_into_the_same_objects() -> None:
    module, holders = nn.Module(), HoldersByType()
    for round_ in range(3):  # the types are known from the second on
        vars(module).update(filled())
        same, texts = dict(vars(module)), {name: repr(one) for name, one in filled().items()}
        held = HeldState([vars(module)], holders)
        module.list[1].append(3), module.list.append(round_)
        module.dict["a"]["b"] = 2
        module.defaultdict["a"].append(2), module.defaultdict["new"]
        module.counter.update("ab")
        module.ordered.move_to_end("a")
        module.set.add(3)
        module.deque.extend([3, 4])
        module.pair.left.append(2), module.pair.right.clear()
        held.restore()
        for name, text in texts.items():
            assert vars(module)[name] is same[name]
            assert name == "config" or repr(vars(module)[name]) == text


def test_a_type_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    contents_of = held_state._contents_of
    monkeypatch.setattr(
        held_state, "_contents_of", lambda one: looked_at.append(one) or contents_of(one)
    )
    module, holders = nn.Linear(2, 2), HoldersByType()
    module.config, module.names, module.numbers = Config(), ["a"] * 9, [Config(), 1, 2.0]
    for _ in range(2):
        HeldState([vars(module)], holders)
    assert [type(one) for one in looked_at] == [list] * 4
    module.config = [Config()]
    module.generator = torch.Generator()
    looked_at.clear()
    HeldState([vars(module)], holders)
    assert sorted(type(one).__name__ for one in looked_at) == ["Generator", "list", "list", "list"]


def test_a_type_that_a_forward_makes_dies_with_what_it_closes_over() -> None:
    """It was remembered, and with it an activation of each step."""
    module, holders = nn.Module(), HoldersByType()
    activation = torch.ones(3)

    def value(of: torch.Tensor) -> Any:
        class Value:
            def get(self) -> torch.Tensor:
                return of

        return Value()

    module.last = value(activation)
    HeldState([vars(module)], holders)
    alive = weakref.ref(activation)
    module.last = activation = None
    gc.collect()
    assert alive() is None


class Standing:
    """A proxy, as libraries for lazy values have them: it says that it is what it stands for."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    @property
    def __class__(self) -> type:
        return type(self.thing)


@pytest.mark.parametrize("thing", [{}, [1], (1,), torch.zeros(2)], ids=repr)
def test_a_proxy_is_no_holder(thing: Any) -> None:
    """Python's own methods refuse it, and torch's crash."""
    module = nn.Module()
    module.proxy = Standing(thing)
    HeldState([vars(module)]).restore()
    assert list(held_tensors({"": vars(module)})) == []
