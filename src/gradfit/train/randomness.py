"""Every random generator a training run may draw from, as a value that can be saved and put back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradfit.batches.snapshot import generator_states, restore_generators
from gradfit.errors import StateError


def seed_everything(seed: int) -> None:
    """Start torch's (every device), Python's and numpy's generators from one number."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(own: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The generators' states as a nest of tensors and plain numbers; `own` are generators the data hold themselves."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "torch": generator_states(),
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype("int64")),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "own": [generator.get_state() for generator in own],
    }


def restore_random(state: dict[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Put back what `random_state` gave."""
    if len(state["own"]) != len(own) or len(state["torch"]) != len(generator_states()):
        raise StateError(
            f"The state holds {len(state['torch'])} devices' and {len(state['own'])} loaders' generators, here are "
            f"{len(generator_states())} and {len(own)}. Resume on the same kind of machine with the same data."
        )
    restore_generators(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": state["numpy"]["key"].numpy().astype("uint32"), "pos": state["numpy"]["pos"]},
            "has_gauss": state["numpy"]["has_gauss"],
            "gauss": state["numpy"]["gauss"],
        }
    )
    for generator, content in zip(own, state["own"], strict=True):
        generator.set_state(content)
