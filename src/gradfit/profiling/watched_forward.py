"""A profile of a forward that was only watched, in somebody's own loop: nothing is run twice.

What it did is known: operations, what they read and made, what autograd saved of them, in which
order. Of its backward pass, which comes later or never, it is reckoned that each operation has a
node, that gradients in flight are as large as what the operation read and returned, and that a
parameter's gradient is there from its first node on. Whoever follows a plan made from that must
hold the budget in another way, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gradfit._torch import storage_key
from gradfit.profiling.profile import BackwardNode, Linear, Operation, Profile, Value
from gradfit.source_line import source_line
from gradfit.tape.operators import info_of
from gradfit.tape.stream import new_bytes
from gradfit.tree import leaves


class _Watched(NamedTuple):
    """One operation."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    overwrites: tuple[int, ...]
    seconds: float
    replayable: bool
    source: str
    parameters_bytes: int


class _Made(NamedTuple):
    """One result."""

    nbytes: int
    operation: int
    storage: int
    tensor: weakref.ref[torch.Tensor]


class WatchedForward:
    """What one forward does; its results are numbered as `tape/stream.py` says."""

    def __init__(self) -> None:
        self._operations: list[_Watched] = []
        self._made: list[_Made] = []
        self._overwritten: set[int] = set()
        self._newest: dict[int, int] = {}  # by storage address
        self._saves: list[tuple[int, int]] = []  # how many operations there were, and the value
        # by storage address: bytes of its gradient to come, and the last operation that reads it
        self._parameters: dict[int, tuple[int, int]] = {}

    def note(self, func: Any, results: list[torch.Tensor], arguments: Any, seconds: float) -> None:
        """An operation has run.

        Args:
            func: the operator.
            results: in their order.
            arguments: of the call, all of them.
            seconds: that it took.
        """
        index = len(self._operations)
        given = [one for one in leaves(arguments) if isinstance(one, torch.Tensor)]
        inputs, parameters_bytes = self._inputs(given, index)
        keys = {key for one in given if (key := _key(one)) is not None}
        overwrites: list[int] = []
        outputs = []
        own_memory = True
        for result in results:
            outputs.append(len(self._made))
            is_written = any(result is one for one in given)
            own_memory &= self._add(result, index, keys, overwrites, is_written=is_written)
        replayable = info_of(func).recordable and own_memory
        self._operations.append(
            _Watched(
                str(func), inputs, tuple(outputs), tuple(overwrites), seconds, replayable,
                source_line(), parameters_bytes,
            )
        )  # fmt: skip

    def _inputs(self, given: Iterable[torch.Tensor], index: int) -> tuple[tuple[int, ...], int]:
        """The values that an operation reads, and the bytes of the parameters among them."""
        found: dict[int, None] = {}
        parameters_bytes = 0
        for tensor in given:
            key = _key(tensor)
            if key is None:
                continue
            parameter = tensor if tensor._base is None else tensor._base
            if parameter.is_leaf and parameter.requires_grad:
                coming = 0 if parameter.grad is not None else parameter.nbytes
                self._parameters[key] = coming, index
                parameters_bytes += parameter.nbytes
            elif key in self._newest:
                found[self._newest[key]] = None
        return tuple(found), parameters_bytes

    def _add(
        self,
        result: torch.Tensor,
        index: int,
        given: set[int],
        overwrites: list[int],
        *,
        is_written: bool,
    ) -> bool:
        """A result; False if it lies in memory that the forward has not made."""
        key, number = _key(result), len(self._made)
        old = None if key is None or not is_written else self._newest.get(key)
        reference = weakref.ref(result)
        if old is not None and key is not None:  # written in place
            storage = self._made[old].storage
            self._made.append(_Made(self._made[old].nbytes, index, storage, reference))
            self._newest[key] = number
            self._overwritten.add(old)
            overwrites.append(old)
            return True
        is_new = key is not None and key not in given and not is_written
        self._made.append(_Made(new_bytes(result) if is_new else 0, index, number, reference))
        if key is not None and is_new:
            self._newest[key] = number
        return not is_written

    # -------------------------------------------------------------------------------- saved tensors

    def before_save(self, tensor: torch.Tensor) -> bool:
        """Autograd saves a tensor; False: it asks again for the next one."""
        key = _key(tensor)
        number = None if key is None else self._newest.get(key)
        if number is not None:
            # Results are saved when their operation has run, arguments before theirs does.
            index = len(self._operations)
            own = self._made[number].operation == index - 1
            self._saves.append((index - 1 if own else index, number))
        return False

    def after_save(self, packed: Any) -> None:
        """It was saved."""

    # ----------------------------------------------------------------------------------- afterwards

    def profile(self, device: torch.device | None = None) -> Profile:
        """What it did, as a profile of one row: all that is there beside it is not part of that.

        Args:
            device: on which it ran; None: the CPU.
        """
        needs: dict[int, dict[int, None]] = {}
        for index, number in self._saves:
            needs.setdefault(index, {})[number] = None
        coming = dict.fromkeys(range(len(self._operations)), 0)
        for nbytes, index in self._parameters.values():
            coming[index] = coming.get(index, 0) + nbytes
        return Profile(
            values=tuple(self._values()),
            operations=tuple(
                Operation(
                    one.name,
                    one.inputs,
                    one.outputs,
                    one.overwrites,
                    Linear(one.seconds),
                    replayable=one.replayable,
                    source=one.source,
                )
                for one in self._operations
            ),
            nodes=tuple(self._nodes(needs, coming)),
            gradient_bytes=sum(coming.values()),
            splittable=False,
            device="cpu" if device is None else str(device),
        )

    def _values(self) -> Iterator[Value]:
        dies = [made.operation for made in self._made]
        for index, operation in enumerate(self._operations):
            for number in operation.inputs:
                dies[number] = index
        last = len(self._operations)
        for number, made in enumerate(self._made):
            lives = made.tensor() is not None and made.nbytes > 0
            overwritten = number in self._overwritten
            dead = last if lives and not overwritten else dies[number]
            yield Value(Linear(made.nbytes), made.operation, made.storage, dead, overwritten)

    def _nodes(
        self, needs: dict[int, dict[int, None]], coming: dict[int, int]
    ) -> Iterator[BackwardNode]:
        for index in reversed(range(len(self._operations))):
            one = self._operations[index]
            given = sum(self._made[number].nbytes for number in one.outputs)
            returned = sum(self._made[number].nbytes for number in one.inputs)
            wanted = tuple(needs.get(index, ()))
            in_flight = given + returned if wanted else max(given, returned)
            yield BackwardNode(
                one.name,
                wanted,
                Linear(2 * one.seconds),
                Linear(given),
                Linear(in_flight + one.parameters_bytes),
                Linear(returned),
                gradient_bytes=coming[index],
            )


def _key(tensor: torch.Tensor) -> int | None:
    """A storage's address; None for a tensor that has none of its own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return storage_key(tensor)
    except (RuntimeError, NotImplementedError):
        return None
