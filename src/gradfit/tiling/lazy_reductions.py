"""What makes a few numbers of each row of lazy logits: done tile by tile."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gradfit.tiling.expression import Constant, Rows
from gradfit.tiling.lazy import LazyLogits, handlers
from gradfit.tiling.lazy_handlers import bound, functions_named, handles, over_words, rows_back


def _reduction(name: str, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """`name(x, dim, keepdim)`, of one result or two."""
    dim, keepdim, dtype = bound(("dim", "keepdim", "dtype"), args, kwargs, (None, False, None))
    if not over_words(lazy, dim) or set(kwargs) - {"dim", "keepdim", "dtype"}:
        return NotImplemented
    extra = {"dim": -1, "keepdim": bool(keepdim)} | ({} if dtype is None else {"dtype": dtype})
    results = rows_back(lazy, lazy.reduce(getattr(torch, name), (lazy.expression,), extra))
    if len(results) == 1:
        return results[0]
    return getattr(torch.return_types, name)(tuple(results))


for _name in ("logsumexp", "argmax", "argmin"):
    handles(_name)(functools.partial(_reduction, _name))


def _of_everything(name: str, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Of one dimension, or of all numbers: of each row, and of these."""
    if len(args) > 1 or kwargs:
        return _reduction(name, lazy, args, kwargs)
    # Of several that are the largest, torch gives each the same part of the gradient.
    if name not in ("sum", "mean", "any", "all") and lazy.requires_grad:
        return NotImplemented
    function = getattr(torch, "sum" if name == "mean" else name)
    of_rows = lazy.reduce(_of_row, (lazy.expression,), {"function": function})[0]
    return function(of_rows) / lazy.numel() if name == "mean" else function(of_rows)


def _of_row(logits: Tensor, function: Any) -> Any:
    result = function(logits, dim=-1)
    return result if isinstance(result, Tensor) else result.values


for _name in ("sum", "mean", "any", "all", "max", "min", "amax", "amin"):
    handles(_name)(functools.partial(_of_everything, _name))


@handles("topk")
def _topk(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    k, dim, largest, is_sorted = bound(
        ("k", "dim", "largest", "sorted"), args, kwargs, (None, -1, True, True)
    )
    if not isinstance(k, int) or not over_words(lazy, dim):
        return NotImplemented
    extra = {"k": k, "dim": -1, "largest": largest, "sorted": is_sorted}
    results = rows_back(lazy, lazy.reduce(torch.topk, (lazy.expression,), extra))
    return torch.return_types.topk((results[0], results[1]))


@handles("gather", "take_along_dim")
def _gather(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if _is_take_along_dim(args, kwargs):
        index, dim = bound(("indices", "dim"), args, kwargs, (None, None))
    else:
        dim, index = bound(("dim", "index"), args, kwargs, (None, None))
    if not isinstance(index, Tensor) or not over_words(lazy, dim):
        return NotImplemented
    words_last = index.movedim(lazy.class_dim, -1) if index.dim() == lazy.dim() else index
    if isinstance(index, LazyLogits) or tuple(words_last.shape[:-1]) != lazy.lead:
        return NotImplemented
    rows = Rows(words_last.contiguous(), lead=len(lazy.lead))
    return rows_back(lazy, lazy.reduce(torch.gather, (lazy.expression, -1, rows), {}))[0]


def _is_take_along_dim(args: Any, kwargs: Any) -> bool:
    """Of the two it is the one that takes the index first."""
    is_index_first = len(args) > 1 and isinstance(args[1], Tensor) and "index" not in kwargs
    return is_index_first or "indices" in kwargs


def _product(function: Any, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Of every row with the same matrix or vector: probabilities with embeddings, say."""
    if kwargs or args[0] is not lazy or not lazy.has_words_last or not _is_same_for_rows(args[1]):
        return NotImplemented
    expression = (lazy.expression, Constant(args[1]))
    return rows_back(lazy, lazy.reduce(function, expression, {}))[0]


def _is_same_for_rows(factor: Any) -> bool:
    return isinstance(factor, Tensor) and not isinstance(factor, LazyLogits) and factor.dim() <= 2


# Not `linear`: what another layer follows is no projection to words.
for _function in functions_named("matmul", "__matmul__"):
    handlers[_function] = functools.partial(_product, _function)
