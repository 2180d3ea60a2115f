"""A job's whole state as one nest, and back into a job: checked to the last shape before anything is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradfit._torch_distributed import is_dtensor
from gradfit.errors import StateError
from gradfit.profiling.optimizer_bytes import probe_of
from gradfit.runs.job import Job
from gradfit.runs.shards import Everybody, Filler, whole
from gradfit.runs.state_codec import Piece
from gradfit.state_checks import MANY, same_kind

_EXTRA = "_extra_state"


def capture(job: Job) -> dict[str, Any]:
    """Model (buffers that are not persistent included), optimizer and scheduler; the tensors are the job's own."""
    extra = {key: value for key, value in job.model.state_dict().items() if key.endswith(_EXTRA)}
    return {
        "model": _tensors_of(job.model),
        "extra": extra,
        "optimizer": job.optimizer.state_dict(),
        "own": _own_attributes(job.optimizer),
        "scheduler": None if job.scheduler is None else job.scheduler.state_dict(),
    }


def check(job: Job, state: dict[str, Any]) -> None:
    """Raise a `StateError` unless this state is one of this job."""
    here = _tensors_of(job.model)
    saved = _dict(state, "model")
    if missing := sorted(here.keys() - saved.keys()):
        raise StateError(f"The state has no {missing[0]!r} ({len(missing)} missing). Resume with the same model.")
    if strange := sorted(saved.keys() - here.keys()):
        raise StateError(f"The state has {strange[0]!r} ({len(strange)} too many). Resume with the same model.")
    for name, tensor in here.items():
        _same_kind(f"{name!r}", saved[name], tensor)
    if (state.get("scheduler") is None) != (job.scheduler is None):
        raise StateError("The state and the job must both have a scheduler or neither. Resume with the same job.")
    extra = {key for key in job.model.state_dict() if key.endswith(_EXTRA)}
    if strange := sorted(_dict(state, "extra").keys() ^ extra):
        raise StateError(f"The state's and the model's extra state differ: {strange[0]!r}. Resume with the same model.")
    _check_optimizer(job.optimizer, _dict(state, "optimizer"))
    own = _own_attributes(job.optimizer)
    if strange := sorted(state.get("own", {}).keys() - own.keys()):
        raise StateError(
            f"The state's optimizer has {strange[0]!r}, the job's has not. Resume with the same optimizer."
        )
    for name, value in state.get("own", {}).items():
        same_kind(f"The state's optimizer's {name!r}", value, own[name])
    if job.scheduler is not None:
        same_kind("The state's scheduler", state["scheduler"], job.scheduler.state_dict())


def restore(job: Job, state: dict[str, Any], everybody: Everybody = list) -> None:
    """Put a state that `check` has passed into the job; what other ranks have of it comes from `everybody`."""
    filler = Filler(everybody)
    with torch.no_grad():
        for name, tensor in _tensors_of(job.model).items():
            filler.fill(tensor, state["model"][name], ("model", name))
        optimizer = _gathered(job.optimizer, state["optimizer"], filler)
        filler.finish()
    if state["extra"]:
        with _said("extra state"):
            job.model.load_state_dict({**job.model.state_dict(), **state["extra"]})
    with _said("optimizer"):
        _restore_optimizer(job.optimizer, optimizer)
        _restore_own(job.optimizer, state.get("own", {}))
    if job.scheduler is not None:
        with _said("scheduler"):
            job.scheduler.load_state_dict(state["scheduler"])


@contextlib.contextmanager
def _said(part: str) -> Iterator[None]:
    """What an optimizer, a scheduler or a model does not take of a state is the state's fault."""
    try:
        yield
    except Exception as error:
        raise StateError(
            f"The job's {part} does not take what the state has of it ({type(error).__name__}: {error}). Resume with "
            "the same job."
        ) from error


def whole_model(model: torch.nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each one whole, for whoever wants to `keep` them; on all ranks together."""
    found = {}
    for name, tensor in _tensors_of(model).items():
        content = whole(tensor)
        if keep:
            found[name] = content.cpu() if content is not tensor else content
    return found


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor if is_dtensor(tensor) else tensor.detach() for name, tensor in named}


def _dict(state: dict[str, Any], name: str) -> dict[str, Any]:
    found = state.get(name)
    if not isinstance(found, dict):
        raise StateError(f"The state has no {name!r}. It was not written by gradfit train.")
    return found


def _same_kind(name: str, saved: Any, here: torch.Tensor) -> None:
    content = saved.content if isinstance(saved, Piece) else saved
    if not isinstance(content, torch.Tensor):
        raise StateError(f"The state's {name} is a {type(content).__name__}, not a tensor.")
    if tuple(saved.shape) != tuple(here.shape) or content.dtype != here.dtype:
        raise StateError(
            f"The state's {name} is {tuple(saved.shape)} of {content.dtype}, the job's {tuple(here.shape)} of "
            f"{here.dtype}. Resume with the same model."
        )


# ------------------------------------------------------------------------------------------------ optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    here = optimizer.state_dict()
    groups, states = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict) or not all(isinstance(g, dict) for g in groups):
        raise StateError("The state's optimizer has no groups. It was not written by gradfit train.")
    if [g.get("params") for g in groups] != [g["params"] for g in here["param_groups"]]:
        raise StateError(
            f"The state's optimizer has other groups of parameters than the job's {type(optimizer).__name__}. "
            "Resume with the same optimizer."
        )
    if [set(g) for g in groups] != [set(g) for g in here["param_groups"]]:
        raise StateError(
            f"The state is that of another optimizer than {type(optimizer).__name__}. Resume with the same."
        )
    for number, (group, own) in enumerate(zip(groups, here["param_groups"], strict=True)):
        same_kind(f"The state's optimizer's group {number}", group, own)
        for name in _FRACTIONS & group.keys():
            for value in group[name] if isinstance(group[name], tuple | list) else [group[name]]:
                if isinstance(value, int | float) and not 0 <= value <= 1:
                    raise StateError(f"The state's optimizer has {name} {value!r}, which is not from 0 to 1.")
    expected = _Expected(optimizer)
    for index, entries in states.items():
        if index not in expected.by_index or not isinstance(entries, dict):
            raise StateError(
                f"The state's optimizer has an entry for parameter {index!r}, which the job does not have."
            )
        for name, made in expected.of(index).items() if entries else ():
            what = f"optimizer's {name!r} of parameter {index}"
            if name not in entries:
                raise StateError(f"The state has no {what}. Resume with the same optimizer.")
            if isinstance(made, torch.Tensor) and isinstance(entries[name], torch.Tensor | Piece):
                _same_kind(what, entries[name], made)
            elif entries[name] is not None or not isinstance(made, torch.Tensor):  # some begin with None
                same_kind(f"The state's {what}", entries[name], made)
            if name == "step":
                _check_count(f"The state's {what}", entries[name])


def _check_count(where: str, value: Any) -> None:
    """How often a parameter was stepped: torch takes powers of it, which overflow where it is negative."""
    count = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(count, int | float) and not 0 <= count <= MANY:
        raise StateError(f"{where} is {count!r}, not a number of steps.")


_FRACTIONS = {"betas"}  # of others torch takes roots


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside what torch's `state_dict` has of it: counters, numbers, tensors of its own."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _TORCHS_OWN
        and (_is_plain(value) or (isinstance(value, torch.Tensor) and id(value) not in trained))
    }


_TORCHS_OWN = vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)).keys() | {"step", "_opt_called"}  # the last: schedulers'


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _restore_own(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        here = getattr(optimizer, name, None)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                here.copy_(value)
        else:
            setattr(optimizer, name, value)


class _Expected:
    """What the optimizer will hold for each parameter, by the numbers that `state_dict` gives them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._known = optimizer, dict[Any, dict[str, Any]]()
        self.by_index = _parameters_by_index(optimizer)

    def of(self, index: int) -> dict[str, Any]:
        group, parameter = self.by_index[index]
        kind = (id(group), parameter.shape, parameter.dtype, parameter.device)
        if kind not in self._known:
            self._known[kind] = _state_after_one_step(self._optimizer, group, parameter)
        return self._known[kind]


def _gathered(optimizer: torch.optim.Optimizer, saved: dict[str, Any], filler: Filler) -> dict[str, Any]:
    """The optimizer's state with tensors laid out as the job's own are; `filler.finish()` completes it."""
    expected = _Expected(optimizer)
    states: dict[Any, dict[str, Any]] = {}
    for index, entries in saved["state"].items():
        states[index] = dict(entries)
        spread = is_dtensor(expected.by_index[index][1])
        for name, value in entries.items():
            if not isinstance(value, Piece) and not spread:
                continue
            made = expected.of(index).get(name)
            if not isinstance(value, Piece) and not is_dtensor(made):
                continue
            if not isinstance(made, torch.Tensor):
                raise StateError(
                    f"The state's optimizer has a sharded {name!r} for parameter {index}, which "
                    f"{type(optimizer).__name__} does not make in its first step. Resume at the world size it had."
                )
            states[index][name] = torch.empty_like(made)
            filler.fill(states[index][name], value, ("optimizer", "state", index, name))
    return {**saved, "state": states}


def _state_after_one_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What this optimizer keeps for such a parameter, seen on a stand-in."""
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    probe = probe_of(optimizer, group, [stand_in])
    with torch.no_grad():
        probe.step()
    return dict(probe.state.get(stand_in, {}))


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(saved)
    # torch casts floating point state to the parameter's type; a state of its own type must come back as it was.
    for index, (_, parameter) in _parameters_by_index(optimizer).items():
        for name, value in saved["state"].get(index, {}).items():
            now = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(now.device)


def _parameters_by_index(optimizer: torch.optim.Optimizer) -> dict[int, tuple[dict[str, Any], torch.Tensor]]:
    """Parameters by the numbers that `state_dict` gives them."""
    numbered = zip(optimizer.state_dict()["param_groups"], optimizer.param_groups, strict=True)
    return {
        index: (group, parameter)
        for numbers, group in numbered
        for index, parameter in zip(numbers["params"], group["params"], strict=True)
    }
