"""Where modules run as they are, tiled or not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from gradfit._torch import inside_forward_mode, inside_functorch


class _Thread(threading.local):
    is_whole = False


_thread = _Thread()


@contextlib.contextmanager
def whole_modules() -> Iterator[None]:
    """Inside, modules run as they are: in a tile, and where one is looked at."""
    before, _thread.is_whole = _thread.is_whole, True
    try:
        yield
    finally:
        _thread.is_whole = before


def runs_whole() -> bool:
    """Whether modules are to run as they are: in a tile, and for whoever follows operations and not
    tensors (`torch.func`, forward-mode differentiation, `torch.jit.trace`, a compiler).
    """
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    return _thread.is_whole or is_traced or inside_functorch() or inside_forward_mode()
