"""Loss scaling for float16: small gradients are lifted above its smallest number, and put back
before the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradfit.arguments import (
    invalid,
    read_count,
    read_flag,
    read_gradient,
    read_mapping,
    read_number,
)
from gradfit.errors import MisuseError, NonFiniteGradient, StateError
from gradfit.norms import values_of
from gradfit.toolbox.gradient_map import GradientMap

# Of the constructor, in its order and under the names in a state of `torch.amp.GradScaler`.
_ARGUMENTS = ("scale", "growth_factor", "backoff_factor", "growth_interval")


class LossScaler:
    """Scales the loss, unscales the gradients, and leaves out the steps that overflowed.

    It has the methods of `torch.amp.GradScaler` and reads and writes its state, so one can stand
    for the other. Beyond it: a static scale (`dynamic=False`), gradients that are a `GradientMap`,
    any device without naming it, and an error instead of a scale that has silently become zero.

    The dynamic scale is multiplied by `backoff_factor` after an overflow and by `growth_factor`
    after `growth_interval` updates in a row without one.

    Args:
        init_scale: what losses are multiplied by at first; 65,536 by default.
        growth_factor: of the scale, after `growth_interval` good updates.
        backoff_factor: of the scale, after an overflow.
        growth_interval: updates in a row without an overflow.
        enabled: False: everything passes as it is.
        dynamic: False: the scale stays.

    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> optimizer = torch.optim.SGD([w], lr=0.5)
    >>> scaler = LossScaler(1024.0)
    >>> scaler.scale((w * 3).sum()).backward(); w.grad
    tensor([3072.])
    >>> _ = scaler.step(optimizer); scaler.update(); w.detach()
    tensor([-0.5000])
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
    ) -> None:
        self._scale = _read_scale(init_scale, "init_scale")
        self.growth_factor = float(read_number(growth_factor, "growth_factor", above=1, like=2))
        self.backoff_factor = float(
            read_number(backoff_factor, "backoff_factor", above=0, below=1, like=0.5)
        )
        self.growth_interval = read_count(growth_interval, "growth_interval")
        self.dynamic = read_flag(dynamic, "dynamic")
        self._enabled = read_flag(enabled, "enabled")
        self._growth_tracker = 0
        # By optimizer, and not together: each steps or not by its own gradients, while the scale
        # follows all of them.
        # whatever was unscaled since the last update; as flags that are true where something is not
        # finite, while nobody has read them
        self._finite: dict[object, bool | list[Tensor]] = {}
        self._stepped: set[object] = set()

    def scale(self, outputs: Any) -> Any:
        """The loss, or any nest of lists and tuples of losses, times the scale.

        Args:
            outputs: losses.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            read_gradient(outputs, "outputs")
            # A float32 factor, not a Python number: it turns a float16 loss into float32, where it
            # cannot overflow.
            return outputs * torch.tensor(self._scale, dtype=torch.float32, device=outputs.device)
        if not isinstance(outputs, list | tuple):
            raise MisuseError(
                f"outputs is a {type(outputs).__name__}. Pass a loss tensor or a list of them."
            )
        scaled = [self.scale(item) for item in outputs]
        is_named = hasattr(outputs, "_fields")  # a NamedTuple takes its items one by one
        return type(outputs)(*scaled) if is_named else type(outputs)(scaled)

    def unscale_(self, target: Optimizer | GradientMap) -> bool:
        """Divide the gradients by the scale, once per update; gives whether all of them are finite.

        Clip after it and before `step`, which does not unscale a second time.

        Args:
            target: an optimizer, for the gradients of its parameters, or a `GradientMap`.
        """
        if not self._enabled:
            return True
        self._unscale(target)
        return self._is_finite(target)

    def _unscale(self, target: Optimizer | GradientMap) -> None:
        """Nothing is read from a device."""
        _check_target(target, "target")
        gradients = list(_gradients(target))
        self._require_not_unscaled(target)
        if not isinstance(target, GradientMap):
            _require_not_float16(gradients)
        # A product with the inverse, as in `torch.amp.GradScaler`, and no division.
        inverse = 1.0 / self._scale
        self._finite[target] = _found([_scale_in_place(one, inverse) for one in gradients])

    def _is_finite(self, target: object) -> bool:
        """Whether what was unscaled is finite; read once."""
        flags = self._finite[target]
        is_finite = flags if isinstance(flags, bool) else not any(map(bool, flags))
        self._finite[target] = is_finite
        return is_finite

    # For an accumulator, which reads them with other numbers.

    def _unscale_unread(self, optimizer: Optimizer) -> list[Tensor]:
        """As `unscale_`; gives numbers above 0 where gradients are not finite."""
        self._unscale(optimizer)
        flags = self._finite[optimizer]
        if isinstance(flags, bool) or any(type(flag) is not Tensor for flag in flags):
            return []  # which `step` reads
        return flags

    def _are_others_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer's gradients were unscaled, and it has not stepped."""
        waiting = self._finite.keys() - self._stepped - {optimizer}
        return any(not isinstance(one, GradientMap) for one in waiting)

    def _note_finite(self, optimizer: Optimizer, is_finite: bool) -> None:
        self._finite[optimizer] = is_finite

    def _forget_unscaled(self, optimizer: Optimizer) -> None:
        """The gradients that were unscaled are gone."""
        self._finite.pop(optimizer, None)
        self._stepped.discard(optimizer)

    def _require_not_unscaled(self, target: object) -> None:
        if target in self._stepped:
            raise MisuseError(
                "unscale_ comes before step: this optimizer has stepped. Call update() first."
            )
        if target in self._finite:
            raise MisuseError(
                "unscale_ was called on these gradients already. Call it once between two update()."
            )

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that is still to do, then `optimizer.step(*args, **kwargs)`, unless a gradient
        is not finite.

        Args:
            optimizer: to be stepped.
            args: of its `step`.
            kwargs: of its `step`.
        """
        _check_target(optimizer, "optimizer")
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise MisuseError(
                "args: a closure computes gradients nobody has unscaled. Run it before, and pass"
                " none."
            )
        is_finite = self._unscale_for_step(optimizer)
        self._stepped.add(optimizer)
        return optimizer.step(*args, **kwargs) if is_finite else None

    def _unscale_for_step(self, optimizer: Optimizer) -> bool:
        """Whether the gradients are finite; they are unscaled if nobody has done it before."""
        if optimizer in self._stepped:
            raise MisuseError(
                "step was called on this optimizer already. Call update() after each step."
            )
        if optimizer not in self._finite:
            self.unscale_(optimizer)
        return self._is_finite(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Choose the next scale from what the gradients since the last update looked like; or set
        it.

        Args:
            new_scale: to set it; None chooses.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _read_scale(new_scale, "new_scale")
        elif not self._finite:
            raise MisuseError(
                "update: no gradients were unscaled since the last update. Call step(optimizer)"
                " first."
            )
        elif self.dynamic:
            self._adapt(all(map(self._is_finite, self._finite)))
        self._finite.clear()
        self._stepped.clear()

    def _adapt(self, finite: bool) -> None:
        if finite:
            self._count_good_update()
        else:
            self._back_off()

    def _back_off(self) -> None:
        smaller = _float32(self._scale * self.backoff_factor)
        if smaller == 0:
            raise NonFiniteGradient(
                f"The gradients overflow at every scale down to {self._scale:.3g}: the NaN or"
                " Inf is the model's own. Find it with gradfit.inspect_gradients(model)."
            )
        self._scale = smaller
        self._growth_tracker = 0

    def _count_good_update(self) -> None:
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            larger = _float32(self._scale * self.growth_factor)
            self._scale = larger if math.isfinite(larger) else self._scale
            self._growth_tracker = 0

    def get_scale(self) -> float:
        """The factor `scale` multiplies by; 1.0 when not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether anything is scaled at all."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history, under the names `torch.amp.GradScaler` uses; empty when not
        enabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
            "dynamic": self.dynamic,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of this class or of `torch.amp.GradScaler`.

        Args:
            state_dict: what `state_dict()` returned.
        """
        if not self._enabled:
            return
        read_mapping(state_dict, "state_dict", "what state_dict() gave")
        _require_entries(state_dict)
        new = LossScaler(
            *(state_dict[name] for name in _ARGUMENTS),
            dynamic=bool(state_dict.get("dynamic", self.dynamic)),
        )  # reads every number before any is taken over
        new._growth_tracker = read_count(
            state_dict["_growth_tracker"], "_growth_tracker", minimum=0
        )
        names = ("_scale", *_ARGUMENTS[1:], "_growth_tracker", "dynamic")
        self.__dict__.update({name: getattr(new, name) for name in names})

    def __repr__(self) -> str:
        mode = "dynamic" if self.dynamic else "static"
        return f"LossScaler(scale={self.get_scale():g}, {mode}, enabled={self._enabled})"


def _require_not_float16(gradients: list[Tensor]) -> None:
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise MisuseError(
            "unscale_: the parameters are float16, where unscaled gradients vanish. Keep them in"
            " float32 under torch.autocast, or pass dtype=torch.float32 to GradientAccumulator."
        )


def _scale_in_place(gradient: Tensor, factor: float) -> Tensor:
    """Gives whether the gradient is finite; nothing is read from its device."""
    gradient.mul_(factor)
    return values_of(gradient).isfinite().all()


def _found(flags: list[Tensor]) -> list[Tensor]:
    """Of flags that are true where a gradient is finite, one for each device, which is true where
    one is not. A DTensor's flag is over all ranks, which all read it.
    """
    plain: dict[torch.device, list[Tensor]] = {}
    of_ranks: list[Tensor] = []
    for flag in flags:
        if type(flag) is Tensor:
            plain.setdefault(flag.device, []).append(flag)
        else:
            of_ranks.append(~flag)
    return [*of_ranks, *(~torch.stack(some).all() for some in plain.values())]


def _require_entries(state: Mapping[str, Any]) -> None:
    missing = [name for name in (*_ARGUMENTS, "_growth_tracker") if name not in state]
    if missing:
        raise StateError(
            f"state_dict holds no {', '.join(missing)}. Save it from a scaler with enabled=True."
        )


def _gradients(target: Optimizer | GradientMap) -> Iterable[Tensor]:
    if isinstance(target, GradientMap):
        return target.values()
    return (p.grad for group in target.param_groups for p in group["params"] if p.grad is not None)


def _check_target(target: Any, name: str) -> None:
    if not isinstance(target, GradientMap) and not hasattr(target, "param_groups"):
        raise invalid(
            name, target, f"is a {type(target).__name__}", "the optimizer, or a GradientMap"
        )


def _read_scale(value: Any, name: str) -> float:
    return _float32(
        float(read_number(value, name, above=0, maximum=torch.finfo(torch.float32).max, like=65536))
    )


def _float32(value: float) -> float:
    """Rounded as `torch.amp.GradScaler` keeps it, so that both give the same scales for any
    factors.
    """
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32).item()
