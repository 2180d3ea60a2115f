"""Which memory a budget is about, and who is asked to let go of some: autograd's engine of passes
that failed, an accelerator of its cache.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from gradfit._torch import graph_task_id
from gradfit._torch_listen import unseen


def counted_device(model: torch.nn.Module) -> torch.device | None:
    """The kind of device whose memory is the model's budget; None on the CPU, where every tensor
    counts.

    With a model on an accelerator, what is on the host (offloaded values, a batch that the loss
    moves) is not counted.
    """
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return torch.device(parameter.device.type)
    return None


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The accelerators of this machine that these tensors are on; fake ones may be on others."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (
        set()
        if here is None
        else {tensor.device for tensor in tensors if tensor.device.type == here.type}
    )


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until these devices have done all that they were given: `synchronize()` alone waits for
    the current one.
    """
    for device in devices:
        torch.accelerator.synchronize(device)


def forget_failed_passes() -> None:
    """Let the engine let go of a backward pass that raised in this thread.

    The nodes that were ready to run then stay in this thread's queue, with all that the graph holds
    before them, until the next backward pass throws them away first (torch 2.10 to 2.15,
    `CompareNodeTaskTime` in torch/csrc/autograd/engine.cpp): so here is one.
    """
    if graph_task_id() != -1:  # inside of a pass that goes on
        return
    with unseen(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)


def free_cached_memory() -> None:
    """After memory ran out: collect what nobody refers to, and let accelerators give back what they
    keep for reuse.
    """
    forget_failed_passes()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """What is free on an accelerator and what it has in all, in bytes; None if its backend does not
    say.
    """
    counters = getattr(torch.get_device_module(device), "mem_get_info", None)
    try:
        free, total = (
            torch.accelerator.get_memory_info(device) if counters is None else counters(device)
        )
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return int(free), int(total)
