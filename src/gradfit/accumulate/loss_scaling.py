"""What a window asks of its loss scaler. What torch's and ours have on an accelerator is left
there, to be read together with other numbers: each read makes the host wait. Other scalers read
what they need by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit import _torch_amp
from gradfit._torch import version_of
from gradfit.errors import MisuseError


def scale_of(scaler: Any) -> float | Tensor:
    """What losses are multiplied by now: a number, or where it is on an accelerator, that tensor
    itself.
    """
    if _torch_amp.is_torchs_own(scaler):
        scale = _torch_amp.scale_of_torchs(scaler)
        if scale is not None and not scale.is_cpu:
            return scale
    return float(scaler.get_scale())


def make_scale(scaler: Any, gradients: Sequence[Tensor]) -> None:
    """Let a scaler have its scale: torch's has none where no loss was scaled."""
    if _torch_amp.is_torchs_own(scaler) and _torch_amp.scale_of_torchs(scaler) is not None:
        return
    device = gradients[0].device if gradients else torch.get_default_device()
    scaler.scale(torch.zeros((), device=device))


def require_no_other_unscaled(scaler: Any, optimizer: Any) -> None:
    """Refuse an update, which ends with `scaler.update()`, while another optimizer's gradients are
    unscaled: the scaler would forget that, and divide them once more.
    """
    if _torch_amp.is_torchs_own(scaler):
        are_there = _torch_amp.are_others_unscaled(scaler, optimizer)
    else:
        are_there = hasattr(scaler, "_are_others_unscaled") and scaler._are_others_unscaled(
            optimizer
        )
    if are_there:
        raise MisuseError(
            "The scaler has unscaled the gradients of another optimizer, which has not stepped, and"
            " this update ends with scaler.update(). Call scaler.step(…) with that optimizer first,"
            " or give each optimizer a scaler of its own."
        )


class CarriedScale:
    """The loss scale that a window's sums carry: the scaler's when the window began.

    One that is on an accelerator is copied there, and read when somebody asks for the number.
    """

    __slots__ = ("_original", "_version", "value")

    def __init__(self, value: float | Tensor = 1.0) -> None:
        self._note(value)
        self.value = value.clone() if isinstance(value, Tensor) else value

    def _note(self, value: float | Tensor) -> None:
        """While it is this tensor, not written to since, it is the same number."""
        self._original = value if isinstance(value, Tensor) else None
        self._version = -1 if self._original is None else version_of(self._original)

    @property
    def number(self) -> float:
        """Read once."""
        if isinstance(self.value, Tensor):
            self.value = float(self.value.item())
        return self.value

    def over_present(self, scaler: Any) -> float:
        """What brings gradients at the scaler's present scale to this one. Nothing is read while
        the scale is as it was.
        """
        now = scale_of(scaler)
        if not isinstance(now, Tensor):
            return self.number / now
        if now is self._original and version_of(now) == self._version:
            return 1.0
        ratio = self.number / float(now.item())
        if ratio == 1.0:
            self._note(now)
        return ratio


class UpdateScaling:
    """Unscales the gradients of one optimizer and steps it, each once in an update.

    Args:
        scaler: enabled.
        optimizer: whose gradients are scaled.
    """

    def __init__(self, scaler: Any, optimizer: Any) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self._is_torchs = _torch_amp.is_torchs_own(scaler)
        self._is_unscaled = False

    def unscale(self) -> list[Tensor]:
        """Divide the gradients by the scale; gives numbers that are above 0 where they are not
        finite, for `step`; none where the scaler reads that itself.
        """
        if hasattr(self._scaler, "_unscale_unread"):
            flags: list[Tensor] = self._scaler._unscale_unread(self._optimizer)
        else:
            self._scaler.unscale_(self._optimizer)
            flags = self._found()
        self._is_unscaled = True
        return flags

    def _found(self) -> list[Tensor]:
        if not self._is_torchs:
            return []
        return _torch_amp.found_by_torchs(self._scaler, self._optimizer)

    def step(self, found: bool | None) -> None:
        """Step, if what was unscaled is finite, and update the scale.

        Torch's scaler would also call a fused optimizer that is not to step: its kernels look at
        what was found, while its hooks and its watchers hear of a step.

        Args:
            found: whether something is not finite; None: it is still to be read.
        """
        scaler, optimizer = self._scaler, self._optimizer
        if self._is_torchs:
            if not (any(self._found()) if found is None else found):
                with _torch_amp.nothing_was_found(scaler, optimizer):
                    scaler.step(optimizer)
        elif found is None:
            scaler.step(optimizer)
        else:
            scaler._note_finite(optimizer, not found)
            scaler.step(optimizer)
        scaler.update()
        self._is_unscaled = False

    def forget(self) -> None:
        """The gradients that were unscaled are gone, and nobody has stepped: the next ones are to
        be unscaled, too.
        """
        if not self._is_unscaled:
            return
        self._is_unscaled = False
        if self._is_torchs:
            _torch_amp.forget_unscaled(self._scaler, self._optimizer)
        elif hasattr(self._scaler, "_forget_unscaled"):
            self._scaler._forget_unscaled(self._optimizer)
        else:
            self._scaler.update(self._scaler.get_scale())
