"""Accelerators by name, for `estimate`: memory, bandwidth and arithmetic, as their makers publish
them.

None of these was measured here. Rates are nominal ones of dense matrices (no structured sparsity).
Memory is a whole number of GiB that the driver leaves, rounded down, so that an estimate errs on
the safe side; contexts and libraries take some hundred MiB of it. For a board that differs pass a
`Hardware` of your own.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

import torch

from gradfit.arguments import invalid
from gradfit.profiling.profile import Hardware

_PCIE3, _PCIE4, _PCIE5 = 12e9, 25e9, 50e9  # bytes per second to the host that copies reach


class Machine(NamedTuple):
    """One accelerator."""

    gib: int
    bandwidth: float
    """TB/s of its memory."""
    float32: float
    """TFLOP/s."""
    half: float
    """TFLOP/s in float16, and in bfloat16 if `has_bfloat16`."""
    host: float = _PCIE4
    has_bfloat16: bool = True

    def rate_for(self, dtype: torch.dtype) -> float:
        """TFLOP/s in this type."""
        halves = (torch.float16, torch.bfloat16) if self.has_bfloat16 else (torch.float16,)
        return self.half if dtype in halves else self.float32


MACHINES: dict[str, Machine] = {
    # NVIDIA, for data centres
    "b200": Machine(178, 8.0, 80, 2250, _PCIE5),
    "gh200-96gb": Machine(95, 4.0, 67, 989, 300e9),
    "h200": Machine(140, 4.8, 67, 989, _PCIE5),
    "h100-80gb": Machine(79, 3.35, 67, 989, _PCIE5),
    "h100-pcie-80gb": Machine(79, 2.0, 51, 756, _PCIE5),
    "h100-nvl-94gb": Machine(93, 3.9, 60, 835, _PCIE5),
    "a100-80gb": Machine(79, 2.039, 19.5, 312),
    "a100-pcie-80gb": Machine(79, 1.935, 19.5, 312),
    "a100-40gb": Machine(39, 1.555, 19.5, 312),
    "a40": Machine(44, 0.696, 37.4, 150),
    "a30": Machine(23, 0.933, 10.3, 165),
    "a10": Machine(22, 0.6, 31.2, 125),
    "a2": Machine(14, 0.2, 4.5, 18),
    "l40s": Machine(44, 0.864, 91.6, 362),
    "l40": Machine(44, 0.864, 90.5, 181),
    "l4": Machine(22, 0.3, 30.3, 121),
    "v100-32gb": Machine(31, 0.9, 15.7, 125, _PCIE3, has_bfloat16=False),
    "v100-16gb": Machine(15, 0.9, 15.7, 125, _PCIE3, has_bfloat16=False),
    "t4": Machine(14, 0.32, 8.1, 65, _PCIE3, has_bfloat16=False),
    "p100-16gb": Machine(15, 0.732, 9.3, 18.7, _PCIE3, has_bfloat16=False),
    # NVIDIA, for desks
    "rtx-6000-ada": Machine(47, 0.96, 91.1, 364),
    "rtx-a6000": Machine(47, 0.768, 38.7, 155),
    "rtx-5090": Machine(31, 1.792, 104.8, 209, _PCIE5),
    "rtx-4090": Machine(23, 1.008, 82.6, 165),
    "rtx-4080": Machine(15, 0.717, 48.7, 97),
    "rtx-3090": Machine(23, 0.936, 35.6, 71),
    "rtx-3060-12gb": Machine(11, 0.36, 12.7, 25),
    "rtx-2080-ti": Machine(10, 0.616, 13.4, 54, _PCIE3, has_bfloat16=False),
    # AMD
    "mi325x": Machine(255, 6.0, 163.4, 1307, _PCIE5),
    "mi300x": Machine(191, 5.3, 163.4, 1307, _PCIE5),
    "mi250x": Machine(
        63, 1.638, 23.9, 191
    ),  # one of its two dies, which torch sees as a device of its own
    "mi210": Machine(63, 1.638, 22.6, 181),
    "mi100": Machine(31, 1.229, 23.1, 92),
    "rx-7900-xtx": Machine(23, 0.96, 61.4, 123),
    # Intel
    "gaudi3": Machine(128, 3.7, 229, 1835, _PCIE5),
    "gaudi2": Machine(96, 2.45, 27, 432),
    "max-1550": Machine(
        64, 1.638, 26, 420, _PCIE5
    ),  # one of its two stacks, which torch sees as a device of its own
}


def find_machine(hardware: Any, dtype: torch.dtype) -> Hardware:
    """A machine by its name in `MACHINES`, at its rate for this type; a `Hardware` as it is.

    >>> find_machine("A100-80GB", torch.bfloat16).flops
    312000000000000.0
    """
    if isinstance(hardware, Hardware):
        return hardware
    names = ", ".join(sorted(MACHINES))
    if not isinstance(hardware, str):
        raise invalid(
            "hardware", hardware, "is no machine", f"a gf.Hardware(...), or one of {names}"
        )
    name = hardware.strip().lower().replace("_", "-").replace(" ", "-")
    machine = MACHINES.get(name)
    if machine is None:
        raise invalid(
            "hardware",
            hardware,
            f"is not in the table{_names_near(name)}",
            f"a gf.Hardware(...), or one of {names}",
        )
    rate = machine.rate_for(dtype)
    return Hardware(
        memory=machine.gib << 30,
        flops=rate * 1e12,
        bandwidth=machine.bandwidth * 1e12,
        host_bandwidth=machine.host,
        name=name,
    )


def _names_near(name: str) -> str:
    near = difflib.get_close_matches(name, MACHINES, n=3, cutoff=0.4)
    return f"; near it are {', '.join(near)}" if near else ""
