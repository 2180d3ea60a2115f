"""Random programs in which tensors die, run plainly and on the tape, in a process of their own.

What other random programs leave out: storages die and their addresses are used again, `.data =`
swaps them, DLPack and NumPy give the same memory a second storage, scopes are left by exceptions
whose tracebacks are garbage in cycles, the garbage collector runs at any moment, tensors are
dropped by other threads, budgets cannot be held.

`python lifetime_programs.py FIRST COUNT` runs the programs with these seeds and prints one line of
JSON: how many were equal to plain PyTorch, how many were refused, and the first that were neither.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import gradfit as gf

SLOTS, SIZE, STEPS = 6, 4, 24
REFUSALS = (gf.ActivationOverwritten, gf.UnsupportedOp, gf.BudgetInfeasible)
OVERWRITTEN = "modified by an inplace operation"  # plain PyTorch's refusal, a RuntimeError
Contexts = Callable[[str], contextlib.AbstractContextManager[Any]]


class Program:
    """One program: the same for the same seed, whatever lies where in memory."""

    def __init__(self, seed: int, open_scope: Contexts) -> None:
        self.dice = random.Random(seed)
        self.open_scope = open_scope
        self.marks = open_scope in (_scope, _keeping)
        numbers = torch.Generator().manual_seed(seed)
        self.parameters = [
            torch.nn.Parameter(torch.randn(SIZE, SIZE, generator=numbers)) for _ in range(3)
        ]
        self.numbers = numbers
        self.slots: list[torch.Tensor | None] = [None] * SLOTS
        self.later: list[Callable[[], object]] = []  # what is done to the inputs after the scope
        self.results: list[torch.Tensor] = []

    def run(self) -> list[torch.Tensor]:
        """Forward, what happens in between, backward; gives everything that can be compared."""
        dice = self.dice
        x = torch.randn(SIZE, SIZE, generator=self.numbers)
        self.slots[0] = x
        with self.open_scope("program"):
            for _ in range(STEPS):
                self.step()
                if dice.random() < 0.1:
                    gc.collect(dice.randrange(3))
            loss = sum(slot.sum() for slot in self.slots if slot is not None)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return [slot.detach().clone() for slot in self.slots if slot is not None]
        kept = [slot.detach().clone() for slot in self.slots if slot is not None]
        if dice.random() < 0.7:
            self.slots = [None] * SLOTS
        for act in self.later:
            act()
        gc.collect(dice.randrange(3))
        loss.backward()
        return [*kept, *self.results, *(p.grad for p in self.parameters if p.grad is not None)]

    def step(self) -> None:
        """One random instruction. The number of dice rolled does not depend on what is in
        memory.
        """
        name = self.dice.choices(
            list(INSTRUCTIONS), [weight for weight, _ in INSTRUCTIONS.values()]
        )[0]
        into, a, b = (self.dice.randrange(SLOTS) for _ in range(3))
        number = self.dice.randrange(1, 8)
        first = next((slot for slot in self.slots[a:] + self.slots[:a] if slot is not None), None)
        if first is None:
            first = torch.randn(SIZE, SIZE, generator=self.numbers)
        second = self.slots[b] if self.slots[b] is not None else first
        result = INSTRUCTIONS[name][1](self, first, second, number)
        if result is not None:
            self.slots[into] = result


# ------------------------------------------------------------------------------------- instructions
Instruction = Callable[[Program, torch.Tensor, torch.Tensor, int], torch.Tensor | None]
INSTRUCTIONS: dict[str, tuple[int, Instruction]] = {}


def instruction(weight: int) -> Callable[[Instruction], Instruction]:
    def add(function: Instruction) -> Instruction:
        INSTRUCTIONS[function.__name__] = (weight, function)
        return function

    return add


@instruction(6)
def compute(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    return [
        a.sin,
        a.tanh,
        lambda: a * b,
        lambda: a @ b,
        lambda: (a - b).sigmoid(),
        lambda: a + number,
        a.exp,
    ][number - 1]().clamp(-3, 3)


@instruction(6)
def read_parameter(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    p = program.parameters[number % 3]
    return [
        lambda: a * p,
        lambda: F.linear(a, p, p[0]),
        lambda: a + p.sin(),
        lambda: (a @ p.t()).tanh(),
    ][number % 4]()


@instruction(2)
def dropout(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    return F.dropout(a, 0.1 * number)


@instruction(3)
def view(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    return [a.t, lambda: a.view(SIZE, SIZE), lambda: torch.cat([a, b])[number % 4 :][:SIZE]][
        number % 3
    ]()


@instruction(4)
def die(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    program.slots[number % SLOTS] = None


@instruction(1)
def die_in_a_thread(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    box = [program.slots[number % SLOTS]]
    program.slots[number % SLOTS] = None
    del a, b
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()


@instruction(3)
def write(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    fresh = a * number
    [
        lambda: fresh.mul_(b),
        lambda: fresh[1:3].copy_(b[1:3]),
        lambda: fresh.add_(1),
        lambda: fresh.t().tanh_(),
    ][number % 4]()
    return fresh


@instruction(2)
def fill(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    zeros = torch.zeros(SIZE, SIZE)
    zeros[number % 3 :].copy_(a[number % 3 :])
    return zeros * b


@instruction(2)
def swap_parameter(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    """As `module.to()` does. The new storage is as large, so that the old one's address is soon
    somebody else's.
    """
    p = program.parameters[number % 3]
    p.data = p.data * 0.5 + number


@instruction(1)
def swap_two_parameters(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    """Their storages: a later write through one is not counted by the other, through which it was
    read.
    """
    p, q = program.parameters[number % 3], program.parameters[(number + 1) % 3]
    p.data, q.data = q.data, p.data


@instruction(1)
def swap_parameter_later(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    def swap() -> None:
        p = program.parameters[number % 3]
        p.data = p.data + number
        p.data = p.data * 2

    program.later.append(swap)


@instruction(1)
def write_parameter(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    with torch.no_grad():
        program.parameters[number % 3].mul_(0.5)


@instruction(2)
def swap_activation(
    program: Program, a: torch.Tensor, b: torch.Tensor, number: int
) -> torch.Tensor:
    fresh = a * number  # autograd does not save what a product by a number returns
    fresh.data = [lambda: fresh.data + 1, lambda: b.detach().clone()][number % 2]()
    return fresh


@instruction(2)
def read_through_data(
    program: Program, a: torch.Tensor, b: torch.Tensor, number: int
) -> torch.Tensor:
    """Which has a version counter of its own."""
    fresh = a * number if number % 3 else program.parameters[number % 2]
    with torch.no_grad():
        fresh.add_(1)
    result = b + fresh.data
    with torch.no_grad():
        fresh.mul_(0.5)
    return result + fresh.detach()


@instruction(2)
def write_through_dlpack(
    program: Program, a: torch.Tensor, b: torch.Tensor, number: int
) -> torch.Tensor:
    fresh = a * number
    torch.from_dlpack(fresh.detach())[number % 3 :].mul_(3)
    return fresh


@instruction(2)
def write_through_numpy(
    program: Program, a: torch.Tensor, b: torch.Tensor, number: int
) -> torch.Tensor:
    fresh = a + number
    torch.as_tensor(fresh.detach().numpy()).add_(b.detach())
    return fresh


@instruction(2)
def read_through_alias(
    program: Program, a: torch.Tensor, b: torch.Tensor, number: int
) -> torch.Tensor:
    fresh = a + number
    alias = (
        torch.from_dlpack(fresh.detach()) if number % 2 else torch.as_tensor(fresh.detach().numpy())
    )
    result = b + alias
    with torch.no_grad():
        fresh.mul_(2)  # which the alias sees, and its version counter does not
    return result + fresh


@instruction(2)
def refill_numpy(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    array = torch.randn(SIZE, SIZE, generator=program.numbers).numpy()
    shared = torch.from_numpy(array)
    result = a + shared
    array[number % 2 :] = number  # unseen by anybody
    result = result + shared[:, number % 4 :][:, :1]

    def refill() -> None:
        array[:] = -number

    program.later.append(refill)
    return result


@instruction(2)
def refill_inference(
    program: Program, a: torch.Tensor, b: torch.Tensor, number: int
) -> torch.Tensor:
    with torch.inference_mode():
        shared = torch.randn(SIZE, SIZE, generator=program.numbers)

    def refill() -> None:
        with torch.inference_mode():
            shared.fill_(number)

    result = a + shared
    if number % 2:
        refill()
        result = result + shared
    program.later.append(refill)
    return result


@instruction(2)
def fail_inside(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    """A scope that is left by an exception; its traceback, with all tensors of its frames, is
    garbage in a cycle.
    """

    def inner(depth: int) -> torch.Tensor:
        c = a * program.parameters[0]
        if depth:
            return inner(depth - 1) + c
        raise KeyError("inside")

    try:
        with program.open_scope("inner"):
            inner(number % 3)
    except KeyError as error:
        cycle: list[Any] = [error]
        cycle.append(cycle)


@instruction(1)
def nested(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    with program.open_scope("nested"):
        return compute(program, read_parameter(program, a, b, number), b, number)


@instruction(1)
def mark(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    fresh = a.sin()
    if program.marks:
        gf.mark_checkpoint(fresh)
    return fresh.exp()


@instruction(1)
def differentiate(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    loss = (a * program.parameters[number % 3]).sin().sum()
    program.results.append(
        torch.autograd.grad(loss, program.parameters[number % 3], retain_graph=True)[0]
    )


@instruction(1)
def metered(program: Program, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    with gf.meter() as meter:
        result = (a * 2).sin()
    assert meter.peak_bytes <= 3 * a.untyped_storage().nbytes() + 2048
    return result


# ------------------------------------------------------------------------------ the ways to run one
def _nothing(name: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _scope(name: str) -> contextlib.AbstractContextManager[Any]:
    return gf.CheckpointScope(name)


def _keeping(name: str) -> contextlib.AbstractContextManager[Any]:
    return gf.CheckpointScope(name, keep=lambda op, output: op is torch.ops.aten.mul.Tensor)


def _budget(nbytes: int) -> Contexts:
    @contextlib.contextmanager
    def opened(name: str) -> Iterator[None]:
        manager = gf.CheckpointManager(
            max_memory_mb=nbytes / 2**20, auto_checkpoint=True, memory_threshold=1.0
        )
        with manager if name == "program" else gf.CheckpointScope(name):
            yield

    return opened


def outcome(seed: int, open_scope: Contexts) -> list[torch.Tensor] | str:
    """What a program gives, or the name of what refused it."""
    torch.manual_seed(seed)
    try:
        return Program(seed, open_scope).run()
    except REFUSALS as refusal:
        return type(refusal).__name__
    except RuntimeError as error:
        if OVERWRITTEN not in str(error):
            raise
        return OVERWRITTEN


def judge(seed: int) -> str:
    """Run one program plainly and on the tape: "equal", "refused", or what is wrong."""
    dice = random.Random(-seed)
    way = dice.choice(
        [_scope, _scope, _keeping, _budget(10**6), _budget(dice.randrange(300, 4000))]
    )
    gc.set_threshold(dice.choice([0, 1, 5, 50, 700]))
    try:
        plain = outcome(seed, _nothing)
        ours = outcome(seed, way)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.set_threshold(700, 10, 10)
    if isinstance(plain, str) or isinstance(ours, str):
        return "refused"
    if len(plain) != len(ours):
        return f"{len(ours)} tensors in the place of {len(plain)}"
    wrong = [n for n, (p, o) in enumerate(zip(plain, ours, strict=True)) if not same_bits(p, o)]
    return f"differs in {wrong} of {len(plain)}" if wrong else "equal"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`torch.equal` for which a NaN is itself."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    )


def main(first: int, count: int) -> None:
    torch.set_num_threads(1)
    judge(first)  # imports the rest
    gc.collect()
    gc.freeze()  # what is imported stays: let no collection look through it again
    verdicts = {seed: judge(seed) for seed in range(first, first + count)}
    wrong = {
        seed: verdict for seed, verdict in verdicts.items() if verdict not in ("equal", "refused")
    }
    counts = {verdict: list(verdicts.values()).count(verdict) for verdict in ("equal", "refused")}
    print(json.dumps({**counts, "wrong": dict(list(wrong.items())[:5]), "wrong_count": len(wrong)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
