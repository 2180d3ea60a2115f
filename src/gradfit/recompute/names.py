"""`name`: a value that a model names, so that scopes and plans can be told what becomes of it."""

from __future__ import annotations

import torch

from gradfit.arguments import read_tensor, read_text
from gradfit.recompute.scope import keep_if_named
from gradfit.tape.value_names import note_name


def name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Name a value, and return the tensor itself: what becomes of it can then be said by name.

    `CheckpointScope(..., keep=["qkv"])` keeps what is called so and rebuilds the rest;
    `gf.plan(profile, keep=["qkv"], rebuild=["mlp"])` and `gf.fit(..., offload=["mlp"])` plan around
    it. Outside of these a name does nothing. The same name may stand in every layer: it is of all
    these values.

    A view names the value that it lies in: the whole result of the operation that made it. A
    parameter or the batch is there all the time: its name is known to a profile, and `keep` has
    nothing to do. What is written in place afterwards is another value, without the name. In code
    that `torch.compile` compiles a name does nothing, since the values there are the compiler's.

    Args:
        tensor: a value that the forward makes.
        name: any text that is not empty.

    >>> x = torch.ones(8, 4, requires_grad=True)
    >>> from gradfit import CheckpointScope
    >>> with CheckpointScope("block", keep=["hidden"]) as scope:
    ...     hidden = name(x.exp(), "hidden")
    ...     loss = hidden.sin().sum()
    >>> scope.stats.kept_bytes  # of `hidden`; only the sine is rebuilt
    128
    >>> loss.backward()
    """
    if torch.compiler.is_compiling():
        return tensor
    read_tensor(tensor, "tensor", "a value that the forward makes")
    read_text(name, "name", "for example 'qkv'")
    keep_if_named(tensor, name)
    note_name(tensor, name)
    return tensor
