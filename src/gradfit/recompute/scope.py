"""`CheckpointScope`: activations made inside are rebuilt in the backward pass instead of being
kept.

Scopes are policies on one tape. The outermost scope of a thread owns the recorder; an inner one
only opens a segment, so that rebuilding one inner scope does not hold what its neighbours made.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradfit._torch import inside_functorch, raised_by_functorch, raised_by_swap_tensors
from gradfit._torch_listen import thread_settings, untraced
from gradfit.arguments import read_callable, read_flag, read_list, read_text
from gradfit.choices import KEEP, REBUILD
from gradfit.errors import MisuseError, UnsupportedOp
from gradfit.tape.decisions import ALL_KEPT, TapeDecision
from gradfit.tape.recorder import Recorder
from gradfit.tape.values import Segment, TapeValue
from gradfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from gradfit.recompute.node import CheckpointNode

KeepPolicy = Callable[[Any, torch.Tensor], bool]
KeepOperation = Callable[[Any, list[torch.Tensor], Any, Any], bool]  # (op, results, args, kwargs)
F = TypeVar("F", bound=Callable[..., Any])
_T = TypeVar("_T")


@dataclass
class ScopeStats:
    """What a scope has saved and spent since it was made."""

    kept_bytes: int = 0
    freed_bytes: int = 0
    recomputed_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"kept {format_bytes(self.kept_bytes)}, freed {format_bytes(self.freed_bytes)}, "
            f"recomputed for {format_seconds(self.recomputed_seconds)}"
        )


class _Frames(threading.local):
    """The scopes that are open in this thread, outermost first."""

    def __init__(self) -> None:
        self.open: list[tuple[CheckpointScope, Segment | None, Recorder | None]] = []
        # told about every scope that is entered
        self.observers: list[Callable[[CheckpointScope], None]] = []
        # Closed before their `with` block ended: by `close()`, or because one around them was left
        # first.
        self.closed: list[weakref.ref[CheckpointScope]] = []
        self.suspended = False  # scopes that are entered do nothing


_frames = _Frames()
_reference_to = weakref.ref


def explain_unsupported(where: str, kind: Any, error: Any, trace: Any) -> None:
    """Say what an error of torch's means if it comes from what no recording can do.

    Args:
        where: in which block of the user's, in words.
        kind: with `error` and `trace`, what `__exit__` was given.
    """
    if kind is RuntimeError and raised_by_swap_tensors(trace):
        raise UnsupportedOp(
            f"torch.utils.swap_tensors was called inside {where} on a tensor that was recorded"
            f" there: {error} Swap before it, or after the backward pass."
        ) from error
    if raised_by_functorch(trace):
        raise UnsupportedOp(
            f"torch.func was used inside {where}, where saved tensors are replaced: {error} Move"
            " the transform out of it, or use torch.autograd.grad."
        ) from error


class CheckpointScope:
    """Rebuild, in the backward pass, what is computed inside; gradients stay bit-identical.

    Python code inside runs once, and so do its side effects: what is run again are the recorded
    tensor operations.

    Args:
        name: for messages and statistics.
        enabled: False makes the scope do nothing.
        use_recomputation: False keeps everything inside, also within another scope.
        keep: `keep(op, output) -> bool`, asked for each result: True keeps it. Or a list of names:
            what the code inside names so (`gf.name`) is kept, and the rest rebuilt. None keeps
            nothing that can be rebuilt.

    >>> import torch
    >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> x = torch.ones(8, 4)
    >>> with CheckpointScope("layer") as scope:
    ...     loss = layer(x).sum()
    >>> loss.backward()
    >>> scope.stats.freed_bytes
    4096

    `keep(op, output)` decides per operation what is kept after all (selective checkpointing); `op`
    is the `torch.ops.aten` overload. Of scopes inside each other, the innermost that has a `keep`
    decides. The scope can be re-used, nested, and put on a function as a
    decorator.
    """

    def __init__(
        self,
        name: str,
        enabled: bool = True,
        *,
        use_recomputation: bool = True,
        keep: KeepPolicy | Iterable[str] | None = None,
    ) -> None:
        policy, names = (None, None) if keep is None else _read_keep(keep)
        self._name = read_text(name, "name", "for example 'encoder'")
        self._is_enabled = read_flag(enabled, "enabled")
        self._use_recomputation = read_flag(use_recomputation, "use_recomputation")
        self.keep = policy
        self.kept_names = names
        # torch's kind of policy: asked once for all results
        self.keep_operation: KeepOperation | None = None
        self.stats = ScopeStats()
        self._saved: list[weakref.ref[TapeValue]] = []  # what autograd has handles on
        self._inner: list[weakref.ref[CheckpointScope]] = []
        self.replay_context: Callable[[], Any] | None = None  # entered around each replay

    @property
    def name(self) -> str:
        """What the scope is called, in statistics and errors."""
        return self._name

    @property
    def is_enabled(self) -> bool:
        """Whether the scope does anything when it is entered."""
        return self._is_enabled

    @is_enabled.setter
    def is_enabled(self, enabled: bool) -> None:
        self._is_enabled = read_flag(enabled, "is_enabled")

    @property
    def use_recomputation(self) -> bool:
        """Whether activations are rebuilt; False keeps them, also inside a scope that rebuilds."""
        return self._use_recomputation

    @use_recomputation.setter
    def use_recomputation(self, recompute: bool) -> None:
        self._use_recomputation = read_flag(recompute, "use_recomputation")

    @untraced
    def close(self) -> None:
        """Leave the scope now, where its `with` block is still open: what follows in the block is
        kept.

        Those that were entered inside it are closed with it. A scope that is not open is left as it
        is.
        """
        frames = _frames.open
        if any(frame[0] is self for frame in frames):
            while _close_innermost() is not self:
                pass

    dispose = close

    def __repr__(self) -> str:
        return f"CheckpointScope({self.name!r}, enabled={self.is_enabled}, {self.stats})"

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, of a model that holds a scope: all but the graphs of this one's
        forwards.
        """
        return {**self.__dict__, "_saved": [], "_inner": []}

    @untraced
    def __enter__(self) -> CheckpointScope:
        depth = len(_frames.open)
        try:
            self._open(_frames.open)
        except BaseException:
            while len(_frames.open) > depth:  # it was interrupted
                _leave(None, None, None)
            raise
        return self

    @untraced
    def _open(self, frames: list[Any]) -> None:
        if not self._is_enabled or not torch.is_grad_enabled():
            frames.append((self, None, None))
            return
        if inside_functorch():
            raise self._inside_transform()
        for observer in _frames.observers:
            observer(self)
        if _frames.suspended:
            frames.append((self, None, None))
            return
        if self._saved:
            self._saved = [reference for reference in self._saved if reference() is not None]
        outer = _innermost() if frames else None
        if outer is not None:
            self._open_inside(outer, frames)
        elif self._use_recomputation:
            self._open_outermost(frames)
        else:
            frames.append((self, None, None))

    def _inside_transform(self) -> UnsupportedOp:
        return UnsupportedOp(
            f"CheckpointScope({self.name!r}) was entered inside a torch.func transform, which"
            " does not allow saved tensors to be replaced. Put the scope around the"
            " transform's result, or use torch.autograd.grad."
        )

    @untraced
    def _open_outermost(self, frames: list[Any]) -> None:
        segment = Segment(Segment(None), self)
        recorder = Recorder(segment, _Keep() if self._has_policy else None)
        frames.append((self, segment, recorder))
        recorder.__enter__()
        if recorder.policy is not None:
            _ask_for(self, recorder)

    @untraced
    def _open_inside(self, recorder: Recorder, frames: list[Any]) -> None:
        """Only a segment: the outermost scope records."""
        around = recorder.segment.scope
        if around is not None:
            around._add_inner(self)
        segment = Segment(recorder.segment, self)
        recorder.segment = segment
        if recorder.policy is None and (self._has_policy or not self.use_recomputation):
            recorder.policy = _Keep()
        frames.append((self, segment, None))
        _ask_for(self, recorder)

    def _add_inner(self, scope: CheckpointScope) -> None:
        if all(reference() is not scope for reference in self._inner):
            alive = [reference for reference in self._inner if reference() is not None]
            self._inner = [*alive, weakref.ref(scope)]

    @property
    def _has_policy(self) -> bool:
        return self.keep is not None or self.keep_operation is not None

    @property
    def has_opinion(self) -> bool:
        """Whether this scope says what is kept inside, and those around it do not."""
        return self._has_policy or self.kept_names is not None or not self.use_recomputation

    @untraced
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        frames = _frames.open
        opened = frames[-1] if frames else None
        try:  # before any call: Ctrl-C may come in each
            self._exit(kind, error, trace)
        except KeyboardInterrupt:
            if frames and frames[-1] is opened and opened[0] is self:  # not done with it yet
                _leave(kind, error, trace)
            raise

    def _exit(self, kind: Any, error: Any, trace: Any) -> None:
        frames = _frames.open
        if frames and frames[-1][0] is self:
            _leave(kind, error, trace)
        elif any(frame[0] is self for frame in frames):
            self._leave_before_inner(kind)
            return
        elif self in (closed := [reference() for reference in _frames.closed]):
            del _frames.closed[closed.index(self)]
        else:
            raise self._not_entered()
        if kind is not None and issubclass(kind, RuntimeError):
            explain_unsupported(f"CheckpointScope({self.name!r})", kind, error, trace)

    def _not_entered(self) -> MisuseError:
        return MisuseError(
            f"CheckpointScope({self.name!r}) is left but was not entered. Use it in a `with` block."
        )

    def _leave_before_inner(self, kind: Any) -> None:
        """One that was entered after this one is still open: close both, and say so."""
        frames = _frames.open
        inner = frames[-1][0].name
        while frames[-1][0] is not self:
            _close_innermost()
        _leave(None, None, None)
        if kind is not None and kind is not GeneratorExit:
            # An interrupt kept the inner one from closing: that is what the caller has to hear of.
            return
        raise MisuseError(
            f"CheckpointScope({self.name!r}) is left while {inner!r}, entered after it, is still"
            " open; both are closed now. Leave scopes in the reverse order of entering them: use"
            " nested `with` blocks."
        )

    def __call__(self, function: F) -> F:
        """Use the scope as a decorator: every call runs inside it.

        Args:
            function: called inside of the scope, each time.
        """
        read_callable(function, "function", "the function to decorate")

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    def nodes(self) -> list[CheckpointNode]:
        """One node for each operation that can be replayed for this scope and those inside it,
        oldest first.

        They are there as long as the graph is, and hold nothing alive themselves.
        """
        from gradfit.recompute.node import nodes_from

        return nodes_from(self._saved_values())

    def _saved_values(self) -> list[TapeValue]:
        values = _alive(self._saved)
        for inner in _alive(self._inner):
            if inner is not self:
                values += inner._saved_values()
        return values

    def note_freed(self, value: TapeValue, nbytes: int) -> None:
        """Autograd got a handle on `value` in the place of so many bytes.

        Args:
            value: that will be rebuilt.
            nbytes: of it.
        """
        self.stats.freed_bytes += nbytes
        self._saved.append(_reference_to(value))

    def note_kept(self, nbytes: int) -> None:
        """Autograd got a tensor itself.

        Args:
            nbytes: of it.
        """
        self.stats.kept_bytes += nbytes

    def note_recomputed(self, seconds: float) -> None:
        """A replay took so long.

        Args:
            seconds: of the clock.
        """
        self.stats.recomputed_seconds += seconds


def _read_keep(keep: Any) -> tuple[KeepPolicy | None, frozenset[str] | None]:
    """A scope's `keep` as a policy, or as names."""
    if not callable(keep) and isinstance(keep, Iterable) and not isinstance(keep, str | bytes):
        instead = "keep=['qkv'], names that gf.name gave"
        names = enumerate(read_list(keep, "keep", instead))
        return None, frozenset(read_text(name, f"keep[{at}]", "'qkv'") for at, name in names)
    instead = "a function (op, output) -> bool, or a list of names"
    return read_callable(keep, "keep", instead, arguments=2), None


def keep_if_named(tensor: torch.Tensor, name: str) -> None:
    """A tensor got a name: keep it, if the innermost open scope that has a `keep` lists the name.

    Args:
        tensor: a view is kept as the whole value that it lies in.
        name: as given.
    """
    for scope, segment, _ in reversed(_frames.open):
        if segment is not None and scope.has_opinion:
            recorder = _innermost()
            if scope.kept_names is not None and name in scope.kept_names and recorder is not None:
                recorder.keep(tensor)
            return


def _alive(references: Iterable[weakref.ref[_T]]) -> list[_T]:
    return [there for reference in references if (there := reference()) is not None]


def _close_innermost() -> CheckpointScope:
    """Close the innermost scope before its block ends; leaving the block does nothing then."""
    scope: CheckpointScope = _frames.open[-1][0]
    _frames.closed = [*(one for one in _frames.closed if one() is not None), weakref.ref(scope)]
    _leave(None, None, None)
    return scope


def _ask_for(scope: CheckpointScope, recorder: Recorder) -> None:
    """Let a scope's policy be asked, from now on."""
    if isinstance(recorder.policy, _Keep):
        recorder.policy.scopes.append(scope)


def _leave(*error: Any) -> None:
    """Close the innermost scope. It may be called again after an interrupt."""
    scope, segment, recorder = _frames.open[-1]
    active = recorder or _innermost()
    try:
        if segment is not None and active is not None:
            if active.policy is not None:
                _forget_policy(scope, active)
            if recorder is not None:
                recorder.__exit__(*error)
            elif segment.parent is not None:
                active.segment = segment.parent
    except Exception:
        _frames.open.pop()
        raise
    _frames.open.pop()


def _forget_policy(scope: CheckpointScope, recorder: Recorder) -> None:
    policy = recorder.policy
    if isinstance(policy, _Keep) and policy.scopes and policy.scopes[-1] is scope:
        policy.scopes.pop()


def _open_scopes() -> Callable[[], None]:
    depth = len(_frames.open)

    def close_later_ones() -> None:
        while len(_frames.open) > depth:
            _leave(None, None, None)

    return close_later_ones


thread_settings.append(_open_scopes)


@contextlib.contextmanager
def suspended() -> Iterator[list[CheckpointScope]]:
    """Inside, scopes do nothing; gives the list of those that were entered."""
    entered: list[CheckpointScope] = []
    before, _frames.suspended = _frames.suspended, True
    add_observer(entered.append)
    try:
        yield entered
    finally:
        _frames.suspended = before
        remove_observer(entered.append)


class _Keep:
    """The keep policies of the open scopes: the innermost that has an opinion decides."""

    def __init__(self) -> None:
        self.scopes: list[CheckpointScope] = []

    def decide(
        self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any
    ) -> TapeDecision | None:
        for scope in reversed(self.scopes):
            if not scope.use_recomputation:
                return ALL_KEPT
            if scope.keep_operation is not None:
                return ALL_KEPT if scope.keep_operation(func, results, args, kwargs) else None
            if scope.keep is not None:
                choices = tuple(KEEP if scope.keep(func, result) else REBUILD for result in results)
                return TapeDecision(choices) if REBUILD in choices else ALL_KEPT
            if scope.kept_names is not None:
                return None  # until it gets its name
        return None


def add_observer(observer: Callable[[CheckpointScope], None]) -> None:
    """Call `observer` with every enabled scope that is entered in this thread."""
    _frames.observers.append(observer)


def remove_observer(observer: Callable[[CheckpointScope], None]) -> None:
    """Undo `add_observer`; may be said twice."""
    if observer in _frames.observers:
        _frames.observers.remove(observer)


def inside_scope() -> bool:
    """Whether any scope, enabled or not, is open in this thread."""
    return bool(_frames.open)


def current_recorder() -> Recorder | None:
    """The recorder at work in this thread."""
    return _innermost()


def _innermost() -> Recorder | None:
    for _, _, recorder in reversed(_frames.open):
        if recorder is not None:
            return recorder
    return None
