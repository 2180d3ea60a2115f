"""A child process in which Ctrl-C comes at random moments of one kind of work; afterwards all must
be as it was.

Prints one JSON line: how often it was interrupted, and what was wrong (nothing). Called by
`test_interrupts.py`:

    python interrupts.py KIND COUNT SEED
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from torch import nn

import gradfit as gf
from gradfit.runs.state_files import StateStore

torch.set_num_threads(1)
warnings.simplefilter("ignore", gf.ExactnessWarning)


class Net(nn.Module):
    """Draws from three generators, writes to a buffer, reassigns another, counts."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        self.calls += 1
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1) * random.uniform(0.9, 1.1)
        return self.norm(x) + float(np.random.rand())


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


BATCH = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
MODULES: Any = torch.nn.modules.module


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


class World:
    """A model and its step, made anew from the plans of the first, and what one step of it
    gives.
    """

    def __init__(self) -> None:
        self.known: tuple[Any, ...] = ()
        _, _, step = self.fresh()
        self.known = step.known
        self.expected = self.after_step(*self.fresh())

    def fresh(self) -> tuple[Net, torch.optim.Optimizer, gf.TrainStep]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        step = gf.fit(
            model,
            optimizer,
            loss_fn,
            BATCH,
            memory="24 KiB",
            known=self.known,
            reproducible=True,
            exact=False,
        )
        return model, optimizer, step

    def after_step(self, model: Net, optimizer: Any, step: gf.TrainStep) -> list[torch.Tensor]:
        """Everything, after one step from a seed."""
        seed()
        step(BATCH)
        return [
            t.detach().clone()
            for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())
        ]

    def same(self, found: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(found, self.expected, strict=True))


def process_state() -> dict[str, Any]:
    """What is set for the whole process, or for this thread."""
    gc.collect()
    return {
        "collector": gc.get_threshold(),
        "hooks": [len(MODULES._global_forward_hooks), len(MODULES._global_forward_pre_hooks)],
        "modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "handled": sys.exc_info()[0],
        "stance": torch._dynamo.eval_frame._stance.stance,
    }


def values(model: Net) -> list[Any]:
    tensors = [(id(t), t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    drawn = [torch.get_rng_state(), random.getstate()[1][-1], int(np.random.get_state()[2])]
    return [
        tensors,
        [None if p.grad is None else id(p.grad) for p in model.parameters()],
        model.calls,
        drawn,
    ]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


class AfterSeconds:
    """Sends SIGINT to this process once, after a while: mostly while torch computes."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._over = seconds, threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def _wait(self) -> None:
        if not self._over.wait(self._seconds):
            os.kill(os.getpid(), signal.SIGINT)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        time.sleep(0)


def _leaves_with(frame: Any) -> bool:
    """Whether the next that this frame does is to call a context's `__exit__`.

    Python does not look for signals there. An error that a tracer raises there is one after the
    `with` block, so that a lock, say, would never be given back.
    """
    code, at = frame.f_code, frame.f_lasti
    load = dis.opmap["LOAD_CONST"]
    return list(code.co_code[at : at + 6 : 2]) == [load] * 3 and all(
        code.co_consts[number] is None for number in code.co_code[at + 1 : at + 6 : 2]
    )


class AtLine:
    """Sends it when so many lines of Python have run, torch's own too: a short line is met as often
    as a long one.
    """

    def __init__(self, line: float, *, at_returns: bool = True) -> None:
        self._line, self._at_returns, self.lines = line, at_returns, 0

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        # Python looks for signals at calls and jumps, never as an `except` ends. An error that a
        # tracer raises there leaves the handled one in `sys.exc_info()` for good, and with it every
        # tensor of its frames. Nor as a function returns: a tracer loses the result there.
        code = frame.f_code.co_code
        if event == "return" and not self._at_returns:
            return self._trace
        if code[frame.f_lasti] == dis.opmap["POP_EXCEPT"] or _leaves_with(frame):
            return self._trace
        self.lines += 1
        if self.lines == self._line:
            signal.raise_signal(signal.SIGINT)
        return self._trace

    def start(self) -> None:
        sys.settrace(self._trace)

    def stop(self) -> None:
        sys.settrace(None)


class Moments:
    """Moments of a piece of work, which is run twice to see how long it is."""

    def __init__(self, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self._seconds = time.perf_counter() - started
        counting = AtLine(math.inf)
        counting.start()
        try:
            work()
        finally:
            counting.stop()
        self._lines = counting.lines

    def draw(self, draw: random.Random) -> AfterSeconds | AtLine:
        if draw.random() < 0.5:
            return AtLine(draw.randrange(self._lines))
        return AfterSeconds(draw.uniform(0, 1.1 * self._seconds))


WHERE = [""]  # the last interrupt's traceback: what to read when something is wrong after it


def interrupted(work: Callable[[], object], moment: AfterSeconds | AtLine) -> bool:
    """Run the work; whether Ctrl-C ended it. One that comes a moment late is waited for here."""
    came = False
    WHERE[0] = "no interrupt was seen"
    try:
        moment.start()
        try:
            work()
        finally:
            moment.stop()
    except KeyboardInterrupt:
        came = True
        WHERE[0] = traceback.format_exc()[-2500:]
    return came


def swallow() -> None:
    """Let an interrupt that is still on its way arrive.

    `os.kill` returns after the signal was delivered, and its thread has been joined: Python has
    only to look.
    """
    try:
        for _ in range(3):
            time.sleep(0)
    except KeyboardInterrupt:
        pass


# ------------------------------------------------------------------------------------ kinds of work


def steps(world: World, draw: random.Random, wrong: list[str]) -> Callable[[], bool]:
    """A step that is interrupted has happened or has not; the next gives what it must."""
    model, optimizer, step = world.fresh()
    once = world.expected
    worlds = iter([world.fresh(), world.fresh()])
    moments = Moments(lambda: world.after_step(*next(worlds)))

    def trial() -> bool:
        nonlocal model, optimizer, step
        seed()
        before = values(model)
        came = interrupted(lambda: step(BATCH), moments.draw(draw))
        swallow()
        after = values(model)
        if not equal(before, after):
            found = [
                t.detach() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())
            ]
            if not equal(found, once):
                wrong.append("a step has happened in part")
            model, optimizer, step = world.fresh()
        if not world.same(world.after_step(model, optimizer, step)):
            wrong.append("the next step is another")
        model, optimizer, step = world.fresh()
        return came

    return trial


def no_trace(
    call: Callable[[Net, Any], object],
) -> Callable[[World, random.Random, list[str]], Callable[[], bool]]:
    def kind(world: World, draw: random.Random, wrong: list[str]) -> Callable[[], bool]:
        model, optimizer, _ = world.fresh()
        moments = Moments(lambda: call(model, optimizer))

        def trial() -> bool:
            seed()
            before = values(model)
            came = interrupted(lambda: call(model, optimizer), moments.draw(draw))
            swallow()
            if not equal(before, values(model)):
                wrong.append("the model is not as it was")
            if not world.same(world.after_step(*world.fresh())):
                wrong.append("the next step is another")
            return came

        return trial

    return kind


def scopes(world: World, draw: random.Random, wrong: list[str]) -> Callable[[], bool]:
    """Checkpoint scopes, a manager that evicts, and a plan that is applied, in a loop by hand."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Dropout(0.2), nn.Tanh()))
    )
    ways = itertools.cycle(["scope", "manager", "accumulator"])

    def run(way: str) -> list[torch.Tensor]:
        torch.manual_seed(2)
        net.zero_grad()
        if way == "scope":
            with gf.CheckpointScope("all"):
                hidden = net(BATCH)
            hidden.square().mean().backward()
        elif way == "manager":
            with gf.CheckpointManager(max_memory_mb=64, auto_checkpoint=True):
                net(BATCH).square().mean().backward()
        else:
            with gf.AccumulationContext(1) as window:
                for parameter in net.parameters():
                    window.register_tensor(parameter)
                net(BATCH).square().mean().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    torch.manual_seed(2)
    expected = {way: run(way) for way in ("scope", "manager", "accumulator")}
    moments = {way: Moments(functools.partial(run, way)) for way in expected}

    def trial() -> bool:
        way = next(ways)
        came = interrupted(lambda: run(way), moments[way].draw(draw))
        swallow()
        if not equal(run(way), expected[way]):
            wrong.append(f"other gradients after an interrupted {way}")
        return came

    return trial


def saves(world: World, draw: random.Random, wrong: list[str]) -> Callable[[], bool]:
    """A save that is interrupted leaves the state before it, or its own."""
    store = StateStore(tempfile.mkdtemp())
    store.prepare()
    weights = {f"w{n}": torch.full((64, 64), float(n)) for n in range(8)}
    numbers = itertools.count(1)
    last = 0
    moments = Moments(lambda: store.save({"step": 0, "weights": weights}, step=0))

    def trial() -> bool:
        nonlocal last
        number = next(numbers)
        content = {"step": number, "weights": weights}
        came = interrupted(
            lambda: store.save(content, step=number // 2, micro=number % 2), moments.draw(draw)
        )
        swallow()
        saved = store.load()
        if saved is None or saved.passed_over or saved.content["step"] not in (last, number):
            wrong.append(
                f"after save {number} there is {saved and saved.content['step']}, not {last} or"
                f" {number}"
            )
        last = number if saved is None else saved.content["step"]
        return came

    return trial


KINDS: dict[str, Callable[[World, random.Random, list[str]], Callable[[], bool]]] = {
    "step": steps,
    "fit": no_trace(
        lambda model, optimizer: gf.fit(model, optimizer, loss_fn, BATCH, "24 KiB", exact=False)
    ),
    "profile": no_trace(lambda model, optimizer: gf.profile(model, loss_fn, BATCH, optimizer)),
    "audit": no_trace(lambda model, optimizer: gf.audit(model, loss_fn, BATCH)),
    "scopes": scopes,
    "saves": saves,
}


def main(kind: str, count: int, number: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    draw, wrong = random.Random(f"{kind}:{number}"), list[str]()
    world = World()
    trial = KINDS[kind](world, draw, wrong)
    gc.collect()
    gc.freeze()  # what is imported stays: each collection below looks at what the trials made
    before = process_state()
    interrupts = tries = 0
    try:
        while interrupts < count and tries < 20 * count:
            tries += 1
            faults = len(wrong)
            interrupts += trial()
            after = process_state()
            if after != before:
                wrong.append(f"the process is not as it was: {after}, not {before}")
            if len(wrong) > faults:
                wrong.append(WHERE[0])
            if after != before:
                break
    except BaseException:
        wrong += [traceback.format_exc(), WHERE[0]]
    print(json.dumps({"interrupts": interrupts, "tries": tries, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
