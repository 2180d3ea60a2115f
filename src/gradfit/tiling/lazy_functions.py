"""What torch's functions do to lazy logits: stay lazy, reduce in tiles, or (what is not here) ask
for the numbers.

Each handler gets the lazy tensor that came first and the call as it was; `NotImplemented` means
that in this form the numbers are needed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit._torch import map_nest
from gradfit.tiling.expression import Operands, Rows
from gradfit.tiling.label_probability import LabelLogProbability, may_use_up
from gradfit.tiling.lazy import Handler, LazyLogits, described, handlers

_NO_KWARGS: dict[str, Any] = {}


def _functions(*names: str) -> Iterator[Any]:
    """Every function of torch that has one of these names."""
    for name in names:
        # `Tensor.softmax`, `torch.softmax` and `F.softmax` are three objects, and handlers are
        # looked up by object.
        for place in (Tensor, torch, F, torch.special):
            function = getattr(place, name, None)
            if callable(function):
                yield function


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(_functions(*names), handler))
        return handler

    return register


for _name in (
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_mps",
    "is_xpu",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "names",
    "_version",
    "_base",
    "is_sparse_csr",
    "output_nr",
    "itemsize",
):
    if hasattr(getattr(Tensor, _name, None), "__get__"):
        described.add(getattr(Tensor, _name).__get__)
described.update(
    _functions( "size", "dim", "ndimension", "numel", "nelement", "element_size",
    "is_floating_point", "is_complex", "get_device", "__len__", "is_inference", "is_same_size",
    "has_names", )
)  # fmt: skip


# -------------------------------------------------------------------------------------- arrangement


def _from_front(dim: int, dims: int) -> int:
    """A dimension counted from the front; one that there is not is torch's error."""
    if not -dims <= dim < dims:
        expected = f"[{-dims}, {dims - 1}]"
        raise IndexError(
            f"Dimension out of range (expected to be in range of {expected}, but got {dim})"
        )
    return dim % dims


def _is_last(dim: int, dims: int) -> bool:
    return _from_front(dim, dims) == dims - 1


def _may_arrange(lazy: LazyLogits) -> bool:
    # What has rows of its own (a mask, say) would have to be arranged alike, and is flat already.
    return lazy.has_words_last and not Operands(lazy.expression).rows


@_handles("view", "reshape")
def _view(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    sizes = _one_by_one(() if kwargs else args[1:])
    if not _may_arrange(lazy) or not _keeps_words(lazy, sizes):
        return NotImplemented
    # `reshape` also where `view` was called: hidden states may lie otherwise than logits would.
    origin = (torch.reshape, (lazy, sizes), _NO_KWARGS)
    return lazy.arrange(
        lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1]), origin, is_view=True
    )


def _one_by_one(items: Any) -> tuple[Any, ...]:
    """Sizes or dimensions, which torch takes as single arguments and as one list, too."""
    is_list = len(items) == 1 and isinstance(items[0], tuple | list)
    return tuple(items[0] if is_list else items)


def _keeps_words(lazy: LazyLogits, sizes: tuple[Any, ...]) -> bool:
    """Whether a view of these sizes has the words as its last dimension."""
    are_numbers = bool(sizes) and all(isinstance(size, int) for size in sizes)
    if not are_numbers or not lazy.numel():
        return False
    words = lazy.shape[-1]
    if sizes[-1] == -1:
        return bool(math.prod(sizes[:-1]) * words == lazy.numel())
    return bool(sizes[-1] == words)


@_handles("flatten")
def _flatten(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    first, last = _bound(("start_dim", "end_dim"), args, kwargs, (0, -1))
    first, last = _from_front(first, lazy.dim()), _from_front(last, lazy.dim())
    if last >= lazy.dim() - 1 or not _may_arrange(lazy):
        return NotImplemented
    origin = (torch.flatten, (lazy, first, last), _NO_KWARGS)
    return lazy.arrange(lambda hidden: hidden.flatten(first, last), origin, is_view=True)


@_handles("contiguous", "to_dense")
def _same(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 or kwargs:
        return NotImplemented
    return lazy


@_handles("view_as", "alias")
def _itself(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 and (not isinstance(args[1], Tensor) or args[1].shape != lazy.shape):
        return NotImplemented
    return lazy


@_handles("clone")
def _clone(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if not _may_arrange(lazy):
        return NotImplemented
    return lazy.arrange(lambda hidden: hidden, (torch.clone, (lazy,), {}), is_view=False)


@_handles("detach")
def _detach(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return lazy.detached((torch.detach, (lazy,), {}))


@_handles("__getitem__")
def _getitem(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    index = args[1]
    if not _may_arrange(lazy) or not _leaves_words(index, lazy.dim()):
        return NotImplemented
    is_view = _is_basic(index)
    return lazy.arrange(
        lambda hidden: hidden[index], (Tensor.__getitem__, (lazy, index), {}), is_view=is_view
    )


def _leaves_words(index: Any, dims: int) -> bool:
    """Whether an index takes rows and all their words."""
    items = _items(index) or [Ellipsis]
    if not all(map(_is_simple, items)) or _moves_dims(items):
        return False
    used = sum(map(_dims_used, items))
    if items[-1] is Ellipsis or (used < dims and not _has_ellipsis(items)):
        return True
    takes_all = isinstance(items[-1], slice) and items[-1] == slice(None)
    return takes_all and used <= dims


def _items(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _has_ellipsis(items: list[Any]) -> bool:
    return any(item is Ellipsis for item in items)  # not `in`, which asks tensors whether they are


def _is_simple(item: Any) -> bool:
    """Not a list or an array, whose rules are many."""
    if isinstance(item, Tensor):
        return not item.is_floating_point()
    return item is None or item is Ellipsis or isinstance(item, int | slice)


def _dims_used(item: Any) -> int:
    """How many dimensions an index takes."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return int(item.dim()) if is_mask else 1


def _moves_dims(items: list[Any]) -> bool:
    """Whether the result may have its dimensions in another order: tensors beside other indices."""
    tensors = sum(isinstance(item, Tensor) for item in items)
    singles = sum(isinstance(item, int | None) for item in items)
    return tensors > 1 or (tensors == 1 and singles > 0)


def _is_basic(index: Any) -> bool:
    return not any(isinstance(item, Tensor) for item in _items(index))


def _by_dim(name: str, is_view: bool, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Functions of one dimension, which must not be that of the words."""
    dims = lazy.dim() + (name == "unsqueeze")
    if kwargs or not _is_beside_words(args[1:2], dims) or not _may_arrange(lazy):
        return NotImplemented
    function = getattr(torch, name)
    rest = (_from_front(args[1], dims), *args[2:])
    return lazy.arrange(
        lambda hidden: function(hidden, *rest), (function, (lazy, *rest), {}), is_view=is_view
    )


def _is_beside_words(given: tuple[Any, ...], dims: int) -> bool:
    """Whether a dimension is given, by its number, and is not the last."""
    return len(given) == 1 and isinstance(given[0], int) and not _is_last(given[0], dims)


for _name, _is_view in (
    ("narrow", True),
    ("select", True),
    ("unsqueeze", True),
    ("squeeze", True),
    ("index_select", False),
):
    _handles(_name)(functools.partial(_by_dim, _name, _is_view))


@_handles("transpose", "swapaxes", "swapdims")
def _transpose(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 3:
        return NotImplemented
    first, second = (_from_front(dim, lazy.dim()) for dim in args[1:])
    order = list(range(lazy.dim()))
    order[first], order[second] = order[second], order[first]
    return _reordered(lazy, order)


@_handles("permute")
def _permuted(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    order = _one_by_one(args[1:])
    if kwargs or len(order) != lazy.dim():
        return NotImplemented
    return _reordered(lazy, [_from_front(dim, lazy.dim()) for dim in order])


@_handles("movedim", "moveaxis")
def _movedim(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 3 or not all(isinstance(dim, int) for dim in args[1:]):
        return NotImplemented
    source, destination = (_from_front(dim, lazy.dim()) for dim in args[1:])
    order = list(range(lazy.dim()))
    order.insert(destination, order.pop(source))
    return _reordered(lazy, order)


def _reordered(lazy: LazyLogits, order: list[int]) -> Any:
    if Operands(lazy.expression).rows:
        return NotImplemented
    words = lazy.class_dim
    lead = [dim for dim in range(lazy.dim()) if dim != words]
    place = order.index(words)
    new_lead = [lead.index(dim) for dim in order if dim != words]
    origin = (torch.permute, (lazy, order), _NO_KWARGS)
    return lazy.arrange(
        lambda hidden: hidden.permute(*new_lead, hidden.dim() - 1),
        origin,
        is_view=True,
        class_dim=place,
    )


# ------------------------------------------------------------------------------------- word by word


def _word_by_word(function: Any, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Functions of single numbers, with numbers, tensors without rows, and other lazy logits beside
    them.
    """
    if "out" in kwargs or not lazy.has_words_last:
        return NotImplemented
    operands = map_nest(lambda item: _operand(lazy, item), (list(args), kwargs))
    if _refused(operands):
        return NotImplemented
    return lazy.apply(function, tuple(operands[0]), operands[1], (function, args, kwargs))


class _Refused:
    """Stands for an argument that cannot be cut into tiles."""


def _refused(operands: Any) -> bool:
    args, kwargs = operands
    return any(item is _Refused for item in (*args, *kwargs.values()))


def _operand(lazy: LazyLogits, item: Any) -> Any:
    """An argument as an expression has it."""
    if isinstance(item, LazyLogits):
        return item.expression if _is_alike(item, lazy) else _Refused
    if not isinstance(item, Tensor) or not item.dim():
        return item
    return _Refused if item.device != lazy.device else _tensor_operand(lazy, item)


def _is_alike(one: LazyLogits, other: LazyLogits) -> bool:
    """Whether they have the same rows and words, in the same places."""
    return one.lead == other.lead and one.has_words_last and one.shape == other.shape


def _tensor_operand(lazy: LazyLogits, item: Tensor) -> Any:
    last = item.shape[-1]
    if last not in (1, lazy.shape[-1]) or item.dim() > lazy.dim():
        return _Refused
    if item.numel() == last:
        return item.reshape(last)  # the same for every row
    if tuple(item.shape[:-1]) == lazy.lead:
        return Rows(item.reshape(-1, last))
    return _Refused


for _function in _functions(
    "mul",
    "multiply",
    "__mul__",
    "__rmul__",
    "div",
    "divide",
    "true_divide",
    "__truediv__",
    "add",
    "__add__",
    "__radd__",
    "sub",
    "subtract",
    "__sub__",
    "__rsub__",
    "rsub",
    "neg",
    "negative",
    "__neg__",
    "tanh",
    "sigmoid",
    "exp",
    "clamp",
    "clamp_min",
    "clamp_max",
    "clip",
    "square",
    "abs",
    "masked_fill",
    "pow",
    "__pow__",
    "logsigmoid",
):
    handlers[_function] = functools.partial(_word_by_word, _function)


def _cast(dtype: torch.dtype, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return NotImplemented if len(args) > 1 or kwargs else _as_type(lazy, dtype)


for _name, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
):
    _handles(_name)(functools.partial(_cast, _dtype))


def _as_type(lazy: LazyLogits, dtype: torch.dtype, *, copy: bool = False) -> Any:
    if lazy.dtype is dtype and not copy:
        return lazy
    if not lazy.has_words_last:
        return NotImplemented
    return lazy.apply(Tensor.to, (lazy.expression, dtype), {}, (Tensor.to, (lazy, dtype), {}))


@_handles("to")
def _to(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if kwargs.get("memory_format") is not None:
        return NotImplemented
    said = [(kwargs.get("dtype"), kwargs.get("device")), *map(_type_and_device, args[1:])]
    if None in said:
        return NotImplemented
    dtype, device = map(_last_said, zip(*said, strict=True))
    if device is not None and not _same_device(device, lazy.device):
        return NotImplemented
    return _as_type(lazy, dtype or lazy.dtype, copy=bool(kwargs.get("copy", False)))


def _last_said(items: tuple[Any, ...]) -> Any:
    """The last that is not None; None if all are."""
    return next((item for item in reversed(items) if item is not None), None)


def _type_and_device(item: Any) -> tuple[torch.dtype | None, Any] | None:
    """What an argument of `to` says; None if it says something else."""
    if isinstance(item, torch.dtype | None):
        return item, None
    if isinstance(item, Tensor):
        return item.dtype, item.device
    is_device = isinstance(item, str | torch.device | int) and not isinstance(item, bool)
    return (None, item) if is_device else None


def _same_device(one: Any, other: torch.device) -> bool:
    device = torch.device(one)
    return device.type == other.type and (device.index is None or device.index == other.index)


@_handles("type_as")
def _type_as(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], LazyLogits) or args[1].device != lazy.device:
        return NotImplemented
    return _as_type(lazy, args[1].dtype)


@_handles("cpu")
def _cpu(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return lazy if lazy.device.type == "cpu" else NotImplemented


# --------------------------------------------------------------------------------------- row by row


def _softmax(function: Any, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    plain = F.log_softmax if "log" in function.__name__ else F.softmax
    names = ("dim", "_stacklevel", "dtype") if function is plain else ("dim", "dtype")
    dim, *_, dtype = _bound(names, args, kwargs, (None,) * len(names))
    if not _over_words(lazy, dim):
        return NotImplemented
    extra = {"dim": -1, "dtype": dtype}
    return lazy.apply(plain, (lazy.expression,), extra, (plain, (lazy,), extra))


for _function in _functions("softmax", "log_softmax"):
    handlers[_function] = functools.partial(_softmax, _function)


def _bound(names: tuple[str, ...], args: Any, kwargs: Any, defaults: tuple[Any, ...]) -> list[Any]:
    """The arguments after the first one, by position or name."""
    by_position = dict(zip(names, args[1:], strict=False))
    given = dict(zip(names, defaults, strict=True)) | by_position | kwargs
    return [given[name] for name in names]


def _over_words(lazy: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and lazy.has_words_last and _is_last(dim, lazy.dim())


def _rows_back(lazy: LazyLogits, results: tuple[Tensor, ...]) -> list[Tensor]:
    """Results with the flat rows first, in the shape of the rows."""
    return [each.reshape(*lazy.lead, *each.shape[1:]) for each in results]


def _reduction(name: str, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """`name(x, dim, keepdim)`, of one result or two."""
    dim, keepdim, dtype = _bound(("dim", "keepdim", "dtype"), args, kwargs, (None, False, None))
    if not _over_words(lazy, dim) or set(kwargs) - {"dim", "keepdim", "dtype"}:
        return NotImplemented
    extra = {"dim": -1, "keepdim": bool(keepdim)} | ({} if dtype is None else {"dtype": dtype})
    results = _rows_back(lazy, lazy.reduce(getattr(torch, name), (lazy.expression,), extra))
    if len(results) == 1:
        return results[0]
    return getattr(torch.return_types, name)(tuple(results))


for _name in ("sum", "mean", "logsumexp", "amax", "amin", "max", "min", "argmax", "argmin"):
    _handles(_name)(functools.partial(_reduction, _name))


_partial_sum = handlers[torch.sum]


@_handles("sum")
def _sum(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Of everything, too: of each row, and of these."""
    if len(args) > 1 or kwargs:
        return _partial_sum(lazy, args, kwargs)
    if not lazy.has_words_last:
        return NotImplemented
    return lazy.reduce(torch.sum, (lazy.expression,), {"dim": -1})[0].sum()


@_handles("topk")
def _topk(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    k, dim, largest, is_sorted = _bound(
        ("k", "dim", "largest", "sorted"), args, kwargs, (None, -1, True, True)
    )
    if not isinstance(k, int) or not _over_words(lazy, dim) or "out" in kwargs:
        return NotImplemented
    extra = {"k": k, "dim": -1, "largest": largest, "sorted": is_sorted}
    results = _rows_back(lazy, lazy.reduce(torch.topk, (lazy.expression,), extra))
    return torch.return_types.topk((results[0], results[1]))


@_handles("gather", "take_along_dim")
def _gather(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if _is_take_along_dim(args, kwargs):
        index, dim = _bound(("indices", "dim"), args, kwargs, (None, None))
    else:
        dim, index = _bound(("dim", "index"), args, kwargs, (None, None))
    if not _has_rows_of(lazy, index) or not _over_words(lazy, dim):
        return NotImplemented
    rows = Rows(index.reshape(-1, index.shape[-1]))
    return _rows_back(lazy, lazy.reduce(torch.gather, (lazy.expression, -1, rows), {}))[0]


def _is_take_along_dim(args: Any, kwargs: Any) -> bool:
    """Of the two it is the one that takes the index first."""
    is_index_first = len(args) > 1 and isinstance(args[1], Tensor) and "index" not in kwargs
    return is_index_first or "indices" in kwargs


def _has_rows_of(lazy: LazyLogits, index: Any) -> bool:
    is_plain = isinstance(index, Tensor) and not isinstance(index, LazyLogits)
    return is_plain and tuple(index.shape[:-1]) == lazy.lead


# ------------------------------------------------------------------------------------------- losses

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NLL_LOSS = inspect.signature(F.nll_loss)
_KL_DIV = inspect.signature(F.kl_div)


@_handles("cross_entropy")
def _cross_entropy(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    given = _arguments(_CROSS_ENTROPY, args, kwargs)
    extra = {"ignore_index": given["ignore_index"], "label_smoothing": given["label_smoothing"]}
    return _class_loss(lazy, F.cross_entropy, given, extra)


@_handles("nll_loss")
def _nll_loss(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    given = _arguments(_NLL_LOSS, args, kwargs)
    return _class_loss(lazy, F.nll_loss, given, {"ignore_index": given["ignore_index"]})


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _is_deprecated(given: dict[str, Any]) -> bool:
    """Whether a loss is called as before torch 0.4.1, which had these in the place of
    `reduction`.
    """
    return given["size_average"] is not None or given["reduce"] is not None


def _class_loss(
    lazy: LazyLogits, function: Any, given: dict[str, Any], extra: dict[str, Any]
) -> Any:
    """A loss of each row by its label, or by its probabilities, added up as `reduction` says."""
    if given["input"] is not lazy or _is_deprecated(given) or not _is_target(given["target"], lazy):
        return NotImplemented
    reduction = given["reduction"]
    if reduction not in ("mean", "sum", "none"):
        return NotImplemented  # torch says what is wrong
    flat = _flat_target(given["target"], lazy)
    losses = _losses_of_rows(lazy, function, given, extra, flat)
    if reduction == "none":
        return losses.reshape(lazy.lead)
    if reduction == "sum":
        return _added_up(losses)
    return _added_up(losses, _divisor(flat, given["weight"], given["ignore_index"]))


def _losses_of_rows(
    lazy: LazyLogits, function: Any, given: dict[str, Any], extra: dict[str, Any], flat: Tensor
) -> Tensor:
    is_labels = flat.dim() == 1
    if is_labels and _is_plain_cross_entropy(function, given) and may_use_up(lazy.expression):
        return _label_losses(lazy, flat, given["weight"], given["ignore_index"])
    extra = {**extra, "weight": given["weight"], "reduction": "none"}
    return lazy.reduce(function, (lazy.expression, Rows(flat)), extra)[0]


def _class_dim_of_loss(lazy: LazyLogits) -> int:
    """Where torch's losses expect the words."""
    return 0 if lazy.dim() == 1 else 1


def _is_target(target: Any, lazy: LazyLogits) -> bool:
    """Whether these are labels or probabilities of the logits' rows, and the words where a loss
    expects them; if not, torch says what is wrong.
    """
    if isinstance(target, LazyLogits) or lazy.class_dim != _class_dim_of_loss(lazy):
        return False
    return tuple(target.shape) in (lazy.lead, tuple(lazy.shape))


def _flat_target(target: Tensor, lazy: LazyLogits) -> Tensor:
    """Labels, or probabilities with the words last, of the flat rows."""
    if tuple(target.shape) == lazy.lead:
        return target.reshape(-1)
    return target.movedim(_class_dim_of_loss(lazy), -1).reshape(-1, lazy.shape[lazy.class_dim])


def _is_plain_cross_entropy(function: Any, given: dict[str, Any]) -> bool:
    return function is F.cross_entropy and not given["label_smoothing"]


def _added_up(losses: Tensor, divisor: Tensor | int | None = None) -> Tensor:
    """In the width of the sum, as torch's own kernels add, and rounded once."""
    wide = losses.float() if losses.dtype in (torch.float16, torch.bfloat16) else losses
    total = wide.sum() if divisor is None else wide.sum() / divisor
    return total.to(losses.dtype)


def _label_losses(
    lazy: LazyLogits, flat: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """Minus the logarithm of each label's probability, which is what a cross-entropy of labels adds
    up.
    """
    ignored = flat == ignore_index
    # An ignored label need not be a word (-100 by default): any word will do for it.
    label = torch.where(ignored, 0, flat).unsqueeze(-1)
    losses = -lazy.reduce(LabelLogProbability(), (lazy.expression, Rows(label)), {})[0].squeeze(-1)
    if weight is not None:
        losses = losses * weight.detach()[label.squeeze(-1)]
    return losses.masked_fill(ignored, 0)


def _divisor(flat: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor | int:
    """What torch divides a mean by: the rows that count, or the weights of their classes."""
    if flat.dim() > 1:  # probabilities, of which every row counts
        return flat.shape[0]
    counts = flat != ignore_index
    if weight is None:
        return counts.sum()
    return weight.detach()[torch.where(counts, flat, 0)].mul(counts).sum()


@_handles("kl_div")
def _kl_div(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    given = _arguments(_KL_DIV, args, kwargs)
    if _is_deprecated(given) or not lazy.has_words_last:
        return NotImplemented
    operands = (_operand(lazy, given["input"]), _operand(lazy, given["target"]))
    if _refused((operands, _NO_KWARGS)):
        return NotImplemented
    extra = {"reduction": "none", "log_target": given["log_target"]}
    if given["reduction"] == "none":
        origin = (F.kl_div, (given["input"], given["target"]), extra)
        return lazy.apply(F.kl_div, operands, extra, origin)
    total = lazy.reduce(_kl_of_rows, operands, extra)[0].sum()
    if given["reduction"] == "sum":
        return total
    return total / (lazy.shape[0] if given["reduction"] == "batchmean" else lazy.numel())


def _kl_of_rows(logits: Tensor, target: Tensor, **extra: Any) -> Tensor:
    return F.kl_div(logits, target, **extra).sum(-1)


# -------------------------------------------------------------------------------------------- hooks


@_handles("register_hook")
def _register_hook(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Of FSDP2, which gathers parameters when a gradient comes; anybody else's gets a gradient of
    all numbers.
    """
    if str(getattr(args[1], "__module__", "")).startswith("torch.distributed"):
        return lazy.take_fsdp_hook(args[1])
    return NotImplemented
