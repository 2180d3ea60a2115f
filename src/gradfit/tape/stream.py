"""The one definition of an operation: profiles, plans, recordings and audits number them by it.

An *operation* is a call of an operator, in a forward, that is no view by its schema and that writes
or returns a tensor. Its *results* are the arguments that it writes, then the tensors that it
returns, without those that are its arguments by its schema. Addresses play no part in it: a result
that happens to lie in memory that was there before gets a number, too, and no bytes. The drawing of
a dropout mask takes two numbers: see `dropout_mask.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from gradfit.tape.operators import OpInfo
from gradfit.tape.storage import flatten, written_tensors

_Tensor = torch.Tensor


def results_of(info: OpInfo, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
    """An operation's results, in the order of their numbers; none if it is not one."""
    if info.view:
        return []
    results = written_tensors(info, args, kwargs) if info.writes else []
    aliased = info.aliased_returns
    is_new = aliased is not None and len(aliased) > 1 and True not in aliased
    for returned in out if is_new else _new_returns(info, out):
        if isinstance(returned, _Tensor):
            results.append(returned)
        elif isinstance(returned, list | tuple):
            results.extend(tensor for tensor in flatten(returned) if isinstance(tensor, _Tensor))
    return results


def _new_returns(info: OpInfo, out: Any) -> Any:
    if info.aliased_returns is None:
        return (out,)
    returned = out if len(info.aliased_returns) > 1 else (out,)
    if True not in info.aliased_returns:
        return returned
    return [
        one for one, aliased in zip(returned, info.aliased_returns, strict=False) if not aliased
    ]


def new_bytes(tensor: torch.Tensor) -> int:
    """What a result's storage takes; nothing for one that has none of its own (a sparse tensor)."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return 0
