"""State files: whole or not at all, the last two kept, damage found, nothing run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradfit.errors import MisuseError, StateError, StateNotWritten
from gradfit.runs import state_files as state_module
from gradfit.runs.state_files import StateStore


def content(step: int) -> dict[str, object]:
    return {
        "step": step,
        "weight": torch.full((64,), float(step)),
        "moment": torch.arange(8, dtype=torch.bfloat16),
    }


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    made = StateStore(tmp_path / "run")
    made.prepare()
    for step in (1, 2, 3):
        made.save(content(step), step=step)
    return made


def test_the_last_two_are_kept_and_the_newest_is_read(store: StateStore) -> None:
    assert store.names() == ["state-00000003-0000", "state-00000002-0000"]
    assert {path.name for path in store.directory.iterdir()} == {
        f"state-0000000{n}-0000{end}" for n in (2, 3) for end in (".json", ".safetensors")
    }
    loaded = store.load()
    assert loaded is not None
    assert loaded.content["step"] == 3
    assert torch.equal(loaded.content["weight"], torch.full((64,), 3.0))
    assert loaded.content["moment"].dtype is torch.bfloat16
    assert loaded.passed_over == ()


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "remove", "longer"])
def test_a_damaged_state_is_passed_over_and_that_is_said(
    store: StateStore, suffix: str, damage: str
) -> None:
    path = store.directory / f"state-00000003-0000{suffix}"
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        raw[len(raw) * 3 // 4] ^= 1
        path.write_bytes(raw)
    elif damage == "longer":
        path.write_bytes(raw + b"\0")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    loaded = store.load()
    assert loaded is not None
    assert loaded.content["step"] == 2
    if damage == "remove" and suffix == ".json":
        assert loaded.passed_over == ()  # it was never committed
    else:
        assert "state-00000003-0000" in loaded.passed_over[0]


def test_any_flipped_bit_is_found(store: StateStore) -> None:
    draw = random.Random(0)
    for _ in range(60):
        path = store.directory / f"state-00000003-0000{draw.choice(('.json', '.safetensors'))}"
        original = path.read_bytes()
        raw = bytearray(original)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        loaded = store.load()
        assert loaded is not None
        assert loaded.content["step"] == 2 or _same_json(raw, original)
        path.write_bytes(original)


def _same_json(raw: bytes, original: bytes) -> bool:
    """A flip can leave the same JSON: one kind of white space for another."""
    try:
        return bool(json.loads(raw) == json.loads(original))
    except ValueError:
        return False


def test_all_damaged_is_an_error(store: StateStore) -> None:
    for path in store.directory.iterdir():
        path.write_bytes(b"x")
    with pytest.raises(StateError, match="No state in"):
        store.load()
    assert StateStore(store.directory / "nothing").load() is None


@pytest.mark.parametrize("moment", range(12))
def test_a_crash_at_any_moment_leaves_a_whole_state(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Stop before the n-th call that touches the disk; the state that can be read is the old one or
    the new one.
    """
    calls = 0

    class Killed(BaseException):
        pass

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    for name in ("save_file", "_sync_and_hash", "_sync_directory"):
        monkeypatch.setattr(state_module, name, counting(getattr(state_module, name)))
    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counting(Path.unlink))
    monkeypatch.setattr(Path, "write_text", counting(Path.write_text))
    try:
        store.save(content(4), step=4)
        finished = True
    except Killed:
        finished = False
    monkeypatch.undo()
    loaded = store.load()
    assert loaded is not None
    assert loaded.content["step"] in ((4,) if finished else (3, 4))
    assert torch.equal(loaded.content["weight"], torch.full((64,), float(loaded.content["step"])))
    store.save(content(5), step=5)  # cleans up what was left
    assert not [path for path in store.directory.iterdir() if path.name.endswith(".tmp")]
    assert len(list(store.directory.iterdir())) == 4


def test_a_state_of_the_same_name_is_replaced(store: StateStore) -> None:
    store.save({"step": 3, "again": True}, step=3)
    loaded = store.load()
    assert loaded is not None
    assert loaded.content == {"step": 3, "again": True}


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch boom",))


def _commit(base: Path, tensors: bytes, body: object = None) -> None:
    """Write a state whose checksums are right, as someone who knows the format would."""
    base.with_suffix(".safetensors").write_bytes(tensors)
    made = {
        "format": "gradfit-state",
        "version": 1,
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "content": body,
    }
    checksum = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    base.with_suffix(".json").write_text(json.dumps({**made, "checksum": checksum}))


@pytest.mark.parametrize(
    "tensors",
    [
        pickle.dumps(Bomb()),
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 60)
        + b'{"a":{"dtype":"F32","shape":[999999999999],"data_offsets":[0,4]}}',
        struct.pack("<Q", 8) + b"notjson!",
        b"",
    ],
    ids=["pickle", "huge header", "huge shape", "no JSON", "empty"],
)
def test_a_malicious_tensor_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    _commit(tmp_path / "state-00000009-0000", tensors, {"a": {"$tensor": "a"}})
    with pytest.raises(StateError):
        StateStore(tmp_path).load()
    assert not (tmp_path / "boom").exists()


def test_a_pickle_for_the_json_is_refused(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.directory)
    (store.directory / "state-00000004-0000.json").write_bytes(pickle.dumps(Bomb()))
    loaded = store.load()
    assert loaded is not None
    assert loaded.content["step"] == 3
    assert not (store.directory / "boom").exists()


def test_tricks_with_names_and_files_are_refused(store: StateStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes((store.directory / "state-00000003-0000.safetensors").read_bytes())
    (store.directory / "state-00000003-0000.safetensors").unlink()
    (store.directory / "state-00000003-0000.safetensors").symlink_to(secret)  # never followed
    os.mkfifo(store.directory / "state-00000009-0000.json")  # never waited for
    (store.directory / "state-99..json").write_text("{}")
    loaded = store.load()
    assert loaded is not None
    assert loaded.content["step"] == 2
    assert len(loaded.passed_over) == 2


def test_a_json_of_any_size_is_not_read(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_MAX_JSON_BYTES", 1000)
    with (store.directory / "state-00000003-0000.json").open("ab") as file:
        file.truncate(2_000_000)
    loaded = store.load()
    assert loaded is not None
    assert "1.91 MiB" in loaded.passed_over[0]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MisuseError, match="Pass another directory as --out"):
        StateStore(tmp_path / "file" / "run").prepare()


def test_a_directory_that_is_gone_or_has_no_state_yet_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(tmp_path / "out")
    store.prepare()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("gradfit.runs.state_files.save_file", full)
        with pytest.raises(StateNotWritten, match="None is there"):
            store.save({"step": 0}, step=0)
    store.save({"step": 0}, step=0)
    with monkeypatch.context() as patched:
        patched.setattr("gradfit.runs.state_files.save_file", full)
        with pytest.raises(StateNotWritten, match="The one before it is whole"):
            store.save({"step": 1}, step=1)
    shutil.rmtree(store.directory)
    with pytest.raises(StateNotWritten, match=r"No such file.*None is there.*--out"):
        store.save({"step": 1}, step=1)
