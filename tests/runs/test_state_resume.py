"""A run that is left and resumed, wherever that is, ends with the parameters of the run that never
was.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradfit import LossScaler
from gradfit.errors import MisuseError, StateError
from gradfit.runs import training_run as run_module
from gradfit.runs.job import Job
from gradfit.runs.random_state import seed_everything
from gradfit.runs.state_files import SavedState, StateStore
from gradfit.runs.training_run import Listener, RunSettings, TrainingRun

BATCH, STEPS, MEMORY = 12, 9, 34_000  # bytes in which a step must be made of several micro-batches


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(50, 20, 6, generator=draw), torch.randint(3, (50,), generator=draw)


def noisy_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 5 rows, so that they never fit into 12, with noise from the global generator."""
    x, y = rows()
    for start in range(0, 50, 5):
        part = x[start : start + 5]
        yield part + 0.1 * torch.randn_like(part), y[start : start + 5]


DATA: dict[str, Callable[[], Any]] = {
    "tensors": rows,
    "dataset": lambda: TensorDataset(*rows()),
    "loader": lambda: DataLoader(TensorDataset(*rows()), batch_size=12, shuffle=True),
    "loader of smaller batches": lambda: DataLoader(
        TensorDataset(*rows()), batch_size=5, shuffle=True
    ),
    "loader with its own generator": lambda: DataLoader(
        TensorDataset(*rows()),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    ),
    "list of batches": lambda: [
        (x, y) for x, y in zip(rows()[0].split(7), rows()[1].split(7), strict=True)
    ],
    "function": lambda: noisy_batches,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "clip": lambda: {"clip": 0.05},
    "torch's scaler": lambda: {
        "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        "clip": 0.5,
    },
    "our scaler": lambda: {"scaler": LossScaler(growth_interval=2), "on_nonfinite": "skip"},
    "wide and offloaded": lambda: {"dtype": torch.float64, "offload": True, "exact": False},
}


def make_job(
    data: str = "tensors",
    optimizer: str = "adamw",
    scheduler: str = "cosine",
    options: str = "none",
) -> Job:
    seed_everything(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
    )
    made = OPTIMIZERS[optimizer](model.parameters())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).mean(dim=1), batch[1])

    chosen = OPTIONS[options]()
    return Job(
        model, loss, DATA[data](), made, BATCH, SCHEDULERS[scheduler](made), fit_options=chosen
    )


class EverySave(Listener):
    """Makes every moment a moment to save at, and counts those at which one could have been
    stopped.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(
    job: Job,
    store: StateStore,
    *,
    stop_at: int | None = None,
    memory: int | None = None,
    **more: Any,
) -> TrainingRun:
    """Train; `stop_at` is the number of times that the run asks whether to stop, before the answer
    is yes.
    """
    asked = itertools.count()
    settings = RunSettings(
        batch_size=BATCH, memory_bytes=memory or MEMORY, steps=more.pop("steps", STEPS), **more
    )
    made = TrainingRun(
        job, settings, store=store, listener=EverySave(), stop=lambda: next(asked) == stop_at
    )
    saved = store.load()
    if saved is not None:
        made.resume(saved)
    made.report = made.train()  # type: ignore[attr-defined]
    return made


def parameters(job: Job) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in job.model.parameters()]


def check(tmp_path: Path, kinds: tuple[str, ...], stops: list[int]) -> tuple[Job, Job]:
    through = make_job(*kinds)
    run(through, StateStore(tmp_path / "through"))
    store = StateStore(tmp_path / "stopped")
    store.prepare()
    for stop in stops:
        run(make_job(*kinds), store, stop_at=stop)
    last = make_job(*kinds)
    seed_everything(99)  # whatever the new process draws must not matter
    finished = run(last, store)
    assert finished.step_number == STEPS
    for a, b in zip(parameters(through), parameters(last), strict=True):
        assert torch.equal(a, b)
    if through.scheduler is not None:
        assert through.scheduler.state_dict() == last.scheduler.state_dict()
    return through, last


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def plans_made_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Planning takes most of the time and is tested elsewhere; that two runs make the same plan is
    tested below.
    """
    if "plans_anew" in request.fixturenames:
        return
    original = run_module.fit

    def fit(
        model: Any, optimizer: Any, loss_fn: Any, sample: Any, memory: int, rows: Any, **more: Any
    ) -> Any:
        key = (type(optimizer), memory, rows)
        more["known"] = more["known"] or _KNOWN.get(key, ())
        step = original(model, optimizer, loss_fn, sample, memory, rows, **more)
        _KNOWN[key] = step.known
        return step

    monkeypatch.setattr(run_module, "fit", fit)


_KNOWN: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def directories(tmp_path: Path) -> None:
    for name in ("through", "stopped"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("data", DATA)
def test_every_kind_of_data(tmp_path: Path, data: str) -> None:
    check(tmp_path, (data, "adamw", "cosine"), [2, 3, 1])


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    list(zip(OPTIMIZERS, itertools.cycle(SCHEDULERS), strict=False)),
)
def test_every_optimizer_and_scheduler(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    check(tmp_path, ("tensors", optimizer, scheduler), [3, 2])


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "none"])
def test_every_option_of_fit(tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches `fit`, and what it holds (a scale that grows) comes back with the state."""
    passed: list[dict[str, Any]] = []
    original = run_module.fit
    monkeypatch.setattr(
        run_module, "fit", lambda *args, **more: passed.append(more) or original(*args, **more)
    )
    monkeypatch.setattr(f"{__name__}.MEMORY", MEMORY * 2)  # a scaler and wide sums take some
    through, last = check(tmp_path, ("tensors", "adamw", "cosine", options), [3, 2])
    assert passed[-1].items() >= dict(last.fit_options).items()
    if through.scaler is not None:
        assert (
            through.scaler.get_scale()
            == last.scaler.get_scale()
            > through.scaler.state_dict()["growth_factor"]
        )
        assert through.scaler.state_dict() == last.scaler.state_dict()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": 1}, "which is none of clip, scaler, dtype"),
        ({"clip": -1}, "clip=-1 must be more than 0"),
        ({"on_nonfinite": "x"}, "on_nonfinite='x'"),
        ({"offload": 1}, "offload=1 is not True or False"),
        ({"dtype": torch.int64}, "is not a floating point type"),
        ([1], "fit_options="),
    ],
)
def test_options_that_fit_does_not_take_are_named(options: Any, text: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisuseError, match=re.escape(text)):
        Job(model, lambda m, x: m(x).mean(), torch.ones(4, 2), optimizer, 2, fit_options=options)


def test_a_state_with_a_scaler_is_not_one_without(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "stopped")
    store.prepare()
    run(make_job(options="our scaler"), store, stop_at=3)
    with pytest.raises(StateError, match="both have a scaler or neither"):
        run(make_job(), store)


@pytest.mark.slow
@pytest.mark.parametrize("stop", range(30))
def test_every_moment(tmp_path: Path, stop: int) -> None:
    check(tmp_path, ("loader of smaller batches", "adamw", "cosine"), [stop])


@pytest.mark.parametrize("plans_anew", [True])
def test_two_runs_choose_the_same_micro_batch(tmp_path: Path, plans_anew: bool) -> None:
    check(tmp_path, ("tensors", "adamw", "cosine"), [3])


def test_a_window_is_left_in_the_middle(tmp_path: Path) -> None:
    """Under this budget a step has several micro-batches, and the first stop falls between two of
    them.
    """
    store = StateStore(tmp_path / "stopped")
    stopped = run(make_job(), store, stop_at=0)
    assert stopped.report.interrupted  # type: ignore[attr-defined]
    saved = store.load()
    assert saved is not None
    assert saved.content["progress"]["done"] == 1
    assert saved.content["step"] == 0
    assert any(name.startswith("grad.") for name in saved.content["accumulator"]["tensors"])


def test_epochs_end_where_the_data_end(tmp_path: Path) -> None:
    job = make_job("loader")
    made = run(job, StateStore(tmp_path / "through"), steps=None, epochs=2)
    assert made.step_number == 10  # 50 rows: 12, 12, 12, 12, 2
    again = run(make_job("loader"), StateStore(tmp_path / "through"), steps=None, epochs=3)
    assert again.step_number == 15
    longer = make_job("loader")
    run(longer, StateStore(tmp_path / "stopped"), steps=None, epochs=3)
    for a, b in zip(parameters(again.job), parameters(longer), strict=True):
        assert torch.equal(a, b)


def test_another_budget_makes_another_plan_and_says_so(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "stopped")
    run(make_job(), store, stop_at=0)
    with pytest.raises(StateError, match="in the middle of a step"):
        run(make_job(), store, memory=1_000_000)
    run(make_job(), store, steps=3)
    other = run(make_job(), store, memory=1_000_000)
    assert any("budget" in text for text in other.listener.notes)  # type: ignore[attr-defined]
    assert other.step is not None
    assert other.step.plan.steps == 1


def test_another_batch_size_or_seed_is_another_run(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "stopped")
    run(make_job(), store, stop_at=3)
    with pytest.raises(StateError, match="--seed"):
        run(make_job(), store, seed=1)


@pytest.mark.parametrize(
    "what", ["shape", "dtype", "missing", "extra", "moment", "groups", "no tensor", "scheduler"]
)
def test_a_state_of_another_job_changes_nothing(tmp_path: Path, what: str) -> None:
    store = StateStore(tmp_path / "stopped")
    run(make_job(), store, stop_at=6)
    saved = store.load()
    assert saved is not None
    state = saved.content["job"]
    if what == "shape":
        state["model"]["0.weight"] = torch.zeros(6, 16)
    elif what == "dtype":
        state["model"]["0.weight"] = torch.zeros(16, 6, dtype=torch.float64)
    elif what == "missing":
        del state["model"]["0.weight"]
    elif what == "extra":
        state["model"]["../../etc/passwd"] = torch.zeros(1)
    elif what == "moment":
        state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(2**10)
    elif what == "groups":
        state["optimizer"]["param_groups"][0]["params"] = [0]
    elif what == "no tensor":
        state["model"]["0.weight"] = "weights"
    else:
        state["scheduler"] = None
    job = make_job()
    before = parameters(job)
    made = TrainingRun(
        job, RunSettings(batch_size=BATCH, memory_bytes=MEMORY, steps=STEPS), store=store
    )
    with pytest.raises(StateError):
        made.resume(SavedState(saved.content, saved.path))
    for a, b in zip(before, parameters(job), strict=True):
        assert torch.equal(a, b)
    assert not job.optimizer.state


def test_low_precision_moments_of_another_type_come_back_as_they_were(tmp_path: Path) -> None:
    """torch's load_state_dict casts state to the parameter's type; bit-identical means that ours
    does not.
    """
    from gradfit.runs import job_state as snapshot

    def make() -> Job:
        model = nn.Linear(4, 2, dtype=torch.bfloat16)
        return Job(
            model,
            lambda m, x: m(x).sum(),
            torch.ones(4, 4),
            torch.optim.SGD(model.parameters(), lr=0.1),
            2,
        )

    job, other = make(), make()
    weight = job.model.weight
    job.optimizer.state[weight]["momentum_buffer"] = torch.full((2, 4), 1 / 3, dtype=torch.float32)
    snapshot.restore(other, snapshot.capture(job))
    back = other.optimizer.state[other.model.weight]["momentum_buffer"]
    assert back.dtype is torch.float32
    assert torch.equal(back, torch.full((2, 4), 1 / 3))


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    job = make_job()
    job.data = iter([torch.ones(2)])
    with pytest.raises(MisuseError, match="cannot be read a second time"):
        run(job, StateStore(tmp_path / "through"))
