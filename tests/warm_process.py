"""Python in a process of its own, without the seconds that torch and gradfit take to import: it is
forked from a process that has imported them, and has done nothing else.

For programs whose start is not what is tested. They have their own directory, environment,
arguments and streams; what is read while torch is imported is as in the tests' own process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent
_IMPORTED = ["torch", "gradfit", "gradfit.cli.app", "torch.distributed.fsdp", "torch._dynamo"]


def warm_context() -> Any:
    """A context of `multiprocessing` whose processes have imported torch and gradfit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class WarmProcess:
    """As `subprocess.Popen` of `python FILE …` or `python -m MODULE …`, whose output is text.

    Args:
        arguments: `sys.executable` first, as for `subprocess`.
        cwd: its directory; None: the one of now.
        env: its environment; None: the one of now.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert arguments[0] == sys.executable
        self.args = list(arguments)
        context = warm_context()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        self._process = context.Process(
            target=_become,
            args=(
                self.args[1:],
                str(cwd or Path.cwd()),
                dict(os.environ if env is None else env),
                *(there for _, there in pipes),
            ),
            daemon=True,  # ends with the tests, whatever becomes of them
        )
        self._process.start()
        self.stdout, self.stderr = (
            open(os.dup(here.fileno()), encoding="utf-8")  # noqa: SIM115  (closed by `communicate`)
            for here, _ in pipes
        )
        for pipe in pipes:
            for end in pipe:
                end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative if a signal has ended it."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has written that nobody has read, after its end; TimeoutExpired, and its end, if
        that takes longer.
        """
        read = ["", ""]

        def read_all(index: int, file: Any) -> None:
            with file:
                read[index] = file.read()

        readers = [
            threading.Thread(target=read_all, args=(index, file), daemon=True)
            for index, file in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout)
        for reader in readers:
            reader.join()
        return read[0], read[1]


def run_warm(
    arguments: Sequence[str],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of Python, with its output as text."""
    process = WarmProcess(arguments, cwd=cwd, env=env)
    out, errors = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


# ---------------------------------------------------------------------------------- in the process


def _become(
    arguments: list[str], cwd: str, env: dict[str, str], out: Connection, errors: Connection
) -> None:
    """Be the program that the arguments say, from here to its end."""
    for number, pipe in ((1, out), (2, errors)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    # as Python makes them, and not as they were where the tests were started
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    with _said():
        _run(arguments)


def _run(arguments: list[str]) -> None:
    sys.path[:] = [path for path in sys.path if path and not Path(path).is_relative_to(_TESTS)]
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """What Python says and does at the end of a program, and `multiprocessing` otherwise."""
    try:
        yield
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
