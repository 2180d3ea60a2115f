"""Random programs, random scopes, random keep-sets: bit by bit what plain PyTorch does, or
refused.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_configuration import copied
from tape_programs import CONTROL, NAMES, OPERATIONS, Instruction, Run, run
from torch.autograd.graph import saved_tensors_hooks

import gradfit as gf
from gradfit.choices import HOLD, KEEP, REBUILD, Choice
from gradfit.tape.decisions import ALL_KEPT, Rest, TapeDecision
from gradfit.tape.recorder import Recorder
from gradfit.tape.values import Segment

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what random programs do

numbers = st.integers(0, 30)
instructions = st.tuples(
    st.one_of(st.sampled_from(NAMES), st.sampled_from(NAMES + list(CONTROL))),
    numbers,
    numbers,
    numbers,
)
programs = st.lists(instructions, min_size=2, max_size=24)
Way = tuple[str, int]
KINDS = ["scopes", "one scope", "keep", "policy", "hold", "kept unheard", "tail"]
choices = st.tuples(st.sampled_from(KINDS), st.integers(0, 10_000))


class RandomPolicy:
    """Draws for every result whether it is dropped, kept or held."""

    def __init__(self, seed: int, among: list[Choice]) -> None:
        self.random = random.Random(seed)
        self.among = among

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        return TapeDecision(tuple(self.random.choice(self.among) for _ in results))


class PartialPolicy(RandomPolicy):
    """Keeps all results of every other operation, and decides no more after a random number of
    them. After as many saves more, autograd saves by itself.
    """

    def __init__(self, seed: int, *, rests: bool) -> None:
        super().__init__(seed, [REBUILD, KEEP])
        draw = random.Random(seed)
        self.left = draw.randrange(30) if rests else 1000
        self.saves = draw.randrange(20)

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        self.left -= 1
        kept = self.random.random() < 0.5
        decision = ALL_KEPT if kept else super().decide(func, results, *call)
        return decision._replace(last=self.left == 0)

    def begin_rest(self) -> Rest:
        return Rest(self, observe_operations=False)

    def before_save(self, tensor: torch.Tensor) -> bool:
        self.saves -= 1
        return self.saves < 0

    def after_save(self, packed: Any) -> None:
        pass


class Partial(Recorder):
    """Does not write down every other operation, and none after a random number of them."""

    lost = False

    def __init__(self, seed: int, *, rests: bool) -> None:
        super().__init__(Segment(None), PartialPolicy(seed, rests=rests))

    def __exit__(self, *error: Any) -> None:
        self.lost = self.table.overwritten_root() is not None
        super().__exit__(*error)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    )


def replay(program: list[Instruction], dtype: torch.dtype, choice: Way, **options: Any) -> Run:
    kind, seed = choice
    draw = random.Random(seed)
    keep = (lambda op, output: draw.random() < 0.4) if kind == "keep" else None

    def scope() -> Any:
        return gf.CheckpointScope("random", keep=keep, use_recomputation=draw.random() > 0.1)

    whole: Any = None
    if kind in ("one scope", "keep"):
        whole = gf.CheckpointScope("whole", keep=keep)
    elif kind == "policy":
        whole = Recorder(Segment(None), RandomPolicy(seed, [REBUILD, KEEP, HOLD]))
    elif kind == "hold":
        whole = Recorder(Segment(None), RandomPolicy(seed, [HOLD]))
    elif kind in ("kept unheard", "tail"):
        whole = Partial(seed, rests=kind == "tail")
    marker = gf.mark_checkpoint if kind in ("one scope", "keep") else lambda tensor: tensor
    ours = run(program, dtype, scope, marker, whole=whole, **options)
    ours.lost = isinstance(whole, Partial) and whole.lost
    return ours


def check(program: list[Instruction], dtype: torch.dtype, choice: Way, **options: Any) -> None:
    plain = run(program, dtype, lambda: torch.enable_grad(), lambda t: t, **options)
    ours = replay(program, dtype, choice, **options)
    assert ours.skipped == plain.skipped
    assert len(ours.outputs) == len(plain.outputs)
    assert all(same_bits(a, b) for a, b in zip(ours.outputs, plain.outputs, strict=True)), "outputs"
    assert torch.equal(ours.rng, plain.rng), "rng"
    if ours.error is not None:
        if plain.error is None:
            # Where nobody listens, nobody sees a write to something that was read before: it can
            # only be refused.
            assert isinstance(ours.error, gf.ActivationOverwritten), ours.error
            assert choice[0] == "scopes" or (choice[0] == "tail" and ours.lost), ours.error
        return
    # torch refuses, the tape has the old version: then it must be the right one
    if plain.error is not None:
        if any(name == "rrelu" for name, *_ in program):
            # it fills its noise after autograd has saved it: the copies below would be of no data
            return
        plain = run(
            program, dtype, lambda: torch.enable_grad(), lambda t: t,
            hooks=saved_tensors_hooks(copied, lambda t: t), **options,
        )  # fmt: skip
        assert plain.error is None
    assert len(ours.gradients) == len(plain.gradients)
    assert all(same_bits(a, b) for a, b in zip(ours.gradients, plain.gradients, strict=True)), (
        "gradients"
    )


def _property(count: int) -> Any:
    def decorate(function: Any) -> Any:
        function = settings(
            max_examples=count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            database=None,
        )(function)
        return given(
            program=programs,
            dtype=st.sampled_from([torch.float32, torch.float64]),
            choice=choices,
            twice=st.booleans(),
        )(function)

    return decorate


@_property(300)
def test_random_programs(
    program: list[Instruction], dtype: torch.dtype, choice: Way, twice: bool
) -> None:
    check(program, dtype, choice, twice=twice)


def test_a_plan_ends_inside_a_scope() -> None:
    """Its recorder rests in the middle of an operation that the scope inside has it run: the scope
    went deaf with it, and refused a write that it had not seen.
    """
    program = [
        *[("add", 0, 0, 0)] * 3, ("add_", 0, 0, 0),
        ("enter", 0, 0, 0), ("softmax", 9, 0, 1), ("add_", 3, 0, 0),
    ]  # fmt: skip
    check(program, torch.float32, ("tail", 1), twice=False)


def test_a_slice_of_a_result_that_is_written_to() -> None:
    """Torch refuses; what is compared with keeps copies in the same layout, or its last bit would
    differ.
    """
    program = [
        ("add", 0, 0, 0), ("qr", 0, 0, 0), ("add_", 5, 0, 1), ("complex", 0, 1, 1), ("add", 0, 0,
        0), ("add", 0, 0, 1), ("add", 0, 0, 1), ("add", 0, 0, 1), ("add", 0, 16, 1), ("baddbmm", 0,
        6, 0),
    ]  # fmt: skip
    check(program, torch.float64, ("one scope", 0))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@_property(3000)
def test_many_random_programs(
    program: list[Instruction], dtype: torch.dtype, choice: Way, twice: bool
) -> None:
    check(program, dtype, choice, twice=twice)


@pytest.mark.exact
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["one scope", "hold", "kept unheard"])
def test_every_operation_alone(name: str, kind: str) -> None:
    """Each operation between others that save it, so that none is left to chance."""
    program = [
        ("sin", 3, 0, 1),
        (name, 4, 1, 1),
        ("sin", 5, 0, 1),
        ("mul", 6, 5, 1),
        (name, 7, 6, 2),
        ("tanh", 8, 0, 1),
    ]
    check(program, torch.float64, (kind, 0), forget=False)


def test_most_programs_differentiate() -> None:
    """The property would be empty if torch refused most programs."""
    draw = random.Random(0)
    good = 0
    for _ in range(100):
        program = [
            (draw.choice(NAMES), draw.randrange(30), draw.randrange(30), draw.randrange(30))
            for _ in range(12)
        ]
        result = run(program, torch.float64, lambda: torch.enable_grad(), lambda t: t)
        good += result.error is None and bool(result.gradients)
    assert good > 50
    assert len(OPERATIONS) > 100
