"""The most bytes that an operation can allocate for its results, told from its arguments alone.

It is a bound, and never too small: an element-wise operation makes no more than its arguments
broadcast to, a product no more than rows times columns, a reduction or a normalisation no more than
what it is given. Where there is room for that much, nobody need know the exact number, for which
torch has to run the operation on fake tensors: some 2 ms, against 5 µs here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from gradfit._torch import is_operator, is_ragged, schema_of
from gradfit._torch_one_operation import OneOperation
from gradfit.tape.operators import info_of

_WIDEST = 16  # bytes of the widest element there is: complex128

_TYPES = {torch.dtype, complex}  # arguments that may make results wider
_REAL = {torch.float32, torch.float64}
# operators, beside those that work element by element, whose results are of their arguments' type
_SAME_TYPE = {
    f"aten::{name}"
    for name in (
        "mm", "bmm", "addmm", "baddbmm", "native_layer_norm", "native_layer_norm_backward",
        "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "sum",
        "mean", "convolution", "convolution_backward", "cat", "stack",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward", "linalg_vector_norm",
    )
}  # fmt: skip

# operators whose results are of their first argument's type, whatever positions and targets are
_TYPE_OF_FIRST = {
    f"aten::{name}"
    for name in (
        "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
        "embedding", "embedding_dense_backward", "index", "index_select", "gather", "index_add",
        "scatter", "scatter_add", "scatter_reduce", "slice_backward", "select_backward",
    )
}  # fmt: skip

# How many elements the results of an operation have at most, by its arguments.
Rule = Callable[[Sequence[Any]], int]


def most_bytes(func: Any, args: Sequence[Any], kwargs: Any) -> int | None:
    """The most bytes that an operation's new results can take; None where no rule tells.

    >>> x = torch.ones(8, 4)
    >>> most_bytes(torch.ops.aten.mm.default, (x, torch.ones(4, 2)), {})  # 16 numbers of 4 bytes
    64
    """
    known = _rules.get(id(func))
    if known is None:
        if isinstance(func, OneOperation):  # its address may be another's later
            return None
        info_of(func)  # which sees to it that the address is not used again
        known = _rules[id(func)] = _rule_of(func), _typed_by(func)
    rule, typed_by = known
    if rule is _unknown:
        return None
    args = (*args, *kwargs.values()) if kwargs else args
    tensors = _tensors(args)
    if not _are_dense(tensors):
        return None
    if rule is _nothing:  # most of what an optimizer runs
        return 0
    number = rule(args)
    return number * _most_width(args, tensors, typed_by) if number else 0


def _are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """A sparse one has fewer elements than its shape, and a nested one may have no shape."""
    return all(tensor.layout is torch.strided and not is_ragged(tensor) for tensor in tensors)


def _most_width(args: Sequence[Any], tensors: Sequence[torch.Tensor], typed_by: _TypedBy) -> int:
    """Bytes of one element of the results, at most."""
    if not tensors:  # what is made of none is of the type that is asked for
        return max((one.itemsize for one in args if type(one) is torch.dtype), default=_WIDEST)
    if typed_by is _TypedBy.FIRST:
        tensors = tensors[:1]
    types = {tensor.dtype for tensor in tensors}
    is_plain = typed_by is not _TypedBy.UNKNOWN and types <= _REAL
    if not is_plain or not _TYPES.isdisjoint(map(type, args)):
        return _WIDEST
    return max(dtype.itemsize for dtype in types)


class _TypedBy(enum.Enum):
    """Which arguments say of what type real results of four bytes or more are; beside them there
    may be truth values.
    """

    UNKNOWN = enum.auto()
    ALL = enum.auto()
    FIRST = enum.auto()


def _typed_by(func: Any) -> _TypedBy:
    if not is_operator(func):
        return _TypedBy.UNKNOWN
    name = schema_of(func).name
    if name in _TYPE_OF_FIRST:
        return _TypedBy.FIRST
    is_by_all = torch.Tag.pointwise in func.tags or name in _SAME_TYPE
    return _TypedBy.ALL if is_by_all else _TypedBy.UNKNOWN


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """Of an operation's arguments, those in lists too."""
    tensors: list[torch.Tensor] = []
    for argument in args:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, list | tuple):
            tensors += [item for item in argument if isinstance(item, torch.Tensor)]
    return tensors


def _unknown(args: Sequence[Any]) -> int:
    raise AssertionError("no rule")


def _nothing(args: Sequence[Any]) -> int:
    return 0


def _broadcast(args: Sequence[Any]) -> int:
    return _broadcast_size([tensor.shape for tensor in _tensors(args)])


def _broadcast_size(shapes: Sequence[Sequence[int]]) -> int:
    if shapes and all(shape == shapes[0] for shape in shapes):
        return math.prod(shapes[0])
    return math.prod(map(max, zip_longest(*map(reversed, shapes), fillvalue=1)))


def _product(args: Sequence[Any]) -> int:
    """Of the last two tensors; what comes before is added to it, and may only be broadcast."""
    left, right = _tensors(args)[-2:]
    return math.prod(left.shape[:-1]) * right.shape[-1]


def _largest(args: Sequence[Any]) -> int:
    """A sum over nothing is something: so a dimension of 0 counts as one of 1."""
    return max((tensor.numel() or _at_least_one(tensor) for tensor in _tensors(args)), default=1)


def _at_least_one(tensor: torch.Tensor) -> int:
    return math.prod(n or 1 for n in tensor.shape)


def _sum_of_all(args: Sequence[Any]) -> int:
    return sum(tensor.numel() for tensor in _tensors(args))


def _rows_looked_up(args: Sequence[Any]) -> int:
    table, positions = args[:2]
    return int(positions.numel()) * int(table.shape[-1])


def _table(args: Sequence[Any]) -> int:
    gradient, _, rows = args[:3]
    return int(rows) * int(gradient.shape[-1])


def _picked(args: Sequence[Any]) -> int:
    """As many slices as positions; masks, of which only the data tell how many, count in full."""
    source, positions = args[:2]
    masks = [index for index in positions if _is_mask(index)]
    shapes = [index.shape for index in positions if index is not None and not _is_mask(index)]
    picked = _broadcast_size(shapes) * math.prod(mask.numel() for mask in masks)
    return int(picked * math.prod(_sizes_left(source.shape, positions)))


def _sizes_left(shape: Sequence[int], positions: Sequence[torch.Tensor | None]) -> list[int]:
    """A tensor's sizes, with 1 where an index picks from a dimension; a mask picks from several."""
    sizes, dim = list(shape), 0
    for index in positions:
        taken = index.dim() if index is not None and _is_mask(index) else 1
        if index is not None:
            sizes[dim : dim + taken] = [1] * taken
        dim += taken
    return sizes


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _slices(args: Sequence[Any]) -> int:
    source, dim, positions = args[:3]
    sizes: list[int] = list(source.shape) or [1]
    sizes[dim] = positions.numel()
    return math.prod(sizes)


def _padded(args: Sequence[Any]) -> int:
    """Of the last dimensions, each two paddings, the last dimension's first."""
    source, padding = args[:2]
    sizes: list[int] = list(source.shape)
    for place, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True), 1):
        sizes[-place] += before + after
    return math.prod(max(0, size) for size in sizes)


def _convolved(args: Sequence[Any]) -> int:
    """Each position of the input, with its padding, has one of the output; a transposed one has as
    many as its stride, and its kernel's beside them.
    """
    source, weight, _, stride, padding, dilation, transposed, extra, groups = args[:9]
    channels, sizes = weight.shape[0], [n + 2 * max(padding) for n in source.shape[2:]]
    if transposed:
        channels, beside = weight.shape[1] * groups, max(dilation) * max(weight.shape) + max(extra)
        sizes = [n * max(stride) + beside for n in source.shape[2:]]
    return int(source.shape[0] * channels * math.prod(sizes))


def _recurrent_workspace(args: Sequence[Any]) -> int:
    """oneDNN's workspace holds gates and states of each step, each padded to whole cache lines and
    begun on a page of its own. It was at most 65 bytes for each padded element of the states
    (LSTM, torch 2.10 to 2.15); torch's fake kernel leaves it out
    (`mkldnn_rnn_layer` in torch/_meta_registrations.py).
    """
    steps, rows, width = args[0].shape
    padded = -(-max(width, args[1].shape[0] // 4, args[2].shape[-1]) // 16) * 16
    pages = 8 * 4096 // _WIDEST
    return int(pages + (steps + 1) * rows * padded * 5 // 4)


def _written_out(args: Sequence[Any]) -> int:
    """The size is the second argument."""
    return math.prod(args[1])


def _size(args: Sequence[Any]) -> int:
    return math.prod(args[0])


def _counted_up(args: Sequence[Any]) -> int:
    """From 0, or from the first number to the second, in steps of the third; what torch will refuse
    takes nothing.
    """
    numbers = [one for one in args if type(one) in (int, float)] or [1]  # of `arange(True)`
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    times = (end - start) / step if step else 0.0
    return max(0, math.ceil(times)) if math.isfinite(times) else 0


def _distances(args: Sequence[Any]) -> int:
    """Of each row of one to each row of the other."""
    left, right = args[:2]
    batch = _broadcast_size([left.shape[:-2], right.shape[:-2]])
    return int(batch * left.shape[-2] * right.shape[-2])


def _of_each_target(args: Sequence[Any]) -> int:
    """A loss for each; the other result is a single number."""
    return int(args[1].numel()) or 1


def _number_of_tensors(args: Sequence[Any]) -> int:
    return len(args[0])


_BY_NAME: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    # each result is as large as some argument, or smaller
    **dict.fromkeys(
        (
            "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
            "native_batch_norm", "native_batch_norm_backward", "_softmax", "_softmax_backward_data",
            "_log_softmax", "_log_softmax_backward_data", "nll_loss_backward",
            "nll_loss2d_backward", "mse_loss", "mse_loss_backward", "native_dropout",
            "_to_copy", "copy", "index_add", "scatter_add", "masked_fill", "zeros_like",
            "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "sum", "mean",
            "amax", "amin", "linalg_vector_norm", "norm", "cumsum", "isfinite", "tril", "triu",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward", "all", "any", "gather",
            "scatter", "flip", "roll", "sort", "topk", "argmax", "argmin", "max", "min",
            "logsumexp", "dot", "mv", "cumprod", "var", "std", "var_mean", "convolution_backward",
            "scatter_reduce",
        ),
        _largest,
    ),
    **dict.fromkeys(("cat", "stack"), _sum_of_all),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _of_each_target),
    "_foreach_norm": _number_of_tensors,
    "arange": _counted_up,
    **dict.fromkeys(("_euclidean_dist", "_cdist_forward"), _distances),
    "convolution": _convolved,
    "mkldnn_rnn_layer": _recurrent_workspace,  # times its four results
    "scalar_tensor": lambda args: 1,
    "index": _picked,
    "index_select": _slices,
    "constant_pad_nd": _padded,
    **dict.fromkeys(("zeros", "ones", "empty", "full", "rand", "randn"), _size),
    "embedding": _rows_looked_up,
    "embedding_dense_backward": _table,
    "slice_backward": _written_out,
    "select_backward": _written_out,
    "new_zeros": _written_out,
    "new_empty": _written_out,
    "new_ones": _written_out,
    "new_full": _written_out,
}  # fmt: skip

# By an operator's address, since hashing an operator runs Python code: its rule, and what says of
# which type its results are.
_rules: dict[int, tuple[Rule, _TypedBy]] = {}


def _rule_of(func: Any) -> Rule:
    """The rule of an operator; `_unknown` if there is none."""
    if not is_operator(func):
        return _unknown
    schema, info = schema_of(func), info_of(func)
    if any(isinstance(where, str) for where in info.writes):
        return _unknown  # `out=`, which may be resized
    if info.writes_self or info.chunks or not _returns_tensors(schema):
        return _nothing
    if info.writes:
        return _unknown
    return _times(len(schema.returns), _rule_of_one_result(func, schema))


def _returns_tensors(schema: Any) -> bool:
    return any("Tensor" in str(one.type) for one in schema.returns)


def _rule_of_one_result(func: Any, schema: Any) -> Rule:
    namespace, name = schema.name.split("::")
    if namespace != "aten":
        return _unknown
    if name.startswith("_foreach_"):
        # a result for each tensor of a list, as large as it at most
        return _BY_NAME.get(name, _sum_of_all)
    return _broadcast if torch.Tag.pointwise in func.tags else _BY_NAME.get(name, _unknown)


def _times(results: int, rule: Rule) -> Rule:
    if results == 1 or rule is _unknown:
        return rule
    return lambda args: results * rule(args)
