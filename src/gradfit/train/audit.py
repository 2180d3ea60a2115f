"""`audit`: run a batch plainly and as planned, from the same state, and compare everything bit by bit."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit import records
from gradfit._torch_listen import unseen
from gradfit.errors import MisuseError
from gradfit.planning.record import Plan
from gradfit.profiling.measure import LossFunction, run_loss
from gradfit.profiling.state import Generators, generator_states, untouched
from gradfit.recompute.planned import Script, recording
from gradfit.recompute.scope import suspended
from gradfit.tape.graph import Handle, Operation, Segment
from gradfit.tape.record import Recorder
from gradfit.tape.save import unpack
from gradfit.train.batchnorm import batch_norm_note, batch_norms
from gradfit.train.digest import Digests, as_bytes
from gradfit.tree import leaves, size_of_batch, split_batch

_COUPLING_TOLERANCE = 1e-3  # far above the rounding of a float sum, far below what a coupled loss changes


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both runs."""

    kind: str  # "output", "gradient", "buffer", "generator" or "activation"
    name: str
    largest: float
    """The largest absolute difference; NaN where the shapes or kinds differ."""


@dataclass(frozen=True)
class AuditReport:
    """What was compared, what differs, and what micro-batches cannot be exact about."""

    identical: bool
    compared: dict[str, int]  # how many tensors of each kind
    differences: tuple[Difference, ...]
    first_operation: str | None
    """The first operation, in the order of the forward pass, whose replay is not what it was; or, where all replays
    are, the first whose result in the planned run is not that of the plain one."""
    micro_batch: int
    micro_batches: int
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.identical

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> AuditReport:
        return records.from_json(AuditReport, text)

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in self.compared.items())
        lines = [f"{'bit-identical' if self.identical else 'DIFFERENT'}: {counted} compared"]
        lines += [
            f"  {difference.kind} {difference.name} differs by up to {difference.largest:.3g}"
            for difference in self.differences[:10]
        ]
        if len(self.differences) > 10:
            lines.append(f"  … and {len(self.differences) - 10} more")
        if self.first_operation is not None:
            lines.append(f"  the first operation that differs: {self.first_operation}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def audit(
    model: torch.nn.Module | Callable[..., Any],
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    plan: Plan | None = None,
) -> AuditReport:
    """Run the batch plainly and with recomputation, from the same state, and compare bit by bit; nothing stays changed.

    Outputs, gradients, buffers and random generators are compared, and each activation that is rebuilt, with what it
    was: the report names the first operation whose replay differs. With `plan` the batch is run as planned. Without it,
    the `CheckpointScope`s in the code are audited if there are any, else everything is dropped and rebuilt, the
    harshest plan there is.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    >>> print(audit(model, lambda m, x: m(x).mean(), torch.ones(6, 4)))
    bit-identical: 1 output, 4 gradients, 0 buffers, 1 generator, 2 activations compared

    A function of tensors can be audited as well: `audit(fn, batch=(x, y))` differentiates the sum of what it returns.
    """
    if not isinstance(model, torch.nn.Module):
        function = model
        if not callable(function):
            raise MisuseError(f"audit() takes a model or a function, not {type(model).__name__}.")
        model, loss_fn, batch = _as_model(function, loss_fn, batch)
    if loss_fn is None:
        raise MisuseError("loss_fn is missing. Pass a function (model, batch) -> loss.")
    micro = plan.micro_batch if plan is not None else None
    parts = [batch] if micro is None or micro >= size_of_batch(batch) else list(split_batch(batch, micro))
    inputs = [tensor for tensor in leaves(batch) if tensor.requires_grad]
    with untouched(model), _no_gradients(inputs):
        generators = Generators()
        buffers = [buffer.clone() for buffer in model.buffers()]
        before, after = Digests(), Digests()
        with suspended() as scopes:
            plain = _run(model, loss_fn, parts, inputs, lambda: before)
        _rewind(model, inputs, buffers, generators)
        checks = _Checks()
        if scopes and plan is None:  # the code has scopes of its own: those are audited
            differences = [*_compare(plain, _run(model, loss_fn, parts, inputs, None))]
            _rewind(model, inputs, buffers, generators)
        with suspended() if scopes and plan is None else contextlib.nullcontext():
            planned = _run(model, loss_fn, parts, inputs, lambda: _checked(checks, plan, after))
        if not scopes or plan is not None:
            differences = [*_compare(plain, planned)]
    if checks.worst is not None:
        differences.append(checks.worst)
    notes = [*_notes(model, loss_fn, batch, parts), *checks.notes]
    first = checks.first
    if differences and first is None:
        first = after.first_difference(before)
        notes.append(
            "Every rebuilt activation is what it was, so the model itself gives different results from the same state. "
            "Call torch.use_deterministic_algorithms(True) and look for state outside of parameters and buffers."
        )
    compared: dict[str, int] = {"output": 0, "gradient": 0, "buffer": 0, "generator": 0}
    for kind, _ in plain:
        compared[kind] += 1
    compared["activation"] = checks.compared
    return AuditReport(
        identical=not differences,
        compared=compared,
        differences=tuple(differences),
        first_operation=first,
        micro_batch=micro or (size_of_batch(batch) if parts == [batch] and next(leaves(batch)).dim() else 1),
        micro_batches=len(parts),
        notes=tuple(notes),
    )


Results = dict[tuple[str, str], torch.Tensor | None]


def _run(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    parts: list[Any],
    inputs: list[torch.Tensor],
    around: Callable[[], Any] | None,
) -> Results:
    found: Results = {}
    for number, part in enumerate(parts):
        with around() if around is not None else contextlib.nullcontext():
            loss, _ = run_loss(loss_fn, model, part)
        found["output", f"loss of micro-batch {number}"] = loss.detach().clone()
        torch.autograd.backward(loss)
        del loss
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found["gradient", name] = None if parameter.grad is None else parameter.grad.detach().clone()
    for number, tensor in enumerate(inputs):
        found["gradient", f"input {number}"] = None if tensor.grad is None else tensor.grad.detach().clone()
    for name, buffer in model.named_buffers():
        found["buffer", name] = buffer.detach().clone()
    for number, state in enumerate(generator_states()):
        found["generator", "cpu" if number == 0 else f"device {number - 1}"] = state
    return found


def _rewind(
    model: torch.nn.Module, inputs: list[torch.Tensor], buffers: list[torch.Tensor], generators: Generators
) -> None:
    for tensor in (*model.parameters(), *inputs):
        tensor.grad = None
    with torch.no_grad():
        for buffer, content in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(content)
    generators.restore()


@contextlib.contextmanager
def _no_gradients(inputs: list[torch.Tensor]) -> Iterator[None]:
    before = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in zip(inputs, before, strict=True):
            tensor.grad = gradient


class _Checks:
    """Compares each activation that is rebuilt with what it was."""

    def __init__(self) -> None:
        self.compared = 0
        self.first: str | None = None
        self.worst: Difference | None = None
        self.notes: list[str] = []
        self._index = sys.maxsize

    def check(self, original: torch.Tensor, rebuilt: torch.Tensor, operation: Operation) -> None:
        self.compared += 1
        if not _same(original, rebuilt) and operation.index < self._index:
            self._index = operation.index
            self.first = f"{operation.name}, result of shape {tuple(original.shape)}"
            self.worst = Difference("activation", f"of {operation.name}", _largest(original, rebuilt))


@contextlib.contextmanager
def _checked(checks: _Checks, plan: Plan | None, digests: Digests) -> Iterator[None]:
    """Follow the plan, or drop everything, and hold what is dropped beside it to compare."""
    recorder, policy = recording(Script(plan)) if plan is not None else (Recorder(Segment(Segment(None))), None)

    def pack(tensor: torch.Tensor) -> Any:
        packed = recorder.pack(tensor)
        if not isinstance(packed, Handle):
            return packed, None
        with unseen():  # else the copy would be an operation that the plan does not know
            # A copy: the original's storage may be written to before backward, which a replay must not notice.
            return packed, tensor.detach().clone()

    with recorder, saved_tensors_hooks(pack, _Checked(weakref.ref(checks))), digests:
        yield
    if policy is not None and policy.diverged is not None:
        checks.notes.append(f"The plan is for another input: {policy.diverged}. From there on everything was kept.")


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
        found = planned.get((kind, name))
        if expected is None and found is None:
            continue
        if expected is None or found is None:
            yield Difference(kind, name, math.nan)
        elif not _same(expected, found):
            yield Difference(kind, name, _largest(expected, found))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit: NaNs are the same as themselves, 0 is not −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a.layout == b.layout and _same(a.coalesce().values(), b.coalesce().values())
    return torch.equal(as_bytes(a), as_bytes(b))


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout is not torch.strided:
        return math.nan
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return float((a != b).any())
    return float((a.detach().to(torch.complex128) - b.detach().to(torch.complex128)).abs().max())


def _notes(model: torch.nn.Module, loss_fn: LossFunction, batch: Any, parts: list[Any]) -> list[str]:
    """What is not exact about splitting this batch (section 1, rule 3 of the contract)."""
    if len(parts) == 1:
        return []
    notes = []
    if names := batch_norms(model):
        notes.append(batch_norm_note(names, size_of_batch(parts[0])))
    try:
        coupling = _coupling(model, loss_fn, batch, parts)
    except Exception as error:  # the user's code, in evaluation mode, which it may not be made for
        notes.append(f"Whether the loss couples the batch could not be checked in evaluation mode: {error}.")
        return notes
    if coupling > _COUPLING_TOLERANCE:
        notes.append(
            f"The loss couples the batch: over all rows it differs by {coupling:.2g} (relative) from its parts' "
            "weighted mean. Use gf.chunked for the encoder, or return (loss_sum, count) if the items are not the rows."
        )
    return notes


def _coupling(model: torch.nn.Module, loss_fn: LossFunction, batch: Any, parts: list[Any]) -> float:
    """How far the whole batch's loss is from its parts', with everything that is random or batch-wide switched off."""
    with untouched(model), torch.no_grad():
        model.eval()

        def total(part: Any) -> tuple[float, float]:
            result = loss_fn(model, part)
            if isinstance(result, tuple):
                return float(result[0]), float(result[1])
            rows = float(size_of_batch(part))
            return float(result) * rows, rows

        whole, items = total(batch)
        pieces = [total(part) for part in parts]
    mean, split = whole / max(items, 1e-12), sum(p[0] for p in pieces) / max(sum(p[1] for p in pieces), 1e-12)
    return abs(mean - split) / max(abs(mean), abs(split), 1e-12)


class _Function(torch.nn.Module):
    """A function of tensors as a model without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _as_model(function: Any, loss_fn: Any, batch: Any) -> tuple[torch.nn.Module, LossFunction, Any]:
    if batch is None:
        batch, loss_fn = loss_fn, None
    if batch is None:
        raise MisuseError("audit(fn) needs the tensors to call it with. Pass audit(fn, batch=(x, y)).")
    arguments = batch if isinstance(batch, tuple | list) else (batch,)
    model = _Function(function)

    def summed(_: torch.nn.Module, given: Any) -> torch.Tensor:
        outputs = list(leaves(model(*given) if isinstance(given, tuple | list) else model(given)))
        return torch.stack([output.sum() for output in outputs if output.requires_grad]).sum()

    return model, loss_fn or summed, arguments
