"""Random training loops, as people write them, and the arithmetic that each of their updates is
compared with.

A program is a loop in one of a dozen styles, disturbed at random: gradients are cleared, clipped or
put by hand, passes die, threads and interrupts come in between, accumulators are saved, resumed,
collected as garbage or made twice, parameters are added. Whatever it does, every update the
optimizer sees must be the mean of what a ledger, kept by hand in float64, says is in the window; or
the call must be refused, by an error that names the next call.
"""

from __future__ import annotations

import copy
import gc
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from window_interrupts import interrupt_in

import gradfit as gf

NEXT_CALL = re.compile(
    r"\b([Cc]all|[Pp]ass|[Uu]se|Leave|Step|Change|Restore|Make|drops it|leaves it out|Load)\b"
)
STYLES = [
    "own", "plain", "is_ready", "modulo", "micro_batch", "terms", "apply", "mixed", "two_losses",
    "by_hand", "threads",
]  # fmt: skip
DISTURBANCES = [
    "zero_grad", "zero_grad_filled", "clip", "optimizer.step", "step", "is_ready", "look",
    "garbage", "reset", "flush", "resume", "add_param_group", "dying_pass", "dying_in_thread",
    "failing_block", "call_in_block", "interrupt", "second", "weightless", "nan", "unscaled",
    "parallel", "grad", "evaluate", "failing_hook", "foreign_pass",
]  # fmt: skip


class HalfWay(RuntimeError):
    """What a dying backward pass raises."""


class Dies(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise HalfWay("half-way")


def _collect(*_: Any) -> None:
    gc.collect(0)


class Recording(torch.optim.SGD):
    """Writes down the gradients it is given; its learning rate is 0, so that losses do not depend
    on updates.
    """

    def __init__(self, tensors: Any, updates: list[dict[int, float | None]]) -> None:
        super().__init__(tensors, lr=0.0)
        self.updates = updates

    def step(self, closure: Any = None) -> Any:
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        self.updates.append(read_gradients(tensors))
        return super().step(closure)


def read_gradients(tensors: list[torch.Tensor]) -> dict[int, float | None]:
    """Each gradient as one number: all of its elements are the same."""
    return {
        id(one): None if one.grad is None else one.grad.double().mean().item() for one in tensors
    }


class Ledger:
    """What is in the window, by hand: per denominator, its weight and each parameter's sum."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.sums: dict[str, dict[int, float]] = {}
        self.reached: set[int] = set()
        self.micro_batches = self.skipped = 0
        self.open = False

    def add(
        self,
        weight: float,
        gradients: dict[int, float],
        name: str = "",
        *,
        times: float | None = None,
    ) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + weight
        sums = self.sums.setdefault(name, {})
        for key, value in gradients.items():
            self.reached.add(key)
            sums[key] = sums.get(key, 0.0) + value * (weight if times is None else times)
        self.open = True

    @property
    def weighs(self) -> bool:
        return any(self.totals.values())

    @property
    def is_empty(self) -> bool:
        return not (self.open or self.micro_batches)

    def mean(self, key: int) -> float | None:
        if key not in self.reached:
            return None
        return sum(
            sums.get(key, 0.0) / self.totals[name]
            for name, sums in self.sums.items()
            if self.totals[name]
        )


class Program:
    """One random loop; `run` raises AssertionError if anything is neither exact nor refused."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.log: list[str] = []
        self.style = rng.choice(STYLES)
        self.kind = rng.choices(["float64", "float32", "float16", "bfloat16"], [6, 2, 1, 1])[0]
        self.dtype = getattr(torch, self.kind)
        self.tensors = [self.new_tensor() for _ in range(rng.randint(1, 3))]
        self.updates: list[dict[int, float | None]] = []
        self.optimizer = Recording(list(self.tensors), self.updates)
        self.handed = self.style not in ("apply",) and (
            self.style not in ("is_ready", "modulo") or rng.random() < 0.5
        )
        scaled = self.handed and self.style not in ("modulo", "by_hand") and rng.random() < 0.3
        self.scaler: Any = None
        if scaled:
            self.scaler = (
                gf.LossScaler(64.0)
                if rng.random() < 0.5
                else torch.amp.GradScaler("cpu", init_scale=64.0)
            )
        self.steps = rng.randint(1, 4)
        wide = torch.float32 if self.kind in ("float16", "bfloat16") else None
        self.options: dict[str, Any] = {
            "steps": self.steps,
            "isolate": (
                self.style == "micro_batch" or (self.style != "threads" and rng.random() < 0.3)
            ),
            "dtype": wide,
            "scaler": self.scaler,
            "on_nonfinite": rng.choice(["raise", "skip"]),
        }
        self.acc = self.make()
        self.ledgers = [Ledger()]  # several if an interrupt leaves open what has happened
        self.poison = ""  # why no update may happen before a reset
        self.final = 1.0  # what final gradients were multiplied by, by hand
        # the optimizer was stepped by hand, and the gradients are still there
        self.uncleared = False
        self.clean = True  # every micro-batch was ended by one step()
        self.updated = 0
        self.refused = 0
        # loss: weight, gradients, factor
        self.last: tuple[float, dict[int, float], float | None] = (0, {}, None)
        self.filled = False  # gradients were set to zero, so that what is not reached has one

    def new_tensor(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.ones(2, dtype=self.dtype))

    def make(self) -> gf.GradientAccumulator:
        if self.handed:
            return gf.GradientAccumulator(self.optimizer, **self.options)
        return gf.GradientAccumulator(parameters=self.tensors, **self.options)

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(self.rng.randint(4, 14)):
            if self.rng.random() < 0.3:
                self.disturb(self.rng.choice(DISTURBANCES))
            self.iteration()
        if self.handed:
            self.attempt("flush", self.acc.flush, self.after_flush)

    def attempt(
        self,
        name: str,
        work: Callable[[], Any],
        effect: Callable[[Any], None] = lambda result: None,
    ) -> bool:
        """Do something; it happens as the ledger says, or is refused with a next call and nothing
        has changed.
        """
        self.log.append(name)
        before = len(self.updates)
        try:
            result = work()
        except (gf.MisuseError, gf.StateError, gf.NonFiniteGradient) as error:
            self.require(bool(NEXT_CALL.search(str(error))), f"no next call in {error}")
            self.require(len(self.updates) == before, f"{name} was refused after an update")
            self.log.append(f"  refused: {error}")
            self.refused += 1
            if self.rng.random() < 0.7:
                self.recover()
            return False
        effect(result)
        return True

    def require(self, holds: bool, what: str) -> None:
        assert holds, what

    def recover(self) -> None:
        """What the errors say: drop the window, and begin anew."""
        self.log.append("reset")
        self.acc.reset()
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.scale(torch.zeros(()))
            self.scaler.update(self.scaler.get_scale())  # forgets what was unscaled
        self.clear()

    def clear(self) -> None:
        self.ledgers, self.poison, self.final, self.uncleared, self.clean = (
            [Ledger()],
            "",
            1.0,
            False,
            True,
        )

    @property
    def holds(self) -> bool:
        return not all(one.is_empty for one in self.ledgers)

    # -- losses -----------------------------------------------------------------------------------

    def loss(self) -> tuple[torch.Tensor, dict[int, float]]:
        """A loss that reaches some of the parameters, and their gradients."""
        chosen = self.rng.sample(self.tensors, self.rng.randint(1, len(self.tensors)))
        gradients = {id(one): self.rng.randint(-8, 8) / 4 for one in chosen}
        return torch.stack([(one * gradients[id(one)]).sum() for one in chosen]).sum(), gradients

    def weight(self) -> int | float:
        return self.rng.choice([1, 1, 2, 3, 7, 0.5, 100])

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def add(
        self, weight: float, gradients: dict[int, float], name: str = "", times: float | None = None
    ) -> None:
        if self.uncleared:
            self.poison = self.poison or "a pass added to gradients that were used"
        for one in self.ledgers:
            one.add(weight, gradients, name, times=times)

    def own(self) -> None:
        loss, gradients = self.loss()
        weight, total = self.weight(), self.rng.random() < 0.2
        self.last = (weight, gradients, 1.0 if total else None)
        self.attempt(
            f"backward weight={weight} sum={total}",
            lambda: self.acc.backward(loss, weight=weight, reduction="sum" if total else "mean"),
            lambda _: self.add(weight, gradients, times=1.0 if total else None),
        )

    def plain(self) -> None:
        loss, gradients = self.loss()
        self.last = (1, gradients, None)
        self.attempt(
            "loss.backward()", self.scaled(loss).backward, lambda _: self.add(1, gradients)
        )

    def two_losses(self) -> None:
        h = torch.stack([one.sum() for one in self.tensors]).sum() * 1.0
        first, second = h * 1.5, h * 0.25
        gradients = {id(one): 1.5 for one in self.tensors}

        def work() -> None:
            self.scaled(first).backward(retain_graph=True)

        if self.attempt("first.backward(retain_graph)", work, lambda _: self.add(1, gradients)):
            later = {id(one): 0.25 for one in self.tensors}
            self.attempt(
                "second.backward()",
                self.scaled(second).backward,
                lambda _: self.add(0, later, times=1.0),
            )

    def terms(self) -> None:
        parts = {}
        for name in self.rng.sample(["a", "b", "c"], self.rng.randint(1, 2)):
            loss, gradients = self.loss()
            parts[name] = (loss, gradients, self.rng.choice([0, 1, 2, 5]))

        def effect(_: Any) -> None:
            for name, (_, gradients, weight) in parts.items():
                self.add(weight, gradients, name, times=1.0 if weight else 0.0)

        work = {name: (loss, weight) for name, (loss, _, weight) in parts.items()}
        self.attempt(
            f"backward terms={ {n: w for n, (_, w) in work.items()} }",
            lambda: self.acc.backward(terms=work),
            effect,
        )

    def block(self, *, fails: bool = False, call: Callable[[], Any] | None = None) -> None:
        """`with micro_batch`: one or two passes, plain or own."""
        weight = self.weight() if self.rng.random() < 0.7 else None
        losses = [self.loss() for _ in range(self.rng.randint(1, 2))]
        own = self.rng.random() < 0.5

        def work() -> None:
            with self.acc.micro_batch(weight=weight):
                for loss, _ in losses:
                    self.acc.backward(loss) if own else self.scaled(loss).backward()
                if call is not None:
                    call()
                if fails:
                    raise HalfWay("half-way")

        def effect(_: Any) -> None:
            number = weight if weight is not None else (len(losses) if own else 1)
            for at, (_, gradients) in enumerate(losses):
                factor = weight if weight is not None else 1
                self.add(number if at == 0 else 0, gradients, times=factor)

        if not fails:
            self.attempt(
                f"micro_batch weight={weight} own={own} passes={len(losses)}", work, effect
            )
            return
        try:
            self.attempt("failing micro_batch", work)
        except HalfWay:
            self.log.append("  failed")

    def put_by_hand(self) -> None:
        """A gradient in `.grad`, as in a loop without autograd; it takes the place of what was
        there.
        """
        gradients = {id(one): self.rng.randint(-8, 8) / 4 for one in self.tensors}
        self.uncleared, self.poison = False, ""  # whatever was there is gone
        self.log.append(f"put by hand {list(gradients.values())}")
        before = copy.deepcopy(self.ledgers)
        for one in self.tensors:
            one.grad = torch.full_like(one, gradients[id(one)], dtype=one.grad_dtype or one.dtype)
        for ledger in self.ledgers:
            ledger.sums, ledger.reached = {"": {}}, set()
            ledger.add(1, gradients)
        refused = self.refused
        self.step()
        if self.refused > refused and self.holds:
            self.ledgers = before
            self.poison = "gradients were put by hand, and not taken"

    # -- one iteration of the loop ----------------------------------------------------------------

    def iteration(self) -> None:
        style = self.style
        if style == "mixed":
            kinds = ["own", "plain"] + (
                ["micro_batch"] if self.options["isolate"] or self.options["dtype"] else []
            )
            style = self.rng.choice(kinds)
        {
            "own": self.own, "plain": self.plain, "is_ready": self.plain, "modulo": self.plain,
            "apply": self.plain, "micro_batch": self.block, "terms": self.terms, "two_losses":
            self.two_losses, "by_hand": self.put_by_hand, "threads": self.in_thread,
        }[style]()  # fmt: skip
        if self.style in ("is_ready", "apply"):
            self.ask()
        elif self.style == "modulo":
            if all(one.micro_batches + one.open >= 1 for one in self.ledgers):
                for one in self.ledgers:
                    one.micro_batches += one.open
                    one.open = False
                if all(one.micro_batches >= self.steps for one in self.ledgers):
                    self.step_by_hand(zero=True)
        elif self.style != "by_hand":
            self.step()

    def in_thread(self) -> None:
        """The pass runs in another thread, which is joined."""
        work = self.rng.choice([self.own, self.plain])
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        if raised:
            raise raised[0]

    def step(self) -> None:
        self.attempt("step", self.acc.step, self.after_step)

    def after_step(self, result: gf.StepResult) -> None:
        passes = any(one.open for one in self.ledgers)
        for one in self.ledgers:
            one.micro_batches += one.open
            one.open = False
        if self.note_update(result):
            return
        if result.reason in ("no weight", "non-finite gradient"):
            # after an interrupt there are several ledgers, one of which is right
            assert result.reason != "no weight" or not all(one.weighs for one in self.ledgers)
            self.clear()
        elif self.clean and passes and not self.poison and len(self.ledgers) == 1:
            assert self.ledgers[0].micro_batches < self.steps, "a full window did not step"

    def after_flush(self, result: gf.StepResult) -> None:
        if not self.note_update(result):
            assert not any(one.weighs for one in self.ledgers) or self.poison, (
                f"flush did not step: {result}"
            )
            self.clear()

    def note_update(self, result: gf.StepResult | None = None) -> bool:
        """Compare the updates since the last look with the ledger."""
        new = self.updates[self.updated :]
        self.updated = len(self.updates)
        if result is not None:
            assert bool(result) == bool(new), f"{result} but {len(new)} updates"
        if not new:
            return False
        assert len(new) == 1, "more than one update"
        assert not self.poison, f"updated although {self.poison}: {new[0]}"
        expected = [{key: one.mean(key) for key in new[0]} for one in self.ledgers]
        exact = any(self.agrees(new[0], one, result) for one in self.ledgers)
        assert exact, f"saw {new[0]}, expected {expected} times {self.final}, {result}"
        self.clear()
        return True

    def agrees(
        self, update: dict[int, float | None], ledger: Ledger, result: gf.StepResult | None
    ) -> bool:
        tolerance = 1e-9 if self.kind == "float64" else 2e-5
        for key, value in update.items():
            mean = ledger.mean(key)
            if mean is None and value == 0.0 and self.filled:
                continue
            if (mean is None) != (value is None):
                return False
            if (
                mean is not None
                and value is not None
                and abs(value - mean * self.final) > tolerance * (1 + abs(mean))
            ):
                return False
        if result is not None and "" in ledger.totals and ledger.totals[""]:
            return abs(result.weight - ledger.totals[""]) < 1e-9
        return True

    # -- steps by hand ----------------------------------------------------------------------------

    def ask(self) -> None:
        """`if acc.is_ready:`, and what people do then."""
        ready: list[bool] = []
        if not self.attempt("is_ready", lambda: self.acc.is_ready, ready.append) or not ready[0]:
            return
        if self.poison or self.uncleared:
            return
        if self.rng.random() < 0.2:
            self.log.append("clip final gradients")
            for one in self.tensors:
                if one.grad is not None:
                    one.grad.mul_(0.5)
            self.final *= 0.5
        if self.style == "apply":
            record: dict[int, float | None] = {id(one): None for one in self.tensors}
            seen = lambda tensor: record.update({id(tensor): tensor.grad.double().mean().item()})  # noqa: E731
            if self.attempt("apply_gradients", lambda: self.acc.apply_gradients(seen)):
                self.updates.append(record)
                self.note_update()
        else:
            self.step_by_hand(zero=True)

    def step_by_hand(self, *, zero: bool) -> None:
        """`optimizer.step()`, and `optimizer.zero_grad()` or not."""

        def work() -> None:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()

        known = self.handed or self.poison or self.acc.is_full or not self.holds
        if not known:  # an optimizer that the accumulator does not know, in the middle of a window
            self.log.append("optimizer.step() of sums")
            self.optimizer.step()
            self.updated = len(self.updates)
            self.poison = "an unknown optimizer has stepped"
        elif self.poison and not self.handed:
            return
        else:
            held = self.holds
            try:
                if not self.attempt("optimizer.step()", work):
                    return
            except HalfWay:
                raise
            except (RuntimeError, AssertionError) as error:  # of torch's own scaler
                self.log.append(f"  {error}")
                self.recover()
                return
            if held:
                if not self.note_update() and self.scaler is not None:
                    self.recover()
                    return
            else:
                self.updated = len(self.updates)
            self.uncleared = any(
                one.grad is not None and bool(one.grad.any()) for one in self.tensors
            )
        if zero:
            self.log.append("optimizer.zero_grad()")
            fill = self.rng.random() < 0.2
            self.optimizer.zero_grad(set_to_none=not fill)
            self.filled = self.filled or fill
            self.uncleared = False

    # -- disturbances -----------------------------------------------------------------------------

    def disturb(self, what: str) -> None:
        self.log.append(f"-- {what}")
        getattr(self, "do_" + what.replace(".", "_"))()

    def do_zero_grad(self, fill: bool = False) -> None:
        if self.holds and any(one.grad is not None for one in self.tensors):  # terms are elsewhere
            self.poison = self.poison or "gradients were cleared in the middle of a window"
        self.optimizer.zero_grad(set_to_none=not fill)
        self.uncleared = False

    def do_zero_grad_filled(self) -> None:
        self.do_zero_grad(fill=True)
        self.filled = True

    def do_clip(self) -> None:
        changed = False
        for one in self.tensors:
            if one.grad is not None and one.grad.any():
                one.grad.mul_(0.5)
                changed = True
        if changed and self.holds:
            if self.acc.window.is_final:
                self.final *= 0.5
            else:
                self.poison = self.poison or "sums were changed by hand"

    def do_optimizer_step(self) -> None:
        self.clean = False
        self.step_by_hand(zero=self.rng.random() < 0.5)

    def do_step(self) -> None:
        self.clean = False
        # where passes are micro-batches by themselves
        if self.style not in ("modulo", "is_ready", "apply"):
            self.step()

    def do_is_ready(self) -> None:
        if self.style not in ("is_ready", "apply"):
            self.clean = False
            self.attempt("is_ready", lambda: self.acc.is_ready)

    def do_look(self) -> None:
        acc = self.acc
        before = read_gradients(self.tensors)
        repr(acc), acc.current_step, acc.is_full, acc.progress, acc.windows, acc.accumulation_count
        assert read_gradients(self.tensors) == before

    def do_garbage(self) -> None:
        """A trainer in a reference cycle, dead, with an accumulator of the same optimizer;
        collected in a hook.
        """
        if not self.holds and self.handed and not self.uncleared:
            trainer: dict[str, Any] = {"acc": gf.GradientAccumulator(self.optimizer, steps=2)}
            trainer["self"] = trainer
            del trainer
        handle = self.optimizer.register_step_post_hook(_collect)
        self.attempt("is_full", lambda: self.acc.is_full)
        handle.remove()
        gc.collect()

    def do_reset(self) -> None:
        self.attempt("reset", self.acc.reset, lambda _: self.clear())
        self.uncleared = False

    def do_flush(self) -> None:
        if self.handed and self.style != "modulo":
            self.attempt("flush", self.acc.flush, self.after_flush)

    def do_resume(self) -> None:
        """Save, throw away, make a new one, load."""
        saved: list[Any] = []
        if self.uncleared or not self.attempt("state_dict", self.acc.state_dict, saved.append):
            return
        state = copy.deepcopy(saved[0])
        self.acc.close()
        self.acc = self.make()
        self.attempt("load_state_dict", lambda: self.acc.load_state_dict(state))

    def do_add_param_group(self) -> None:
        if self.handed:
            new = self.new_tensor()
            self.tensors.append(new)
            self.optimizer.add_param_group({"params": [new]})

    def dying(self) -> torch.Tensor:
        first, *rest = self.tensors
        loss = Dies.apply((first * 2.0).sum())
        for one in rest:
            loss = loss * (one * 1.0).sum()
        return loss

    def do_dying_pass(self, own: bool | None = None) -> None:
        own = self.rng.random() < 0.5 if own is None else own
        loss, before = self.dying(), read_gradients(self.tensors)
        try:
            work = (lambda: self.acc.backward(loss)) if own else self.scaled(loss).backward
            self.attempt(f"dying pass own={own}", work)
        except HalfWay:
            if read_gradients(self.tensors) != before:
                self.poison = self.poison or "a pass has died half-way"
            self.clean = False

    def do_dying_in_thread(self) -> None:
        thread = threading.Thread(target=self.do_dying_pass)
        thread.start()
        thread.join(60)

    def do_failing_block(self) -> None:
        if self.options["isolate"] or self.options["dtype"]:
            before = read_gradients(self.tensors)
            refused = self.refused
            self.block(fails=True)
            same = read_gradients(self.tensors) == before
            assert self.refused != refused or self.uncleared or self.style == "apply" or same

    def do_call_in_block(self) -> None:
        """What ends a window, inside of a micro-batch or from another thread; what it says goes
        on.
        """
        if not (self.options["isolate"] or self.options["dtype"]):
            return
        acc, optimizer = self.acc, self.optimizer
        calls: list[Callable[[], Any]] = [
            acc.step,
            acc.flush,
            acc.reset,
            acc.state_dict,
            lambda: acc.is_ready,
        ]
        calls += [optimizer.step] if self.handed else []
        call = self.rng.choice(calls)
        refused = self.refused
        self.block(call=call)
        assert self.refused > refused, "a call inside of micro_batch was not refused"
        self.clean = False

    def do_interrupt(self) -> None:
        """Ctrl-C in the middle of a call: what it did is in as a whole, or not at all, or the
        window is refused.
        """
        self.clean = False
        steps = (
            self.style not in ("modulo", "is_ready", "apply", "by_hand") and self.rng.random() < 0.4
        )
        names = (
            ["end_micro_batch", "combine", "meet"]
            if steps
            else ["add", "take_marks", "divisor_for", "begin"]
        )
        window, name = self.acc.window, self.rng.choice(names)
        after = self.rng.random() < 0.5
        before = copy.deepcopy(self.ledgers)
        try:
            with interrupt_in(window, name, after=after):
                self.step() if steps else self.rng.choice([self.own, self.plain])()
        except KeyboardInterrupt:
            self.log.append(f"  interrupted in {name}, {after=}")
            if steps:
                for one in self.ledgers:
                    one.micro_batches += one.open
                    one.open = False
                self.note_update()
            else:
                self.ledgers = before + [self.with_last(one) for one in copy.deepcopy(before)]
            if self.rng.random() < 0.5:
                self.recover()
        if not steps and self.style not in ("modulo", "is_ready", "apply", "by_hand"):
            self.step()  # else it would be part of the next micro-batch

    def with_last(self, ledger: Ledger) -> Ledger:
        """A ledger that holds the last loss as well."""
        ledger.add(*self.last[:2], times=self.last[2])
        return ledger

    def do_second(self) -> None:
        """Another accumulator of the same parameters, used or not."""
        if self.uncleared:
            return
        made: list[Any] = []
        if not self.attempt("second accumulator", lambda: self.make_second(), made.append):
            return
        if self.rng.random() < 0.5 and not self.holds:
            loss, gradients = self.loss()
            second = made[0]
            updates = len(self.updates)
            if self.attempt("second.backward", lambda: second.backward(loss)) and second.step():
                for key, value in gradients.items():
                    assert abs((self.updates[updates][key] or 0.0) - value) < 1e-2, (
                        "the second accumulator's update"
                    )
                self.updated = len(self.updates)
            second.reset()

    def make_second(self) -> gf.GradientAccumulator:
        if self.handed:
            return gf.GradientAccumulator(self.optimizer, steps=1, dtype=self.options["dtype"])
        return gf.GradientAccumulator(parameters=self.tensors, steps=1, dtype=self.options["dtype"])

    def do_foreign_pass(self) -> None:
        """An accumulator of other parameters runs a pass that reaches these, too."""
        if not self.holds or self.acc.window.is_final:
            return
        other = self.new_tensor()
        foreign = gf.GradientAccumulator(torch.optim.SGD([other], lr=0.0), steps=8)
        reached = [one for one in self.tensors if one.requires_grad]
        foreign.backward(sum((one.sum() for one in reached), other.sum()))
        foreign.close()
        if reached:
            self.poison = self.poison or "another accumulator's pass has added to the sums"

    def do_weightless(self) -> None:
        loss, gradients = self.loss()
        bad = loss * float("nan") if self.rng.random() < 0.5 else loss
        if self.style in ("modulo", "is_ready", "apply"):
            return
        self.attempt(
            "backward weight=0",
            lambda: self.acc.backward(bad, weight=0),
            lambda _: self.add(0, gradients),
        )
        if self.style != "by_hand":
            self.step()

    def do_nan(self) -> None:
        """A micro-batch that is skipped: it leaves no trace but its count."""
        if not self.options["isolate"] or (
            self.options["on_nonfinite"] == "raise" and self.scaler is None
        ):
            return
        if self.style in ("modulo", "is_ready", "apply"):
            return
        loss, _ = self.loss()

        def effect(_: Any) -> None:
            for one in self.ledgers:
                one.open = True

        if self.attempt("backward nan", lambda: self.acc.backward(loss * float("nan")), effect):
            self.step()

    def do_unscaled(self) -> None:
        if self.scaler is None:
            return
        loss, _ = self.loss()
        refused = self.refused
        self.attempt("unscaled loss.backward()", loss.backward)
        assert self.refused > refused or self.acc.window.state.phase.value == "broken"

    def do_parallel(self) -> None:
        """Threads that all run the same loss and step, side by side: each update is that loss's
        gradient.
        """
        if (
            self.holds
            or self.uncleared
            or self.poison
            or not self.handed
            or self.style in ("modulo", "is_ready")
        ):
            return
        if self.acc.window.in_use:  # a pass has died in it
            return
        gradients = {id(one): 1.5 for one in self.tensors}
        results: list[gf.StepResult] = []
        problems: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(2):
                    loss = torch.stack([(one * 1.5).sum() for one in self.tensors]).sum()
                    self.acc.backward(loss, weight=2)
                    results.append(self.acc.step())
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not problems, problems
        results.append(self.acc.flush())
        assert sum(one.weight for one in results if one.stepped) == 12
        for update in self.updates[self.updated :]:
            for key, value in gradients.items():
                assert abs((update[key] or 0.0) - value) < 1e-4, f"{update} in threads"
        self.updated = len(self.updates)
        self.clear()

    def do_grad(self) -> None:
        """`torch.autograd.grad` adds nothing, and counts nothing."""
        loss, _ = self.loss()
        before, count = read_gradients(self.tensors), self.acc.current_step
        torch.autograd.grad(loss, self.tensors, allow_unused=True)
        assert (read_gradients(self.tensors), self.acc.current_step) == (before, count)

    def do_evaluate(self) -> None:
        with torch.no_grad():
            self.loss()

    def do_failing_hook(self) -> None:
        """A post-hook of the user's raises after the update: it is not repeated."""
        if not self.handed:
            return
        self.clean = False

        def fail(*_: Any) -> None:
            raise HalfWay("a logger")

        handle = self.optimizer.register_step_post_hook(fail)
        try:
            self.iteration()
        except HalfWay:
            handle.remove()
            if self.scaler is not None:
                self.updated = len(self.updates)
                self.recover()
                return
            assert self.note_update()
            self.uncleared = any(
                one.grad is not None and bool(one.grad.any()) for one in self.tensors
            )
        finally:
            handle.remove()
