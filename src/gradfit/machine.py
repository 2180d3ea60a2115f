"""What this machine has: memory to plan for, and the versions and sizes a result depends on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from gradfit.devices import memory_of


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; on the CPU within the process's and the container's
    limits too.
    """
    if device.type != "cpu":
        memory = memory_of(device)
        return None if memory is None else memory[0]
    return _least([_meminfo(), _control_group(), _data_limit()])


def total_bytes(device: torch.device) -> int | None:
    """Bytes that a device has in all; on the CPU no more than the process and its container may
    have.
    """
    if device.type != "cpu":
        memory = memory_of(device)
        return None if memory is None else memory[1]
    return _least([_meminfo("MemTotal:"), _group_limit(), _data_rlimit()])


def _least(limits: list[int | None]) -> int | None:
    """Of those that are there."""
    return min((count for count in limits if count is not None), default=None)


def environment(model: torch.nn.Module) -> dict[str, str]:
    """What a reader needs to repeat a measurement, as text."""
    from gradfit import __version__

    parameter = next(model.parameters())
    return {
        "gradfit": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "model": type(model).__name__,
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
    }


def _meminfo(name: str = "MemAvailable:") -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError):
        return _physical_memory()


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _group_limit() -> int | None:
    """What the control group may have."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def _control_group() -> int | None:
    limit = _group_limit()
    try:
        return (
            None
            if limit is None
            else limit - int(Path("/sys/fs/cgroup/memory.current").read_text())
        )
    except (OSError, ValueError):
        return None


def _data_rlimit() -> int | None:
    if sys.platform != "linux":
        return None
    import resource

    limit: Any = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else int(limit)


def _data_limit() -> int | None:
    """What RLIMIT_DATA leaves; it counts every private writable page, so what is mapped already is
    taken off.
    """
    limit = _data_rlimit()
    return None if limit is None else max(1, limit - data_bytes())


def data_bytes() -> int:
    """Private writable memory this process has mapped, as RLIMIT_DATA counts it; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
