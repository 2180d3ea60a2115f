"""The simulated accelerator `sim`: builds it on first use, registers it with torch, and is its
device module.

Load it before the first backward pass of a process: autograd starts its threads for devices once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
NAME = "sim"
DEVICES = 2
_SOURCES = ("device.cpp", "memory.h", "streams.h")
_native: Any = None


def why_missing() -> str | None:
    """Why the device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return "the simulated device needs Linux (memfd)"
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "no C++ compiler to build the simulated device with"
    if shutil.which("ninja") is None:
        return "no ninja to build the simulated device with"
    return None


def load() -> types.ModuleType:
    """Build (about a minute; then cached, by source and version of torch) and register the
    device.
    """
    global _native
    module = sys.modules[__name__]
    if _native is not None:
        return module
    content = b"".join((HERE / name).read_bytes() for name in _SOURCES)
    key = hashlib.sha256(content + torch.__version__.encode() + sys.version.encode()).hexdigest()[
        :16
    ]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    _native = _built(f"simulated_{key}")
    torch.utils.generate_methods_for_privateuse1_backend()
    for index in range(DEVICES):
        manual_seed_of(index, 0)
    return module


def _built(name: str) -> Any:
    """The native module. It is built apart and then put in its place: whoever is ended in between
    leaves no lock that others wait for, and another copy of these sources need not build again.
    """
    from torch.utils.cpp_extension import get_default_build_root
    from torch.utils.cpp_extension import load as build

    library = Path(get_default_build_root()) / f"{name}.so"
    if library.exists():
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        return native
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        flags = ["-O1", "-std=c++20"]
        native = build(name, [str(HERE / "device.cpp")], extra_cflags=flags, build_directory=folder)
        Path(folder, library.name).replace(library)
    return native


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else int(index)


# What torch asks a device's module for.

_initialized = True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def is_available() -> bool:
    return _native is not None


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return int(_native.current_device())


def set_device(device: Any) -> None:
    _native.set_device(_index(device))


def synchronize(device: Any = None) -> None:
    _native.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed_of(device: Any, seed: int) -> None:
    _native.default_generator(_index(device)).manual_seed(seed)


def manual_seed(seed: int) -> None:
    manual_seed_of(None, seed)


def manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        manual_seed_of(index, seed)


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    state: torch.Tensor = _native.default_generator(_index(device)).get_state()
    return state


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    _native.default_generator(_index(device)).set_state(state)


class device:  # noqa: N801 - torch's own name for it
    """`with torch.sim.device(1):` makes another device the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        _native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _native.set_device(self._before)


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """As `torch.cuda`'s: a cap on what the allocator reserves."""
    index = _index(device)
    _native.set_cap(index, int(fraction * _native.total(index)))


def get_per_process_memory_fraction(device: Any = None) -> float:
    index = _index(device)
    return min(1.0, _native.cap(index) / _native.total(index))


# What only the tests ask for.


class _History:
    """As `torch.cuda.memory`: what the allocators were asked for, while that is recorded."""

    def __init__(self) -> None:
        self._traces: list[list[dict[str, Any]]] = [[] for _ in range(DEVICES)]
        self._records = False

    def _record_memory_history(
        self, enabled: str | None = "all", *, context: str | None = "all", clear_history: bool
    ) -> None:
        self._records = enabled is not None
        for index, trace in enumerate(self._traces):
            _native.write_down_requests(index, self._records)
            if clear_history or enabled is None:
                trace.clear()

    def _snapshot(self) -> dict[str, Any]:
        for index, trace in enumerate(self._traces):
            for address, size in _native.write_down_requests(index, self._records):
                action = "free_completed" if size < 0 else "alloc"
                trace.append({"action": action, "addr": address, "size": size})
        return {"segments": _all_segments(), "device_traces": [list(one) for one in self._traces]}


def _all_segments() -> list[dict[str, Any]]:
    return [segment for index in range(DEVICES) for segment in _native.snapshot(index)]


def say_what_is_reserved(on: bool) -> None:
    """As CUDA, which tells its segments and what was asked for, or, as from the beginning, like
    backends that do not.

    Where it is told a budget is about segments, of 2 MiB and more: too coarse for small models.
    """
    for index in range(DEVICES):
        _native.write_down_requests(index, False)  # whatever somebody has left
    told = {"memory_snapshot": _all_segments, "memory": _History()}
    for name, value in told.items():
        globals().pop(name, None)
        if on:
            globals()[name] = value


def settings() -> Any:
    """The native module: delays, caps, counters."""
    return _native


def set_delays(seed: int = 0, probability: float = 0.0, longest_us: int = 0) -> None:
    """From now on this share of what is written, and every copy that does not wait, appears
    late.
    """
    _native.set_delays(seed, probability, longest_us)


def counters() -> dict[str, int]:
    """How many kernels ran, numbers were read and waits made since the process began."""
    return dict(_native.counters())


if __name__ == "__main__":  # build it, so that tests that run side by side find it built
    print(why_missing() or load().settings().__name__)
