"""Gradients as a value: computed without touching anybody's `.grad`, then added, scaled, clipped or
assigned.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradfit import _torch
from gradfit.arguments import (
    invalid,
    read_flag,
    read_list,
    read_mapping,
    read_number,
    read_tensor,
    read_text,
    show,
)
from gradfit.errors import GraphError, MisuseError, NonFiniteGradient, StateError, UnknownName
from gradfit.norms import total_norm, values_of
from gradfit.toolbox.autograd_nodes import backward_order, leaf_of, operation_name
from gradfit.toolbox.gradient_stats import GradientStats
from gradfit.toolbox.inputs import Inputs, label, named_tensors

Key = str | Tensor | int


class GradientMap(MutableMapping[Key, Tensor]):
    """Gradients by tensor or by name.

    A gradient that is a value can be kept, compared, averaged over micro-batches, sent and saved,
    which a gradient inside `.grad` cannot. An entry is found by its tensor, by `id(tensor)` and, if
    it has one, by its name; iterating gives the names where there are names, the tensors otherwise.
    All operations ending in `_` work in place.

    Args:
        gradients: gradients by tensor or by name.

    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> grads = backward((w * w).sum() / 2, {"w": w})
    >>> grads["w"] is grads[w], grads.norm().item(), w.grad
    (True, 5.0, None)
    >>> grads.scale_(2.0).add_(grads.clone())["w"]
    tensor([12., 16.])
    """

    def __init__(self, gradients: Mapping[Any, Tensor] | Iterable[tuple[Key, Tensor]] = ()) -> None:
        # by name where there is one, else by tensor (hashed by identity)
        self._gradients: dict[Key, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[Tensor, str] = {}
        # of the tensors, which are held: no other tensor has such an id meanwhile
        self._ids: dict[int, Key] = {}
        for key, gradient in _pairs(gradients):
            self[key] = gradient

    @classmethod
    def from_grads(cls, source: Inputs) -> GradientMap:
        """The gradients now in `.grad`, not copied: what is done in place to the map is done to
        `.grad`.

        Args:
            source: a model, names with tensors, or tensors; those without `.grad` are left out.

        >>> layer = nn.Linear(2, 1); layer(torch.ones(1, 2)).sum().backward()
        >>> list(GradientMap.from_grads(layer))
        ['weight', 'bias']
        """
        return gradients_of(source, "source")

    # -- a mapping --------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self:
            raise self._unknown(key)
        return self._gradients[self._key(key)]

    def __setitem__(self, key: Key, gradient: Tensor) -> None:
        key = self._read_key(key)
        tensor = key if isinstance(key, Tensor) else self._tensors.get(key)
        read_tensor(gradient, "gradient", f"the gradient of {label(key)}, which is a tensor")
        if tensor is not None:
            _require_shape_of(tensor, gradient, f"the key {label(key)}")
            self._ids[id(tensor)] = key
        self._gradients[key] = gradient

    def _read_key(self, key: Key) -> str | Tensor:
        """What a new entry is filed under: a name, or a tensor, which an `id` cannot stand for."""
        if not isinstance(key, str | Tensor | int):
            raise invalid("key", key, f"is a {type(key).__name__}", "a name or a tensor")
        key = self._key(key)
        if isinstance(key, int):
            raise invalid(
                "key",
                key,
                "is the id of no tensor in this map, and holds none",
                "the tensor itself",
            )
        if isinstance(key, str) and not key:
            raise invalid("key", key, "is empty", "a name or a tensor")
        return key

    def __delitem__(self, key: Key) -> None:
        key = self._key(key)
        if key not in self:
            raise self._unknown(key)
        tensor = self.tensor(key)
        del self._gradients[key]
        if tensor is not None:
            self._forget(key, tensor)

    def _forget(self, key: Key, tensor: Tensor) -> None:
        del self._ids[id(tensor)]
        if isinstance(key, str):
            del self._names[self._tensors.pop(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str | Tensor | int):
            return False
        mine = self._key(key)
        return not isinstance(mine, int) and mine in self._gradients

    # Two maps are equal only if they are one: comparing tensors elementwise has no single answer.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def insert(self, key: Key, gradient: Tensor) -> None:
        """Put a gradient in, or replace it: `grads[key] = gradient`.

        Args:
            key: a tensor or a name.
            gradient: not copied.
        """
        self[key] = gradient

    def iter(self) -> Iterator[tuple[Key, Tensor]]:
        """Each key with its gradient, `items()` one by one."""
        # Of a list: entries may be replaced, or taken out, on the way.
        return iter(list(self._gradients.items()))

    def iter_mut(self) -> Iterator[tuple[Key, Tensor]]:
        """`iter`, to change what it gives: in place (`gradient.mul_(2)`), or by `grads[key] =
        gradient * 2`.
        """
        return self.iter()

    def get_mut(self, key: Key) -> Tensor | None:
        """`get`, to change what it gives: in place (`gradient.add_(other)`); None if there is none.

        Args:
            key: a tensor, its `id`, or a name.
        """
        return self.get(key)

    def bind(self, key: Key, tensor: Tensor | None, gradient: Tensor) -> None:
        """Put a gradient in under a name, together with the tensor it belongs to.

        Args:
            key: the name.
            tensor: it belongs to; None: none.
            gradient: not copied.
        """
        if tensor is not None:
            read_tensor(tensor, "tensor", "the tensor that the gradient is of, or None")
            if isinstance(gradient, Tensor):
                _require_shape_of(tensor, gradient, label(key))
        if isinstance(key, str) and tensor is not None:
            self._tensors[key] = tensor
            self._names[tensor] = key
        self[key] = gradient

    def tensor(self, key: Key) -> Tensor | None:
        """The tensor this is the gradient of; None for an entry that was put in by name alone.

        Args:
            key: a tensor, its `id`, or a name.
        """
        if key not in self:
            raise self._unknown(key)
        key = self._key(key)
        return key if isinstance(key, Tensor) else self._tensors.get(str(key))

    # -- arithmetic -------------------------------------------------------------------------------

    def add_(self, other: Mapping[Any, Tensor], *, alpha: float = 1.0) -> GradientMap:
        """Add `alpha * other`; entries that are not here yet are copied in.

        Args:
            other: gradients with the same keys.
            alpha: what they are multiplied by; 1 by default.

        >>> total = GradientMap()
        >>> for x in (1.0, 2.0):
        ...     total.add_({"w": torch.tensor([x])}, alpha=0.5)["w"]
        tensor([0.5000])
        tensor([1.5000])
        """
        alpha = read_number(alpha, "alpha")
        read_mapping(other, "other", "a GradientMap, or gradients by name")
        for mine, key, gradient in self._matches(other):  # a list: every problem before any change
            if mine is not None:
                self[mine].add_(gradient, alpha=alpha)
            else:
                scaled = gradient.clone() if alpha == 1.0 else gradient * alpha
                self.bind(key, _tensor_of(key, other), scaled)
        return self

    def _matches(self, other: Mapping[Key, Tensor]) -> list[tuple[Key | None, Key, Tensor]]:
        """The entry here that each of `other` belongs to, its key there, and its gradient."""
        matches = []
        for key, gradient in other.items():
            read_tensor(gradient, f"other[{label(key)}]", "gradients by name")
            matches.append((self._match(key, other), key, gradient))
        for mine, key, gradient in matches:
            if mine is not None and self[mine].shape != gradient.shape:
                raise MisuseError(
                    f"other: {label(key)} has shape {tuple(gradient.shape)}, expected"
                    f" {tuple(self[mine].shape)}."
                )
        return matches

    def scale_(self, factor: float | Tensor) -> GradientMap:
        """Multiply every gradient by a number, or by a tensor of one.

        Args:
            factor: a number, or a tensor of one element.
        """
        if not isinstance(factor, Tensor):
            factor = read_number(factor, "factor")
        elif not _holds_one_number(factor):
            raise invalid("factor", factor, "is not one number", "factor=0.5")
        for gradient in self._gradients.values():
            gradient.mul_(factor)
        return self

    def clone(self) -> GradientMap:
        """A copy that shares no gradient with this one."""
        copy = GradientMap()
        for key, gradient in self._gradients.items():
            copy.bind(key, self.tensor(key), gradient.clone())
        return copy

    def norm(self, p: float = 2.0) -> Tensor:
        """The norm of all gradients taken as one vector; differentiable if they are
        (`create_graph=True`).

        Args:
            p: of the norm: 2 is Euclid's, `inf` the largest element.
        """
        is_largest = isinstance(p, float) and p == math.inf
        order = p if is_largest else read_number(p, "p", above=0, like=2)
        return total_norm(self._gradients.values(), order)

    def clip_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; gives the norm before.

        A NaN or an infinity would spread to every gradient, so it raises `NonFiniteGradient` with
        the names, and nothing is changed.

        Args:
            max_norm: the largest norm of all gradients together.
        """
        max_norm = read_number(max_norm, "max_norm", above=0)
        norm = self.norm()
        self.require_finite(norm)
        self.scale_(clip_factor(norm, max_norm))
        return norm

    # -- looking ----------------------------------------------------------------------------------

    def nonfinite(self) -> list[Key]:
        """The names (or tensors) whose gradient holds a NaN or an infinity."""
        return [
            key
            for key, gradient in self._gradients.items()
            if not bool(values_of(gradient).isfinite().all())
        ]

    def _counts(self, keys: Iterable[Any]) -> str:
        """How many NaN and infinities each of these gradients has."""
        stats = {key: GradientStats.of(self[key]) for key in keys}
        return ", ".join(
            f"{label(key)} ({one.nan_count} NaN, {one.inf_count} Inf)" for key, one in stats.items()
        )

    def require_finite(self, norm: Tensor | None = None) -> None:
        """Raise `NonFiniteGradient` with the names if anything is not finite; a finite `norm` saves
        the search.

        Args:
            norm: of these gradients, if it is known already.
        """
        if norm is not None and _is_finite(norm):
            return
        self._require_finite_elements()
        if norm is not None:
            raise NonFiniteGradient(
                f"The norm of {len(self)} finite gradients overflows"
                f" {str(norm.dtype).removeprefix('torch.')}. Scale them down first:"
                " grads.scale_(1e-6)."
            )

    def _require_finite_elements(self) -> None:
        bad = self.nonfinite()
        if bad:
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise NonFiniteGradient(
                f"{len(bad)} of {len(self)} gradients are not finite: {self._counts(bad[:5])}"
                f"{more}. Skip this step, or find the operation with"
                " torch.autograd.set_detect_anomaly(True)."
            )

    def stats(self) -> dict[Key, GradientStats]:
        """Norm, mean, spread, extremes, zeros, NaN and Inf of each gradient."""
        return {key: GradientStats.of(gradient) for key, gradient in self._gradients.items()}

    # -- out, and in again ------------------------------------------------------------------------

    def assign(self) -> None:
        """Hand the gradients to their tensors' `.grad`, replacing what is there, without a copy.

        >>> w = torch.ones(2, requires_grad=True)
        >>> backward(w.sum()).assign(); w.grad
        tensor([1., 1.])
        """
        tensors = [self._tensor_to_assign_to(key) for key in self._gradients]
        for tensor, gradient in zip(tensors, self._gradients.values(), strict=True):
            # torch takes no `.grad` that is on another device, and none of another type (unless
            # the tensor's `grad_dtype` says so).
            tensor.grad = gradient.detach().to(dtype=tensor.dtype, device=tensor.device)

    def _tensor_to_assign_to(self, key: Key) -> Tensor:
        tensor = self.tensor(key)
        if tensor is None:
            raise MisuseError(
                f"assign: {label(key)} was put in by name, without its tensor. Use grads[tensor]."
            )
        return tensor

    def state_dict(self) -> dict[str, Tensor]:
        """The gradients by name, or by position where there are no names; ready for
        `safetensors`.
        """
        return {
            name: self._gradients[key].detach() for name, key in self._keys_by_saved_name().items()
        }

    def _keys_by_saved_name(self) -> dict[str, Key]:
        return {
            key if isinstance(key, str) else str(at): key for at, key in enumerate(self._gradients)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a saved map with the same entries; an empty map takes any.

        Args:
            state: what `state_dict()` returned.
        """
        for name, gradient in read_mapping(state, "state", "what state_dict() gave").items():
            read_text(name, "state", "what state_dict() gave")
            read_tensor(gradient, f"state[{name!r}]", "what state_dict() gave")
        keys = self._keys_by_saved_name()
        if keys:
            self._require_same_entries(keys, state)
        for name, gradient in state.items():
            key = keys.get(name, name)
            like = self._gradients.get(key)
            self._gradients[key] = (
                gradient.clone() if like is None else gradient.to(like, copy=True)
            )

    def _require_same_entries(self, keys: dict[str, Key], state: Mapping[str, Tensor]) -> None:
        missing, unexpected = set(keys) - set(state), set(state) - set(keys)
        if missing or unexpected:
            raise StateError(
                f"state: it does not belong to this map: missing {sorted(missing)}, unexpected"
                f" {sorted(unexpected)}. Load into a map of the same model, or an empty one."
            )
        for name, key in keys.items():
            if self[key].shape != state[name].shape:
                raise StateError(
                    f"The state's {name!r} has shape {tuple(state[name].shape)}, expected"
                    f" {tuple(self[key].shape)}."
                )

    def __repr__(self) -> str:
        elements = sum(gradient.numel() for gradient in self._gradients.values())
        shown = ", ".join(label(key) for key in list(self)[:4]) + (", …" if len(self) > 4 else "")
        return f"GradientMap({len(self)} gradients, {elements} elements: {shown})"

    # -- inside -----------------------------------------------------------------------------------

    def _key(self, key: Key) -> Key:
        """The key that an entry is filed under."""
        if isinstance(key, Tensor):
            return self._names.get(key, key)
        return self._ids.get(key, key) if isinstance(key, int) else key

    def _match(self, key: Key, other: Mapping[Key, Tensor]) -> Key | None:
        """Which entry here `other[key]` belongs to: the two may know the same tensor by name and
        without.
        """
        if key in self:
            return key
        tensor = _tensor_of(key, other)
        return tensor if tensor in self else None

    def _unknown(self, key: object) -> UnknownName:
        if isinstance(key, Tensor):
            return UnknownName(
                f"key: there is no gradient for this tensor of shape {tuple(key.shape)}: the loss"
                f" does not depend on it, or it was not among the inputs. The map holds {len(self)}"
                " gradients."
            )
        return self._unknown_name(key)

    def _unknown_name(self, key: object) -> UnknownName:
        names = [name for name in self._gradients if isinstance(name, str)]
        if not names:
            return UnknownName(
                f"key={show(key)}: these gradients have no names. Pass inputs=model to backward, or"
                " look up by tensor."
            )
        # Of a long key its beginning: comparing takes time in the square of its length.
        close = difflib.get_close_matches(str(key)[:200], names, n=3) or names[:3]
        return UnknownName(
            f"key={show(key)}: there is no gradient of that name. The nearest of {len(names)}:"
            f" {', '.join(close)}."
        )


def _tensor_of(key: Key, gradients: Mapping[Key, Tensor]) -> Tensor | None:
    """The tensor that an entry is the gradient of, where a mapping knows it."""
    return gradients.tensor(key) if isinstance(gradients, GradientMap) else None


def _require_shape_of(tensor: Tensor, gradient: Tensor, whose: str) -> None:
    if gradient.shape != tensor.shape:
        raise MisuseError(
            f"gradient: that of {whose} has shape {tuple(gradient.shape)}, expected"
            f" {tuple(tensor.shape)}, the tensor's. Pass it in that shape."
        )


def _holds_one_number(tensor: Tensor) -> bool:
    """A real one, which can be read."""
    is_readable = tensor.layout == torch.strided and not tensor.is_meta
    return is_readable and tensor.numel() == 1 and not tensor.is_complex()


def _is_finite(norm: Any) -> bool:
    if not isinstance(norm, Tensor) or norm.numel() != 1 or norm.is_meta:
        raise invalid("norm", norm, "is not one number in a tensor", "grads.norm()")
    return bool(norm.isfinite())


def backward(loss: Tensor, inputs: Inputs | None = None, create_graph: bool = False) -> GradientMap:
    """The gradients of `loss` as a value; nobody's `.grad` is touched.

    `inputs` is a model or names with tensors (then the map has names), or tensors, leaves or not;
    by default every leaf that the loss depends on. `create_graph=True` makes the gradients
    differentiable themselves. The graph is freed otherwise, as by `loss.backward()`. Parameters of
    a model that the loss does not reach are left out.

    Args:
        loss: a tensor of one element.
        inputs: what to differentiate by.
        create_graph: whether the gradients can be differentiated again; False by default.

    >>> layer = nn.Linear(3, 1)
    >>> grads = backward(layer(torch.ones(2, 3)).sum(), layer)
    >>> grads["weight"], layer.weight.grad
    (tensor([[2., 2., 2.]]), None)
    """
    read_tensor(loss, "loss", "the tensor that the model's loss returned")
    read_flag(create_graph, "create_graph")
    _require_graph(loss)
    pairs = _differentiate_by(loss, inputs)
    gradients = _differentiate(loss, [tensor for _, tensor in pairs], create_graph)
    result = GradientMap()
    for position, ((name, tensor), gradient) in enumerate(zip(pairs, gradients, strict=True)):
        if gradient is not None:
            result.bind(name or tensor, tensor, gradient)
        elif not isinstance(inputs, nn.Module):
            raise GraphError(
                f"inputs[{position}], {label(name, tensor)}, has no gradient: the loss does not"
                " depend on it. Leave it out, or pass the model, whose unused parameters are left"
                " out."
            )
    return result


def _require_graph(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise MisuseError(
            f"loss has shape {tuple(loss.shape)}, expected one number. Pass loss.mean() or"
            " loss.sum()."
        )
    if loss.is_complex():
        raise MisuseError(
            f"loss is {loss.dtype}, expected a real number. Pass loss.abs() or loss.real."
        )
    if not loss.requires_grad:
        raise GraphError(
            "loss has no graph: it does not require a gradient. Compute it outside torch.no_grad()"
            " and without .detach(), from tensors with requires_grad=True. If it is made of"
            " gradients, pass create_graph=True to the backward that gave them."
        )


def _differentiate_by(loss: Tensor, inputs: Inputs | None) -> list[tuple[str | None, Tensor]]:
    """What to differentiate by, with names where there are any; each requires a gradient."""
    pairs: list[tuple[str | None, Tensor]]
    if inputs is None:
        pairs = [(None, leaf) for leaf in _leaves(loss)]
    else:
        pairs = trained_tensors(inputs)
    _require_gradients_of(pairs)
    return pairs


def _require_gradients_of(pairs: list[tuple[str | None, Tensor]]) -> None:
    for position, (name, tensor) in enumerate(pairs):
        if not tensor.requires_grad:
            raise GraphError(
                f"inputs[{position}], {label(name, tensor)}, does not require a gradient. "
                "Call .requires_grad_() on it before the forward pass."
            )
    if not pairs:
        raise MisuseError(
            "inputs holds no tensor that requires a gradient. Pass the model or its parameters."
        )


def trained_tensors(inputs: Inputs) -> list[tuple[str | None, Tensor]]:
    """Tensors with their names; of a model those that require a gradient."""
    pairs = named_tensors(inputs, argument="inputs")
    if not isinstance(inputs, nn.Module):
        return pairs
    return [(name, tensor) for name, tensor in pairs if tensor.requires_grad]


def _differentiate(
    loss: Tensor, tensors: list[Tensor], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, which says in words that the graph is gone."""
    try:
        return torch.autograd.grad(loss, tensors, create_graph=create_graph, allow_unused=True)
    except RuntimeError as error:
        # any other failure has freed what was behind it, too
        freed = _first_freed(loss) if _torch.says_freed(error) else None
        if freed is None:
            raise
        raise GraphError(
            f"The graph is already freed: {operation_name(freed)} has given back what it saved for "
            "its backward. Compute the loss again, or keep the graph the first time with "
            "create_graph=True or retain_graph=True."
        ) from error


def _first_freed(loss: Tensor) -> Node | None:
    return next((node for node in backward_order(loss) if _torch.has_freed_tensors(node)), None)


_PAIRS = "{name: gradient} or pairs of both"


def _pairs(gradients: Any) -> list[tuple[Any, Any]]:
    """What a map is made from, key by key."""
    if isinstance(gradients, Mapping):
        pairs = list(gradients.items())
    else:
        pairs = read_list(gradients, "gradients", _PAIRS)
    for at, pair in enumerate(pairs):
        _require_pair(pair, at)
    return pairs


def _require_pair(pair: Any, position: int) -> None:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise invalid(f"gradients[{position}]", pair, "is not a pair", _PAIRS)
    key, gradient = pair
    if not isinstance(gradient, Tensor):
        problem = f"is a {type(gradient).__name__} under {label(key)}"
        raise invalid("gradients", gradient, problem, _PAIRS)


def gradients_of(source: Inputs, argument: str) -> GradientMap:
    """`GradientMap.from_grads` of what came in under this name."""
    grads = GradientMap()
    for name, tensor in named_tensors(source, argument=argument):
        if tensor.grad is not None:
            grads.bind(name or tensor, tensor, tensor.grad)
    return grads


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What brings `norm` down to `max_norm`, and leaves a smaller one as it is, bit for bit."""
    return torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))


def _leaves(loss: Tensor) -> list[Tensor]:
    """Every leaf the loss depends on, those of the first operations first."""
    if loss.grad_fn is None:
        return [loss]
    leaves = map(leaf_of, reversed(backward_order(loss)))
    return [leaf for leaf in leaves if leaf is not None]
