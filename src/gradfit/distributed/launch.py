"""Processes that `torchrun` has started: who they are, which rows are theirs, and what they decide
together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from gradfit import _torch_distributed as private
from gradfit.distributed.fsdp import data_parallel_size, is_fully_sharded
from gradfit.distributed.process_group import Group
from gradfit.distributed.replicas import replicate
from gradfit.distributed.same_model import require_same_model, require_same_settings
from gradfit.errors import MisuseError
from gradfit.tree import map_tensors, size_of_batch


def _init(backend: str) -> None:
    """Form the default group, in a part of the store of this attempt's own where that is possible.

    torchrun keeps one store over all restarts, and torch's own start reads it as it is: the
    addresses of killed processes are still there, and a restarted one may try to reach them.
    Restarts are counted per machine, so only on one machine do all ranks know the same number
    (https://github.com/pytorch/pytorch/issues/135712,
    https://github.com/pytorch/pytorch/issues/108158).
    """
    size = int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != size:
        dist.init_process_group(backend)
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, attempt = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    store = PrefixStore(f"gradfit/{attempt}", private.tcp_store(host, port, hosts))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


class Ranks:
    """The processes of one run; a process alone is the only rank."""

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)

    @classmethod
    def join(cls) -> Ranks:
        """The ranks that `torchrun` has started, if it has: gloo on CPUs, NCCL on GPUs.

        A single rank is a group too: the job may call `fully_shard` whatever their number.
        """
        if not dist.is_torchelastic_launched():
            return cls()
        if not dist.is_initialized() and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            _init("nccl")
        elif not dist.is_initialized():
            _init("gloo")
        world = dist.group.WORLD
        assert world is not None
        return cls(Group(world))

    @property
    def size_here(self) -> int:
        """How many of the ranks are on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self._group is not None else 1

    @property
    def restarted(self) -> bool:
        """Whether `torchrun` has started this process again after a failure."""
        return (
            self._group is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        )

    def leave(self) -> None:
        """The run is over."""
        if self._group is not None:
            dist.destroy_process_group()

    def share(self, model: torch.nn.Module) -> None:
        """Make the model one over all ranks, unless the job has done so itself."""
        if self.size > 1:
            require_same_model(model, self.tell_all)
        if isinstance(model, DistributedDataParallel):
            return
        if is_fully_sharded(model):
            self._require_over_all_ranks(model)
        elif self.size > 1:
            replicate(model)

    def _require_over_all_ranks(self, model: torch.nn.Module) -> None:
        ranks = data_parallel_size(model)
        if ranks != self.size:
            raise MisuseError(
                f"The model is fully_shard over {ranks} ranks, the run has {self.size}: each"
                " rank takes rows of its own. Make the mesh of all ranks, or start torchrun"
                f" with --nproc-per-node {ranks}."
            )

    def require_same(self, settings: Mapping[str, Any]) -> None:
        """Raise a `MisuseError` that names what differs, on all ranks, unless all have these
        settings.
        """
        require_same_settings(settings, self.tell_all)

    def part(self, batch: Any) -> Any:
        """This rank's rows of a batch; None if there are fewer rows than ranks and none is left."""
        if self.size == 1:
            return batch
        rows = size_of_batch(batch)
        start, end = self.rank * rows // self.size, (self.rank + 1) * rows // self.size
        if start == end:
            return None
        return map_tensors(batch, lambda tensor: tensor[start:end] if tensor.dim() else tensor)

    def first_says(self, text: str) -> str:
        """What the first rank says."""
        said: str = self.tell_all({"text": text})[0]["text"]
        return said

    def any_of(self, *wishes: bool) -> list[bool]:
        """For each wish, whether any rank has it."""
        records = self.tell_all({"wishes": list(map(int, wishes))})
        return list(map(any, zip(*(one["wishes"] for one in records), strict=True)))

    def tell_all(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Everybody's record, in the order of the ranks."""
        return [record] if self._group is None else self._group.exchange(record)
