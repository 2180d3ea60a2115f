"""A model's modules and parameters are those of now, whatever was changed in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradfit.batches.model_tree import ModelTree


def model() -> nn.Sequential:
    tied = nn.Linear(2, 2)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(tied, nn.ReLU()), tied)
    net.register_module("nothing", None)
    return net


def replace_parameter(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.zeros(2, 2))


def drop_parameter(net: nn.Sequential) -> None:
    net[0].bias = None


def give_back_parameter(net: nn.Sequential) -> None:
    net[0].register_parameter("more", nn.Parameter(torch.zeros(1)))


def replace_module(net: nn.Sequential) -> None:
    net[0] = nn.Linear(3, 3)


def replace_inner_module(net: nn.Sequential) -> None:
    net[1][1] = nn.PReLU()


def fill_empty_name(net: nn.Sequential) -> None:
    net.nothing = nn.Linear(1, 1)


def tie(net: nn.Sequential) -> None:
    net[0].weight = net[2].weight


def replace_registry(net: nn.Sequential) -> None:
    net[0]._parameters = {"weight": nn.Parameter(torch.zeros(1))}


@pytest.mark.parametrize(
    "change",
    [
        lambda net: None,
        replace_parameter,
        drop_parameter,
        give_back_parameter,
        replace_module,
        replace_inner_module,
        fill_empty_name,
        tie,
        replace_registry,
    ],
)
def test_what_was_changed_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    net = model()
    tree = ModelTree(net)
    change(net)
    tree.renew()
    # in torch's order, too: an optimizer's list is then seen to be the same without a set
    assert [*map(id, tree.modules)] == [*map(id, net.modules())]
    assert [*map(id, tree.parameters)] == [*map(id, net.parameters())]
