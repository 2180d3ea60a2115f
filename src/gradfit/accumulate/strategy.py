"""When is a window full? By steps, by items, or by what the gradients themselves say."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from gradfit.arguments import Number, read_choice, read_count, read_mapping, read_number
from gradfit.errors import StateError


class Strategy(ABC):
    """Decides when a window is full; subclass it for a rule of your own."""

    needs_norms = False
    """Whether `observe` needs each micro-batch's own gradient norm."""

    @abstractmethod
    def is_complete(self, micro_batches: int, weight: Number) -> bool:
        """Whether a window of that many micro-batches, weighing so much together, is full.

        Args:
            micro_batches: how many are in the window.
            weight: items in all of them together.
        """

    @abstractmethod
    def progress(self, micro_batches: int, weight: Number) -> float:
        """How full it is, from 0 to 1.

        Args:
            micro_batches: how many are in the window.
            weight: items in all of them together.
        """

    @abstractmethod
    def expected_weight(self, first: Number) -> Number:
        """What the window will weigh if the first micro-batch is typical; a right guess saves a
        pass over them all.

        Args:
            first: items in the first micro-batch.
        """

    def observe(self, weight: Number, squared_norm: float | None = None) -> None:  # noqa: B027
        """One micro-batch has come in; most strategies need not know.

        Args:
            weight: its items.
            squared_norm: of its mean gradient; None where that is not measured.
        """

    def end_window(self, weight: Number, squared_norm: float | None = None) -> None:  # noqa: B027
        """The window is over; `squared_norm` is that of its mean gradient, None if it was dropped.

        Args:
            weight: items in all of its micro-batches.
            squared_norm: of the window's mean gradient.
        """

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, as plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: what `state_dict()` returned.
        """
        if read_mapping(state, "state", "what state_dict() gave"):
            raise StateError(
                f"The state is that of another strategy than {self!r}: it holds {sorted(state)}."
            )


class FixedStepCount(Strategy):
    """A window is `steps` micro-batches, whatever their sizes.

    Args:
        steps: micro-batches in one window, at least 1.

    >>> FixedStepCount(4).is_complete(3, 100), FixedStepCount(4).progress(1, 7)
    (False, 0.25)
    """

    def __init__(self, steps: int) -> None:
        self.steps = read_count(steps, "steps")

    def is_complete(self, micro_batches: int, weight: Number) -> bool:
        return micro_batches >= self.steps

    def progress(self, micro_batches: int, weight: Number) -> float:
        return min(1.0, micro_batches / self.steps)

    def expected_weight(self, first: Number) -> Number:
        return self.steps * first

    def __repr__(self) -> str:
        return f"FixedStepCount({self.steps})"


class FixedTargetBatch(Strategy):
    """A window is at least `batch_size` items, however many micro-batches that takes.

    Args:
        batch_size: items that fill a window.

    >>> FixedTargetBatch(32).is_complete(3, 31), FixedTargetBatch(32).is_complete(2, 40)
    (False, True)
    """

    def __init__(self, batch_size: Number) -> None:
        self.batch_size = read_number(batch_size, "batch_size", above=0, like=64)

    def is_complete(self, micro_batches: int, weight: Number) -> bool:
        return weight >= self.batch_size

    def progress(self, micro_batches: int, weight: Number) -> float:
        return min(1.0, weight / self.batch_size)

    def expected_weight(self, first: Number) -> Number:
        return max(self.batch_size, first)

    def __repr__(self) -> str:
        return f"FixedTargetBatch({self.batch_size})"


_EMPTY_WINDOW = {"count": 0, "sum": 0, "squares": 0, "inverse": 0.0, "norms": 0.0, "normed": 0}
# of the required batch size from one window to the next, by one noisy measurement
_LARGEST_CHANGE = 2.0


class AdaptiveAccumulation(Strategy):
    """A window that grows where its gradient would be noisy.

    `by="variance"`: n micro-batches of b₁…bₙ items, whose sizes vary by the coefficient c =
    deviation / mean, are worth Σb / (1 + c²) items (Kish's effective sample size); the window is
    full when that reaches `target_batch_size`. Small micro-batches therefore accumulate longer,
    large ones less, uneven ones longer.

    `by="noise_scale"`: the target follows the measured gradient noise scale, trace of the
    covariance over the squared gradient, from the norms of the micro-batches' gradients and of
    their mean (McCandlish et al. 2018, an estimate from two batch sizes). Below that batch size a
    larger window pays for itself, above it hardly. `target_batch_size` is where it starts. Each
    measurement is noisy itself, above all in small windows: estimates are averaged (`smoothing`),
    and what is required at most doubles or halves from one window to the next. Measuring takes two
    micro-batches in a window; where one is enough, a window now and then takes two all the same.

    Args:
        target_batch_size: items that a window should be worth; where `by="noise_scale"` starts.
        by: "variance" of the sizes, or the measured "noise_scale".
        min_steps: micro-batches that a window has at least.
        max_steps: micro-batches that a window has at most.
        smoothing: how much of the running estimate stays when a new measurement comes, from 0 to
            below 1; of "noise_scale" only.

    >>> even, uneven = AdaptiveAccumulation(16), AdaptiveAccumulation(16)
    >>> for size in (8, 8): even.observe(size)
    >>> for size in (2, 14): uneven.observe(size)
    >>> even.is_complete(2, 16), uneven.is_complete(2, 16)
    (True, False)
    """

    def __init__(
        self,
        target_batch_size: Number,
        *,
        by: str = "variance",
        min_steps: int = 1,
        max_steps: int = 1024,
        smoothing: float = 0.9,
    ) -> None:
        self.target_batch_size = read_number(
            target_batch_size, "target_batch_size", above=0, like=64
        )
        self.by = read_choice(by, "by", ("variance", "noise_scale"))
        self.min_steps = read_count(min_steps, "min_steps")
        self.max_steps = read_count(max_steps, "max_steps", minimum=self.min_steps)
        self.smoothing = float(read_number(smoothing, "smoothing", minimum=0, below=1, like=0.9))
        self.needs_norms = by == "noise_scale"
        self._state: dict[str, float] = {
            "noise": 0.0,
            "signal": 0.0,
            "measured": 0,
            "unmeasured": 0,  # windows since the last measurement
            "required": float(self.target_batch_size),
            **_EMPTY_WINDOW,
        }

    @property
    def noise_scale(self) -> float | None:
        """The measured gradient noise scale in items; None before two micro-batches of one window
        were measured.
        """
        if not self._state["measured"]:
            return None
        if self._state["signal"] <= 0:  # the gradient drowns in noise: any batch is too small
            return math.inf
        return max(0.0, self._state["noise"] / self._state["signal"])

    @property
    def required_batch_size(self) -> float:
        """How many items the window must hold to be full, as far as it is known now."""
        if self.by == "noise_scale":
            return self._state["required"]
        count, total, squares = (self._state[name] for name in ("count", "sum", "squares"))
        return self.target_batch_size * (count * squares / total**2 if total else 1.0)  # 1 + c²

    def is_complete(self, micro_batches: int, weight: Number) -> bool:
        if micro_batches < self._least_steps:
            return False
        return micro_batches >= self.max_steps or weight >= self.required_batch_size

    def progress(self, micro_batches: int, weight: Number) -> float:
        if self.is_complete(micro_batches, weight):
            return 1.0
        by_weight = min(1.0, weight / self.required_batch_size) if self.required_batch_size else 1.0
        return max(
            min(by_weight, micro_batches / self._least_steps), micro_batches / self.max_steps
        )

    @property
    def _least_steps(self) -> int:
        """`min_steps`, and two where it is time to measure again."""
        if self.by == "variance" or self._state["unmeasured"] * (1 - self.smoothing) < 1:
            return self.min_steps
        return min(max(2, self.min_steps), self.max_steps)

    def expected_weight(self, first: Number) -> Number:
        required = min(self.required_batch_size, self.max_steps * first)
        return max(required, self._least_steps * first)

    def observe(self, weight: Number, squared_norm: float | None = None) -> None:
        if not weight:
            return
        state = self._state
        state["count"] += 1
        state["sum"] += weight
        state["squares"] += weight**2
        if squared_norm is not None:
            state["inverse"] += 1 / weight
            state["norms"] += squared_norm
            state["normed"] += 1

    def end_window(self, weight: Number, squared_norm: float | None = None) -> None:
        state = self._state
        if squared_norm is not None:
            if state["count"] > 1 and state["count"] == state["normed"]:
                self._measure(weight, squared_norm)
                state["unmeasured"] = 0
            else:
                state["unmeasured"] += 1
        state.update(_EMPTY_WINDOW)

    def _measure(self, weight: Number, squared_norm: float) -> None:
        """E|g_b|² = |G|² + S/b for a batch of b items: two equations, one for the micro-batches,
        one for the window.
        """
        state, count = self._state, self._state["count"]
        noise = (state["norms"] / count - squared_norm) / (state["inverse"] / count - 1 / weight)
        signal = squared_norm - noise / weight
        state["measured"] += 1
        # a plain average, until there are enough
        new = max(1 - self.smoothing, 1 / state["measured"])
        state["noise"] += new * (noise - state["noise"])
        state["signal"] += new * (signal - state["signal"])
        if self.noise_scale is not None:
            before, typical = state["required"], state["sum"] / count
            bounded = min(max(self.noise_scale, before / _LARGEST_CHANGE), before * _LARGEST_CHANGE)
            state["required"] = min(max(bounded, typical), self.max_steps * typical)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(read_mapping(state, "state", "what state_dict() gave")) != set(self._state):
            raise StateError(
                f"The state is not one of {self!r}: it holds {sorted(map(str, state))}."
            )
        self._state = {
            name: read_number(value, f"state[{name!r}]") for name, value in state.items()
        }

    def __repr__(self) -> str:
        return f"AdaptiveAccumulation({self.target_batch_size}, by={self.by!r})"
