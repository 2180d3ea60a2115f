"""A group of processes: how they exchange small records, and what they learn when one of them does
not come.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from gradfit import _torch_distributed as private
from gradfit.errors import RankFailed

_SLOT_BYTES = 512  # a record that fits goes in one exchange, a longer one in two
_LENGTH_BYTES = 4
_PATIENCE_SECONDS = 2.0  # for the others to write down where they are, once something has failed


_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _hear_what_is_not_caught(group: Group) -> None:
    """Let an error that ends this process, wherever it comes from, be known to those who will wait
    for it.
    """
    if getattr(sys.excepthook, "__module__", None) != __name__:
        before = sys.excepthook

        def leave_word(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            for one in _groups:
                one.leave_word(error)
            before(kind, error, trace)

        sys.excepthook = leave_word
    _groups.add(group)


class Group:
    """The processes that fill windows together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.handle = group
        self.size, self.rank = group.size(), group.rank()
        self.device = private.default_device(group)
        self.meetings = 0
        _hear_what_is_not_caught(self)

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Everybody's record, in the order of the ranks."""
        self.meetings += 1
        if self.size == 1:
            return [record]
        # Not torch's `all_gather_object`: it pickles, and takes two collectives for a few bytes.
        text = json.dumps(record, separators=(",", ":")).encode()
        try:
            texts = self._gather(text)
        except RuntimeError as error:
            self.meetings -= 1
            raise self.explain(error, f"the end of window {self.meetings + 1}") from error
        return [json.loads(one) for one in texts]

    def _gather(self, text: bytes) -> list[bytes]:
        room = _SLOT_BYTES - _LENGTH_BYTES
        first = len(text).to_bytes(_LENGTH_BYTES, "little") + text[:room]
        slots = self._all_gather(first, _SLOT_BYTES)
        lengths = [int.from_bytes(slot[:_LENGTH_BYTES], "little") for slot in slots]
        if max(lengths) <= room:
            texts = [slot[_LENGTH_BYTES:] for slot in slots]
        else:
            texts = self._all_gather(text, max(lengths))
        return [one[:length] for one, length in zip(texts, lengths, strict=True)]

    def _all_gather(self, content: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).to(
            self.device
        )
        of_all_ranks = torch.empty(self.size * size, dtype=torch.uint8, device=self.device)
        private.all_gather_flat(of_all_ranks, mine, self.handle)
        data = of_all_ranks.cpu().numpy().tobytes()
        return [data[at : at + size] for at in range(0, len(data), size)]

    # -- when somebody does not come --------------------------------------------------------------

    def leave_word(self, error: BaseException) -> None:
        """Write down why this process may not come to the next meeting; read only if it does
        not.
        """
        text = str(error).split("\n")[0]
        self._write(f"{type(error).__name__}{': ' if text else ''}{text}"[:500])

    def explain(self, error: RuntimeError, where: str) -> RankFailed:
        """Who did not come, and what they said."""
        self._write("")  # this one came
        # What failed elsewhere may be written down a moment after it is felt here.
        time.sleep(_PATIENCE_SECONDS)
        said = {rank: self._read(rank) for rank in range(self.size) if rank != self.rank}
        first = str(error).split("\n")[0].rstrip(".")
        return RankFailed(
            f"{_who_failed(said, where).rstrip('.')}. Rank {self.rank} waited for it: {first}."
            " Restart from the last saved state."
        )

    def _key(self, rank: int) -> str:
        """Where a rank writes why it may not come to the next meeting."""
        return f"gradfit/{private.group_name(self.handle)}/{self.meetings + 1}/{rank}"

    def _write(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have died with its process
            store = private.default_store()
            store.set(self._key(self.rank), text)

    def _read(self, rank: int) -> str | None:
        with contextlib.suppress(RuntimeError):
            store = private.default_store()
            key = self._key(rank)
            if store.check([key]):
                before = store.timeout  # all ranks': it is the default store
                store.set_timeout(datetime.timedelta(seconds=_PATIENCE_SECONDS))
                try:
                    text: str = store.get(key).decode()
                finally:
                    store.set_timeout(before)
                return text
        return None


def _who_failed(said: dict[int, str | None], where: str) -> str:
    """From what each rank has written down: an error, nothing ("") if it came, or None."""
    failed = [f"rank {rank} raised {text}" for rank, text in said.items() if text]
    missing = [str(rank) for rank, text in said.items() if text is None]
    if missing and not failed:
        return f"rank {', '.join(missing)} did not come to {where} and left no word"
    return "; ".join(failed) or "The processes lost each other"
