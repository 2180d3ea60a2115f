"""The native core: finds, builds and loads the extension of `native/*.cpp`, which is written
against torch's C++ headers.

It is optional. Nothing is ever compiled that nobody has asked for: `gradfit build-native` compiles
it, once for each version of torch, of Python and of the source, and a process uses it from then on
when it finds one that was built for exactly these. The environment variable `GRADFIT_NATIVE` says
otherwise: `0` never, `1` always, so that a process that has none stops with an error.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradfit.errors import InvalidParameter, NativeCoreMissing

SETTING = "GRADFIT_NATIVE"
_SOURCES = sorted((Path(__file__).parent / "native").glob("*.cpp"))
_NAME = "gradfit_native"
_HOW_TO_BUILD = "`gradfit build-native` compiles it, in about a minute"
_lock = threading.Lock()


@dataclass(frozen=True)
class NativeCore:
    """Which core records in this process, and why.

    `str` of it is one line for a person.
    """

    used: bool
    """Whether the native core does; else Python."""
    why: str
    """Where the native core lies, or why there is none."""

    def __str__(self) -> str:
        return f"{'native' if self.used else 'Python'} core: {self.why}"


class _Decided:
    """What this process uses, decided when it first records."""

    core: Any = None
    said: NativeCore | None = None


def native_core() -> NativeCore:
    """Which core records operations in this process: the compiled one, or Python.

    It is decided once, when something is first recorded or this is first asked.

    >>> import gradfit as gf
    >>> print(gf.native_core())  # doctest: +SKIP
    Python core: not built for this torch and Python; `gradfit build-native` compiles it, in ...
    """
    core()
    assert _Decided.said is not None
    return _Decided.said


def core() -> Any:
    """The extension, or None where Python records."""
    if _Decided.said is None:
        with _lock:
            if _Decided.said is None:
                _Decided.core, _Decided.said = _decide()
    return _Decided.core


def _decide() -> tuple[Any, NativeCore]:
    wanted = os.environ.get(SETTING) or "auto"  # a variable that is empty is not set
    if wanted not in ("0", "1", "auto"):
        reason = f"it is {wanted!r}, and may be 0, 1 or auto"
        raise InvalidParameter(f"{SETTING}: {reason}.", name=SETTING, reason=reason)
    if wanted == "0":
        return None, NativeCore(False, f"{SETTING}=0")
    why = why_unsupported()
    built = library_path()
    if why is None and not built.exists():
        why = f"not built for this torch and Python; {_HOW_TO_BUILD}"
    if why is None:
        try:
            return _load(built), NativeCore(True, str(built))
        except Exception as error:
            why = f"{built} cannot be loaded ({error}); {_HOW_TO_BUILD} anew"
    if wanted == "1":
        raise NativeCoreMissing(f"{SETTING}=1 asks for the native core, and there is none: {why}.")
    return None, NativeCore(False, why)


def why_unsupported() -> str | None:
    """Why the native core cannot be used here, whatever is built; None if it can."""
    if sys.platform not in ("linux", "darwin"):
        return f"it is written for Linux and macOS, and this is {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it relies on Python's global lock, which this Python has not"
    if sys.implementation.name != "cpython":
        return "it is written for CPython"
    fake = torch._C._dispatch_key_parse("Fake")
    if not torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python).has(fake):
        return (
            f"torch {torch.__version__} calls listeners before dispatch modes, which it leaves to"
            " Python; torch 2.13 does not"
        )
    return None


# ----------------------------------------------------------------------------------------- building


def library_path() -> Path:
    """Where a build for this torch, this Python and this source lies, or would."""
    about = "\n".join(
        (torch.__version__, str(torch.version.git_version), sys.version, sysconfig.get_platform())
    )
    headers = sorted((Path(__file__).parent / "native").glob("*.h"))
    source = b"".join(path.read_bytes() for path in (*_SOURCES, *headers))
    tag = hashlib.sha256(source + about.encode()).hexdigest()[:16]
    return _cache() / f"torch-{torch.__version__}-{tag}" / f"{_NAME}{_suffix()}"


def _cache() -> Path:
    chosen = os.environ.get("GRADFIT_NATIVE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gradfit"


def _suffix() -> str:
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, or the first of the usual names that is there."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build() -> Path:
    """Compile the core for this torch and this Python, if that was not done before.

    A process that has already decided goes on with what it uses.

    Returns:
        Where it lies.

    Raises:
        NativeCoreMissing: there is no compiler, or it found an error.
    """
    why = why_unsupported()
    if why is not None:
        raise NativeCoreMissing(f"The native core cannot be used here: {why}.")
    built = library_path()
    if not built.exists():
        found = compiler()
        if found is None:
            raise NativeCoreMissing(
                "The native core needs a C++ compiler, and there is none: neither $CXX nor c++,"
                " g++ or clang++ is a program here. Without it Python records."
            )
        _compile(found, built)
    return built


def _compile(program: str, built: Path) -> None:
    """Into a directory of its own first: two processes may build at the same time."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        new = Path(folder) / built.name
        done = subprocess.run(
            _command(program, new), capture_output=True, text=True, errors="replace"
        )
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if "error" in line][:5]
            raise NativeCoreMissing(
                f"{program} could not compile the native core for torch {torch.__version__}. It"
                " said:\n  " + "\n  ".join(said or done.stderr.splitlines()[-5:])
            )
        new.replace(built)


def _command(program: str, new: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    libraries = library_paths()
    command = [program, "-O2", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}"]
    if sys.platform == "linux":
        command.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    else:
        command += ["-undefined", "dynamic_lookup"]
    command += [f"-I{path}" for path in includes] + [f"-L{path}" for path in libraries]
    linked = [f"-l{name}" for name in ("torch_python", "torch", "torch_cpu", "c10")]
    return [*command, *map(str, _SOURCES), "-o", str(new), *linked]


def _load(built: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, built)
    if spec is None or spec.loader is None:
        raise ImportError(f"{built} is no extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
