"""Tensors that ranks have written in shards, put back together in whatever layout there is now.

At the same world size each rank's own file has what it needs. At another one,
`torch.distributed.checkpoint` works out which parts of which shards go where, and only those are
read.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit._torch_distributed import is_dtensor, shard_of
from gradfit.errors import StateError
from gradfit.runs.state_codec import Shard

ReadAllRanks = Callable[[], list[Mapping[str, Any]]]
"""The same part of the state of every rank that the run had, read on demand."""


class Filler:
    """Copies saved content into tensors: from this rank's own state where that has it, else from
    those of all ranks.
    """

    def __init__(self, read_all_ranks: ReadAllRanks) -> None:
        self._read_all_ranks = read_all_ranks
        self._missing: dict[tuple[Any, ...], Tensor] = {}

    def fill(self, tensor: Tensor, saved: Tensor | Shard, path: tuple[Any, ...]) -> None:
        """Give a tensor its saved content, now or when `finish` is called; `path` leads to it in
        any rank's state.
        """
        own = shard_of(tensor)
        local, offset = (tensor, (0,) * tensor.dim()) if own is None else own
        shard = as_shard(saved)
        if not local.numel():
            return
        window = _window_within(shard, offset, local.shape)
        if window is None:
            self._missing[path] = tensor
        else:
            local.copy_(shard.content[window])

    def finish(self) -> None:
        """Read what this rank's own state did not have."""
        if not self._missing:
            return
        states = self._read_all_ranks()
        # unlike the nest's own names, these only have to be different
        names = {path: "/".join(map(str, path)) for path in self._missing}
        reshard(
            {names[path]: tensor for path, tensor in self._missing.items()},
            {names[path]: _shards_at(path, states) for path in self._missing},
        )
        self._missing = {}


def _window_within(
    shard: Shard, offset: Sequence[int], shape: Sequence[int]
) -> tuple[slice, ...] | None:
    """Where in a shard these elements of the whole are; None if it does not have all of them."""
    window = []
    for at, size, start, there in zip(
        offset, shape, shard.offset, shard.content.shape, strict=True
    ):
        if not start <= at <= at + size <= start + there:
            return None
        window.append(slice(at - start, at - start + size))
    return tuple(window)


def as_shard(saved: Any) -> Shard:
    """A whole tensor is the only shard of itself."""
    if isinstance(saved, Shard):
        return saved
    if not isinstance(saved, Tensor) and not hasattr(saved, "get_shape"):
        raise StateError(
            f"A rank's state has a {type(saved).__name__} where there must be a tensor."
        )
    shape = tuple(saved.shape if isinstance(saved, Tensor) else saved.get_shape())
    return Shard(saved, shape, (0,) * len(shape))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are; on all ranks together."""
    gathered: Tensor = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return gathered


def reshard(targets: dict[str, Tensor], shards: Mapping[str, list[Shard]]) -> None:
    """Fill tensors, sharded or not, from shards of any layout, by name."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    distinct = {name: _distinct(name, of_name) for name, of_name in shards.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            {name: tensor.detach() for name, tensor in targets.items()},
            storage_reader=_reader(distinct),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,  # every rank reads what it needs by itself
        )


def _distinct(name: str, shards: list[Shard]) -> list[Shard]:
    """Each part once, however many ranks have it; all parts must be there."""
    by_offset = {shard.offset: shard for shard in shards if math.prod(_size(shard))}
    shape = shards[0].shape
    there = sum(math.prod(_size(shard)) for shard in by_offset.values())
    if any(shard.shape != shape for shard in shards) or there != math.prod(shape):
        raise StateError(
            f"The ranks' states hold {there} of the {math.prod(shape)} elements of {name!r}. Resume"
            " with the directories of all ranks that the run had."
        )
    return list(by_offset.values())


def _size(shard: Shard) -> list[int]:
    content = shard.content
    return list(content.shape) if isinstance(content, Tensor) else content.get_shape()


def _shards_at(path: tuple[Any, ...], states: Iterable[Any]) -> list[Shard]:
    return [as_shard(_follow(state, path)) for state in states]


def _follow(nest: Any, path: tuple[Any, ...]) -> Any:
    try:
        for key in path:
            nest = nest[key]
    except (KeyError, TypeError):
        raise StateError(
            f"A rank's state has no {'.'.join(map(str, path))}. It is that of another run."
        ) from None
    return nest


def _reader(shards: Mapping[str, list[Shard]]) -> Any:
    """What `torch.distributed.checkpoint` reads from: it asks for parts of shards, and is given
    them.
    """
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

    def described(of_name: list[Shard]) -> TensorStorageMetadata:
        return TensorStorageMetadata(
            TensorProperties(),
            torch.Size(of_name[0].shape),
            [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(_size(p))) for p in of_name],
        )

    class Reader(StorageReader):
        def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
            pass

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return Metadata({name: described(of_name) for name, of_name in shards.items()})

        def set_up_storage_reader(
            self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
        ) -> None:
            pass

        def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
            return plan

        def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
            return plans

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
            for item in plan.items:
                shard = shards[item.storage_index.fqn][item.storage_index.index or 0]
                ranges = zip(item.storage_offsets, item.lengths, strict=True)
                part = shard.content[tuple(slice(at, at + count) for at, count in ranges)]
                planner.resolve_tensor(item).copy_(part)
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
            return False

    return Reader()
