"""Torch's own databases of operators and modules, each called plainly and inside a scope, in one
configuration.

A *case* is an operator or a module, a dtype, one of its sample inputs and a variant: where the
inputs come from and what happens to them afterwards. Whatever plain PyTorch computes (results,
gradients, buffers, the generator's state) a scope has to compute bit by bit. This file is run as a
program of its own, because torch's testing modules change flags of the process that imports them,
and because a case that kills the interpreter has to be seen as one:

    python tests/tape/torch_databases.py --part 3 --parts 8  # every eighth name, all of its cases
    python tests/tape/torch_databases.py --sample 1  # one case drawn for every name and dtype
    python tests/tape/torch_databases.py --only linalg.svd       # the names that contain this

It prints a line `FAILED case: what differs` for each case that is wrong, and at the end how many
were compared.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a program, not by pytest
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as in conftest.py

import torch
from one_configuration import copied
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

import gradfit as gf

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
VARIANTS = (
    "leaf",  # the inputs are leaves
    "intermediate",  # the inputs are computed in the scope, the results are read in it
    "double backward",  # of an intermediate
    "in-place",  # the operator's in-place form, on an intermediate
    "slice",  # the inputs are slices of an intermediate
    "written slice",  # they are slices that were written to
    "kept",  # every second result is kept
    "overwritten",  # inputs and results are overwritten after the scope
)
MOST_SAMPLES = 6  # of one name and dtype
UNREPEATABLE = (
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
)  # plain PyTorch differs from itself, whatever MKL_CBWR says


@dataclass
class Callee:
    """What is called, as new: a module has fresh copies of the same weights every time."""

    call: Callable[[Any], Any]
    parameters: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Case:
    """Something to call with its inputs, in each of the variants it has."""

    name: str
    dtype: torch.dtype
    number: int
    inputs: Any
    make: Callable[[str], Callee]  # for a variant
    variants: list[str]

    def __str__(self) -> str:
        return f"{self.name}[{str(self.dtype).removeprefix('torch.')}-{self.number}]"


@dataclass
class Outcome:
    """What one run left behind."""

    tensors: list[tuple[str, torch.Tensor | None]] = field(default_factory=list)
    forward_error: Exception | None = None
    backward_error: Exception | None = None


# -------------------------------------------------------------------------------- the two databases
def load_databases() -> tuple[list[Any], list[Any]]:
    """Torch's operators and modules. They need a test library for a base class that nothing here
    uses.
    """
    if "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return op_db, module_db


def operator_cases(operator: Any, dtype: torch.dtype) -> Iterator[Case]:
    if not operator.supports_autograd or dtype not in operator.supported_backward_dtypes("cpu"):
        return
    variants = [v for v in VARIANTS if v != "double backward" or operator.supports_gradgrad]
    if not operator.inplace_variant or not operator.supports_inplace_autograd:
        variants.remove("in-place")

    def make(variant: str) -> Callee:
        call = operator.inplace_variant if variant == "in-place" else operator.op
        return Callee(lambda given: call(given[0], *given[1], **given[2]))

    for number, sample in enumerate(operator.sample_inputs("cpu", dtype, requires_grad=True)):
        yield Case(
            operator.full_name,
            dtype,
            number,
            (sample.input, sample.args, sample.kwargs),
            make,
            variants,
        )


def module_cases(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    if dtype not in info.supported_dtypes("cpu"):
        return
    variants = [
        v
        for v in VARIANTS
        if v != "in-place" and (v != "double backward" or info.supports_gradgrad)
    ]
    for training in (True, False):
        samples = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for number, sample in enumerate(samples):
            if sample.forward_input is None:
                continue

            def make(variant: str, sample: Any = sample, training: bool = training) -> Callee:
                arguments = sample.constructor_input
                torch.manual_seed(1)
                module = (
                    info.module_cls(*arguments.args, **arguments.kwargs).to(dtype).train(training)
                )
                parameters = [p for p in module.parameters() if p.requires_grad]
                return Callee(
                    lambda given: module(*given[0], **given[1]), parameters, list(module.buffers())
                )

            inputs = (sample.forward_input.args, sample.forward_input.kwargs)
            yield Case(
                f"{info.name}.{'train' if training else 'eval'}",
                dtype,
                number,
                inputs,
                make,
                variants,
            )


# ------------------------------------------------------------------------------------------ one run
def run(case: Case, variant: str, *, scope: Any, hooks: Any = None) -> Outcome:
    """Call it once, plainly or in a scope, and run backward."""
    outcome = Outcome()
    callee = case.make(variant)
    inputs = tree_map(_copy, case.inputs)
    leaves = [leaf for leaf in tree_leaves(inputs) if _needs_gradient(leaf)] + callee.parameters
    torch.manual_seed(0)
    try:
        with hooks or contextlib.nullcontext(), scope:
            given = (
                inputs
                if variant == "leaf"
                else tree_map(lambda leaf: _prepare(leaf, variant), inputs)
            )
            results = [
                leaf for leaf in tree_leaves(callee.call(given)) if isinstance(leaf, torch.Tensor)
            ]
            reached = [_dense(result) for result in results if _needs_gradient(result)]
            if variant != "leaf":
                reached = [result * result for result in reached]  # which saves it
    except Exception as error:
        outcome.forward_error = error
        return outcome
    outcome.tensors += [("result", _copy(result).detach()) for result in (*results, *reached)]
    if variant == "overwritten":
        for leaf in tree_leaves((given, results)):
            if _needs_gradient(leaf):
                _overwrite(leaf)
    try:
        _backward(reached, leaves, outcome, twice=variant == "double backward")
    except Exception as error:
        outcome.backward_error = error
    outcome.tensors += [("buffer", buffer) for buffer in callee.buffers]
    outcome.tensors.append(("generator", torch.get_rng_state()))
    return outcome


def _backward(
    reached: list[torch.Tensor], leaves: list[torch.Tensor], outcome: Outcome, *, twice: bool
) -> None:
    source = torch.Generator().manual_seed(2)
    for order in ("gradient", "second gradient")[: 2 if twice else 1]:
        reached = [tensor for tensor in reached if tensor.requires_grad]
        if not reached or not leaves:
            return
        directions = [torch.randn(t.shape, dtype=t.dtype, generator=source) for t in reached]
        gradients = torch.autograd.grad(
            reached,
            leaves,
            directions,
            allow_unused=True,
            create_graph=twice and order == "gradient",
        )
        outcome.tensors += [(order, None if g is None else _dense(g).detach()) for g in gradients]
        reached = [_dense(gradient) for gradient in gradients if gradient is not None]


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _copy(leaf: Any) -> Any:
    return (
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _overwrite(tensor: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # expanded, or sparse: torch cannot
        tensor.detach().fill_(0.25)


def _prepare(leaf: Any, variant: str) -> Any:
    """An input that is computed in the scope, equal to the leaf."""
    if not _needs_gradient(leaf):
        return leaf
    if leaf.layout is not torch.strided or variant not in ("slice", "written slice"):
        return leaf * 1
    if variant == "slice":
        return torch.stack([leaf * 1, leaf])[0]
    base = torch.zeros((2, *leaf.shape), dtype=leaf.dtype)
    base[1] = leaf * 2
    base[0] = leaf
    return base[0]


def _scope(variant: str) -> Any:
    if variant != "kept":
        return gf.CheckpointScope("s")
    number = 0

    def every_second(op: Any, output: Any) -> bool:
        nonlocal number
        number += 1
        return number % 2 == 0

    return gf.CheckpointScope("s", keep=every_second)


# -------------------------------------------------------------------------------------- comparisons
def compare(case: Case, variant: str) -> str | None:
    """What is wrong, or "" where plain PyTorch cannot do it either, or None."""
    plain = run(case, variant, scope=contextlib.nullcontext())
    ours = run(case, variant, scope=_scope(variant))
    if plain.forward_error is not None:
        return "" if ours.forward_error is not None else f"plain says {_said(plain.forward_error)}"
    if ours.forward_error is not None:
        return f"forward: {_said(ours.forward_error)}"
    if plain.backward_error is not None:
        if ours.backward_error is not None:
            return ""
        # Torch refuses, and the tape has the old content: then it has to be the right one.
        plain = run(
            case,
            variant,
            scope=contextlib.nullcontext(),
            hooks=saved_tensors_hooks(copied, lambda t: t),
        )
        if plain.forward_error is not None or plain.backward_error is not None:
            return ""
    if ours.backward_error is not None:
        return f"backward: {_said(ours.backward_error)}"
    different = [
        name
        for (name, a), (_, b) in zip(plain.tensors, ours.tensors, strict=True)
        if not (a is b or (a is not None and b is not None and same_bits(a, b)))
    ]
    return f"{', '.join(dict.fromkeys(different))} differ" if different else None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, and not a number in the same places."""
    if a.dtype != b.dtype or a.layout != b.layout or a.shape != b.shape:
        return False
    a, b = _dense(a), _dense(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


# ------------------------------------------------------------------------------------ which of them
def chosen_cases(arguments: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """Whole, or as many as are drawn of each name and dtype: the draw depends on nothing but their
    names.
    """
    operators, modules = load_databases()
    everything = [(o.full_name, operator_cases, o) for o in operators] + [
        (m.name, module_cases, m) for m in modules
    ]
    for name, cases, entry in everything[arguments.part :: arguments.parts]:
        if arguments.only not in name or name in UNREPEATABLE:
            continue
        for dtype in DTYPES:
            torch.manual_seed(0)
            if not arguments.sample:
                for case in itertools.islice(cases(entry, dtype), MOST_SAMPLES):
                    yield from ((case, variant) for variant in case.variants)
                continue
            draw = random.Random(f"{name} {dtype}")
            if draw.random() > arguments.sample:
                continue
            few = list(itertools.islice(cases(entry, dtype), 1 + draw.randrange(MOST_SAMPLES)))
            if few:
                yield few[-1], draw.choice(few[-1].variants)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--sample", type=float, default=0.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # as in conftest.py
    compared = refused = failed = 0
    warnings.simplefilter("ignore")  # torch's own, about what its samples do
    for case, variant in chosen_cases(arguments):
        print(
            f"{case} {variant}",
            file=sys.stderr if not arguments.verbose else sys.stdout,
            flush=True,
        )
        wrong = compare(case, variant)
        compared += 1
        refused += wrong == ""
        if wrong:
            failed += 1
            print(f"FAILED {case} {variant}: {wrong}", flush=True)
    print(f"{compared} compared, {refused} refused by both, {failed} failed")


if __name__ == "__main__":
    main()
