"""Every random generator a training run may draw from, as a value that can be saved and put
back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradfit.batches.snapshot import generator_states, restore_generators
from gradfit.errors import StateError
from gradfit.interrupts import uninterrupted
from gradfit.state_checks import fields, integer, list_of, number, optional, tensor


def seed_everything(seed: int) -> None:
    """Start torch's (every device), Python's and numpy's generators from one number."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(own: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The generators' states as a nest of tensors and plain numbers; `own` are generators the data
    hold themselves.
    """
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "torch": generator_states(),
        "python": {
            "version": version,
            "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype("int64")),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "own": [generator.get_state() for generator in own],
    }


_WORDS = 624  # of the Mersenne Twister, which Python and NumPy use
_RANDOM = fields(
    {
        "torch": list_of(tensor(torch.uint8), most=1024),
        "python": fields(
            {
                "version": integer(3, 3),
                "numbers": tensor(torch.int64, (_WORDS + 1,)),
                "gauss": optional(number()),
            }
        ),
        "numpy": fields(
            {
                "key": tensor(torch.int64, (_WORDS,)),
                "pos": integer(0, _WORDS),  # beyond it NumPy reads past its end
                "has_gauss": integer(0, 1),
                "gauss": number(),
            }
        ),
        "own": list_of(tensor(torch.uint8)),
    }
)


def check_random(where: str, state: Any) -> None:
    """Raise a `StateError` unless generators of this machine can be put to this state."""
    _RANDOM(where, state)
    numbers, key = state["python"]["numbers"], state["numpy"]["key"]
    _in_bounds(f"{where}.python.numbers", numbers[:_WORDS], 2**32 - 1)
    _in_bounds(f"{where}.python.numbers", numbers[_WORDS:], _WORDS)
    _in_bounds(f"{where}.numpy.key", key, 2**32 - 1)
    for index, content in enumerate((*state["torch"][:1], *state["own"])):  # those of the CPU
        try:
            torch.Generator("cpu").set_state(content)
        except (RuntimeError, ValueError, TypeError) as error:
            raise StateError(
                f"{where} has a state {index} that is no generator's ({error})."
            ) from None


def _in_bounds(where: str, numbers: torch.Tensor, high: int) -> None:
    if int(numbers.min()) < 0 or int(numbers.max()) > high:
        raise StateError(f"{where} has a number that is not from 0 to {high}.")


def restore_random(state: dict[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Put back what `random_state` gave; nothing is changed if it is not such a state."""
    check_random("The state of the generators", state)
    if len(state["own"]) != len(own) or len(state["torch"]) != len(generator_states()):
        raise StateError(
            f"The state holds {len(state['torch'])} devices' and {len(state['own'])} loaders'"
            f" generators, here are {len(generator_states())} and {len(own)}. Resume on the same"
            " kind of machine with the same data."
        )
    python, legacy = state["python"], state["numpy"]
    with uninterrupted():
        try:
            restore_generators(state["torch"])
            for generator, content in zip(own, state["own"], strict=True):
                generator.set_state(content)
        except (RuntimeError, ValueError, TypeError) as error:  # of another device than the CPU
            raise StateError(
                f"A generator's state is of another kind than here: {error}."
            ) from None
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": legacy["key"].numpy().astype("uint32"), "pos": legacy["pos"]},
                "has_gauss": legacy["has_gauss"],
                "gauss": legacy["gauss"],
            }
        )
