"""Every parameter of every public name is described where a reader looks: in the docstring's Args
or Attributes.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradfit as gf
from gradfit.integrations.accelerate import accumulator
from gradfit.integrations.lightning import Fit
from gradfit.integrations.transformers import FitTrainer, enable_checkpointing

# What `AccumulationContext` has of the window behind it, and promises; the rest is between the
# accumulator's parts.
PROMISED = {"register_tensor", "step", "reset", "close"}


def public() -> dict[str, Any]:
    """All public names, functions of public modules included."""
    names = {name: getattr(gf, name) for name in gf.__all__}
    modules = [(name, value) for name, value in names.items() if inspect.ismodule(value)]
    for name, module in modules:
        del names[name]
        own = {
            key: one
            for key, one in vars(module).items()
            if getattr(one, "__module__", "") == module.__name__
        }
        names |= {f"{name}.{key}": one for key, one in own.items() if not key.startswith("_")}
    return names | {
        one.__name__: one for one in (accumulator, Fit, FitTrainer, enable_checkpointing)
    }


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that are written in a public class, and calling it."""
    everything = set(map(id, public().values()))
    for base in kind.__mro__:
        for name, raw in vars(base).items():
            function = getattr(raw, "__func__", raw)
            if not inspect.isfunction(function) or (name.startswith("_") and name != "__call__"):
                continue
            if id(base) in everything or (
                base.__module__.startswith("gradfit.") and name in PROMISED
            ):
                yield name, getattr(kind, name)


def section(docstring: str) -> set[str]:
    """The names that Args and Attributes describe."""
    described: set[str] = set()
    inside = False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Args:", "Attributes:")
        elif inside and (entry := re.match(r" {4}\*{0,2}(\w+): \S", line)):
            described.add(entry.group(1))
    return described


def described_fields(kind: type) -> set[str]:
    """The fields of a record that have a docstring under them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id
        for field, below in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def parameters(call: Callable[..., Any]) -> list[str]:
    try:
        found = inspect.signature(call).parameters
    except ValueError:  # an exception without a constructor of its own
        return []
    return [name for name in found if name not in ("self", "cls")]


def undescribed(call: Any) -> list[str]:
    described = section(inspect.getdoc(call) or "")
    if inspect.isclass(call):
        described |= described_fields(call)
    return [name for name in parameters(call) if name not in described]


@pytest.mark.parametrize("name", sorted(public()))
def test_every_parameter_is_described(name: str) -> None:
    one = public()[name]
    missing = {name: undescribed(one)}
    if (
        inspect.isclass(one)
        and one.__module__.startswith("gradfit.")
        and "integrations" not in one.__module__
    ):
        missing |= {f"{name}.{key}": undescribed(method) for key, method in methods(one)}
    assert not {key: names for key, names in missing.items() if names}


@pytest.mark.parametrize("name", sorted(public()))
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert (inspect.getdoc(public()[name]) or "").strip()


def test_a_parameter_that_is_not_described_is_noticed() -> None:
    def function(one: int, two: int, three: int) -> None:
        """Take three.

        Args:
            one: the first.
            three:

        Nothing else:
            two: is not in the section.
        """

    assert undescribed(function) == ["two", "three"]


def test_the_arguments_of_described_names_exist() -> None:
    """A parameter that was renamed leaves no description behind."""
    stale = {}
    for name, one in public().items():
        if inspect.isfunction(one):
            stale[name] = section(inspect.getdoc(one) or "") - set(parameters(one))
    assert not {name: names for name, names in stale.items() if names}
