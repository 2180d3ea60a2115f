"""What becomes of values that a model has named (`gf.name`), where somebody says so by name.

A profile knows which values have a name (`Profile.names`); what is asked for is written into a copy
of it (`Profile.fixed`), so that every plan from that copy does it, whatever else it chooses. What
cannot be is refused here, before anything is planned.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradfit.arguments import read_list, read_text
from gradfit.errors import MisuseError, UnknownName
from gradfit.planning.plan import NamedChoice
from gradfit.profiling.profile import Profile, Value
from gradfit.profiling.step_graph import Graph

Named = Mapping[str, str]  # by name: "keep", "rebuild" or "offload"


def read_named(*, keep: Any = (), rebuild: Any = (), offload: Any = ()) -> dict[str, str]:
    """What was asked for, by name; each argument is a list of names.

    Raises:
        MisuseError: one is no list of names, or a name is in two of them.
    """
    named: dict[str, str] = {}
    for action, given in (("keep", keep), ("rebuild", rebuild), ("offload", offload)):
        for name in read_names(given, action):
            if named.setdefault(name, action) != action:
                raise MisuseError(
                    f"{name!r} is in {named[name]}= and in {action}=. Name it in one of them."
                )
    return named


def read_names(given: Any, parameter: str) -> list[str]:
    """A list of names."""
    instead = f"{parameter}=['qkv'], names that gf.name gave"
    names = read_list(given, parameter, instead)
    return [read_text(name, f"{parameter}[{at}]", "'qkv'") for at, name in enumerate(names)]


def fix_by_name(profile: Profile, named: Named) -> Profile:
    """The profile, from which each plan does what is asked for.

    Raises:
        UnknownName: no value has one of the names.
        MisuseError: it cannot be done with one of the values; the text says why.
    """
    for name, action in named.items():
        if name not in profile.names:
            raise _unknown(name, action, profile)
        for value in profile.names[name]:
            if (obstacle := _obstacle(profile, value, action)) is not None:
                raise MisuseError(f"{action}=[{name!r}] cannot be: {obstacle}")
        if action != "keep" and not profile.names[name]:
            raise MisuseError(
                f"{action}=[{name!r}] cannot be: only tensors that no operation makes (parameters,"
                " buffers, the batch) have this name, and these are there all the time. Name what"
                " the forward makes of them."
            )
    _check_agreement(profile, named)
    return dataclasses.replace(profile, fixed=dict(named))


def fix_each(profiles: Sequence[Profile], named: Named) -> list[Profile]:
    """The profiles of one step, the first without tiles; of the others those in which it can be.

    In tiles a named value need not exist whole.
    """
    if not named:
        return list(profiles)
    return [fix_by_name(profiles[0], named), *_those_that_can(profiles[1:], named)]


def _those_that_can(profiles: Iterable[Profile], named: Named) -> Iterator[Profile]:
    for profile in profiles:
        try:
            yield fix_by_name(profile, named)
        except MisuseError:
            continue


def fix_known_names(profile: Profile, named: Named) -> Profile:
    """The same, without the names that mean nothing in this forward: it is another sequence of
    operations than the one for which they were given.
    """
    for name, action in named.items():
        with contextlib.suppress(MisuseError):
            profile = fix_by_name(profile, {**profile.fixed, name: action})
    return profile


def _unknown(name: str, action: str, profile: Profile) -> UnknownName:
    if not profile.names:
        return UnknownName(
            f"{action}=[{name!r}]: the forward names no value. Call gf.name(tensor, {name!r}) in"
            " it, outside of code that torch.compile compiles, and profile again."
        )
    there = ", ".join(map(repr, profile.names))
    return UnknownName(f"{action}=[{name!r}]: no value has this name. There are {there}.")


def _obstacle(profile: Profile, value: int, action: str) -> str | None:
    """Why this cannot be done with a value; None if it can."""
    by = profile.operations[profile.values[value].operation or 0]
    which = f"a value of it, made by {by.name} in {by.module or 'the model'} ({by.source})"
    if action == "rebuild":
        if _can_be_rebuilt(profile, value):
            return None
        return (
            f"{which}, cannot be rebuilt, since that operation, or one that made what it reads,"
            " cannot be replayed. Leave it out."
        )
    if profile.values[value].overwritten:
        return (
            f"{which}, is written over in place later in the forward. Name what is there after the"
            " write, or write to a copy."
        )
    if action == "offload" and not profile.host_bandwidth:
        return (
            "this profile does not say how fast values are moved out. Pass host_bandwidth= (bytes"
            " per second, as 25e9) to gf.profile."
        )
    return None


def _can_be_rebuilt(profile: Profile, value: int) -> bool:
    """Whether a value's operation can be replayed, from inputs that are kept or rebuilt in turn."""
    waiting, looked_at = [value], {value}
    while waiting:
        operation = profile.operations[profile.values[waiting.pop()].operation or 0]
        if not operation.replayable:
            return False
        # What is not written over can be kept; all else has to be rebuilt on the way.
        further = {v for v in operation.inputs if _must_be_rebuilt(profile.values[v])} - looked_at
        waiting += further
        looked_at |= further
    return True


def _must_be_rebuilt(value: Value) -> bool:
    return value.overwritten and value.operation is not None


def _check_agreement(profile: Profile, named: Named) -> None:
    """A value may have several names; they must ask for the same."""
    asked: dict[int, str] = {}
    for name, action in named.items():
        for value in profile.names[name]:
            first = asked.setdefault(value, name)
            if named[first] != action:
                raise MisuseError(
                    f"{named[first]}=[{first!r}] and {action}=[{name!r}] are about the same value:"
                    " both names lie in one storage. Leave one of them out."
                )


def named_choices(profile: Profile, graph: Graph, until: Sequence[int]) -> Iterator[NamedChoice]:
    """What was fixed by name, with the values that something asks for after the forward.

    Args:
        profile: with what was asked for.
        graph: of it, at one micro-batch size.
        until: of each value, up to which node it is alive; -1: nothing needs it.
    """
    for name, action in profile.fixed.items():
        needed = [value for value in profile.names[name] if until[value] >= 0]
        yield NamedChoice(name, action, len(needed), sum(graph.nbytes[v] for v in needed))
