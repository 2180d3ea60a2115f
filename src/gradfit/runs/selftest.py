"""`gradfit selftest`: what gradfit promises, checked on the machine it runs on against plain
PyTorch there.

Each check is small, so that all of them take a few minutes on anything; a check that cannot run
here says why.
"""

from __future__ import annotations

import contextlib
import copy
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradfit as gf
from gradfit import records
from gradfit.batches.snapshot import generator_states
from gradfit.devices import memory_of
from gradfit.runs.builtin_networks import ResNet, Transformer
from gradfit.units import format_bytes

_BATCH, _LENGTH, _VOCABULARY = 8, 64, 512
_ROUNDING = 1e-4  # of float32 sums, relative to the largest element


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: whether it holds here, and the numbers that say so."""

    name: str
    passed: bool
    skipped: bool
    facts: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class SelfTest:
    """All checks, and where they ran."""

    device: str
    machine: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed or check.skipped for check in self.checks)

    def to_json(self) -> str:
        """As JSON text."""
        return records.to_json(self, indent=1)

    @classmethod
    def from_json(cls, text: str) -> SelfTest:
        """Read what `to_json` wrote.

        Args:
            text: JSON.
        """
        return records.from_json(cls, text)

    def __str__(self) -> str:
        lines = [f"{self.device}, torch {self.machine['torch']}, gradfit {self.machine['gradfit']}"]
        lines += [
            f"{_verdict(check):<8}{check.name}: {_in_words(check.facts)}" for check in self.checks
        ]
        failed = sum(not (check.passed or check.skipped) for check in self.checks)
        lines.append(
            "All that could be checked here holds." if self.passed else f"{failed} checks failed."
        )
        return "\n".join(lines)

    def page(self) -> str:
        """One self-contained HTML page."""
        style = resources.files("gradfit.data").joinpath("report.css").read_text()
        machine = "".join(
            f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in self.machine.items()
        )
        rows = "".join(map(_row_of, self.checks))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            'content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light'
            ' dark">'
            "<title>gradfit selftest:"
            f" {escape(self.device)}</title><style>{style}</style></head><body><header>"
            "<h1>gradfit selftest:"
            f" {escape(self.device)}</h1></header><main><section><h2>Checks</h2><table>"
            f"<tr><th>Result</th><th>Check</th><th>Numbers</th><th>Took</th></tr>{rows}</table></section>"
            f"<section><h2>Machine</h2><table>{machine}</table></section></main></body></html>\n"
        )


def _row_of(check: Check) -> str:
    facts = "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in check.facts.items())
    return (
        f"<tr><td>{_verdict(check)}</td><th>{escape(check.name)}</th><td>{facts}</td>"
        f"<td>{check.seconds:.1f} s</td></tr>"
    )


def _in_words(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _verdict(check: Check) -> str:
    return "skipped" if check.skipped else "passed" if check.passed else "FAILED"


class _Skip(Exception):
    """This check cannot run here, and why."""


class _Failed(Exception):
    """What was promised does not hold; the numbers."""


def run_selftest(
    device: torch.device | None = None, progress: Callable[[str], None] = lambda _: None
) -> SelfTest:
    """Run all checks on a device; without one, on the accelerator if there is any, else on the CPU.

    Args:
        device: where to run.
        progress: called with the name of each check before it runs.
    """
    here = torch.accelerator.current_accelerator(check_available=True) if device is None else device
    device = torch.device("cpu") if here is None else here
    return SelfTest(
        str(device), _machine(device), tuple(_run(check, device, progress) for check in _CHECKS)
    )


def _run(
    check: Callable[[torch.device], dict[str, str]], device: torch.device, progress: Any
) -> Check:
    name = (check.__doc__ or "").strip().rstrip(".")
    progress(name)
    started = time.perf_counter()
    passed = skipped = False
    try:
        with torch.device(device):
            facts = check(device)
        passed = True
    except _Skip as why:
        facts, skipped = {"because": str(why)}, True
    except _Failed as why:
        facts = {"found": str(why)}
    except Exception as error:  # any error of a check is a result, too
        where = traceback.extract_tb(error.__traceback__)[-1]
        facts = {
            "error": f"{type(error).__name__}: {error}",
            "at": f"{where.name}, line {where.lineno}",
        }
    return Check(name, passed, skipped, facts, time.perf_counter() - started)


def _machine(device: torch.device) -> dict[str, str]:
    memory = memory_of(device) if device.type != "cpu" else None
    return {
        "gradfit": gf.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "core": "native" if gf.native_core().used else "Python",
        "system": f"{platform.system()} {platform.machine()}",
        "device": _device_name(device),
        "memory": "" if memory is None else format_bytes(memory[1]),
        "CUDA": str(torch.version.cuda or ""),
    }


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device) if device.type != "cpu" else None
    name_of = getattr(module, "get_device_name", None)
    if name_of is None:
        return platform.processor() or platform.machine()
    return str(name_of(device))


# -- what is trained -----------------------------------------------------------------------------


def _language_model(device: torch.device, dropout: float = 0.1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=_VOCABULARY,
        length=_LENGTH,
        layers=3,
        width=64,
        heads=4,
        causal=True,
        dropout=dropout,
    )
    return model.to(device), torch.randint(_VOCABULARY, (_BATCH, _LENGTH + 1), device="cpu").to(
        device
    )


def _token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _gradients(model: nn.Module) -> list[Tensor]:
    gradients = [
        parameter.grad.detach().clone()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    model.zero_grad(set_to_none=True)
    return gradients


def _same(first: list[Tensor], second: list[Tensor]) -> None:
    if len(first) != len(second):
        raise _Failed(f"{len(first)} tensors of plain PyTorch, {len(second)} of gradfit")
    wrong = [
        at for at, (a, b) in enumerate(zip(first, second, strict=True)) if not torch.equal(a, b)
    ]
    if wrong:
        a, b = first[wrong[0]], second[wrong[0]]
        worst = float((a.double() - b.double()).abs().max())
        raise _Failed(
            f"{len(wrong)} of {len(first)} tensors differ, by up to {worst:.3g} in the first"
        )


def _error(exact: list[Tensor], got: list[Tensor]) -> float:
    errors = [float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-30))
              for a, b in zip(exact, got, strict=True)]  # fmt: skip
    return max(errors)


def _compare(run: Callable[[bool], list[Tensor]]) -> dict[str, str]:
    """Run plainly and with gradfit from the same generators; results and generators must be the
    same bits.
    """
    results = []
    for ours in (False, True):
        torch.manual_seed(3)
        results.append([*run(ours), *generator_states()])
    _same(*results)
    return {"tensors compared": str(len(results[0])), "different": "0"}


# -- the checks ----------------------------------------------------------------------------------


def _check_scopes(device: torch.device) -> dict[str, str]:
    """Recomputation in scopes is bit-identical, dropout and generators included."""
    model, tokens = _language_model(device)

    def run(ours: bool) -> list[Tensor]:
        with gf.CheckpointScope("model", enabled=ours):
            loss = _token_loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return _gradients(model)

    return _compare(run)


def _check_autocast(device: torch.device) -> dict[str, str]:
    """Recomputation under autocast in bfloat16 is bit-identical."""
    model, tokens = _language_model(device)

    def run(ours: bool) -> list[Tensor]:
        with (
            torch.autocast(device.type, dtype=torch.bfloat16),
            gf.CheckpointScope("model", enabled=ours),
        ):
            loss = _token_loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return _gradients(model)

    return _compare(run)


def _check_convolutions(device: torch.device) -> dict[str, str]:
    """Convolutions and BatchNorm are bit-identical, running statistics too, if plain PyTorch is to
    itself.
    """
    torch.manual_seed(0)
    model = ResNet(classes=10, blocks=1, width=8).to(device)
    images = torch.randn(8, 3, 16, 16)
    start = copy.deepcopy(model.state_dict())

    def run(ours: bool) -> list[Tensor]:
        model.load_state_dict(start)
        with gf.CheckpointScope("model", enabled=ours):
            loss = model(images).square().mean()
        loss.backward()
        return [*_gradients(model), *(buffer.clone() for buffer in model.buffers())]

    first, second = run(False), run(False)
    if any(not torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise _Skip(
            "plain PyTorch does not give the same numbers twice here; use deterministic algorithms"
        )
    return _compare(run)


def _check_budgets(device: torch.device) -> dict[str, str]:
    """Steps under budgets stay below them and are bit-identical to plain ones."""
    facts = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model, tokens = _language_model(device)
        start = copy.deepcopy(model.state_dict())
        profile = gf.profile(model, _token_loss, tokens, kind(model.parameters(), lr=1e-3))
        plans = gf.frontier(profile, points=2, tile=False)
        least, most = plans[-1].peak_bytes, plans[0].peak_bytes
        for share in (0.25, 0.6):
            budget = int(least + share * (most - least)) + 65536
            with _restored(model, start):
                optimizer = kind(model.parameters(), lr=1e-3)
                step = gf.fit(
                    model,
                    optimizer,
                    _token_loss,
                    tokens,
                    memory=budget,
                    micro_batch="whole",
                    tile=False,
                )
                torch.manual_seed(1)
                result = step(tokens)
                got = [parameter.detach().clone() for parameter in model.parameters()]
            if result.peak_bytes > budget:
                raise _Failed(
                    f"{kind.__name__}: {result.peak_bytes} bytes with a budget of {budget}"
                )
            with _restored(model, start):
                optimizer = kind(model.parameters(), lr=1e-3)
                torch.manual_seed(1)
                _token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                _same([parameter.detach().clone() for parameter in model.parameters()], got)
                model.zero_grad(set_to_none=True)
            facts[f"{kind.__name__}, {format_bytes(budget)}"] = (
                f"peak {format_bytes(result.peak_bytes)}"
            )
    return facts


@contextlib.contextmanager
def _restored(model: nn.Module, state: dict[str, Any]) -> Iterator[None]:
    model.load_state_dict(state)
    yield


def _check_micro_batches(device: torch.device) -> dict[str, str]:
    """Micro-batches of any size give the full batch's gradient, padding or not."""
    model, tokens = _language_model(device, dropout=0.0)
    tokens = torch.where(torch.rand(tokens.shape) < 0.3, -100, tokens)

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1].clamp_min(0))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    loss_fn(model, tokens).backward()  # type: ignore[no-untyped-call]
    whole = _gradients(model)
    accumulator = gf.GradientAccumulator(parameters=model.parameters(), steps=3)
    for part in torch.split(tokens, 3):
        accumulator.backward(loss_fn(model, part), weight="auto")
    accumulator.flush()
    error = _error(whole, _gradients(model))
    if error > _ROUNDING:
        raise _Failed(f"largest relative difference {error:.3g}")
    return {"largest relative difference": f"{error:.2g}"}


def _check_tiles(device: torch.device) -> dict[str, str]:
    """Tiles give the same gradients up to the rounding of a sum, with a lower peak."""
    model, tokens = _language_model(device, dropout=0.0)
    results, peaks = [], []
    for tiled in (False, True):
        with (
            gf.tile(model, size=64) if tiled else contextlib.nullcontext(),
            gf.meter(model, tokens) as live,
        ):
            _token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        results.append(_gradients(model))
        peaks.append(live.peak_bytes)
    error = _error(*results)
    if error > _ROUNDING:
        raise _Failed(f"largest relative difference {error:.3g}")
    return {
        "largest relative difference": f"{error:.2g}",
        "peak": f"{format_bytes(peaks[1])} of {format_bytes(peaks[0])}",
    }


def _check_recovery(device: torch.device) -> dict[str, str]:
    """A step in which memory runs out is repeated, with the same result."""
    results = []
    attempts = 1
    for disturbed in (False, True):
        model, tokens = _language_model(device)
        left = [0]

        def loss_fn(model: nn.Module, tokens: Tensor, left: list[int] = left) -> Tensor:
            loss = _token_loss(model, tokens)
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("raised by gradfit selftest")
            return loss

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = gf.fit(
            model, optimizer, loss_fn, tokens, memory="1 GiB", micro_batch=_BATCH // 2, tile=False
        )
        torch.manual_seed(1)
        left[0] = int(disturbed)
        attempts = step(tokens).attempts
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    _same(*results)
    if attempts < 2:
        raise _Failed("the step was not disturbed")
    return {"attempts": str(attempts), "different": "0"}


def _check_offloading(device: torch.device) -> dict[str, str]:
    """Values that are moved to the host come back as they were."""
    if device.type == "cpu":
        raise _Skip("there is no device to move them from")
    model, tokens = _language_model(device)
    profile = gf.profile(model, _token_loss, tokens, host_bandwidth=1e15)
    plan = gf.frontier(profile, points=2, tile=False)[-1]
    if "offload" not in plan.actions:
        raise _Skip("no plan moves anything here")

    def run(ours: bool) -> list[Tensor]:
        with gf.apply(model, plan) if ours else contextlib.nullcontext():
            loss = _token_loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return _gradients(model)

    return {**_compare(run), "values moved": str(plan.actions.count("offload"))}


def _check_predictions(device: torch.device) -> dict[str, str]:
    """The peak is predicted, on shapes and by a profile, and the meter counts what the device's
    allocator does.
    """
    model, tokens = _language_model(device, dropout=0.0)
    # what a first run allocates for good
    _token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    on_shapes = gf.estimate(model, _token_loss, tokens, hardware="t4").peak_bytes
    counts = torch.accelerator.memory_stats if device.type != "cpu" else None
    if counts is not None:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
    with gf.meter(model, tokens, device=device) as live:
        others = (
            0
            if counts is None
            else counts().get("requested_bytes.all.current", 0) - live.current_bytes
        )
        _token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    facts = {
        "measured": format_bytes(live.peak_bytes),
        "on shapes": f"{on_shapes / live.peak_bytes - 1:+.1%}",
    }
    if counts is not None:
        own = counts().get("requested_bytes.all.peak", 0) - others
        facts["the allocator's own"] = f"{own / live.peak_bytes - 1:+.1%}"
        facts["reserved at most"] = format_bytes(torch.accelerator.max_memory_reserved())
    if abs(on_shapes / live.peak_bytes - 1) > 0.05:
        raise _Failed(_in_words(facts))
    return facts


_CHECKS = (
    _check_scopes,
    _check_autocast,
    _check_convolutions,
    _check_budgets,
    _check_micro_batches,
    _check_tiles,
    _check_recovery,
    _check_offloading,
    _check_predictions,
)
