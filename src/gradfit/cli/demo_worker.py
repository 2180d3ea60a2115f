"""The demo's child processes: cap their own memory, then train, plainly or with gradfit; one line
of JSON per event.

RLIMIT_DATA counts every private writable page of a process: the interpreter, torch's own data and
the threads' stacks as well as tensors. So the cap is what this process has mapped once everything
is warm, plus the budget for tensors, plus some slack for what the allocator cannot hand out again.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from gradfit.fitting.audit import audit
from gradfit.fitting.fit import fit
from gradfit.machine import data_bytes, environment
from gradfit.planning.plan import Plan
from gradfit.profiling.meter import meter
from gradfit.runs.batch_stream import Batches
from gradfit.runs.builtin_jobs import gpt
from gradfit.runs.job import Job
from gradfit.runs.random_state import seed_everything

BUDGET_BYTES = 128 * 1024**2
SLACK_BYTES = 96 * 1024**2
STEPS = 20
SECONDS = 60.0  # and then no further step is begun


def demo_job() -> Job:
    """A language model whose plain step needs several times the cap, and even one row of it more
    than the budget.
    """
    seed_everything(0)
    return gpt(length=512, batch_size=4)


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def cap_memory() -> int | None:
    """Warm everything up, then forbid this process more than the cap; None where the system
    cannot.
    """
    job = gpt(layers=1, width=48, length=16, batch_size=2)
    batch = Batches(job.data, batch_size=2).next()
    job.loss_fn(job.model, batch).backward()
    job.optimizer.step()
    (torch.randn(512, 512) @ torch.randn(512, 512)).sum().item()
    if sys.platform != "linux":
        return None
    import resource

    cap = data_bytes() + BUDGET_BYTES + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    return cap


def train_plainly(job: Job, batches: Batches) -> None:
    """One step as anyone would write it."""
    live = meter(job.model, job.optimizer, timeline=True)
    try:
        with live:
            batch = batches.next()
            loss = job.loss_fn(job.model, batch)
            loss.backward()
            job.optimizer.step()
        tell(
            event="survived",
            loss=float(loss.detach()),
            peak_bytes=live.peak_bytes,
            curve=live.timeline,
        )
    except (RuntimeError, MemoryError) as error:
        tell(event="died", error=str(error), peak_bytes=live.peak_bytes, curve=live.timeline)


def train_fitted(job: Job, batches: Batches) -> None:
    """The same under gradfit."""
    batch = batches.next()
    step = fit(
        job.model, job.optimizer, job.loss_fn, batch, memory=BUDGET_BYTES, batch_size=job.batch_size
    )
    tell(event="planned", plan=step.plan.to_json(), profile=step.profile.to_json())
    started = time.perf_counter()
    live = meter(job.model, job.optimizer, batch, timeline=True)
    for number in range(1, STEPS + 1):
        before = time.perf_counter()
        if number == 1:
            with live:
                result = step(batch)
        else:
            result = step(batches.next())
        now = time.perf_counter()
        tell(
            event="stepped",
            step=number,
            loss=result.loss,
            peak_bytes=result.peak_bytes,
            seconds=now - before,
        )
        if now - started > SECONDS:
            break
    tell(
        event="done",
        # the one that the steps settled on, if a faster one was found
        plan=step.plan.to_json(),
        profile=step.profile.to_json(),
        curve=live.timeline,
        mapped_bytes=data_bytes() if sys.platform == "linux" else None,
    )


def audit_plan(job: Job, batches: Batches) -> None:
    """Compare with plain PyTorch; nothing is capped for this, since the plain run must fit."""
    report = audit(job.model, job.loss_fn, batches.next(), plan=Plan.from_json(sys.stdin.read()))
    tell(event="audited", audit=report.to_json(), environment=environment(job.model))


def main(kind: str) -> None:
    if kind != "audit":
        tell(event="capped", cap_bytes=cap_memory())
    job = demo_job()
    batches = Batches(job.data, batch_size=job.batch_size, seed=0)
    {"plain": train_plainly, "fitted": train_fitted, "audit": audit_plan}[kind](job, batches)


if __name__ == "__main__":
    main(sys.argv[1])
