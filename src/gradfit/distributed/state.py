"""A window's state over several ranks: one sum, whoever holds which part of it, and so fit for any
number of ranks.

In the middle of a window each rank has sums of its own. A state that can be written once and read
at another world size holds their total: plain tensors under DDP, shards under FSDP2. It is taken
and loaded by all ranks together, in the middle of a window too. `save` and `load` keep it in files
that hold data and nothing else; an accumulator's state may also be part of a checkpoint of
`torch.distributed.checkpoint`, whose files are pickles.

Whoever loads it gives the total to the first rank and goes on; the mean does not depend on who
holds what.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from gradfit.accumulate import accumulator_state as local
from gradfit.accumulate.window_state import Total
from gradfit.distributed.shared_window import AllRanks, add_weights, to_dense
from gradfit.distributed.window_files import (
    Exchange,
    WindowFiles,
    failures_in,
    file_of,
    write_window,
)
from gradfit.errors import RankFailed, StateError

if TYPE_CHECKING:
    from gradfit.accumulate.accumulator import GradientAccumulator

_SAME_ON_ALL = (
    "version", "shapes", "windows", "strategy", "final", "scale", "delimited",
    "divisor",
)  # fmt: skip


def save(accumulator: GradientAccumulator, path: str | os.PathLike[str]) -> None:
    """Write the window into a directory, on all ranks together; one process alone can, too.

    Args:
        accumulator: Whose window; it may be in the middle of one.
        path: A directory that all ranks see. A window that is there is replaced when all ranks have
            written theirs.

    Raises:
        StateNotWritten: This rank could not write; what was there before is whole.
        RankFailed: Another rank could not.
    """
    content = share(accumulator)
    rank, exchange = _ranks(accumulator)
    write_window(path, rank, content["tensors"], content["window"], exchange)


def load(
    accumulator: GradientAccumulator, path: str | os.PathLike[str], *, trust_pickles: bool = False
) -> None:
    """Go on in the middle of the window that `save` has written, with any number of ranks.

    Args:
        accumulator: Of the same parameters in the same order.
        path: The directory that `save` was given.
        trust_pickles: Read what `torch.distributed.checkpoint` has written, too: its index is a
            pickle, and reading a pickle runs what is in it. Only for files that nobody else could
            have changed.

    Raises:
        StateError: It is another model's, damaged, or not all of it is there. Nothing is changed.
    """
    like = share(accumulator)["tensors"]  # by all ranks together, as all that follows
    if trust_pickles and _is_checkpoint(Path(path)):
        _load_checkpoint(accumulator, path, like)
        return
    content = _read_or_error(Path(path), like)
    _, exchange = _ranks(accumulator)
    failed = str(content) if isinstance(content, StateError) else ""
    said = exchange({"kind": "load", "failed": failed})
    if isinstance(content, StateError):
        raise content  # only now: the other ranks wait for what this one says
    _check_all_read(said, path)
    restore(accumulator, content)


def _read_or_error(path: Path, like: dict[str, Tensor]) -> dict[str, Any] | StateError:
    try:
        return _read(path, like)
    except StateError as error:
        return error


def _check_all_read(said: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    failures = failures_in(said)
    if failures:
        raise RankFailed(f"Not every rank could read {str(path)!r} ({failures}).")


def _is_checkpoint(folder: Path) -> bool:
    """Whether `torch.distributed.checkpoint` has written there, and not `save`."""
    return (folder / ".metadata").exists() and not file_of(folder, 0).exists()


def _read(path: Path, like: dict[str, Tensor]) -> dict[str, Any]:
    if _is_checkpoint(path):
        raise StateError(
            f"{str(path)!r} was written by torch.distributed.checkpoint, whose index is a pickle:"
            " reading it runs what is in it. Pass trust_pickles=True if nobody else could have"
            " changed it."
        )
    files = WindowFiles(path)
    tensors: dict[str, Any] = {}
    for name, parts in files.parts.items():
        tensors[name] = _template(like, name, parts[0].shape, parts[0].dtype)
        files.read_into(name, tensors[name])
    return {"tensors": tensors, "window": files.window}


def _template(
    like: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor to read into, laid out as the parameter's gradient is here."""
    parameter = like.get(f"grad.{name.rpartition('.')[2]}")
    if parameter is None or tuple(parameter.shape) != shape or not dtype.is_floating_point:
        raise StateError(
            f"The state's {name!r:.60} fits no parameter here. Load it with the same parameters."
        )
    return torch.zeros_like(parameter, dtype=dtype)


def _load_checkpoint(accumulator: GradientAccumulator, path: Any, like: dict[str, Tensor]) -> None:
    """What `torch.distributed.checkpoint` has written, pickles and all."""
    index = FileSystemReader(path).read_metadata().state_dict_metadata
    prefix = next(
        (key.removesuffix("window") for key in index if key.endswith(".window")), "accumulator."
    )
    entries = _tensors_in(index, f"{prefix}tensors.")
    template = {
        name: _template(like, name, tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
    }
    content: dict[str, Any] = {prefix[:-1]: {"tensors": template, "window": ""}}
    with warnings.catch_warnings():
        # One process alone is what `no_dist` is for; torch says so each time.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        alone = not isinstance(accumulator.ranks, AllRanks)
        state_dict_loader.load(content, checkpoint_id=path, no_dist=alone)
    restore(accumulator, content[prefix[:-1]])


def _tensors_in(index: Mapping[str, Any], prefix: str) -> dict[str, TensorStorageMetadata]:
    """The tensors of an index whose names begin so, by the rest of their names."""
    return {
        key.removeprefix(prefix): entry
        for key, entry in index.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _ranks(accumulator: GradientAccumulator) -> tuple[int, Exchange]:
    """Which rank this is, and how it tells the others something."""
    ranks = accumulator.ranks
    if isinstance(ranks, AllRanks):
        return ranks.group.rank, ranks.group.exchange
    return 0, lambda record: [record]


def share(accumulator: GradientAccumulator) -> dict[str, Any]:
    """The window as all ranks hold it: {"tensors": totals by name, "window": numbers as JSON}; on
    all ranks together.

    There is a tensor for every parameter, zeros where nothing has come in: a state that is only
    made to be loaded into has the same names.
    """
    window, ranks = accumulator.window, accumulator.ranks
    numbers = local.numbers_of(accumulator)
    shapes = numbers.pop("shapes")
    numbers["steps"] = window.accumulation_steps
    numbers["present"] = list(_gradients_in(window))
    whole = {**_add(_exchanged(ranks, numbers, len(shapes))), "shapes": shapes}
    is_spread = not window.is_final and whole["steps"] > 0
    adding = _Adding(window, ranks if is_spread and isinstance(ranks, AllRanks) else None)
    tensors = adding.total("grad", window.state.main, whole["divisor"])
    for name, (_, divisor) in whole["terms"].items():
        term = window.state.terms.get(name, Total())
        tensors.update(adding.total(f"term.{name}", term, divisor))
    return {"tensors": tensors, "window": json.dumps(whole)}


def _exchanged(ranks: Any, numbers: dict[str, Any], parameters: int) -> list[dict[str, Any]]:
    """The windows of all ranks, as numbers."""
    if not isinstance(ranks, AllRanks):
        return [numbers]
    ranks.settle()
    record = {"kind": "state", "flags": [0, 0, 0], "parameters": parameters, **numbers}
    records = ranks.group.exchange(record)
    ranks.check(records)
    return records


def _slots(window: Any) -> Any:
    return window.tensors if window.is_final else window.sources


class _Adding(NamedTuple):
    """Adds up a window's sums over the ranks; None: they are all here."""

    window: Any
    ranks: AllRanks | None

    def total(self, name: str, part: Total, divisor: float | None) -> dict[str, Tensor]:
        """One denominator's sums over the ranks, brought to one divisor."""
        sums = _gradients_in(self.window) if name == "grad" else dict(part.gradients)
        with torch.no_grad():
            totals = self._added(sums, _factor_to(divisor, part.divisor))
            for at, tensor in enumerate(self.window.tensors):
                if totals.get(at) is None:
                    totals[at] = _zero_gradient(tensor)
        return {f"{name}.{at}": total.detach() for at, total in totals.items()}

    def _added(self, sums: dict[int, Tensor], factor: float) -> dict[int, Tensor]:
        if self.ranks is not None:
            return dict(enumerate(self.ranks.total(self.window, sums, factor)))
        return {at: to_dense(one).clone() for at, one in sums.items()}


def _zero_gradient(tensor: Tensor) -> Tensor:
    dtype = tensor.grad_dtype or tensor.dtype
    return torch.zeros_like(tensor, dtype=dtype, requires_grad=False)


def _gradients_in(window: Any) -> dict[int, Tensor]:
    return {at: slot.grad for at, slot in enumerate(_slots(window)) if slot.grad is not None}


def _factor_to(divisor: float | None, own: float | None) -> float:
    return own / divisor if own is not None and divisor is not None else 1.0


def _add(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks hold, as the numbers of one window."""
    all_of = {name: [one[name] for one in records] for name in records[0]}
    return {
        **{name: records[0][name] for name in ("version", "windows", "strategy", "final")},
        "scale": _first_holding(records)["scale"],
        "steps": sum(all_of["steps"]),
        "skipped": sum(all_of["skipped"]),
        "delimited": any(all_of["delimited"]),
        "weight": add_weights(all_of["weight"]),
        "divisor": _first(all_of["divisor"]),
        "terms": _add_terms(all_of["terms"]),
        "present": sorted(set().union(*all_of["present"])),
    }


def _first_holding(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank that something has come in on; the first of all if none has."""
    return next((one for one in records if one["steps"]), records[0])


def _add_terms(terms: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each term the sum of its weights, and the first divisor that there is."""
    names = dict.fromkeys(itertools.chain(*terms))
    return {name: _add_term([one[name] for one in terms if name in one]) for name in names}


def _add_term(pairs: list[Any]) -> list[Any]:
    weights, divisors = zip(*pairs, strict=True)
    return [add_weights(list(weights)), _first(list(divisors))]


def _first(divisors: list[float | None]) -> float | None:
    return next((one for one in divisors if one is not None), None)


def restore(accumulator: GradientAccumulator, state: Mapping[str, Any]) -> None:
    """Put a shared state in the place of the window there is, on all ranks together: the sums go to
    the first.
    """
    ranks = accumulator.ranks
    rank, size = (ranks.group.rank, ranks.group.size) if isinstance(ranks, AllRanks) else (0, 1)
    try:
        whole = json.loads(state["window"])
        holds = rank == 0 or whole["final"]
        tensors = _tensors_to_load(state["tensors"], whole, holds=holds)
        numbers = _numbers_to_load(whole, rank, size, holds=holds)
    # A state is input: whatever is wrong with it comes out as one kind of error, before any change.
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise StateError(
            f"The state is damaged, or not all of it was loaded: {error!r}. Load it with "
            "gradfit.distributed.state.load(accumulator, path)."
        ) from error
    local.load(accumulator, {"tensors": tensors, "window": numbers})


def _tensors_to_load(
    tensors: Mapping[str, Any], whole: dict[str, Any], *, holds: bool
) -> dict[str, Tensor]:
    """The sums that this rank goes on with: all, if it `holds` them, or none."""
    loaded = {}
    for name in _names_of_sums(whole):
        # by all ranks together; who does not hold it lets it go before the next
        tensor = _whole_sum(tensors[name], final=whole["final"])
        if holds:
            loaded[name] = tensor
    return loaded


def _names_of_sums(whole: dict[str, Any]) -> list[str]:
    parameters = range(len(whole["shapes"]))
    names = [f"grad.{at}" for at in whole["present"]]
    return names + [f"term.{name}.{at}" for name in whole["terms"] for at in parameters]


def _whole_sum(tensor: Any, *, final: bool) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) and not final else tensor


def _numbers_to_load(whole: dict[str, Any], rank: int, size: int, *, holds: bool) -> dict[str, Any]:
    """This rank's share of the window's counts, and the weights of the sums that it holds."""
    steps = _share_of(whole["steps"], rank, size)
    return {
        **{name: whole[name] for name in _SAME_ON_ALL},
        "closed": steps,
        "open": 0,
        "open_plain": 0,
        "skipped": min(_share_of(whole["skipped"], rank, size), steps),
        "weight": whole["weight"] if holds else 0,
        "terms": {
            name: [weight if holds else 0, divisor]
            for name, (weight, divisor) in whole["terms"].items()
        },
        "sparse": {},
    }


def _share_of(count: int, rank: int, size: int) -> int:
    """As even as it goes: the first ranks have one more."""
    return count // size + (rank < count % size)
