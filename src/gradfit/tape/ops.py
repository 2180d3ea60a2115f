"""What kind of operation an aten overload is, decided once per overload from its schema and its tags.

Schemas do not say everything: what they leave out is listed here, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradfit._torch import schema_of


@dataclass(frozen=True, slots=True)
class OpInfo:
    """How the recorder and the replay treat one operator."""

    view: bool  # results alias arguments, nothing is computed: not recorded
    writes: tuple[int | str, ...]  # arguments it changes: positions, or names for keyword-only ones
    reads_written: bool  # whether what was in a written argument matters
    random: bool
    uninitialised: bool  # the results hold no data yet
    scratch: tuple[int, ...]  # positions of hidden state it updates: replayed on copies
    recordable: bool


# These overwrite all of `self` without reading it.
_FILLS = {
    "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "cauchy_",
    "geometric_", "log_normal_",
}  # fmt: skip
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "empty_quantized"}
# Running statistics are updated in training though the schema says that nothing is mutated.
_RUNNING_STATISTICS = {
    "native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4),
    "_native_batch_norm_legit": (3, 4), "_batch_norm_with_update": (3, 4),
    "batch_norm_gather_stats": (3, 4), "batch_norm_gather_stats_with_counts": (3, 4),
}  # fmt: skip
# These change a tensor's storage or geometry, not its values.
_METADATA = {"set_", "resize_", "resize_as_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_",
             "swapaxes_", "_resize_output_", "detach_", "requires_grad_", "rename_", "set_data", "record_stream",
             "_reshape_copy_", "resize", "set", "squeeze_.dims"}  # fmt: skip
_RNN_WITH_HIDDEN_STATE = {"_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"}

_known: dict[Any, OpInfo] = {}


def info_of(op: Any) -> OpInfo:
    """The (cached) description of an operator."""
    info = _known.get(op)
    if info is None:
        info = _known[op] = _describe(op)
    return info


def _describe(op: Any) -> OpInfo:
    schema = schema_of(op)
    name = schema.name.split("::")[-1]
    aten = schema.name.startswith("aten::")
    scratch = _RUNNING_STATISTICS.get(name, ()) if aten else ()
    writes: list[int | str] = []
    aliased = False
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None:
            continue
        if alias.is_write:
            if position not in scratch:
                writes.append(argument.name if argument.kwarg_only else position)
        else:
            aliased = True
    return OpInfo(
        view=aliased and not writes and not (aten and name in _METADATA),
        writes=tuple(writes),
        reads_written=not (aten and name in _FILLS) and not any(isinstance(w, str) for w in writes),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        uninitialised=aten and name in _EMPTY,
        scratch=scratch,
        recordable=not (aten and name in _METADATA) and name not in _RNN_WITH_HIDDEN_STATE,
    )
