"""How the tests use the machine."""

import gc
import os
import signal
import sys
from pathlib import Path

# A virtual machine may announce matrix tiles (AMX) that it cannot run, and bfloat16 would crash.
# Before torch is used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Python is the reference, whatever is built on this machine; `make test-native` says otherwise.
os.environ.setdefault("GRADFIT_NATIVE", "0")

# What a shell runs in the background ignores Ctrl-C, and tests of it would fail.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import torch

# Seconds decide nothing. The same examples every time, so that a red run is about the change;
# `make test-all` draws others.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))
# One: tests run side by side, and threads that wait for each other's cores take a hundred times
# longer.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", help="run on this device: sim, the simulated one, or sim:1, cuda, …"
    )
    parser.addoption(
        "--delays", type=int, help="on the simulated device, work appears late, by this seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    """With `--device`, tensors are made there unless a test says otherwise."""
    name = config.getoption("--device")
    if name is None:
        return
    if name.startswith("sim"):
        sys.path.insert(0, str(Path(__file__).parent / "device"))
        import simulated

        if reason := simulated.why_missing():
            pytest.exit(reason, returncode=0)
        simulated.load()
        if (seed := config.getoption("--delays")) is not None:
            simulated.set_delays(seed, 0.05, 200)
    torch.set_default_device(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is about the CPU alone is left out on a device; `tests/device` is about the simulated
    one.
    """
    name = config.getoption("--device") or ""
    if name.startswith("sim"):
        _leave_out(items)
    for item in items:
        if item.get_closest_marker("on_device") is not None and not name.startswith("sim"):
            item.add_marker(pytest.mark.skip(reason="needs --device sim: make test-device"))


def _leave_out(items: list[pytest.Item]) -> None:
    from not_on_device import CPU_ALONE, KNOWN_GAPS, reason_in

    for item in items:
        if reason := reason_in(CPU_ALONE, item.nodeid):
            item.add_marker(pytest.mark.skip(reason=f"the CPU alone: {reason}"))
        elif reason := reason_in(KNOWN_GAPS, item.nodeid):
            item.add_marker(pytest.mark.xfail(reason=reason))


def pytest_collection_finish() -> None:
    """What is imported stays: let no collection look through it again."""
    gc.collect()
    gc.freeze()
