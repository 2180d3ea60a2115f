"""What kind of operation an aten overload is, decided once per overload from its schema and its
tags.

Schemas do not say everything: what they leave out is listed here, with the reason.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from gradfit._torch import direct, is_custom, is_operator, schema_of
from gradfit._torch_listen import aten_schemas, full_name
from gradfit._torch_one_operation import OneOperation

UNINITIALISED, CONSTANT = "uninitialised", "constant"  # no data yet; one number everywhere


@dataclass(frozen=True, slots=True)
class OpInfo:
    """How the recorder and the replay treat one operator."""

    view: bool = False  # results alias arguments, nothing is computed: not recorded
    # Arguments that it changes: positions, or names for keyword-only ones.
    writes: tuple[int | str, ...] = ()
    reads_written: bool = False  # whether what was in a written argument matters
    random: bool = False
    # What the results hold may be written unseen: UNINITIALISED, or CONSTANT.
    unwritten: str | None = None
    scratch: tuple[int, ...] = ()  # positions of hidden state it updates: replayed on copies
    recordable: bool = True
    simple: bool = False  # none of the above but recordable: the fast path
    call: Any = None
    generator: bool = False  # takes a generator
    # The position of a probability that, when zero, means that nothing is drawn.
    dropout: int | None = None
    dtype: bool = False  # makes tensors from nothing, of the default dtype unless told
    grad_mode: bool = False  # its results depend on whether gradients are enabled
    # One result, which is the first argument, and nothing else is written.
    writes_self: bool = False
    writes_lists: bool = False
    # The name of one that does not read what is in its tensors: see `shape_only.py`.
    shape_only: str = ""
    counts_first: bool = False  # changes the version counters of what it writes to before it runs
    collective: bool = False  # talks to other processes, and writes to what it is given
    mask: bool = False  # fills its tensor with zeros and ones: see `dropout_mask.py`
    # Whether each return is an argument, by the schema; None: it has no schema.
    aliased_returns: tuple[bool, ...] | None = None
    copies: bool = False  # only copies its one tensor
    # Its results lie in its argument's storage, each with a version counter of its own.
    chunks: bool = False

    @property
    def uninitialised(self) -> bool:
        """Whether the results hold no data yet."""
        return self.unwritten == UNINITIALISED


LOAD = OpInfo()  # bringing back a value that was moved out

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
    # composite ones, which are observed as a whole under inference mode
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
# Give out a nested tensor's own sizes. torch also asks for them in C++ that must not throw
# (`InputMetadata`, torch/csrc/autograd/input_metadata.cpp): an error there ends the process.
_UNDECLARED_VIEWS |= {
    "_nested_tensor_size",
    "_nested_tensor_strides",
    "_nested_tensor_storage_offsets",
}
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
        if isinstance(op, OneOperation):  # not among them: it may die
            return _info_of_one_operation(op)
        info = infos[id(op)] = _describe(op)
        _alive.append(op)
    return info


def _info_of_one_operation(function: OneOperation) -> OpInfo:
    """Of what torch.compile made of a graph, and of sums over tiles."""
    info: OpInfo | None = function.info
    if info is None:
        random, again = function.draws, function.can_run_again
        info = function.info = OpInfo(
            writes=function.mutated,
            reads_written=True,
            random=random,
            recordable=again,
            simple=again and not random,
            call=function,
        )
    return info


def view_names() -> list[str]:
    """The aten operators that only make views, without their namespace."""
    return [
        full_name(schema).removeprefix("aten::") for schema in aten_schemas() if _is_view(schema)
    ]


def _is_view(schema: Any) -> bool:
    namespace, name = schema.name.split("::")
    if namespace == "aten" and name in _METADATA | _UNDECLARED_VIEWS:
        return name in _UNDECLARED_VIEWS
    aliases = [argument.alias_info for argument in schema.arguments]
    return any(aliases) and not any(map(_is_write, aliases))


def _is_write(alias: Any) -> bool:
    return alias is not None and alias.is_write


def _describe(op: Any) -> OpInfo:
    """Ask the schema for what it says, and the tables above for what it leaves out."""
    if not is_operator(op):
        return OpInfo(recordable=False, call=op)
    schema = _Schema(schema_of(op))
    scratch = schema.scratch
    writes = schema.writes
    random = torch.Tag.nondeterministic_seeded in op.tags
    special = (
        schema.is_view, writes, scratch, schema.makes_from_nothing, schema.collective, random,
        schema.shape_only, schema.among(_CHUNKS),
    )  # fmt: skip
    return OpInfo(
        view=schema.is_view,
        writes=writes,
        reads_written=schema.reads_written,
        random=random,
        unwritten=schema.unwritten,
        scratch=scratch,
        recordable=schema.recordable,
        simple=schema.recordable and not any(special),
        call=direct(op),
        generator="generator" in schema.names,
        dropout=schema.position_of("dropout_p"),
        dtype=schema.makes_from_nothing,
        grad_mode=schema.name in _GRAD_MODE,
        writes_self=schema.writes_self,
        writes_lists=schema.writes_lists,
        shape_only=schema.shape_only,
        counts_first=is_custom(op),
        collective=schema.collective,
        mask=schema.draws_mask,
        aliased_returns=schema.aliased_returns,
        copies=schema.among({"clone"}),
        chunks=schema.among(_CHUNKS),
    )


class _Schema:
    """What one operator's schema says, each thing by its name."""

    def __init__(self, schema: Any) -> None:
        self.namespace, self.name = schema.name.split("::")
        self.names = [argument.name for argument in schema.arguments]
        self.is_view = _is_view(schema)
        self.collective = self.namespace in _COLLECTIVES
        self._arguments, self._returns = schema.arguments, schema.returns

    def among(self, names: Container[str]) -> bool:
        """Whether it is one of these operators of torch's own."""
        return self.namespace == "aten" and self.name in names

    def position_of(self, argument: str) -> int | None:
        return self.names.index(argument) if argument in self.names else None

    def _type_of(self, position: int) -> str:
        return str(self._arguments[position].type)

    @property
    def _written(self) -> list[int]:
        return [
            position
            for position, argument in enumerate(self._arguments)
            if _is_write(argument.alias_info)
        ]

    @property
    def scratch(self) -> tuple[int, ...]:
        return _RUNNING_STATISTICS[self.name] if self.among(_RUNNING_STATISTICS) else ()

    @property
    def writes(self) -> tuple[int | str, ...]:
        return tuple(
            self.names[position] if self._arguments[position].kwarg_only else position
            for position in self._written
            if position not in self.scratch
        )

    @property
    def reads_written(self) -> bool:
        """`out=` is written over, whatever was in it."""
        return not self.among(_FILLS) and not any(isinstance(where, str) for where in self.writes)

    @property
    def writes_self(self) -> bool:
        is_method = self.namespace == "aten" and self.name.endswith("_") and self.recordable
        return is_method and self._writes_first and len(self._returns) == 1

    @property
    def _writes_first(self) -> bool:
        """Only its first argument, which is one tensor."""
        return self.writes == (0,) and not self.writes_lists

    @property
    def writes_lists(self) -> bool:
        return any("List" in self._type_of(position) for position in self._written)

    @property
    def recordable(self) -> bool:
        if self.among(_METADATA) or self.name in _RNN_WITH_HIDDEN_STATE:
            return False
        return self.namespace in _REPLAYABLE

    @property
    def makes_from_nothing(self) -> bool:
        return self.namespace == "aten" and "dtype" in self.names and not self._takes_tensors

    @property
    def _takes_tensors(self) -> bool:
        return any("Tensor" in str(argument.type) for argument in self._arguments)

    @property
    def unwritten(self) -> str | None:
        if self.among(_EMPTY):
            return UNINITIALISED
        return CONSTANT if self.among(_CONSTANT) else None

    @property
    def shape_only(self) -> str:
        return self.name if self.among(_SHAPE_ONLY) else ""

    @property
    def draws_mask(self) -> bool:
        """Draws with one probability, not with a tensor of them."""
        return (
            self.among({"bernoulli_"})
            and "generator" in self.names
            and "Tensor" not in self._type_of(1)
        )

    @property
    def aliased_returns(self) -> tuple[bool, ...]:
        return tuple(returned.alias_info is not None for returned in self._returns)
