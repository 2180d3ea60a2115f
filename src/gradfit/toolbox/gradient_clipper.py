"""Keeping gradients within bounds: by their norm together, each by its own norm, or element by
element.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradfit.arguments import read_flag, read_number
from gradfit.errors import MisuseError
from gradfit.norms import total_norm
from gradfit.toolbox.gradient_map import GradientMap, clip_factor, gradients_of
from gradfit.toolbox.inputs import Inputs, label


class GradientClipper:
    """Clips gradients in place, wherever they are: in a `GradientMap`, in `.grad` of parameters, or
    of a model.

    With both bounds the elements are clipped first. `per_parameter` holds each gradient's own norm
    to `max_norm`, so that one exploding layer does not silence the others.

    Args:
        max_norm: the largest norm; None: no bound.
        max_value: the largest absolute value of an element; None: no bound.
        per_parameter: clip each gradient's norm by itself.

    >>> import torch
    >>> grads = GradientMap({"w": torch.tensor([3.0, 4.0])})
    >>> GradientClipper(1.0).clip_grads(grads).item()
    5.0
    >>> grads["w"]
    tensor([0.6000, 0.8000])
    """

    def __init__(
        self,
        max_norm: float | None = None,
        max_value: float | None = None,
        per_parameter: bool = False,
    ) -> None:
        if max_norm is None and max_value is None:
            raise MisuseError(
                "GradientClipper has no bound. Pass max_norm=1.0, max_value=0.5, or both."
            )
        _check_bound(max_norm, "max_norm")
        _check_bound(max_value, "max_value")
        if read_flag(per_parameter, "per_parameter") and max_norm is None:
            raise MisuseError(
                "per_parameter=True bounds each gradient's norm. Pass max_norm=1.0 with it."
            )
        self.max_norm = max_norm
        self.max_value = max_value
        self.per_parameter = per_parameter

    def clip_grads(self, grads: GradientMap | Inputs, *, scale: float = 1.0) -> Tensor:
        """Clip, and give the norm of all gradients together as it was before.

        `scale` is the loss scale the gradients still carry (`scaler.get_scale()`): the bounds, and
        the norm that is returned, are those of the unscaled gradients. A NaN or an infinity raises
        `NonFiniteGradient` with the names of the parameters, and nothing is changed.

        Args:
            grads: a `GradientMap`, a model, or parameters.
            scale: what the gradients are still multiplied by; 1 by default.
        """
        scale = read_number(scale, "scale", above=0)
        gradients = grads if isinstance(grads, GradientMap) else gradients_of(grads, "grads")
        norm = gradients.norm()
        gradients.require_finite(norm)
        if self.max_value is not None:
            _clip_elements(gradients, self.max_value * scale)
        if self.max_norm is not None and self.per_parameter:
            _clip_each_norm(gradients, self.max_norm * scale)
        elif self.max_norm is not None:
            clipped = norm if self.max_value is None else gradients.norm()
            gradients.scale_(clip_factor(clipped, self.max_norm * scale))
        return norm / scale

    def __repr__(self) -> str:
        bounds = (
            f"max_norm={self.max_norm}",
            f"max_value={self.max_value}",
            f"per_parameter={self.per_parameter}",
        )
        return f"GradientClipper({', '.join(bounds)})"


def _check_bound(bound: Any, name: str) -> None:
    if bound is not None:
        read_number(bound, name, above=0)


def _clip_elements(gradients: GradientMap, bound: float) -> None:
    # All are looked at before any is clipped: a refusal changes nothing.
    for key, gradient in gradients.items():
        if gradient.is_sparse or gradient.is_complex():
            kind = "sparse" if gradient.is_sparse else "complex"
            raise MisuseError(
                f"max_value cannot clip the {kind} gradient of {label(key)}. Pass max_norm only."
            )
    for gradient in gradients.values():
        gradient.clamp_(-bound, bound)


def _clip_each_norm(gradients: GradientMap, bound: float) -> None:
    for gradient in gradients.values():
        gradient.mul_(clip_factor(total_norm([gradient]), bound))
