"""How the tests use the machine."""

import gc
import os

# A virtual machine may announce matrix tiles (AMX) that it cannot run, and bfloat16 would crash. Before torch is used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import torch

hypothesis.settings.register_profile("tests", deadline=None)  # seconds decide nothing
hypothesis.settings.load_profile("tests")
# One: tests run side by side, and threads that wait for each other's cores take a hundred times longer.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))


def pytest_collection_finish() -> None:
    """What is imported stays: let no collection look through it again."""
    gc.collect()
    gc.freeze()
