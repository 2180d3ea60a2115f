"""What is to be done to logits that do not exist yet, written down so that it can be done to a few
rows at a time.

An expression is a projection (hidden states times a vocabulary's weights) or a function applied to
expressions. All of it treats each row by itself: what one row of the result is depends on that row
of the hidden states alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit._torch import FakeTensor, inside_fake_mode
from gradfit._torch_listen import unseen
from gradfit.errors import ActivationOverwritten


class AutocastState(NamedTuple):
    """Autocast as it is when something is written down: it is done later, and once more in the
    backward pass.
    """

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device: torch.device) -> AutocastState:
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return AutocastState(kind, False, torch.float32)
        return AutocastState(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def __call__(self) -> Any:
        """A context with autocast as it was."""
        # Some kinds of devices have none, and torch raises where it is asked for.
        if not torch.amp.is_autocast_available(self.device):
            return contextlib.nullcontext()
        if not self.enabled:
            return torch.autocast(self.device, enabled=False)
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


def without_autocast(device: torch.device) -> Any:
    """A context in which nothing is cast by itself."""
    return AutocastState(device.type, False, torch.float32)()


@dataclass(frozen=True, eq=False)
class Projection:
    """`hidden @ weight.T + bias`, not made."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: AutocastState
    versions: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self._versions())

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        # Autocast leaves float64 as it is.
        if self.autocast.enabled and self.hidden.dtype is not torch.float64:
            return self.autocast.dtype
        return self.hidden.dtype

    def whole(self) -> Tensor:
        """All logits, as the plain module makes them."""
        self.check()
        with self.autocast():
            return F.linear(self.hidden, self.weight, self.bias)

    def detach(self) -> Projection:
        """The same numbers without a graph."""
        self.check()
        bias = None if self.bias is None else self.bias.detach()
        return Projection(self.hidden.detach(), self.weight.detach(), bias, self.autocast)

    def check(self) -> None:
        """Refuse to go on if what the logits are made of is no longer what it was."""
        if self.weight.numel() and not self.weight.untyped_storage().nbytes():
            raise ActivationOverwritten(
                "The weights of the projection were freed after these logits were returned: FSDP2"
                " has resharded the module around it. Compute the loss inside of that module, or"
                " pass fully_shard(..., reshard_after_forward=False)."
            )
        if self._versions() != self.versions:
            raise self._overwritten()

    def _overwritten(self) -> ActivationOverwritten:
        same_hidden = self.versions[0] == _content(self.hidden)
        return ActivationOverwritten(
            f"{'The weights of the projection' if same_hidden else 'The hidden states'} were"
            " changed in place after these logits were returned and before their numbers were"
            " asked for: they would be others now. Use the logits before optimizer.step(), or ask"
            " for the numbers earlier, with logits.detach().clone() + 0."
        )

    def _versions(self) -> tuple[Any, ...]:
        return tuple(map(_content, (self.hidden, self.weight, self.bias)))


def _content(tensor: Tensor | None) -> Any:
    """What changes when somebody writes to a tensor, or gives it another memory (`.data = …`)."""
    if tensor is None:
        return None
    # An inference tensor counts no versions, and torch raises where they are read; a fake one has
    # no memory.
    version = None if tensor.is_inference() else tensor._version
    return version, None if isinstance(tensor, FakeTensor) else tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class Beside:
    """A tensor that something was written down with, and may be written to before it is read."""

    tensor: Tensor
    content: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", _content(self.tensor))

    def check(self) -> None:
        """Refuse to go on if the tensor is no longer what it was."""
        if _content(self.tensor) != self.content:
            raise ActivationOverwritten(
                f"A tensor of shape {tuple(self.tensor.shape)} was changed in place after logits"
                " were combined with it and before their numbers were asked for: they would be"
                " others now. Change a copy: tensor.clone()."
            )


@dataclass(frozen=True, eq=False)
class Constant(Beside):
    """The same for every row: class weights, another bias, a scale."""


@dataclass(frozen=True, eq=False)
class Rows(Beside):
    """What has the logits' rows: labels, a mask, a teacher's probabilities."""

    lead: int = 1  # so many of its dimensions are the rows'

    def flat(self) -> Tensor:
        """With the rows as dim 0."""
        sizes = self.tensor.shape
        return self.tensor.reshape(math.prod(sizes[: self.lead]), *sizes[self.lead :])


@dataclass(frozen=True, eq=False)
class Applied:
    """A function of expressions, which is to treat each row by itself."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: AutocastState


Expression = Projection | Applied


class _Slot(NamedTuple):
    """The place of a tensor in a program."""

    kind: str  # "logits", "rows" or "constant"
    at: int


class Operands:
    """The tensors that an expression reads, each once, and the program that says what is done with
    them.

    The program holds no tensor: a node of autograd can keep it, and whatever it saves can still be
    dropped.
    """

    def __init__(self, expression: Expression) -> None:
        self.projections: list[Projection] = []
        self.rows: list[Rows] = []
        self.constants: list[Tensor] = []  # the same for every row
        self._beside: list[Beside] = []
        self.program = Program(
            self._read(expression), [each.dtype for each in self.projections], len(self.rows)
        )

    def tensors(self) -> list[Tensor | None]:
        """Hidden states, rows flat, weight and bias of each projection; then what has rows; then
        constants.
        """
        tensors: list[Tensor | None] = []
        self.check_others()
        for projection in self.projections:
            projection.check()
            hidden = projection.hidden
            tensors += [hidden.reshape(-1, hidden.shape[-1]), projection.weight, projection.bias]
        return [*tensors, *(one.flat() for one in self.rows), *self.constants]

    def check_others(self) -> None:
        """Refuse to go on if a tensor that the logits were combined with was written to."""
        for each in self._beside:
            each.check()

    def tensors_as_given(self) -> list[Tensor | None]:
        """The same, with hidden states in the shape in which they came."""
        tensors = [each for p in self.projections for each in (p.hidden, p.weight, p.bias)]
        return [*tensors, *(one.flat() for one in self.rows), *self.constants]

    def _read(self, item: Any) -> Any:
        """The item with slots in the places of its tensors."""
        if isinstance(item, Applied):
            args = tuple(self._read(each) for each in item.args)
            kwargs = {name: self._read(each) for name, each in item.kwargs.items()}
            return Applied(item.function, args, kwargs, item.autocast)
        if isinstance(item, Projection):
            return _Slot("logits", _place_in(self.projections, item))
        if isinstance(item, Beside):
            self._beside.append(item)
        if isinstance(item, Rows):
            return _Slot("rows", _place_in(self.rows, item))
        constant = item.tensor if isinstance(item, Constant) else item
        if isinstance(constant, Tensor):
            return _Slot("constant", _place_in(self.constants, constant))
        return item


def _place_in(items: list[Any], item: Any) -> int:
    """Where the item is, by identity (tensors compare their elements); it is added if need be."""
    for at, each in enumerate(items):
        if each is item:
            return at
    items.append(item)
    return len(items) - 1


class Program:
    """What is done to each tile."""

    def __init__(self, tree: Any, dtypes: list[torch.dtype], row_tensors: int) -> None:
        self._tree = tree
        self.dtypes = dtypes  # of each projection's logits
        self.row_tensors = row_tensors

    def evaluate(
        self,
        logits: list[Tensor],
        rows: list[Tensor],
        constants: list[Tensor],
        *,
        plain: bool = False,
    ) -> tuple[Tensor, ...]:
        """The results for a tile, of these tensors; `plain` by functions that can be differentiated
        twice.
        """
        results = _evaluate(
            self._tree, {"logits": logits, "rows": rows, "constant": constants}, plain
        )
        return tuple(results) if isinstance(results, tuple | list) else (results,)


def _evaluate(item: Any, tensors: dict[str, list[Tensor]], plain: bool) -> Any:
    if isinstance(item, _Slot):
        return tensors[item.kind][item.at]
    if not isinstance(item, Applied):
        return item
    function = getattr(item.function, "plain", item.function) if plain else item.function
    args = [_evaluate(each, tensors, plain) for each in item.args]
    kwargs = {name: _evaluate(each, tensors, plain) for name, each in item.kwargs.items()}
    with item.autocast():
        return function(*args, **kwargs)


def dtype_of(expression: Expression) -> torch.dtype:
    """Of an expression's result, by evaluating it for no rows at all."""
    operands = Operands(expression)
    # Nobody need observe it but fake tensors, which are made by the mode that does.
    with torch.no_grad(), contextlib.nullcontext() if inside_fake_mode() else unseen():
        logits = [
            each.weight.new_empty((0, each.weight.shape[0]), dtype=each.dtype)
            for each in operands.projections
        ]
        rows = [one.flat()[:0] for one in operands.rows]
        return operands.program.evaluate(logits, rows, operands.constants)[0].dtype


def change_leaves(expression: Any, change: Callable[[Any], Any]) -> Any:
    """The same expression of other tensors; one that is read twice stays one."""
    changed: dict[int, Any] = {}

    def changed_leaf(item: Any) -> Any:
        if not isinstance(item, Projection | Beside | Tensor):
            return item
        if id(item) not in changed:
            changed[id(item)] = change(item)
        return changed[id(item)]

    return _map_leaves(expression, changed_leaf)


def rearranged(expression: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same expression with its rows in another arrangement.

    Args:
        expression: of projections, and of tensors that have their rows.
        change: of a tensor with the rows first and one more dimension, which it leaves last.
    """

    def changed(item: Any) -> Any:
        if isinstance(item, Projection):
            item.check()
            return Projection(change(item.hidden), item.weight, item.bias, item.autocast)
        if isinstance(item, Rows):
            item.check()
            tensor = change(item.tensor)
            return Rows(tensor, lead=tensor.dim() - 1)
        return item

    return change_leaves(expression, changed)


def detached(expression: Any) -> Any:
    """The same numbers without a graph."""
    return change_leaves(expression, _detached_leaf)


def _detached_leaf(item: Any) -> Any:
    if not isinstance(item, Beside):
        return item.detach()
    item.check()
    return replace(item, tensor=item.tensor.detach())


def _map_leaves(item: Any, change: Callable[[Any], Any]) -> Any:
    # Not a function inside of its callers: one that calls itself is a cycle, and holds hidden
    # states until collected.
    if not isinstance(item, Applied):
        return change(item)
    args = tuple(_map_leaves(each, change) for each in item.args)
    kwargs = {name: _map_leaves(each, change) for name, each in item.kwargs.items()}
    return Applied(item.function, args, kwargs, item.autocast)
