"""All that running a model changes, so that a trial leaves no trace and a step that fails has not
happened.

What a snapshot knows, beside the parameters' content, which only an optimizer changes:

1. Buffers, by module and name. One that the forward wrote to gets its content back; one that it put
   another tensor in the place of (`self.count = self.count + 1`) is the first tensor again.
2. Every other attribute of each module (its mode, a counter, a cached mask) is what it was, and so
   is what is in the lists, dicts and sets that it holds (`held_state.py`); hooks that were set
   since go.
3. Gradients, those that FSDP2 has not reduced yet too.
4. Random generators: torch's on every device, Python's, NumPy's, and those that a module holds.
5. The garbage collector's thresholds, the hooks that are set for all modules, and what contexts
   have set for this thread: Ctrl-C may have ended one, torch's own too, when it had just begun.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Container, Iterable, Mapping, MutableMapping
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from gradfit._torch import global_module_hooks, gradient_of
from gradfit._torch_fsdp import drop_gradients, set_unsharded_gradient, units_of, unsharded_gradient
from gradfit._torch_listen import ThreadState
from gradfit.batches.held_state import HeldState
from gradfit.batches.model_tree import ModelTree, joined
from gradfit.batches.numpy_generator import numpy_state
from gradfit.batches.python_generator import python_state
from gradfit.interrupts import uninterrupted
from gradfit.own_passes import NobodysPasses, end_trials

_MISSING = object()
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip
_all_hooks = itemgetter(*_HOOKS)


def generator_states() -> list[torch.Tensor]:
    """The default generators' states: the CPU's, then each accelerator's."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states += [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return states


def restore_generators(states: list[torch.Tensor]) -> None:
    """Put the default generators back to what `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        for index, state in enumerate(states[1:]):
            module.set_rng_state(state, index)


class Generators:
    """All global random generators as they are now: torch's, Python's and NumPy's, from which
    models draw, too.
    """

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = (
            generator_states(),
            python_state(),
            numpy_state(),
        )

    def restore(self) -> None:
        """Put them back."""
        with uninterrupted():
            restore_generators(self._torch)
            random.setstate(self._python)
            np.random.set_state(self._numpy)


def _restore_module(
    module: torch.nn.Module,
    before: dict[str, Any],
    hooks: Mapping[str, set[int]],
    buffers: Mapping[str, _Buffer],
) -> None:
    """Give one module the attributes, hooks and buffers that it had."""
    _restore_attributes(vars(module), before)
    for kind in _HOOKS:  # one that took itself away has done what it is for
        _remove_new(before.get(kind) or {}, hooks.get(kind, ()))
    registered = module._buffers
    _remove_new(registered, buffers)
    for name, buffer in buffers.items():
        registered[name] = buffer.restored()


def _restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    _remove_new(now, before)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            now[name] = value


def _hooks_in(attributes: dict[str, Any]) -> dict[str, set[int]]:
    """The keys of a module's hooks.

    Whoever sets hooks in the first forward notes it in an attribute (transformers 5 does, to
    collect hidden states). If only the attribute went back, the hooks would be set twice.
    """
    return {name: set(hooks) for name in _HOOKS if (hooks := attributes.get(name))}


def _remove_new(now: MutableMapping[Any, Any], before: Container[Any]) -> None:
    there = [key for key, _ in now.items()]  # TorchScript's tables can be walked in no other way
    for key in [key for key in there if key not in before]:
        del now[key]


class _Buffer:
    """One buffer: which tensor, and a copy of its content."""

    __slots__ = ("content", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.content = None if tensor is None else tensor.detach().clone()
        self.version = None if tensor is None or tensor.is_inference() else tensor._version

    def restored(self) -> torch.Tensor | None:
        tensor, content = self.tensor, self.content
        if tensor is None or content is None or tensor.is_meta:
            return tensor
        if self._was_written(tensor, content):
            with torch.no_grad():
                tensor.copy_(content)
        return tensor

    def _was_written(self, tensor: torch.Tensor, content: torch.Tensor) -> bool:
        if self.version is None or tensor._version != self.version:
            return True
        # a write through `.data` or NumPy does not move the version
        return not torch.equal(tensor, content)


def _hooks_by_position(attributes: list[dict[str, Any]]) -> dict[int, dict[str, set[int]]]:
    try:
        if not any(chain.from_iterable(map(_all_hooks, attributes))):
            return {}
    except KeyError:  # a module from before torch had all these kinds
        pass
    return {
        position: _hooks_in(here)
        for position, here in enumerate(attributes)
        if any(map(here.get, _HOOKS))
    }


def _buffers_by_position(modules: list[torch.nn.Module]) -> dict[int, dict[str, _Buffer]]:
    # not by `vars`: those of a traced module are of another one, which it stands for
    return {
        position: {name: _Buffer(buffer) for name, buffer in module._buffers.items()}
        for position, module in enumerate(modules)
        if module._buffers
    }


def unreduced_gradients(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """What FSDP2 keeps for each parameter, with the gradient that it has not reduced yet."""
    sharded = [kept for unit in units_of(model) for kept in unit.fsdp_params]
    return [(kept, unsharded_gradient(kept)) for kept in sharded]


class Snapshot:
    """All of a model's state beside its parameters' content, as it is now; `restore()` puts it
    back, whole.

    `tensors` are others whose gradients are put back too: inputs that require one. Gradients are
    held, not copied: set them to None before anything adds to them (`clear_gradients`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Iterable[torch.Tensor] = (),
        *,
        tree: ModelTree | None = None,
    ) -> None:
        """Look at everything. `tree` is the model's, if it was walked over just now."""
        self._model, tree = model, tree or ModelTree(model)
        self._modules = tree.modules
        self._attributes: list[dict[str, Any]] = [*map(dict.copy, map(vars, tree.modules))]
        self._held = HeldState(self._attributes, tree.holders)
        # of the modules that have any, by position: most have none
        self._hooks = _hooks_by_position(self._attributes)
        self._buffers = _buffers_by_position(tree.modules)
        self.tensors: list[torch.Tensor] = joined(tree.parameters, [*tensors])
        """The model's parameters, and the other `tensors`, each once."""
        self._gradients = [*map(gradient_of, self.tensors)]
        self._unreduced = unreduced_gradients(model)
        self._thresholds = gc.get_threshold()
        self._global_hooks = [(hooks, dict(hooks)) for hooks in global_module_hooks()]
        self._thread = ThreadState()
        self._generators = Generators()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers' content, by the names of `model.named_buffers()`."""
        buffers = [buffer for named in self._buffers.values() for buffer in named.values()]
        copies = {id(one.tensor): one.content for one in buffers if one.content is not None}
        return {name: copies[id(tensor)] for name, tensor in self._model.named_buffers()}

    def clear_gradients(self) -> None:
        """From here on nothing is added to the gradients that were there."""
        drop_gradients(self._model)
        for holder in self.tensors:
            holder.grad = None

    def add_gradients(self) -> None:
        """Add the gradients that were there then to those that are there now."""
        with torch.no_grad():
            for holder, gradient in zip(self.tensors, self._gradients, strict=True):
                if gradient is not None:
                    holder.grad = gradient if holder.grad is None else gradient + holder.grad

    def restore(self, *, thread: bool = True) -> None:
        """Make everything as it was.

        Args:
            thread: what contexts have set for the thread, too; False inside of contexts that were
                entered since.
        """
        with uninterrupted():
            self.restore_settings(thread=thread)
            self._restore_modules()
            self.clear_gradients()
            self._restore_gradients()
            self._generators.restore()

    def _restore_gradients(self) -> None:
        for holder, gradient in zip(self.tensors, self._gradients, strict=True):
            holder.grad = gradient
        for kept, gradient in self._unreduced:
            set_unsharded_gradient(kept, gradient)

    def rewind(self) -> None:
        """Only modules and generators, so that a trial inside of this one begins where it began."""
        with uninterrupted():
            self._restore_modules()
            self._generators.restore()

    def _restore_modules(self) -> None:
        for position, module in enumerate(self._modules):
            _restore_module(
                module,
                self._attributes[position],
                self._hooks.get(position, {}),
                self._buffers.get(position, {}),
            )
        self._held.restore()

    def restore_settings(self, *, thread: bool = True) -> None:
        """Only what is set for this thread, and for the process: where the rest has changed for
        good.
        """
        with uninterrupted():
            if thread:
                self._thread.restore()
            for hooks, before in self._global_hooks:
                _remove_new(hooks, before)
            if gc.get_threshold() != self._thresholds:
                gc.set_threshold(*self._thresholds)


class untouched:  # noqa: N801  (as torch.no_grad)
    """A context: run anything inside, and the model's whole state (see above) comes back as it was.

    Backward passes inside are nobody's micro-batches: no accumulator that holds the parameters
    counts them.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    >>> with untouched(model):
    ...     model(torch.randn(4, 2)).sum().backward()
    >>> int(model[1].num_batches_tracked), model[0].weight.grad
    (0, None)
    """

    def __init__(self, model: torch.nn.Module, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._model, self._tensors = model, list(tensors)
        self._before: Snapshot | None = None
        self._passes: NobodysPasses | None = None

    def __enter__(self) -> Snapshot:
        before = self._before = Snapshot(self._model, self._tensors)
        try:
            _open.trials.append(before)
            self._passes = NobodysPasses()
            before.clear_gradients()
        except BaseException:  # Ctrl-C: `__exit__` is not called
            self.__exit__()
            raise
        return before

    def __exit__(self, *error: Any) -> None:
        self._passes = None
        before = self._before
        if before is not None:
            with uninterrupted():
                before.restore()
                _open.trials = [trial for trial in _open.trials if trial is not before]
                self._before = None


class _OpenTrials(threading.local):
    """The trials that this thread is in, outer ones first."""

    def __init__(self) -> None:
        self.trials: list[Snapshot] = []


_open = _OpenTrials()


class trials_end:  # noqa: N801  (as torch.no_grad)
    """A context around trials (`untouched`): none of them is left open, whatever ended the block.

    Ctrl-C can come as `__exit__` of a trial begins, before its first line. Then only somebody
    around it can put things back.
    """

    def __enter__(self) -> None:
        self._outer = len(_open.trials)

    def __exit__(self, *error: Any) -> None:
        if len(_open.trials) > self._outer:
            with uninterrupted():
                while len(_open.trials) > self._outer:
                    _open.trials.pop().restore()
                if not _open.trials:
                    end_trials(threading.get_ident())
