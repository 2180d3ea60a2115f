"""Random programs recorded by both cores in one process, and the tapes compared object by object:
`python tests/tape/native_tapes.py FIRST COUNT`; prints how many operations were compared.

Run with the native core, in a process of its own: a fault of the core may end it.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from tape_programs import NAMES, OPERATIONS

from gradfit._torch_native import core
from gradfit.choices import HOLD, KEEP, REBUILD
from gradfit.tape.decisions import ALL_KEPT, TapeDecision
from gradfit.tape.recorder import Recorder
from gradfit.tape.storage_table import StorageTable
from gradfit.tape.values import (
    Handle,
    ParameterRef,
    Scratch,
    Segment,
    Slice,
    TapeOperation,
    TapeValue,
    geometry_of,
)

ROWS, COLUMNS = 4, 6
Program = list[tuple[str, int, int, int]]
# what both must agree on; addresses and indices differ, and what refers to other objects is
# described by their numbers
_OF_VALUE = (
    "geometry", "position", "version", "write_pending", "unwritten", "evictable", "held_version",
    "digest", "unpacked",
)  # fmt: skip


class DrawnPolicy:
    """Decides by the number of the operation, and enters segments."""

    def __init__(self, seed: int, root: Segment) -> None:
        self.draw = random.Random(seed)
        self.segments = [root, Segment(root), Segment(root)]
        self.segments.append(Segment(self.segments[1]))

    def decide(self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        which = self.draw.random()
        if which < 0.1:
            return None
        if which < 0.2:
            return ALL_KEPT
        choices = tuple(self.draw.choice([REBUILD, REBUILD, HOLD, KEEP]) for _ in results)
        segment = self.draw.choice([*self.segments, None])
        return TapeDecision(choices, segment)


class Description:
    """A tape as plain data: objects by the order in which they are first met."""

    def __init__(self, leaves: list[torch.Tensor], root: Segment) -> None:
        self.leaves, self.root = leaves, root
        self.numbers: dict[int, int] = {}
        self.values: list[TapeValue] = []

    def number(self, value: TapeValue) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.values)
            self.values.append(value)
        return self.numbers[id(value)]

    def argument(self, argument: Any) -> Any:
        if isinstance(argument, TapeValue):
            return "value", self.number(argument)
        if isinstance(argument, Slice):
            return "slice", self.number(argument.value), str(argument.geometry)
        if isinstance(argument, ParameterRef):
            content, source = argument.content, argument.source
            which = [leaf is source for leaf in self.leaves]
            return "read", which, type(content).__name__, argument.version, content.tolist()
        if isinstance(argument, Scratch):
            return "scratch", str(argument.shape), str(argument.dtype)
        if isinstance(argument, list | tuple):
            return type(argument).__name__, [self.argument(one) for one in argument]
        if isinstance(argument, torch.Generator):  # another object, in the same state
            return "generator", argument.get_state().tolist()
        return type(argument).__name__, str(argument)

    def segment(self, segment: Segment | None) -> list[int]:
        path = []
        while segment is not None:
            path.append(segment.depth)
            segment = segment.parent
        return path

    def operation(self, op: TapeOperation) -> Any:
        outputs = [None if one is None else one() for one in op.outputs]
        return {
            "func": str(op.func),
            "info": str(op.info),
            "args": self.argument(op.args),
            "kwargs": {name: self.argument(one) for name, one in op.kwargs.items()},
            "inputs": [self.number(value) for value in op.inputs],
            "outputs": [None if one is None else self.number(one) for one in outputs],
            "written": [self.number(value) for value in op.written],
            "slices": op.slices,
            "random": None if op.random_state is None else op.random_state[1].tolist(),
            "kinds": [type(op.args).__name__, type(op.inputs).__name__, type(op.outputs).__name__],
        }

    def value(self, value: TapeValue, places: dict[int, int]) -> Any:
        users = None if value.users is None else [one() for one in value.users]
        return {
            **{name: str(getattr(value, name)) for name in _OF_VALUE},
            "segment": self.segment(value.segment),
            "op": None if value.op is None else places.get(id(value.op), "another"),
            # not what is in it, which may be memory that nobody has written
            "tensor": None if value.tensor is None else str(geometry_of(value.tensor)),
            "watched": value.death_watch is not None,
            "alive": value.forward_tensor() is not None,
            "users": users
            if users is None
            else [None if one is None else places.get(id(one), "another") for one in users],
            "handles": None if value.handles is None else [_handle(one()) for one in value.handles],
        }


def _handle(handle: Handle | None) -> Any:
    return None if handle is None else (str(handle.geometry), handle.pass_number)


def reads_alive(table: StorageTable) -> list[int]:
    """How many references to each parameter are left. Those that died stay in the table's lists,
    and somebody else's may come to the same address: how these lie in memory is nobody's tape.
    """
    lists = table.parameters.by_storage.values()
    alive = [sum(one() is not None for one in references) for references in lists]
    return sorted(count for count in alive if count)


def record(program: Program, seed: int, native: bool) -> tuple[Any, Any]:
    """The tape of a program, described, and its gradients."""
    core().enable(native)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=source))
    leaves = [parameter, torch.randn(ROWS, COLUMNS, generator=source).requires_grad_()]
    made: list[Any] = [*leaves, torch.randn(ROWS, COLUMNS, generator=source), parameter * 1.0]
    root = Segment(None)
    policy = DrawnPolicy(seed, root) if seed % 3 else None
    operations: list[TapeOperation] = []
    recorder = Recorder(root, policy, recorded=operations.append)
    refused = []
    with recorder:
        for name, a, b, c in program:
            try:
                made.append(OPERATIONS[name](made[a % len(made)], made[b % len(made)], c))
            except RuntimeError as error:
                refused.append(type(error).__name__)
                continue
            if c % 3 == 0 and len(made) > 6:
                made.pop(draw.randrange(4, len(made)))
            if c % 7 == 0:
                gc.collect(1)
        table = recorder.table
        table.remove_dead()
        sizes = (
            len(table.values),
            sum(one() is not None for one in table.roots.values()),
            reads_alive(table),
        )
        tensors = [one for one in made if isinstance(one, torch.Tensor) and one.requires_grad]
        loss = sum((one.float().square().sum() for one in tensors), torch.zeros(()))
    description = Description(leaves, root)
    places = {id(op): place for place, op in enumerate(operations)}
    told = [description.operation(op) for op in operations]
    values = [description.value(value, places) for value in description.values]
    del operations
    try:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        found = [None if one is None else str(one.tolist()) for one in gradients]
    except Exception as error:  # the same for both
        found = [f"{type(error).__name__}: {str(error)[:200]}"]
    return (told, values, sizes, refused), found


def program_of(seed: int) -> Program:
    draw = random.Random(seed)
    numbers = range(31)
    return [
        (draw.choice(NAMES), draw.choice(numbers), draw.choice(numbers), draw.choice(numbers))
        for _ in range(draw.randrange(4, 24))
    ]


def compare(seed: int) -> int:
    """How many operations the two tapes of one program have."""
    program = program_of(seed)
    (expected, gradients), (found, ours) = (record(program, seed, n) for n in (False, True))
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert len(one) == len(other), (seed, program, len(one), len(other))
        for place, (python, native) in enumerate(zip(one, other, strict=True)):
            differs = {
                name: (python[name], native[name])
                for name in python
                if python[name] != native[name]
            }
            assert not differs, (seed, program, place, differs)
    assert expected[2:] == found[2:], (seed, program, expected[2:], found[2:])
    assert gradients == ours, (seed, program)
    return len(expected[0])


def main() -> None:
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:3])
    assert core() is not None
    compared = sum(compare(seed) for seed in range(first, first + count))
    print(json.dumps({"operations": compared}))


if __name__ == "__main__":
    main()
