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

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from gradfit.accumulate import accumulator_state as local
from gradfit.accumulate.window_state import Total
from gradfit.distributed.shared_window import Together, add_weights
from gradfit.distributed.window_files import Exchange, WindowFiles, file_of, write_window
from gradfit.errors import RankFailed, StateError

if TYPE_CHECKING:
    from gradfit.accumulate.accumulator import GradientAccumulator

_SAME_ON_ALL = (
    "version", "shapes", "windows", "strategy", "final", "scale", "rescaled", "delimited",
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
    problem: StateError | None = None
    content: dict[str, Any] = {}
    if (Path(path) / ".metadata").exists() and not file_of(Path(path), 0).exists():
        if trust_pickles:
            _load_checkpoint(accumulator, path, like)
            return
        problem = StateError(
            f"{str(path)!r} was written by torch.distributed.checkpoint, whose index is a pickle:"
            " reading it runs what is in it. Pass trust_pickles=True if nobody else could have"
            " changed it."
        )
    else:
        try:
            content = _read(path, like)
        except StateError as error:
            problem = error
    _, exchange = _ranks(accumulator)
    said = exchange({"kind": "load", "failed": "" if problem is None else str(problem)})
    if problem is not None:
        raise problem
    failed = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(said) if one["failed"]]
    if failed:
        raise RankFailed(f"Not every rank could read {str(path)!r} ({'; '.join(failed)}).")
    restore(accumulator, content)


def _read(path: str | os.PathLike[str], like: dict[str, Tensor]) -> dict[str, Any]:
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
    template: dict[str, Any] = {}
    for key, found in index.items():
        if key.startswith(f"{prefix}tensors.") and isinstance(found, TensorStorageMetadata):
            name = key.removeprefix(f"{prefix}tensors.")
            template[name] = _template(like, name, tuple(found.size), found.properties.dtype)
    content: dict[str, Any] = {prefix[:-1]: {"tensors": template, "window": ""}}
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        alone = not isinstance(accumulator.ranks, Together)
        state_dict_loader.load(content, checkpoint_id=path, no_dist=alone)
    restore(accumulator, content[prefix[:-1]])


def _ranks(accumulator: GradientAccumulator) -> tuple[int, Exchange]:
    """Which rank this is, and how it tells the others something."""
    ranks = accumulator.ranks
    return (
        (ranks.group.rank, ranks.group.exchange)
        if isinstance(ranks, Together)
        else (0, lambda record: [record])
    )


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
    numbers["present"] = [at for at, slot in enumerate(_slots(window)) if slot.grad is not None]
    if isinstance(ranks, Together):
        ranks.settle()
        records = ranks.group.exchange(
            {"kind": "state", "flags": [0, 0, 0], "parameters": len(shapes), **numbers}
        )
        ranks.check(records)
    else:
        records = [numbers]
    whole = {**_add(records), "shapes": shapes}
    # nothing to add up
    apart = not isinstance(ranks, Together) or window.is_final or not whole["steps"]
    tensors = _total(window, ranks, window.state.main, whole["divisor"], "grad", apart)
    for name, (_, divisor) in whole["terms"].items():
        tensors.update(
            _total(
                window, ranks, window.state.terms.get(name, Total()), divisor, f"term.{name}", apart
            )
        )
    return {"tensors": tensors, "window": json.dumps(whole)}


def _slots(window: Any) -> Any:
    return window.tensors if window.is_final else window.sources


def _total(
    window: Any, ranks: Any, part: Total, divisor: float | None, name: str, apart: bool
) -> dict[str, Tensor]:
    """One denominator's sums over the ranks, brought to one divisor."""
    if name == "grad":
        sums = {at: slot.grad for at, slot in enumerate(_slots(window)) if slot.grad is not None}
    else:
        sums = dict(part.gradients)
    factor = part.divisor / divisor if part.divisor is not None and divisor is not None else 1.0
    with torch.no_grad():
        if not apart:
            totals = dict(enumerate(ranks.total(window, sums, factor)))
        else:
            totals = {
                at: (one.to_dense() if one.is_sparse else one).clone() for at, one in sums.items()
            }
        for at, tensor in enumerate(window.tensors):
            if totals.get(at) is None:
                totals[at] = torch.zeros_like(
                    tensor, dtype=tensor.grad_dtype or tensor.dtype, requires_grad=False
                )
    return {f"{name}.{at}": total.detach() for at, total in totals.items()}


def _add(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks hold, as the numbers of one window."""
    holding = next((one for one in records if one["steps"]), records[0])
    names = dict.fromkeys(name for one in records for name in one["terms"])
    terms = {
        name: [one["terms"][name] for one in records if name in one["terms"]] for name in names
    }
    return {
        **{name: records[0][name] for name in ("version", "windows", "strategy", "final")},
        "scale": holding["scale"],
        "rescaled": any(one["rescaled"] for one in records),
        "steps": sum(one["steps"] for one in records),
        "skipped": sum(one["skipped"] for one in records),
        "delimited": any(one["delimited"] for one in records),
        "weight": add_weights([one["weight"] for one in records]),
        "divisor": _first([one["divisor"] for one in records]),
        "terms": {
            name: [
                add_weights([weight for weight, _ in pairs]),
                _first([divisor for _, divisor in pairs]),
            ]
            for name, pairs in terms.items()
        },
        "present": sorted({at for one in records for at in one["present"]}),
    }


def _first(divisors: list[float | None]) -> float | None:
    return next((one for one in divisors if one is not None), None)


def restore(accumulator: GradientAccumulator, state: Mapping[str, Any]) -> None:
    """Put a shared state in the place of the window there is, on all ranks together: the sums go to
    the first.
    """
    ranks = accumulator.ranks
    rank, size = (ranks.group.rank, ranks.group.size) if isinstance(ranks, Together) else (0, 1)
    try:
        whole = json.loads(state["window"])
        steps, skipped = (
            whole[name] // size + (rank < whole[name] % size) for name in ("steps", "skipped")
        )
        final, holds = whole["final"], rank == 0 or whole["final"]
        names = [f"grad.{at}" for at in whole["present"]]
        names += [
            f"term.{name}.{at}" for name in whole["terms"] for at in range(len(whole["shapes"]))
        ]
        tensors = {}
        for name in names:
            tensor = state["tensors"][name]
            if isinstance(tensor, DTensor) and not final:
                tensor = tensor.full_tensor()  # by all ranks together
            if holds:
                tensors[name] = tensor
        numbers = {
            **{name: whole[name] for name in _SAME_ON_ALL},
            "closed": steps,
            "open": 0,
            "open_plain": 0,
            "skipped": min(skipped, steps),
            "weight": whole["weight"] if holds else 0,
            "terms": {
                name: [weight if holds else 0, divisor]
                for name, (weight, divisor) in whole["terms"].items()
            },
            "sparse": {},
        }
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
