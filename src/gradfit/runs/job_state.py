"""A job's whole state as one nest, and back into a job: checked to the last shape before anything
is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

from gradfit._torch_distributed import is_dtensor
from gradfit.arguments import plain_number
from gradfit.errors import StateError
from gradfit.profiling.optimizer_bytes import probe_of
from gradfit.runs.job import Job
from gradfit.runs.shards import Filler, ReadAllRanks, whole
from gradfit.runs.state_codec import Shard
from gradfit.state_checks import MANY, same_kind

_EXTRA = "_extra_state"


def capture(job: Job) -> dict[str, Any]:
    """The job's state; its tensors are the job's own.

    Model (buffers that are not persistent included), optimizer, scheduler and loss scaler.
    """
    state = {
        "model": _tensors_of(job.model),
        "extra": _extra_state(job.model),
        "optimizer": job.optimizer.state_dict(),
        "own": _own_attributes(job.optimizer),
        "scheduler": None if job.scheduler is None else job.scheduler.state_dict(),
    }
    return state if job.scaler is None else {**state, "scaler": job.scaler.state_dict()}


def check(job: Job, state: dict[str, Any]) -> None:
    """Raise a `StateError` unless this state is one of this job."""
    _check_model(job.model, _dict(state, "model"), _dict(state, "extra"))
    _check_optimizer(job.optimizer, _dict(state, "optimizer"))
    _check_own_attributes(job.optimizer, state.get("own", {}))
    for name, here in (("scheduler", job.scheduler), ("scaler", job.scaler)):
        _check_optional(name, state.get(name), here)


def _check_optional(name: str, saved: Any, here: Any) -> None:
    """What a job need not have."""
    if (saved is None) != (here is None):
        raise StateError(
            f"The state and the job must both have a {name} or neither. Resume with the same job."
        )
    if here is not None:
        same_kind(f"The state's {name}", saved, here.state_dict())


def _check_model(
    model: torch.nn.Module, saved: dict[str, Any], saved_extra: dict[str, Any]
) -> None:
    here = _tensors_of(model)
    _check_names(set(saved), set(here))
    for name, tensor in here.items():
        _same_tensor(f"{name!r}", saved[name], tensor)
    if strange := sorted(saved_extra.keys() ^ _extra_state(model).keys()):
        raise StateError(
            f"The state's and the model's extra state differ: {strange[0]!r}. Resume with the same"
            " model."
        )


def _check_names(saved: set[str], here: set[str]) -> None:
    if missing := sorted(here - saved):
        raise StateError(
            f"The state has no {missing[0]!r} ({len(missing)} missing). Resume with the same model."
        )
    if strange := sorted(saved - here):
        raise StateError(
            f"The state has {strange[0]!r} ({len(strange)} too many). Resume with the same model."
        )


def _extra_state(model: torch.nn.Module) -> dict[str, Any]:
    """What modules add to a state by `get_extra_state`."""
    return {key: value for key, value in model.state_dict().items() if key.endswith(_EXTRA)}


def restore(job: Job, state: dict[str, Any], read_all_ranks: ReadAllRanks = list) -> None:
    """Put a state that `check` has passed into the job; what other ranks have of it comes from
    `read_all_ranks`.
    """
    filler = Filler(read_all_ranks)
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
    for name, here in (("scheduler", job.scheduler), ("scaler", job.scaler)):
        if here is not None:
            with _said(name):
                here.load_state_dict(state[name])


@contextlib.contextmanager
def _said(part: str) -> Iterator[None]:
    """What an optimizer, a scheduler or a model does not take of a state is the state's fault."""
    try:
        yield
    except Exception as error:
        raise StateError(
            f"The job's {part} does not take what the state has of it ({type(error).__name__}:"
            f" {error}). Resume with the same job."
        ) from error


def whole_model(model: torch.nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each one whole, for whoever wants to `keep` them; on all
    ranks together.
    """
    contents = {}
    for name, tensor in _tensors_of(model).items():
        content = whole(tensor)
        if keep:
            contents[name] = content.cpu() if content is not tensor else content
    return contents


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor if is_dtensor(tensor) else tensor.detach() for name, tensor in named}


def _dict(state: dict[str, Any], name: str) -> dict[str, Any]:
    part = state.get(name)
    if not isinstance(part, dict):
        raise StateError(f"The state has no {name!r}. It was not written by gradfit train.")
    return part


def _same_tensor(name: str, saved: Any, here: torch.Tensor) -> None:
    content = saved.content if isinstance(saved, Shard) else saved
    if not isinstance(content, torch.Tensor):
        raise StateError(f"The state's {name} is a {type(content).__name__}, not a tensor.")
    if tuple(saved.shape) != tuple(here.shape) or content.dtype != here.dtype:
        raise StateError(
            f"The state's {name} is {tuple(saved.shape)} of {content.dtype}, the job's"
            f" {tuple(here.shape)} of {here.dtype}. Resume with the same model."
        )


# ---------------------------------------------------------------------------------------- optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    groups, states = _groups_and_states(saved)
    _check_groups(optimizer, groups)
    expected = _Expected(optimizer)
    for index, entries in states.items():
        if index not in expected.by_index or not isinstance(entries, dict):
            raise StateError(
                f"The state's optimizer has an entry for parameter {index!r}, which the job does"
                " not have."
            )
        if entries:
            _check_entries(index, entries, expected.of(index))


def _groups_and_states(
    saved: dict[str, Any],
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    groups, states = saved.get("param_groups"), saved.get("state")
    if not _are_dicts(groups):
        raise StateError(
            "The state's optimizer has no groups. It was not written by gradfit train."
        )
    if not isinstance(states, dict):
        raise StateError("The state's optimizer has no state. It was not written by gradfit train.")
    return groups, states


def _are_dicts(groups: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(groups, list) and all(isinstance(group, dict) for group in groups)


def _check_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    here = optimizer.state_dict()["param_groups"]
    if _members(groups) != _members(here):
        raise StateError(
            "The state's optimizer has other groups of parameters than the job's "
            f"{type(optimizer).__name__}. Resume with the same optimizer."
        )
    if [*map(set, groups)] != [*map(set, here)]:
        raise StateError(
            f"The state is that of another optimizer than {type(optimizer).__name__}. Resume with"
            " the same."
        )
    for number, (group, own) in enumerate(zip(groups, here, strict=True)):
        same_kind(f"The state's optimizer's group {number}", group, own)
        _check_fractions(group)


def _members(groups: list[dict[str, Any]]) -> list[Any]:
    return [group.get("params") for group in groups]


_FRACTIONS = {"betas"}  # torch takes roots of what is left to 1


def _check_fractions(group: dict[str, Any]) -> None:
    for name in _FRACTIONS & group.keys():
        several = group[name] if isinstance(group[name], tuple | list) else [group[name]]
        wrong = [value for value in several if _is_no_fraction(value)]
        if wrong:
            raise StateError(
                f"The state's optimizer has {name} {wrong[0]!r}, which is not from 0 to 1."
            )


def _is_no_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not 0 <= value <= 1


def _check_entries(index: Any, entries: dict[str, Any], expected: dict[str, Any]) -> None:
    """What the optimizer holds for one parameter, against what its first step makes for one."""
    for name, here in expected.items():
        what = f"optimizer's {name!r} of parameter {index}"
        if name not in entries:
            raise StateError(f"The state has no {what}. Resume with the same optimizer.")
        _check_entry(what, entries[name], here)
        if name == "step":
            _check_count(f"The state's {what}", entries[name])


def _check_entry(what: str, entry: Any, here: Any) -> None:
    if isinstance(here, torch.Tensor) and isinstance(entry, torch.Tensor | Shard):
        _same_tensor(what, entry, here)
    elif entry is not None or not isinstance(here, torch.Tensor):  # some begin with None
        same_kind(f"The state's {what}", entry, here)


def _check_count(where: str, value: Any) -> None:
    """How often a parameter was stepped: torch takes powers of it, which overflow where it is
    negative.
    """
    count = plain_number(value)
    if isinstance(count, int | float) and not 0 <= count <= MANY:
        raise StateError(f"{where} is {count!r}, not a number of steps.")


def _check_own_attributes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    own = _own_attributes(optimizer)
    if strange := sorted(saved.keys() - own.keys()):
        raise StateError(
            f"The state's optimizer has {strange[0]!r}, the job's has not. Resume with the same"
            " optimizer."
        )
    for name, value in saved.items():
        same_kind(f"The state's optimizer's {name!r}", value, own[name])


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside what torch's `state_dict` has of it: counters, numbers,
    tensors of its own.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = {name: value for name, value in vars(optimizer).items() if name not in _TORCHS_OWN}
    return {name: value for name, value in own.items() if _can_be_saved(value, trained)}


def _can_be_saved(value: Any, trained: set[int]) -> bool:
    """Whether it is plain, or a tensor that is no parameter."""
    return id(value) not in trained if isinstance(value, torch.Tensor) else _is_plain(value)


# the last: schedulers'
_TORCHS_OWN = vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)).keys() | {"step", "_opt_called"}


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
    """What the optimizer will hold for each parameter, by the numbers that `state_dict` gives
    them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._by_kind = optimizer, dict[Any, dict[str, Any]]()
        self.by_index = _parameters_by_index(optimizer)

    def of(self, index: int) -> dict[str, Any]:
        group, parameter = self.by_index[index]
        kind = (id(group), parameter.shape, parameter.dtype, parameter.device)
        if kind not in self._by_kind:
            self._by_kind[kind] = _state_after_one_step(self._optimizer, group, parameter)
        return self._by_kind[kind]

    def spread(self, index: int, name: str, saved: Any) -> torch.Tensor | None:
        """The job's own tensor for an entry that is spread over ranks, here or in the state; None
        for others.
        """
        if not isinstance(saved, Shard) and not is_dtensor(self.by_index[index][1]):
            return None
        here = self.of(index).get(name)
        if not isinstance(saved, Shard) and not is_dtensor(here):
            return None
        if not isinstance(here, torch.Tensor):
            raise StateError(
                f"The state's optimizer has a sharded {name!r} for parameter {index}, which"
                f" {type(self._optimizer).__name__} does not make in its first step. Resume at the"
                " world size it had."
            )
        return here


def _gathered(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], filler: Filler
) -> dict[str, Any]:
    """The optimizer's state with tensors laid out as the job's own are; `filler.finish()` completes
    it.
    """
    expected = _Expected(optimizer)
    states: dict[Any, dict[str, Any]] = {}
    for index, entries in saved["state"].items():
        states[index] = dict(entries)
        for name, value in entries.items():
            here = expected.spread(index, name, value)
            if here is not None:
                states[index][name] = torch.empty_like(here)
                filler.fill(states[index][name], value, ("optimizer", "state", index, name))
    return {**saved, "state": states}


def _state_after_one_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What this optimizer keeps for such a parameter, seen on a stand-in."""
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    probe = probe_of(optimizer, group, [stand_in], [parameter])
    with torch.no_grad():
        probe.step()
    return dict(probe.state.get(stand_in, {}))


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(saved)
    # torch casts floating point state to the parameter's type; a state of its own type must come
    # back as it was.
    for index, (_, parameter) in _parameters_by_index(optimizer).items():
        for name, value in saved["state"].get(index, {}).items():
            now = optimizer.state[parameter].get(name)
            if _was_cast(value, now):
                optimizer.state[parameter][name] = value.to(now.device)


def _was_cast(value: Any, now: Any) -> bool:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
    return are_tensors and now.dtype != value.dtype


def _parameters_by_index(
    optimizer: torch.optim.Optimizer,
) -> dict[int, tuple[dict[str, Any], torch.Tensor]]:
    """Parameters by the numbers that `state_dict` gives them."""
    numbered = zip(optimizer.state_dict()["param_groups"], optimizer.param_groups, strict=True)
    return {
        index: (group, parameter)
        for numbers, group in numbered
        for index, parameter in zip(numbers["params"], group["params"], strict=True)
    }
