"""What `fit` runs before it returns, and what it says meanwhile."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.batches.additivity import measure_additivity
from gradfit.batches.additivity_record import Additivity
from gradfit.fitting import known_plans, progress, race, token_tiles
from gradfit.planning.microbatch import MicrobatchSearch
from gradfit.profiling import measure, sampled_sizes, traced_seconds
from gradfit.profiling.profile import Profile

ROWS = 64
EXACT = Additivity("divisor", roles=("adds",))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def fitted(memory: Any = "64 MiB", loss_fn: Any = square, **options: Any) -> gf.TrainStep:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gf.fit(model, optimizer, loss_fn, torch.rand(ROWS, 32), memory, **options)


@pytest.fixture
def long_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every pass took so long that once is enough."""
    monkeypatch.setattr(traced_seconds, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(sampled_sizes, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(race, "_ALONE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "additivity_within", lambda *_: EXACT)


@pytest.mark.usefixtures("long_passes")
def test_a_model_that_fits_is_run_on_two_batches_rows() -> None:
    """Few rows watched and timed, and the whole batch tried out: its seconds are those of steps."""
    seen: list[int] = []

    def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return square(model, x)

    step = fitted(loss_fn=counted)
    assert step.plan.keeps_everything
    assert sum(seen) <= 2 * ROWS
    assert seen.count(ROWS) == 1


def test_a_loss_that_can_be_read_is_measured_on_few_rows() -> None:
    """Five forwards of values, and both passes of three rows, whole and in parts."""
    seen: list[int] = []

    def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return square(model, x)

    found = measure_additivity(network(), counted, torch.rand(ROWS, 32))
    assert found.over == "divisor"
    assert seen == [1, 4, 1, 1, 5, 2, 1, 3]


def test_a_later_plan_is_made_of_few_rows_too() -> None:
    """What was measured of the loss is known by then: every size was run, up to the whole batch,
    and timed five times.
    """
    seen: list[int] = []

    def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return square(model, x)

    step = fitted(loss_fn=counted)
    seen.clear()
    assert step(torch.rand(ROWS, 3, 32)).stepped  # of another kind: no plan serves it
    assert len(step.known) == 2
    assert set(seen) == {1, 2, 4, ROWS}
    assert seen.count(ROWS) == 2  # the trial and the step


def plain_peak() -> int:
    model, x = network(), torch.rand(ROWS, 32)
    with gf.meter(model, x) as live:
        square(model, x).backward()
    return live.peak_bytes


@pytest.mark.usefixtures("long_passes")
def test_all_plans_are_timed_in_one_race(monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[int] = []
    made = race.Race.__init__

    def noted(self: race.Race, passes: Any, **options: Any) -> None:
        races.append(len(passes))
        made(self, passes, **options)

    monkeypatch.setattr(race.Race, "__init__", noted)
    step = fitted(plain_peak() - 30_000, plan_ahead=True)
    assert step.plan.steps > 1 or not step.plan.keeps_everything
    assert len(races) == 1


@pytest.mark.usefixtures("long_passes")
def test_one_profile_where_nothing_could_be_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are not tried where the plan without them is nearly as fast as if everything were
    kept.
    """
    from gradfit.fitting.plan_search import may_be_beaten
    from gradfit.fitting.step_profiles import StepProfiles
    from gradfit.fitting.tested_plan import TestedPlan

    profiles: list[Any] = []
    run = StepProfiles.measure

    def noted(self: StepProfiles, *args: Any, **options: Any) -> Profile:
        profiles.append(options.get("tiles"))
        return run(self, *args, **options)

    monkeypatch.setattr(StepProfiles, "measure", noted)
    step = fitted()
    assert profiles == [None]
    (known,) = step.known
    assert isinstance(known, TestedPlan)
    assert not may_be_beaten(known)


def test_the_first_plan_is_found_quickly_and_a_better_one_while_training_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that takes its time begins when steps have paid for it, or with plan_ahead."""
    searched: list[int] = []
    best = MicrobatchSearch.best

    def noted(self: MicrobatchSearch, budget_bytes: int, **options: Any) -> Any:
        searched.append(budget_bytes)
        return best(self, budget_bytes, **options)

    monkeypatch.setattr(MicrobatchSearch, "best", noted)
    memory = plain_peak() - 30_000
    step = fitted(memory, planning_share=1000.0)
    assert not searched
    first = step.plan
    assert first.steps > 1 or not first.keeps_everything
    for _ in range(30):
        result = step(torch.rand(ROWS, 32))
        assert result.peak_bytes <= memory
    assert searched
    fitted(memory, plan_ahead=True)
    assert len(searched) > 1


def test_tiles_are_not_looked_for_where_logits_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would take a forward of its own."""
    looked: list[Any] = []
    find = token_tiles.choose_tiles
    monkeypatch.setattr(
        token_tiles, "choose_tiles", lambda *given: looked.append(given) or find(*given)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    ids = torch.randint(0, 300, (8, 64))
    gf.fit(model, optimizer, loss, ids, memory="64 MiB")
    assert not looked
    gf.fit(model, optimizer, loss, ids, memory="600 KiB")
    assert looked


def test_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    fitted(on_progress=lambda doing, seconds: told.append((doing, seconds)), plan_ahead=True)
    doing = [what for what, _ in told]
    assert doing[0] == "measuring a step's operations"
    assert any(what.startswith("planning for") for what in doing)
    assert f"trying out a plan, micro-batch {ROWS}" in doing
    assert doing[-1] == "timing a plan"
    seconds = [since for _, since in told]
    assert seconds == sorted(seconds)


def test_what_the_function_raises_ends_fit_and_changes_nothing() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]

    def stop(doing: str, seconds: float) -> None:
        if doing.startswith("trying out"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gf.fit(model, optimizer, square, torch.rand(ROWS, 32), "64 MiB", on_progress=stop)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_shown_after_a_while_and_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_PATIENCE", 1e9)
    fitted()
    assert "gradfit:" not in terminal.getvalue()
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    fitted()
    assert "gradfit: trying out a plan" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_elsewhere_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    fitted()
    assert capsys.readouterr().err == ""


def test_a_batch_like_the_last_one_is_served_without_asking_every_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 8)
    step = gf.fit(model, optimizer, lambda model, x: model(x).square().mean(), x, memory="8 MiB")
    asked: list[Any] = []
    original = known_plans.covering
    monkeypatch.setattr(
        known_plans, "covering", lambda *given: asked.append(given) or original(*given)
    )
    # the peak of the first two is measured, and then the seconds of at most ten: new records of the
    # plan
    for _ in range(14):
        step(x)
    before = len(asked)
    for _ in range(3):
        step(x)
    assert len(asked) == before
    step(x[:9])
    assert len(asked) > before
    larger = torch.randn(64, 8)
    assert step(larger).stepped
    assert step.plan.batch_size >= 64
