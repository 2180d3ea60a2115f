"""State files: written so that a crash at any moment leaves a whole one, read so that nothing in
them can run.

A state is two files of one name: `state-….safetensors` holds the tensors, `state-….json` everything
else, with the checksum of the first and of itself. The rules:

1. Each file is written under another name, synced to the disk, and renamed; the JSON comes last and
   makes it count.
2. The last two states are kept, and the last one of the step before: another rank may not have come
   further. A state that is cut short or changed is not used, the one before it is, and it is said.
3. A file is data. It is opened only if it is a regular file, its size is limited before it is read,
   and names inside it are compared with names the job has; none is ever used as a path.
4. What could not be read is not written: sizes and depth have the same limits for both, and `check`
   is called for both, before the last state goes.
5. One run at a time: whoever `prepare`s a directory holds it until `close`, or until its process
   ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gradfit.errors import MisuseError, StateError, StateNotWritten
from gradfit.runs.state_codec import flatten, unflatten
from gradfit.units import format_bytes

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_VERSION = 1
_KEPT = 2
_MAX_JSON_BYTES = 64 * 1024**2
_NAME = re.compile(r"state-(\d{8,12})-(\d{4,8})")


@dataclass(frozen=True)
class SavedState:
    """One state as it was read: its content, where it was, and what was passed over to reach it."""

    content: dict[str, Any]
    path: Path
    passed_over: tuple[str, ...] = ()


class StateStore:
    """The states of one run, in one directory.

    >>> import tempfile
    >>> store = StateStore(tempfile.mkdtemp())
    >>> _ = store.save({"step": 3, "weight": torch.ones(2)}, step=3)
    >>> store.load().content
    {'step': 3, 'weight': tensor([1., 1.])}
    """

    def __init__(
        self, directory: str | Path, check: Callable[[dict[str, Any]], None] = lambda content: None
    ) -> None:
        self.directory = Path(directory)
        self._check = check
        self._lock: weakref.finalize[Any, Any] | None = None

    def prepare(self) -> None:
        """Make the directory, see that it can be written to, and take it for this process."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            trial = self.directory / f".trial-{os.getpid()}"
            trial.touch()
            trial.unlink()
            if self._lock is None and (held := _take(self.directory)) is not None:
                self._lock = weakref.finalize(self, _let_go, held)
        except OSError as error:
            raise MisuseError(
                f"Cannot write to {str(self.directory)!r}: {error.strerror}. Pass another directory"
                " as --out."
            ) from None

    def close(self) -> None:
        """Let another run have the directory."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def names(self) -> list[str]:
        """The states there are, newest first, whole or not."""
        if not self._exists():
            return []
        stems = [path.stem for path in self.directory.iterdir() if path.suffix == ".json"]
        matches = filter(None, map(_NAME.fullmatch, stems))
        return [match.group() for match in sorted(matches, key=_order, reverse=True)]

    def _exists(self) -> bool:
        try:
            return self.directory.is_dir()
        except (OSError, ValueError) as error:  # a name that is too long, or holds what no name can
            why = getattr(error, "strerror", None) or str(error)
            raise MisuseError(
                f"{str(self.directory)[:80]!r} cannot be a directory: {why}. Pass another as --out."
            ) from None

    def save(self, content: dict[str, Any], *, step: int, micro: int = 0) -> Path:
        """Write one state, then remove those before the last (rule 2). Returns the JSON file's
        path.
        """
        self._check(content)
        data, tensors = flatten(content)
        with naming(self.directory):
            return self._write(f"state-{step:08d}-{micro:04d}", data, tensors)

    def _write(self, name: str, data: Any, tensors: dict[str, torch.Tensor]) -> Path:
        target = self.directory / name
        self._remove_leftovers()
        with contextlib.ExitStack() as undo:
            temporary = self.directory / f".{name}.safetensors.tmp"
            undo.callback(temporary.unlink, missing_ok=True)
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary)
            _names_in(temporary)
            digest = _sync_and_hash(temporary)
            body = {
                "format": "gradfit-state",
                "version": _VERSION,
                "sha256": digest,
                "content": data,
            }
            text = json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False)
            _check_size(len(text))  # all of it is ASCII
            written = self.directory / f".{name}.json.tmp"
            undo.callback(written.unlink, missing_ok=True)
            written.write_text(text, encoding="utf-8")
            _sync_and_hash(written)
            # A state of this name would for a moment be half old, half new: without its JSON it
            # does not count.
            target.with_suffix(".json").unlink(missing_ok=True)
            os.replace(temporary, target.with_suffix(".safetensors"))
            _sync_directory(self.directory)
            os.replace(written, target.with_suffix(".json"))
            _sync_directory(self.directory)
        names = self.names()
        before = [other for other in names if _step_of(other) < _step_of(names[0])]
        self._remove([old for old in names[_KEPT:] if old not in before[:1]])
        return target.with_suffix(".json")

    def steps(self) -> list[int]:
        """The steps there are states of, the newest first."""
        return list(dict.fromkeys(_step_of(name) for name in self.names()))

    def forget_after(self, step: int) -> None:
        """Remove the states of later steps: the run goes on from this one, perhaps in another
        way.
        """
        self._remove([name for name in self.names() if _step_of(name) > step])

    def load(self, step: int | None = None, *, lazily: bool = False) -> SavedState | None:
        """The newest state that is whole; None where there is none at all, a `StateError` if all
        are damaged.

        `step`: the newest of that step. `lazily`: for a tensor there is a slice of its file, read
        when it is indexed.
        """
        problems: list[str] = []
        for name in self._names_of(step):
            try:
                content = self._load(name, lazily)
            except StateError as error:
                problems.append(f"{name}: {error}")
            else:
                return SavedState(content, self.directory / f"{name}.json", tuple(problems))
        if problems:
            raise StateError(
                f"No state in {str(self.directory)!r} can be used. " + " ".join(problems)
            )
        return None

    def _names_of(self, step: int | None) -> list[str]:
        """The states of a step, or all."""
        names = self.names()
        return names if step is None else [name for name in names if _step_of(name) == step]

    def _load(self, name: str, lazily: bool) -> dict[str, Any]:
        content = _read(self.directory / name, lazily)
        if not lazily:
            self._check(content)
        return content

    def _remove(self, names: list[str]) -> None:
        for name in names:
            (self.directory / f"{name}.json").unlink(missing_ok=True)
            (self.directory / f"{name}.safetensors").unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """What a killed process left: half-written files, and tensors whose JSON was never
        written.
        """
        whole = set(self.names())
        for path in self.directory.iterdir():
            if _is_leftover(path.name, whole):
                path.unlink(missing_ok=True)


def _is_leftover(file: str, whole: set[str]) -> bool:
    """Whether a file is one of a state, and its state is not among these, which are whole."""
    stem, _, suffix = file.removeprefix(".").removesuffix(".tmp").partition(".")
    if not _NAME.fullmatch(stem) or suffix not in ("safetensors", "json"):
        return False
    return file.endswith(".tmp") or (suffix == "safetensors" and stem not in whole)


def write_atomically(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path.parent), contextlib.ExitStack() as undo:
        undo.callback(temporary.unlink, missing_ok=True)
        temporary.unlink(missing_ok=True)  # a link would be followed
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary
        )
        _sync_and_hash(temporary)
        os.replace(temporary, path)
        _sync_directory(path.parent)


@contextlib.contextmanager
def naming(directory: Path) -> Iterator[None]:
    """A disk that is full, or gone: say which, and what is there all the same."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        before = "The one before it is whole" if _has_a_state(directory) else "None is there"
        raise StateNotWritten(
            f"The state could not be written to {str(directory)!r}: {why}. {before}. Make room"
            " there and go on with --resume, or pass another directory as --out."
        ) from error


def _has_a_state(directory: Path) -> bool:
    try:
        return any(_NAME.fullmatch(path.stem) for path in directory.glob("*.json"))
    except OSError:
        return False


_held: set[int] = set()  # directories that are open because they are taken


def _let_go(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_all_go() -> None:
    for descriptor in list(_held):
        _let_go(descriptor)


if hasattr(os, "register_at_fork"):  # a worker that loads data may live on when the run is killed
    os.register_at_fork(after_in_child=_let_all_go)


def _take(directory: Path) -> int | None:
    """Hold a directory that only one process can; the system lets go of it when the process ends,
    however it does.
    """
    if fcntl is None:
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return None  # a file system without locks
        raise MisuseError(
            f"Another run is writing to {str(directory)!r}. Wait until it has ended, or pass"
            " another --out."
        ) from None
    _held.add(descriptor)
    return descriptor


def _order(match: re.Match[str]) -> tuple[int, int]:
    return int(match.group(1)), int(match.group(2))


def _step_of(name: str) -> int:
    return int(name.split("-")[1])


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest(file)
        )


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1024**2):
        digest.update(block)
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------ reading


def _read(base: Path, lazily: bool) -> dict[str, Any]:
    body = _read_json(base.with_suffix(".json"))
    path = base.with_suffix(".safetensors")
    with open_regular(path) as file:
        if _digest(file) != body["sha256"]:
            raise StateError("its tensors' checksum is wrong: the file was cut short or changed.")
    content = unflatten(body["content"], _read_tensors(path, lazily))
    if not isinstance(content, dict):
        raise StateError("its content is not a dict.")
    return content


def _read_tensors(path: Path, lazily: bool) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            read = opened.get_slice if lazily else opened.get_tensor
            return {name: read(name) for name in opened.keys()}  # noqa: SIM118 -- not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise StateError(f"its tensors are not in the safetensors format ({error}).") from None


def _names_in(path: Path) -> list[str]:
    """The tensors of a file, by the reader that will read it: its own limits hold when it is
    written, too.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise StateError(
            f"The state's tensors cannot be written: {error}. Leave some out of state_dict()."
        ) from None


def _check_size(size: int) -> None:
    if size > _MAX_JSON_BYTES:
        raise StateError(
            f"The state has {format_bytes(size)} of numbers and text;"
            f" {format_bytes(_MAX_JSON_BYTES)} is the most. Make tensors of what is large in a"
            " state_dict()."
        )


def _read_json(path: Path) -> dict[str, Any]:
    body = _parse_json(path)
    if not isinstance(body, dict) or body.get("format") != "gradfit-state":
        raise StateError("its JSON is not a gradfit state.")
    if body.get("version") != _VERSION:
        raise StateError(
            f"it has format version {body.get('version')!r}, this gradfit reads {_VERSION}."
        )
    if not _is_as_written(body, body.pop("checksum", None)):
        raise StateError("its JSON's checksum is wrong: the file was changed.")
    return body


def _parse_json(path: Path) -> Any:
    with open_regular(path) as file:
        _check_size(os.fstat(file.fileno()).st_size)
        raw = file.read(_MAX_JSON_BYTES + 1)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise StateError("its JSON was cut short or is not JSON.") from None


def _is_as_written(body: dict[str, Any], claimed: Any) -> bool:
    try:
        is_same = claimed == _checksum(body)
    except (ValueError, RecursionError):
        return False
    return is_same and isinstance(body.get("sha256"), str) and "content" in body


@contextlib.contextmanager
def open_regular(path: Path) -> Any:
    """Open for reading, never through a link, and never a pipe or a device, which could hang or
    have no end.
    """
    flags = (
        os.O_RDONLY
        | getattr(os, "O_NOFOLLOW", 0)
        | getattr(os, "O_NONBLOCK", 0)
        | getattr(os, "O_BINARY", 0)
    )
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise StateError(f"its {path.suffix} file cannot be read ({error.strerror}).") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StateError(f"its {path.suffix} file is not a regular file.")
        yield file
