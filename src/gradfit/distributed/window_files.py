"""A window's tensors in files, one per rank, that any number of ranks can read: safetensors, and
nothing that runs.

Each rank writes the parts of tensors that it holds; where all ranks have the same, the first one
does. A file's header says which parts of what they are, how many ranks there were, and of which
save it is: files of two saves are told apart. `torch.distributed.checkpoint` would do as much, but
writes its index with pickle, and whoever reads a pickle runs what is in it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradfit._torch_distributed import shard_of
from gradfit.errors import RankFailed, StateError, StateNotWritten

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Tells all ranks a record, and gives every rank's, in the order of the ranks."""

_FORMAT = "gradfit-window-1"
_MOST_RANKS = 2**16
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SavedPart(NamedTuple):
    """A part of a tensor in a file: of which shape the whole is, and where the part begins."""

    file: Any
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


class WindowFiles:
    """A saved window, open for reading."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(path)
        files = self._open_all()
        self.window = files[0][1]["window"]
        self.parts: dict[str, list[SavedPart]] = {}
        for file, header in files:
            for name, (shape, offset) in header["parts"].items():
                self.parts.setdefault(name, []).append(_part(file, name, shape, offset))
        self._check_alike()

    def _check_alike(self) -> None:
        for name, parts in self.parts.items():
            if len({(part.shape, part.dtype) for part in parts}) > 1:
                raise StateError(
                    f"The ranks' parts of {name!r} are of different tensors. Load one state, not"
                    " two."
                )

    def _open_all(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each rank's file and its header, all of one save."""
        first = self._open(0)
        files = [first, *(self._open(rank) for rank in range(1, first[1]["ranks"]))]
        for rank, (_, header) in enumerate(files):
            if (header["ranks"], header["save"]) != (first[1]["ranks"], first[1]["save"]):
                raise StateError(
                    f"The files in {str(self._folder)!r} are of different saves: rank {rank}'s is"
                    " not that of the first. Load one that was written to its end."
                )
        return files

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill a tensor, or this rank's shard of one, with what the files have of it."""
        shard = shard_of(target)
        local, start = (target, (0,) * target.dim()) if shard is None else shard
        missing = torch.ones(local.shape, dtype=torch.bool, device="cpu")
        for part in self.parts[name]:
            common = _in_common(start, local.shape, part)
            if common is not None:
                mine, theirs = common
                local[mine] = _content_of(part, theirs).to(local.device)
                missing[mine] = False
        if bool(missing.any()):
            raise StateError(
                f"The files in {str(self._folder)!r} do not have all of {name!r}:"
                f" {int(missing.sum())} elements are missing. Put the files of all ranks there."
            )

    def _open(self, rank: int) -> tuple[Any, dict[str, Any]]:
        path = file_of(self._folder, rank)
        try:
            _require_regular(path)
            file: Any = safe_open(path, framework="pt", device="cpu")
            header = json.loads((file.metadata() or {}).get("gradfit", "null"))
        except OSError as error:
            raise StateError(
                f"There is no state of rank {rank} in {str(self._folder)!r}: {error.strerror}."
            ) from None
        except StateError:  # which is a ValueError, too
            raise
        except (SafetensorError, ValueError, RecursionError) as error:
            raise StateError(f"{str(path)!r} is not a window of gradfit ({error}).") from None
        _check_header(header, str(path))
        return file, header


def _require_regular(path: Path) -> None:
    """A link or a pipe is nothing that `save` has written: reading it may reach elsewhere, or
    wait.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise StateError(f"{str(path)!r} is not a regular file.")


_Slices = tuple[slice, ...]


def _content_of(part: SavedPart, slices: _Slices) -> Tensor:
    content = part.file.get_slice(part.name)
    selected: Tensor = content[slices] if slices else content[...]  # no dimensions, no slices
    return selected


def _in_common(
    start: Sequence[int], size: Sequence[int], part: SavedPart
) -> tuple[_Slices, _Slices] | None:
    """Where a shard and a part of a file overlap, in each; None if they do not."""
    mine, theirs = [], []
    for a, n, b, m in zip(start, size, part.offset, part.size, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if high <= low:
            return None
        mine.append(slice(low - a, high - a))
        theirs.append(slice(low - b, high - b))
    return tuple(mine), tuple(theirs)


_FIELDS = {"format": str, "ranks": int, "save": str, "window": str, "parts": dict}


def _has_fields(header: Any) -> bool:
    return isinstance(header, dict) and all(
        type(header.get(name)) is kind for name, kind in _FIELDS.items()
    )


def _is_place(place: Any) -> bool:
    """A shape, and where in it something begins."""
    return isinstance(place, list) and len(place) == 2 and all(map(_are_counts, place))


def _are_counts(numbers: Any) -> bool:
    # By type: True is an instance of int.
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _check_header(header: Any, path: str) -> None:
    if not _has_fields(header):
        raise StateError(f"{path!r} is not a window of gradfit: its header is another's.")
    if header["format"] != _FORMAT or not 1 <= header["ranks"] <= _MOST_RANKS:
        raise StateError(
            f"{path!r} is not a window of this gradfit: format {header['format']!r:.40}."
        )
    for name, place in header["parts"].items():
        if not _is_place(place):
            raise StateError(f"{path!r} does not say where {name!r:.60} belongs.")


def _part(file: Any, name: str, shape: list[int], offset: list[int]) -> SavedPart:
    try:
        content = file.get_slice(name)
        size, dtype = tuple(content.get_shape()), _DTYPES[content.get_dtype()]
    except (SafetensorError, KeyError):
        raise StateError(
            f"A file of the state has no gradient {name!r:.60}, though it says so."
        ) from None
    if not _is_inside(size, offset, shape):
        raise StateError(
            f"The state's {name!r:.60} reaches beyond its tensor: {size} at {offset} of {shape}."
        )
    return SavedPart(file, name, tuple(shape), tuple(offset), size, dtype)


def _is_inside(size: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> bool:
    return len(shape) == len(offset) == len(size) and all(
        at + count <= whole for at, count, whole in zip(offset, size, shape, strict=True)
    )


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's part of a window is."""
    return folder / f"window-{rank:05d}.safetensors"


def write_window(
    path: str | os.PathLike[str],
    rank: int,
    tensors: dict[str, Tensor],
    window: str,
    exchange: Exchange,
) -> None:
    """Write a window, by all ranks together: no rank's file takes the place of an old one before
    all are written.
    """
    mine, parts = _held_here(tensors, rank)
    records = exchange({"kind": "save", "save": os.urandom(8).hex()})
    header = {
        "format": _FORMAT,
        "ranks": len(records),
        "save": records[0]["save"],
        "window": window,
        "parts": parts,
    }
    target = file_of(Path(path), rank)
    temporary = target.with_name(f".{target.name}.tmp")
    failed = _write(temporary, mine, header)
    failures = failures_in(exchange({"kind": "saved", "failed": failed}))
    if failures:
        temporary.unlink(missing_ok=True)
        text = (
            f"The window could not be written to {str(path)!r} ({failures}). What was there before"
            " is whole."
        )
        raise StateNotWritten(text) if failed else RankFailed(text)
    os.replace(temporary, target)
    exchange({"kind": "in place"})  # nobody reads before all files are of this save


def failures_in(records: list[dict[str, Any]]) -> str:
    """What has failed on which rank, from what each has said."""
    return "; ".join(
        f"rank {rank}: {one['failed']}" for rank, one in enumerate(records) if one["failed"]
    )


def _held_here(
    tensors: dict[str, Tensor], rank: int
) -> tuple[dict[str, Tensor], dict[str, list[list[int]]]]:
    """What this rank writes: its shards, and the first rank what all have alike; with the shape of
    the whole, and where it begins there.
    """
    mine: dict[str, Tensor] = {}
    parts: dict[str, list[list[int]]] = {}
    for name, tensor in tensors.items():
        shard = shard_of(tensor)
        if shard is None and rank == 0:
            shard = (tensor.detach(), (0,) * tensor.dim())
        if shard is not None:
            mine[name], parts[name] = shard[0], [list(tensor.shape), list(shard[1])]
    return mine, parts


def _write(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> str:
    """Write a file; gives what went wrong, which the other ranks must hear of."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link would be followed
        # Copies: the format has no views, and refuses tensors that share memory.
        contents = {name: part.contiguous().clone() for name, part in tensors.items()}
        save_file(contents, path, metadata={"gradfit": json.dumps(header)})
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""
