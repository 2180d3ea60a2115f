"""Processes on this machine that form a group, kept alive over many jobs because starting them
takes seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from warm_process import warm_context

TIMEOUT_SECONDS = 30


class JobFailed(AssertionError):
    """A job raised on some rank; the text is that rank's traceback."""


class Pool:
    """`size` processes in one gloo group; `run(job, *args)` gives each rank's `job(rank, size,
    *args)`.
    """

    def __init__(self, size: int, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.size, self._timeout = size, timeout_seconds
        self._start()

    def _start(self) -> None:
        size, timeout_seconds = self.size, self._timeout
        context = warm_context()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, rank, size, port, timeout_seconds), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job on all ranks; the first rank that failed says why."""
        answers = self.outcomes(job, *args)
        failed = [
            f"rank {rank} of {self.size}: {answer}"
            for rank, (good, answer) in enumerate(answers)
            if not good
        ]
        if failed:
            raise JobFailed("\n".join(failed))
        return [answer for _, answer in answers]

    def outcomes(self, job: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """Like `run`, but with each rank's traceback in the place of its result where it failed."""
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(2 * self._timeout + 30):
                answers.append((False, "no answer"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, "the process is gone"))
        if not all(good for good, _ in answers):  # its ranks are out of step
            self.close()
            self._start()
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(pipe: Any, rank: int, size: int, port: int, timeout_seconds: float) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import warnings

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # its bfloat16 kernels are illegal instructions on some virtual machines
    torch.backends.mkldnn.enabled = False
    warnings.simplefilter("error")
    for text in (
        "Full backward hook is firing",
        "FSDP2-wrapped module",
        "This function should only be used",
        "TypedStorage is deprecated",  # torch 2.10 about its own checkpoints
    ):
        warnings.filterwarnings("ignore", message=f".*{text}")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    while (task := pipe.recv()) is not None:
        job, args = task
        try:
            pipe.send((True, job(rank, size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
