"""A trial run must leave no trace: gradients, buffers, random generators as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator_states() -> list[torch.Tensor]:
    """The default generators' states: the CPU's, then each accelerator's."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states += [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return states


def restore_generators(states: list[torch.Tensor]) -> None:
    """Put the default generators back to what `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        for index, state in enumerate(states[1:]):
            module.set_rng_state(state, index)


class Generators:
    """All global random generators as they are now: torch's, Python's and NumPy's, from which models draw, too."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = generator_states(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        restore_generators(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Run anything inside: the model's gradients, buffers and mode, and the generators, come back as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    generators = Generators()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, content in buffers:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
        for module, training in modes:
            module.training = training
        generators.restore()
