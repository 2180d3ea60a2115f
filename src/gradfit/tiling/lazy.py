"""Logits that do not exist: a tensor with their shape, whose numbers are made when somebody asks
for them.

What models and losses usually do with logits (views, shifts, casts, scaling, soft-capping) is
written down; what reduces each row to a few numbers (a cross-entropy, `argmax`) is done tile by
tile. Anything else gets all the numbers, as the plain projection makes them, with the same graph.

Three rules, so that nothing is silently something else:

1. What was derived from a lazy tensor before it was written to keeps its values: expressions are of
   hidden states, and their versions are compared.
2. Numbers are made under the gradient mode and the autocast of the moment when the lazy tensor was
   returned.
3. To code that does not ask `__torch_function__` (a custom `autograd.Function`, C++), it is a
   tensor with a graph: the numbers are made below autograd, and a gradient that arrives goes on to
   hidden states and weights.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from gradfit._torch import leaves_of_nest, map_nest, tensor_without_storage, without_torch_function
from gradfit.errors import LogitsMaterialised, MisuseError
from gradfit.source_line import source_line
from gradfit.tiling.cut import Cut
from gradfit.tiling.expression import (
    Applied,
    AutocastState,
    Expression,
    Operands,
    Program,
    Projection,
    detached,
    dtype_of,
    rearranged,
    without_autocast,
)
from gradfit.tiling.gradient_sum import in_places
from gradfit.tiling.reduce_rows import evaluate_whole, reduce_rows
from gradfit.tiling.sum_rows import EarlyGradients, sum_rows

Handler = Callable[["LazyLogits", Any, Any], Any]
handlers: dict[Any, Handler] = {}  # by torch function; `lazy_functions` fills it
_EDGE = 3  # of each dimension torch prints so many from both ends
# functions that want a tensor's gradient, with what says of their arguments whose
gradient_askers: dict[Any, Callable[[Any, Any], Any]] = {}
described: set[Any] = set()  # functions that only look at shape, type and the like


class Head:
    """The projection that makes lazy logits: how they are cut, and what became of them.

    Args:
        name: of the module.
        cut: how many rows at a time.
        says_so: whether to warn when the numbers are made whole.
        gradients_early: whether a loss computes its gradients with its value.
    """

    def __init__(
        self, name: str, cut: Cut, *, says_so: bool = True, gradients_early: bool = True
    ) -> None:
        self.name, self.cut = name, cut
        self.says_so = says_so
        self._gradients_early = gradients_early
        self._early: Callable[[], EarlyGradients | None] = _none
        self.is_trained = True  # whether the module was in training mode when it was last called
        self.reduced = 0  # how often something was computed in tiles
        self.materialised = ""  # the first function that needed all numbers, and where
        self.rows = 0  # of the largest logits
        self.nbytes = 0

    @property
    def is_of_no_use(self) -> bool:
        """Whether all numbers were needed, and nothing was computed in tiles so far."""
        return bool(self.materialised) and not self.reduced

    def early_gradients(self) -> EarlyGradients | None:
        """For a loss that is to compute its gradients at once; None if it should not: no backward
        pass may come, or gradients of an earlier loss are there still, and the memory of both would
        be needed.
        """
        if not (self._gradients_early and self.is_trained) or self._early() is not None:
            return None
        early = EarlyGradients()
        self._early = weakref.ref(early)
        return early

    def needs_numbers(self, function: Any) -> None:
        """Some function needs all the logits: say so, once."""
        if self.materialised:
            return
        name = _name_of(function)
        self.materialised = f"{name} at {source_line() or 'an unknown line'}"
        if self.says_so:
            warnings.warn(
                f"The logits of {self.name or 'the model'} were made whole, {self.nbytes} bytes,"
                f" for {self.materialised}: {_why(name)} Results are the same."
                " gf.tile(model, exclude=[...]) leaves this projection as it is.",
                LogitsMaterialised,
                stacklevel=4,
            )


def _none() -> None:
    return None


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    # of a property its own, which torch passes as the method that gets or sets it
    is_property = name in ("__get__", "__set__")
    return str(function.__self__.__name__) if is_property else name


def _why(function: str) -> str:
    """What about a function asks for all numbers, by its name."""
    if function.endswith("_") and callable(getattr(Tensor, function[:-1], None)):
        return f"it writes to them. {function[:-1]}, which makes new ones, would not need them."
    return "it does not treat each row by itself, or gradfit does not know that it does."


class LazyLogits(Tensor):
    """See the module's text. `whole()` gives the numbers."""

    _expression: Expression
    _head: Head
    _class_dim: int
    _origin: tuple[Any, Any, Any] | None
    _is_lazy_view: bool
    _family: _Family
    _grad_mode: bool
    _autocast: AutocastState
    _dense: Tensor | None
    _dense_version: int
    _hooks: list[Any]
    _was_reduced: bool
    _place: tuple[Any, bool]

    @staticmethod
    def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> LazyLogits:
        """What `F.linear(hidden, weight, bias)` would give.

        Args:
            hidden: (…, features).
            weight: (words, features).
            bias: (words,), or None.
            head: whose logits these are.
        """
        projection = Projection(hidden, weight, bias, AutocastState.now(hidden.device))
        logits = LazyLogits._make(
            projection, hidden.shape[:-1], hidden.dim() - 1, head, projection.dtype
        )
        head.rows = max(head.rows, logits.numel() // max(1, weight.shape[0]))
        head.nbytes = max(head.nbytes, logits.numel() * logits.element_size())
        return logits

    @staticmethod
    def _make(
        expression: Expression,
        lead: Any,
        class_dim: int,
        head: Head,
        dtype: torch.dtype,
        origin: tuple[Any, Any, Any] | None = None,
        family: _Family | None = None,
    ) -> LazyLogits:
        if not torch.is_grad_enabled():  # rule 2, whenever the numbers are made
            expression = detached(expression)
        operands = Operands(expression)
        first = operands.projections[0]
        shape = [*lead]
        shape.insert(class_dim, first.weight.shape[0])
        # One by one, not in the program: autograd sees tensors only as arguments of `apply`.
        given = operands.tensors_as_given()
        kind = (dtype, first.hidden.device)
        logits: LazyLogits = _Wrapped.apply(operands.program, tuple(shape), kind, class_dim, *given)  # type: ignore[no-untyped-call]
        logits._expression, logits._head, logits._class_dim = expression, head, class_dim
        logits._origin, logits._is_lazy_view = origin, family is not None
        logits._family = family or _Family()
        logits._grad_mode, logits._autocast = (
            torch.is_grad_enabled(),
            AutocastState.now(first.hidden.device),
        )
        logits._dense, logits._was_reduced = None, False
        logits._hooks = [hook for parent in _lazy_in(origin) for hook in parent._hooks]
        logits._place = _place(logits)
        return logits

    # --------------------------------------------------------------------------------- for handlers

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape without the words."""
        sizes = list(_described(self, "shape"))
        del sizes[self._class_dim]
        return tuple(sizes)

    @property
    def class_dim(self) -> int:
        """Which dimension the words are."""
        return self._class_dim

    @property
    def has_words_last(self) -> bool:
        return self._class_dim == len(_described(self, "shape")) - 1

    def apply(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: Any,
    ) -> Any:
        """Lazy: a function of expressions that treats each row by itself and keeps the words.

        Args:
            function: of a tile, in two dimensions.
            args: with expressions where lazy tensors were.
            kwargs: more of them.
            origin: the call as it was, on whole tensors.
        """
        expression = self._applied(function, args, kwargs)
        return LazyLogits._make(
            expression, self.lead, self._class_dim, self._head, dtype_of(expression), origin
        )

    def arrange(
        self,
        change: Callable[[Tensor], Tensor],
        origin: Any,
        *,
        is_view: bool,
        class_dim: int | None = None,
    ) -> Any:
        """Lazy: the same rows in another arrangement, made by arranging the hidden states."""
        return self._derived(rearranged(self._expression, change), origin, is_view, class_dim)

    def take_words(self, words: slice, origin: Any) -> Any:
        """Lazy: a slice of the words, made of a slice of the weights; of a projection alone."""
        projection = self._expression
        assert isinstance(projection, Projection)
        projection.check()
        bias = None if projection.bias is None else projection.bias[words]
        narrower = replace(projection, weight=projection.weight[words], bias=bias)
        return self._derived(narrower, origin, is_view=True)

    def _derived(
        self, expression: Expression, origin: Any, is_view: bool, class_dim: int | None = None
    ) -> Any:
        lead = Operands(expression).projections[0].hidden.shape[:-1]
        family = self._family if is_view else None
        dim = len(lead) if class_dim is None else class_dim
        return LazyLogits._make(
            expression, lead, dim, self._head, _described(self, "dtype"), origin, family
        )

    def reduce(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """In tiles: a function that makes a few numbers of each row; results have the flat rows
        first.
        """
        results = reduce_rows(self._applied(function, args, kwargs), self._head.cut)
        self._note_results(results)
        return results

    def add_up(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, torch.dtype]:
        """In tiles: the sum over all rows of a function that makes one number of each, not narrower
        than float32; and the type of these numbers.
        """
        expression = self._applied(function, args, kwargs)
        total, dtype = sum_rows(expression, self._head.cut, self._head.early_gradients())
        self._note_results((total,))
        return total, dtype

    def _applied(self, function: Any, args: Any, kwargs: Any) -> Applied:
        return Applied(function, args, kwargs, AutocastState.now(_described(self, "device")))

    def _note_results(self, results: tuple[Tensor, ...]) -> None:
        self._head.reduced += 1
        # FSDP2 waits for a gradient of the logits, and none comes to what does not exist.
        differentiable = [each for each in results if each.requires_grad]
        if differentiable:
            self._note_reduced()
        for hook in self._hooks:
            for each in differentiable:
                each.register_hook(hook)  # type: ignore[no-untyped-call]

    def _note_reduced(self) -> None:
        """From now on part of the gradient goes past these logits, and those they are made of."""
        if not self._was_reduced:
            self._was_reduced = True
            for parent in _lazy_in(self._origin):
                parent._note_reduced()

    def refuse_if_reduced(self, function: Any) -> None:
        """For whoever wants the gradient of the logits."""
        if self._was_reduced:
            raise MisuseError(
                f"{_name_of(function)} asks for the gradient of logits of"
                f" {self._head.name or 'the model'} from which something was computed in tiles"
                " already: that part of the gradient never exists. Call logits.retain_grad() before"
                " the loss, which makes the logits whole, or leave the projection as it is:"
                f" gf.tile(model, exclude=[{self._head.name!r}])."
            )

    def detached(self, origin: Any) -> LazyLogits:
        """Without a graph."""
        with torch.no_grad():
            expression = detached(self._expression)
            dtype = _described(self, "dtype")
            return LazyLogits._make(
                expression, self.lead, self._class_dim, self._head, dtype, origin
            )

    @property
    def expression(self) -> Expression:
        return self._expression

    @property
    def is_plain(self) -> bool:
        """Whether the numbers are there: whoever was given them may have written to them, or hooked
        them.
        """
        return self._family.is_whole

    # ---------------------------------------------------------------------------------- the numbers

    def whole(self) -> Tensor:
        """The numbers, with the graph that the plain model would have given them."""
        if self._dense is None:
            with without_torch_function(), _mode(self._grad_mode), self._autocast():
                self._dense = self._compute()
                self._dense_version = self._dense._version
        return self._dense

    def _compute(self) -> Tensor:
        if self._origin is None:
            self._family.is_whole = True
            projection = self._expression
            assert isinstance(projection, Projection)
            return projection.whole()
        function, args, kwargs = self._origin
        operands = Operands(self._expression)
        operands.check_others()
        self._family.is_whole = True
        if not self._is_lazy_view and any(
            parent.is_written for parent in _lazy_in((args, kwargs))
        ):  # rule 1
            return self.own_numbers()
        args, kwargs = map_nest(_whole, (args, kwargs))
        result: Tensor = function(*args, **kwargs)
        return result

    def own_numbers(self) -> Tensor:
        """These numbers alone, of hidden states: nobody else's, and none of what they come from."""
        operands = Operands(self._expression)
        with without_autocast(_described(self, "device")):
            rows = evaluate_whole(operands.program, tuple(operands.tensors()))[0]
        return rows.reshape(*self.lead, rows.shape[-1]).movedim(-1, self._class_dim)

    @property
    def is_written(self) -> bool:
        """Whether somebody has written to the numbers since they were made."""
        return self._family.is_whole and (
            self._dense is None or self._dense._version > self._dense_version
        )

    def take_fsdp_hook(self, hook: Any) -> Any:
        """FSDP2 gathers a unit's parameters when a gradient comes to its results: to what is made
        of these, then.
        """
        self._hooks.append(hook)
        return contextlib.nullcontext()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in gradient_askers:
            for each in _lazy_in(gradient_askers[func](args, kwargs)):
                each.refuse_if_reduced(func)
        if _needs_no_numbers(func, _lazy_in((args, kwargs))):
            with without_torch_function():
                return func(*args, **kwargs)
        result = _in_tiles(func, args, kwargs)
        return _on_numbers(func, args, kwargs) if result is NotImplemented else result

    # Below autograd, for those who did not ask `__torch_function__` (rule 3): the numbers without a
    # graph, since `_Wrapped` is the node to which the gradient will come.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = map_nest(lambda item: _numbers(item, func), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._head.needs_numbers(pickle.dumps)
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        self._head.needs_numbers(copy.deepcopy)
        return copy.deepcopy(self.whole(), memo)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return _shown(self)


class _Family:
    """A lazy tensor and the views of it: once one of them has its numbers, all go by these."""

    is_whole = False


class _Wrapped(torch.autograd.Function):
    """Gives a lazy tensor its place in the graph (rule 3)."""

    @staticmethod
    def forward(
        ctx: Any, program: Program, shape: Any, kind: Any, class_dim: int, *tensors: Tensor | None
    ) -> Tensor:
        ctx.program, ctx.class_dim = program, class_dim
        ctx.save_for_backward(*tensors)
        without_numbers: Tensor = tensor_without_storage(LazyLogits, shape, *kind)
        return without_numbers

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        create_graph = torch.is_grad_enabled()
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        if not create_graph:
            saved = list(map(_leaf_like, saved, needed))
        wanted = list(compress(saved, needed))
        with torch.enable_grad(), without_autocast(gradient.device):
            flat = [_flat_hidden(each, at, ctx.program) for at, each in enumerate(saved)]
            (logits,) = evaluate_whole(ctx.program, tuple(flat))
            initial = gradient.movedim(ctx.class_dim, -1).reshape(logits.shape)
            gradients = torch.autograd.grad(
                logits, wanted, initial, create_graph=create_graph, allow_unused=True
            )
        return None, None, None, None, *in_places(gradients, needed)


def _leaf_like(tensor: Tensor | None, is_needed: bool) -> Tensor | None:
    """The same numbers, from which a graph of our own begins."""
    return None if tensor is None else tensor.detach().requires_grad_(is_needed)


def _flat_hidden(tensor: Tensor | None, at: int, program: Program) -> Tensor | None:
    is_hidden = at < 3 * len(program.dtypes) and at % 3 == 0
    return tensor.reshape(-1, tensor.shape[-1]) if is_hidden and tensor is not None else tensor


def _mode(enabled: bool) -> Any:
    return torch.enable_grad() if enabled else torch.no_grad()


def _described(tensor: Tensor, name: str) -> Any:
    # Else a lazy tensor's shape is asked of its own `__torch_function__`, in which this is called.
    with without_torch_function():
        return getattr(tensor, name)


def _lazy_in(nest: Any) -> list[LazyLogits]:
    return [item for item in leaves_of_nest(nest) if isinstance(item, LazyLogits)]


def _whole(item: Any) -> Any:
    return item.whole() if isinstance(item, LazyLogits) else item


def _in_tiles(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives without the numbers; `NotImplemented` where they are needed."""
    handler = handlers.get(func)
    if (
        handler is None
        or "out" in kwargs
        or any(lazy.is_plain for lazy in _lazy_in((args, kwargs)))
    ):
        return NotImplemented
    first = next((each for each in args if isinstance(each, LazyLogits)), None)
    return NotImplemented if first is None else handler(first, args, kwargs)


def _place(lazy: Tensor) -> tuple[Any, bool]:
    """Where in the graph a tensor is."""
    with without_torch_function():
        return lazy.grad_fn, lazy.requires_grad


def _is_displaced(lazy: LazyLogits) -> bool:
    """Whether somebody gave it another place in the graph: as a result of an `autograd.Function`,
    as a leaf.
    """
    node, requires_grad = _place(lazy)
    return node is not lazy._place[0] or requires_grad != lazy._place[1]


def _needs_no_numbers(func: Any, lazy: list[LazyLogits]) -> bool:
    """Whether a function only looks at what a tensor is like, or is autograd's business alone."""
    if any(map(_is_displaced, lazy)):
        return True
    # Numbers that are there may have been made a leaf, or were written to: they say what they are.
    return func in described and not any(each.is_plain for each in lazy)


def _on_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on all the numbers."""

    def replaced(item: Any) -> Any:
        if not isinstance(item, LazyLogits):
            return item
        item._head.needs_numbers(func)
        return item.whole()

    args, kwargs = map_nest(replaced, (args, kwargs))
    return func(*args, **kwargs)


def _numbers(item: Any, func: Any) -> Any:
    if not isinstance(item, LazyLogits):
        return item
    item._head.needs_numbers(func)
    return item.whole().detach()


def _shown(lazy: LazyLogits) -> str:
    """The corners alone, as torch prints large tensors."""
    shape = tuple(_described(lazy, "shape"))
    with torch.no_grad():
        if lazy.is_plain:
            corner = _corner(lazy.whole().detach(), range(len(shape)))
        else:
            # Rows are left out while they are lazy, so that few numbers are made.
            words_last: Any = torch.movedim(lazy.detach(), lazy.class_dim, -1)
            numbers = _corner(words_last, range(len(shape) - 1)).own_numbers()
            corner = _corner(numbers, [len(shape) - 1]).movedim(-1, lazy.class_dim)
    return f"<lazy logits of shape {shape}, the ends of each dimension: {corner!r}>"


def _corner(tensor: Any, dims: Iterable[int]) -> Any:
    for dim in dims:
        size = tensor.shape[dim]
        if size > 2 * _EDGE:
            tensor = torch.index_select(tensor, dim, _ends(size, tensor.device))
    return tensor


def _ends(size: int, device: torch.device) -> Tensor:
    """The first and last positions, of a size that has more."""
    return torch.cat([torch.arange(_EDGE), torch.arange(size - _EDGE, size)]).to(device)
