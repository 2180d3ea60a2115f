"""`audit`: run a batch plainly and as planned, from the same state, and compare everything bit by
bit.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit import records
from gradfit._torch_listen import unseen
from gradfit.arguments import check_arguments, read_callable, read_instance
from gradfit.batches.additivity import batch_norms
from gradfit.batches.runner import LossFunction, count_rows, run_part
from gradfit.batches.snapshot import Snapshot, generator_states, trials_end, untouched
from gradfit.errors import MisuseError
from gradfit.fitting.audit_digests import Digests, as_bytes
from gradfit.fitting.full_batch import FullBatchError, compare_with_full_batch
from gradfit.planning.plan import Plan
from gradfit.recompute.follow_plan import Script, recording
from gradfit.recompute.scope import suspended
from gradfit.tape.recorder import Recorder
from gradfit.tape.saved_tensors import unpack
from gradfit.tape.values import Handle, Segment, TapeOperation
from gradfit.tiling.tile import with_tiles
from gradfit.tree import leaves, split_batch


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both runs."""

    kind: str  # "output", "gradient", "buffer", "generator" or "activation"
    name: str
    largest: float | None
    """The largest absolute difference; None where there is no such number: other shapes, or not
    finite.
    """

    def __str__(self) -> str:
        by = "" if self.largest is None else f" by up to {self.largest:.3g}"
        return f"{self.kind} {self.name} differs{by}"


@dataclass(frozen=True)
class AuditReport:
    """Two answers: is what was rebuilt what it was, and how far is the update from the whole
    batch's.
    """

    identical: bool
    """Whether the run as planned is, bit by bit, plain PyTorch's on the same micro-batches."""
    compared: dict[str, int]  # how many tensors of each kind
    """How many tensors of each kind were compared."""
    differences: tuple[Difference, ...]
    """Each tensor that is not the same, with how far it is off."""
    first_operation: str | None
    """The first operation, in the order of the forward pass, whose replay is not what it was; or,
    where all replays are, the first whose result in the planned run is not that of the plain one.
    """
    micro_batch: int
    """Rows of one micro-batch."""
    micro_batches: int
    """How many of them the batch was cut into."""
    notes: tuple[str, ...]
    """What else a reader should know: modules that see micro-batches instead of the batch, for
    one."""
    full_batch: FullBatchError | None = None
    """The micro-batches' gradient beside that of the whole batch; None if the batch was not cut."""

    @property
    def exact(self) -> bool:
        """Whether the update is the whole batch's: in one piece, or in parts that were measured to
        add up.
        """
        return self.identical and (self.full_batch is None or self.full_batch.exact)

    def __bool__(self) -> bool:
        return self.exact

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> AuditReport:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        return records.from_json(AuditReport, text)

    def __str__(self) -> str:
        counted = ", ".join(_counted(count, kind) for kind, count in self.compared.items())
        answer = "bit-identical" if self.identical else "DIFFERENT"
        lines = [f"replay: {answer} ({counted} compared)", *self._lines_of_differences()]
        if self.first_operation is not None:
            lines.append(f"  the first operation that differs: {self.first_operation}")
        lines.append(f"against the full batch: {self.said_of_full_batch}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _lines_of_differences(self) -> list[str]:
        lines = [f"  {difference}" for difference in self.differences[:10]]
        if len(self.differences) > 10:
            lines.append(f"  … and {len(self.differences) - 10} more")
        return lines

    @property
    def said_of_full_batch(self) -> str:
        """The second answer, in words."""
        return (
            "the same, it is run in one piece" if self.full_batch is None else str(self.full_batch)
        )


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}" if count == 1 else f"{count} {kind}s"


def audit(
    model: torch.nn.Module | Callable[..., Any],
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    plan: Plan | None = None,
    *,
    split: Callable[[Any, int], Iterable[Any]] | None = None,
) -> AuditReport:
    """Run the batch plainly and with recomputation, from the same state, and compare; nothing stays
    changed.

    Two questions are answered apart. *Is the replay bit-identical?* Outputs, gradients, buffers and
    random generators are compared with plain PyTorch on the same micro-batches, and each activation
    that is rebuilt with what it was: the report names the first operation whose replay differs.
    *How far is the update from the full batch's?* If the plan cuts the batch, it is also run
    plainly in one piece, with the same random numbers, and the gradients are compared.

    Args:
        model: The model, in the mode it is trained in; or a function of tensors: `audit(fn,
            batch=(x, y))` differentiates the sum of what it returns.
        loss_fn: `(model, batch) -> loss`, as for `fit`.
        batch: What to run.
        plan: Run the batch as planned. Without it, the `CheckpointScope`s in the code are audited
            if there are any, else everything is dropped and rebuilt, the harshest plan there is.
        split: As for `fit`, where the batch is not cut along dim 0.

    Raises:
        MisuseError: An argument is missing or is not what it should be.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    >>> print(audit(model, lambda m, x: m(x).mean(), torch.ones(6, 4)))
    replay: bit-identical (1 output, 4 gradients, 0 buffers, 1 generator, 2 activations compared)
    against the full batch: the same, it is run in one piece
    """
    if not isinstance(model, torch.nn.Module):
        model, loss_fn, batch = _as_model(model, loss_fn, batch)
    loss_fn = check_arguments(model, loss_fn, split=split)
    if plan is not None:
        read_instance(plan, "plan", Plan, "what gf.plan(...) returned, or None")
    parts, micro_batch = _parts(batch, plan, split)
    inputs = [tensor for tensor in leaves(batch) if tensor.requires_grad]
    untiled, loss_fn = loss_fn, with_tiles(loss_fn, None if plan is None else plan.tiles)
    with trials_end(), untouched(model, inputs):
        runs = _run_both(model, loss_fn, parts, inputs, plan)
    full_batch = None
    if len(parts) > 1 or loss_fn is not untiled:
        full_batch = compare_with_full_batch(
            model, untiled, batch, parts, split, part_loss_fn=loss_fn
        )
    notes = [
        *_notes_on_cutting(model, full_batch, micro_batch),
        *runs.checks.notes,
        *_notes_on_tiles(plan),
        *runs.notes,
    ]
    return AuditReport(
        identical=not runs.differences,
        compared=runs.compared,
        differences=tuple(runs.differences),
        first_operation=runs.first_operation,
        micro_batch=micro_batch,
        micro_batches=len(parts),
        notes=tuple(notes),
        full_batch=full_batch,
    )


_Split = Callable[[Any, int], Iterable[Any]] | None


def _parts(batch: Any, plan: Plan | None, split: _Split) -> tuple[list[Any], int]:
    """The micro-batches, and how many rows each but the last has."""
    if plan is None:
        return [batch], _rows_of_whole(batch, split)
    rows = count_rows(batch, split)
    if plan.micro_batch >= rows:
        return [batch], rows
    return list((split or split_batch)(batch, plan.micro_batch)), plan.micro_batch


def _rows_of_whole(batch: Any, split: _Split) -> int:
    """One, for a function of scalars."""
    first = next(leaves(batch), None)
    is_scalar = first is None or not first.dim()
    return 1 if split is None and is_scalar else count_rows(batch, split)


Results = dict[tuple[str, str], torch.Tensor | None]


@dataclass
class _BothRuns:
    """The plain run beside the one that is audited."""

    differences: list[Difference]
    checks: _Checks
    compared: dict[str, int]
    before: Digests  # of the operations in the plain run
    after: Digests

    @property
    def _is_unsteady(self) -> bool:
        return bool(self.differences) and self.checks.first is None

    @property
    def first_operation(self) -> str | None:
        return self.after.first_difference(self.before) if self._is_unsteady else self.checks.first

    @property
    def notes(self) -> list[str]:
        if not self._is_unsteady:
            return []
        return [
            "Every rebuilt activation is what it was, so the model itself gives different results"
            " from the same state. Call torch.use_deterministic_algorithms(True) and look for state"
            " outside of parameters and buffers."
        ]


def _run_both(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    parts: list[Any],
    inputs: list[torch.Tensor],
    plan: Plan | None,
) -> _BothRuns:
    start = Snapshot(model, inputs)
    before, after, checks = Digests(), Digests(), _Checks()
    with suspended() as scopes:
        plain = _run(model, loss_fn, parts, inputs, lambda: before)
    start.restore()
    audits_scopes = bool(scopes) and plan is None  # the code has some of its own
    if audits_scopes:
        differences = [*_compare(plain, _run(model, loss_fn, parts, inputs, None))]
        start.restore()
    with suspended() if audits_scopes else contextlib.nullcontext():
        planned = _run(model, loss_fn, parts, inputs, lambda: _checked(checks, plan, after))
    if not audits_scopes:
        differences = [*_compare(plain, planned)]
    if checks.worst is not None:
        differences.append(checks.worst)
    return _BothRuns(differences, checks, _count_kinds(plain, checks), before, after)


def _count_kinds(results: Results, checks: _Checks) -> dict[str, int]:
    counts = Counter(kind for kind, _ in results)
    kinds = ("output", "gradient", "buffer", "generator")
    return {kind: counts[kind] for kind in kinds} | {"activation": checks.compared}


def _run(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    parts: list[Any],
    inputs: list[torch.Tensor],
    around: Callable[[], Any] | None,
) -> Results:
    results: Results = {}
    for number, part in enumerate(parts):
        with around() if around is not None else contextlib.nullcontext():
            loss = run_part(loss_fn, model, part).loss
        results["output", f"loss of micro-batch {number}"] = loss.detach().clone()
        torch.autograd.backward(loss)
        del loss
    return results | _gradients_and_buffers(model, inputs) | _named_generators()


def _gradients_and_buffers(model: torch.nn.Module, inputs: list[torch.Tensor]) -> Results:
    results: Results = {}
    for name, tensor in _differentiated(model, inputs):
        results["gradient", name] = None if tensor.grad is None else tensor.grad.detach().clone()
    for name, buffer in model.named_buffers():
        results["buffer", name] = buffer.detach().clone()
    return results


def _differentiated(
    model: torch.nn.Module, inputs: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All that gradients are compared of, by name."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
    for number, tensor in enumerate(inputs):
        yield f"input {number}", tensor


def _named_generators() -> Results:
    states = list(generator_states())
    names = ["cpu", *(f"device {number}" for number in range(len(states) - 1))]
    return {("generator", name): state for name, state in zip(names, states, strict=True)}


class _Checks:
    """Compares each activation that is rebuilt with what it was."""

    def __init__(self) -> None:
        self.compared = 0
        self.first: str | None = None
        self.worst: Difference | None = None
        self.notes: list[str] = []
        self._index = sys.maxsize

    def check(
        self, original: torch.Tensor, rebuilt: torch.Tensor, operation: TapeOperation
    ) -> None:
        self.compared += 1
        if not _same(original, rebuilt) and operation.index < self._index:
            self._index = operation.index
            self.first = f"{operation.name}, result of shape {tuple(original.shape)}"
            self.worst = Difference(
                "activation", f"of {operation.name}", _largest(original, rebuilt)
            )


@contextlib.contextmanager
def _checked(checks: _Checks, plan: Plan | None, digests: Digests) -> Iterator[None]:
    """Follow the plan, or drop everything, and hold what is dropped beside it to compare."""
    recorder, policy = (
        recording(Script(plan)) if plan is not None else (Recorder(Segment(Segment(None))), None)
    )

    def pack(tensor: torch.Tensor) -> Any:
        packed = recorder.pack(tensor)
        if not isinstance(packed, Handle):
            return packed, None
        with unseen():  # else the copy would be an operation that the plan does not know
            # A copy: the original's storage may be written to before backward, which a replay must
            # not notice.
            return packed, tensor.detach().clone()

    with recorder, saved_tensors_hooks(pack, _Checked(weakref.ref(checks))), digests:
        yield
    if policy is not None and policy.diverged is not None:
        checks.notes.append(
            f"The plan is for another input: {policy.diverged}. From there on everything was kept."
        )


class _Checked:
    def __init__(self, checks: weakref.ref[_Checks]) -> None:
        self._checks = checks

    def __call__(self, packed: Any) -> torch.Tensor:
        inner, original = packed
        operation = inner.value.op if isinstance(inner, Handle) else None
        tensor = unpack(inner)
        checks = self._checks()
        if original is not None and operation is not None and checks is not None:
            checks.check(original, tensor, operation)
        return tensor


def _compare(plain: Results, planned: Results) -> Iterator[Difference]:
    for (kind, name), expected in plain.items():
        result = planned.get((kind, name))
        if expected is not None and result is not None:
            if not _same(expected, result):
                yield Difference(kind, name, _largest(expected, result))
        elif expected is not result:  # only one of them is there
            yield Difference(kind, name, None)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit: NaNs are the same as themselves, 0 is not −0."""
    if not _are_of_one_kind(a, b) or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return _same(a.coalesce().values(), b.coalesce().values())
    return torch.equal(as_bytes(a), as_bytes(b))


def _are_of_one_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _largest(a: torch.Tensor, b: torch.Tensor) -> float | None:
    if not _are_of_one_kind(a, b) or a.layout is not torch.strided:
        return None
    if not _has_fractions(a.dtype):
        return float((a != b).any())
    largest = float((a.detach().to(torch.complex128) - b.detach().to(torch.complex128)).abs().max())
    return largest if math.isfinite(largest) else None


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _notes_on_tiles(plan: Plan | None) -> list[str]:
    if plan is None or plan.tiles is None:
        return []
    return [
        f"The plan has {plan.tiles}: its replay is compared with the same tiles, and its"
        " gradients, equal up to the rounding of a float sum, with those of the whole batch"
        " without tiles."
    ]


def _notes_on_cutting(
    model: torch.nn.Module, full_batch: FullBatchError | None, micro_batch: int
) -> list[str]:
    """What is not exact about cutting this batch, and what to do."""
    if full_batch is None:
        return []
    names = batch_norms(model)
    if names:
        return [_batch_norm_note(names, micro_batch)]
    if full_batch.error is None or full_batch.exact:
        return []
    return [
        f"The parts, weighted by {full_batch.weighted_by}, do not add up to the whole batch:"
        " the loss couples the batch, or is a mean over something else. Return (loss_sum,"
        " count), count being the items; use gf.chunked for what couples rows, or raise"
        " `memory` until the batch is not cut."
    ]


def _batch_norm_note(names: list[str], micro_batch: int) -> str:
    """What it means that these modules are trained in micro-batches."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm ({shown}) takes its statistics over each micro-batch of {micro_batch}, not over"
        " the whole batch, so these gradients are those of the micro-batches. Use GroupNorm or"
        " LayerNorm, freeze the statistics with module.eval(), or raise `memory` until the batch"
        " fits in one piece."
    )


class _Function(torch.nn.Module):
    """A function of tensors as a model without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _as_model(function: Any, loss_fn: Any, batch: Any) -> tuple[torch.nn.Module, LossFunction, Any]:
    expected = "a torch.nn.Module, or a function of the batch's tensors"
    read_callable(function, "model", expected, arguments=len(_as_arguments(batch)))
    if batch is None:
        batch, loss_fn = loss_fn, None
    if batch is None:
        raise MisuseError(
            "audit(fn) needs the tensors to call it with. Pass audit(fn, batch=(x, y))."
        )
    return _Function(function), loss_fn or _sum_of_outputs, _as_arguments(batch)


def _as_arguments(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)


def _sum_of_outputs(model: torch.nn.Module, given: Any) -> torch.Tensor:
    outputs = leaves(model(*_as_arguments(given)))
    return torch.stack([output.sum() for output in outputs if output.requires_grad]).sum()
