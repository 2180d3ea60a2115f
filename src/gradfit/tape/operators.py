"""What kind of operation an aten overload is, decided once per overload from its schema and its
tags.

Schemas do not say everything: what they leave out is listed here, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradfit._torch import direct, is_custom, is_operator, schema_of
from gradfit._torch_listen import aten_schemas, full_name

UNINITIALISED, CONSTANT = "uninitialised", "constant"  # no data yet; one number everywhere


@dataclass(frozen=True, slots=True)
class OpInfo:
    """How the recorder and the replay treat one operator."""

    view: bool  # results alias arguments, nothing is computed: not recorded
    writes: tuple[int | str, ...]  # arguments it changes: positions, or names for keyword-only ones
    reads_written: bool  # whether what was in a written argument matters
    random: bool
    unwritten: str | None  # what the results hold may be written unseen: UNINITIALISED, or CONSTANT
    scratch: tuple[int, ...]  # positions of hidden state it updates: replayed on copies
    recordable: bool
    simple: bool = False  # none of the above but recordable: the fast path
    call: Any = None
    generator: bool = False  # takes a generator
    # the position of a probability that, when zero, means that nothing is drawn
    dropout: int | None = None
    dtype: bool = False  # makes tensors from nothing, of the default dtype unless told
    grad_mode: bool = False  # its results depend on whether gradients are enabled
    # one result, which is the first argument, and nothing else is written
    writes_self: bool = False
    writes_lists: bool = False
    # the name of one that does not read what is in its tensors: see shape_only.py
    shape_only: str = ""
    counts_first: bool = False  # changes the version counters of what it writes to before it runs
    collective: bool = False  # talks to other processes, and writes to what it is given
    mask: bool = False  # fills its tensor with zeros and ones: see dropout_mask.py
    # whether each is an argument, by the schema; None: it has none
    aliased_returns: tuple[bool, ...] | None = None
    copies: bool = False  # only copies its one tensor
    # its results lie in its argument's storage, each with a version counter of its own
    chunks: bool = False

    @property
    def uninitialised(self) -> bool:
        """Whether the results hold no data yet."""
        return self.unwritten == UNINITIALISED


# Bringing back a value that was moved out.
LOAD = OpInfo(
    view=False,
    writes=(),
    reads_written=False,
    random=False,
    unwritten=None,
    scratch=(),
    recordable=True,
)

# These overwrite all of `self` without reading it.
_FILLS = {
    "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_",
    "cauchy_", "geometric_", "log_normal_",
}  # fmt: skip
_EMPTY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "empty_quantized",
}
_CONSTANT = {
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "full",
    "full_like",
    "new_full",
}
# Running statistics are updated in training though the schema says that nothing is mutated.
_RUNNING_STATISTICS = {
    "native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4),
    "_native_batch_norm_legit": (3, 4), "_batch_norm_with_update": (3, 4),
    "batch_norm_gather_stats": (3, 4), "batch_norm_gather_stats_with_counts": (3, 4),
    # composite ones, which are heard as a whole under inference mode
    "batch_norm": (3, 4), "instance_norm": (3, 4), "_batch_norm_impl_index": (3, 4),
}  # fmt: skip
# These change a tensor's storage or geometry, not its values.
_METADATA = {
    "set_",
    "resize_",
    "resize_as_",
    "as_strided_",
    "squeeze_",
    "unsqueeze_",
    "t_",
    "transpose_",
    "swapdims_",
    "swapaxes_",
    "_resize_output_",
    "detach_",
    "requires_grad_",
    "rename_",
    "set_data",
    "record_stream",
    "_reshape_copy_",
    "resize",
    "set",
    "squeeze_.dims",
}
# These look at the shape of their tensor, not at what is in it.
_SHAPE_ONLY = {
    "empty_like", "new_empty", "new_empty_strided", "zeros_like", "new_zeros", "ones_like",
    "new_ones", "full_like", "new_full", "rand_like", "randn_like",
}  # fmt: skip
_RNN_WITH_HIDDEN_STATE = {"_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"}
# Makes the workspace that its backward needs only where gradients are enabled.
_GRAD_MODE = {"mkldnn_rnn_layer"}
# Gives back its argument's storage though the schema says that it is new.
_UNDECLARED_VIEWS = {"_unsafe_view"}
# Likewise, and each result counts its writes by itself (`TensorShape.cpp`, `unsafe_split`): RNN
# cells write their gates side by side that way.
_CHUNKS = {"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
# torch's own operators. Others may be written in Python, which runs once: their results are kept.
_REPLAYABLE = {
    "aten",
    "prims",
    "quantized",
    "mkldnn",
    "mkldnn_prepacked",
    "mkl",
    "inductor",
    "torchvision",
    "torchaudio",
}
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}

infos: dict[int, OpInfo] = {}  # by address: hashing an operator runs Python code
_alive: list[Any] = []  # the operators in `infos`: their addresses must not be used again


def info_of(op: Any) -> OpInfo:
    """The (cached) description of an operator."""
    info = infos.get(id(op))
    if info is None:
        info = infos[id(op)] = _describe(op)
        _alive.append(op)
    return info


def view_names() -> list[str]:
    """The aten operators that only make views, without their namespace."""
    return [
        full_name(schema).removeprefix("aten::") for schema in aten_schemas() if _is_view(schema)
    ]


def _is_view(schema: Any) -> bool:
    namespace, name = schema.name.split("::")
    if namespace == "aten" and (name in _METADATA or name in _UNDECLARED_VIEWS):
        return name in _UNDECLARED_VIEWS
    aliases = [
        argument.alias_info for argument in schema.arguments if argument.alias_info is not None
    ]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _describe(op: Any) -> OpInfo:
    if not is_operator(op):
        return OpInfo(
            view=False, writes=(), reads_written=False, random=False, unwritten=None, scratch=(),
            recordable=False, call=op,
        )  # fmt: skip
    schema = schema_of(op)
    namespace, name = schema.name.split("::")
    aten = namespace == "aten"
    scratch = _RUNNING_STATISTICS.get(name, ()) if aten else ()
    metadata = aten and name in _METADATA
    writes: list[int | str] = [
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and position not in scratch
    ]
    names = [argument.name for argument in schema.arguments]
    view = _is_view(schema)
    random = torch.Tag.nondeterministic_seeded in op.tags
    recordable = namespace in _REPLAYABLE and not metadata and name not in _RNN_WITH_HIDDEN_STATE
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    makes_from_nothing = aten and not takes_tensors and "dtype" in names
    collective = namespace in _COLLECTIVES
    shape_only = name if aten and name in _SHAPE_ONLY else ""
    plain = recordable and not (view or writes or scratch or makes_from_nothing or collective)
    return OpInfo(
        view=view,
        writes=tuple(writes),
        reads_written=not (aten and name in _FILLS) and not any(isinstance(w, str) for w in writes),
        random=random,
        unwritten=(
            UNINITIALISED
            if aten and name in _EMPTY
            else CONSTANT
            if aten and name in _CONSTANT
            else None
        ),
        scratch=scratch,
        recordable=recordable,
        simple=plain and not random and not shape_only and not (aten and name in _CHUNKS),
        call=direct(op),
        generator="generator" in names,
        dropout=names.index("dropout_p") if "dropout_p" in names else None,
        dtype=makes_from_nothing,
        grad_mode=name in _GRAD_MODE,
        writes_self=aten
        and writes == [0]
        and recordable
        and len(schema.returns) == 1
        and name.endswith("_")
        and "List" not in str(schema.arguments[0].type),
        writes_lists=any(
            argument.alias_info is not None
            and argument.alias_info.is_write
            and "List" in str(argument.type)
            for argument in schema.arguments
        ),
        shape_only=shape_only,
        counts_first=is_custom(op),
        collective=collective,
        aliased_returns=tuple(returned.alias_info is not None for returned in schema.returns),
        copies=aten and name == "clone",
        chunks=aten and name in _CHUNKS,
        mask=aten
        and name == "bernoulli_"
        and "generator" in names
        and "Tensor" not in str(schema.arguments[1].type),
    )
