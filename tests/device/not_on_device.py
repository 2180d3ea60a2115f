"""What `make test-device` leaves out, and why: what exists on the CPU alone, and gaps that are
known and not closed.
"""

from __future__ import annotations

_SPARSE = "the simulated device has no sparse tensors"
_NUMPY = "NumPy, and memory that is shared with it, is the host's"

# By the beginning of a test's name.
CPU_ALONE: dict[str, str] = {
    "tests/tape/test_saved_classes.py": (
        "sparse, nested and MKL-DNN tensors, which the simulated device does not have"
    ),
    "tests/tape/test_held_content.py": _NUMPY,
    "tests/tape/test_torch_databases.py": (
        "samples of operators: the simulated device has the CPU's kernels"
    ),
    "tests/recompute/test_hard_cases.py::test_custom_functions": _NUMPY,
    "tests/recompute/test_hard_cases.py::test_sparse": _SPARSE,
    "tests/recompute/test_hard_cases.py::test_a_learned_sparse": _SPARSE,
    "tests/recompute/test_hard_cases.py::test_a_mark_outside": _SPARSE,
    "tests/recompute/test_masks.py": (
        "on the CPU a mask is two operations, on an accelerator dropout is one"
    ),
    "tests/recompute/test_planned.py::test_offloaded_values": (
        "the file is where the CPU offloads to"
    ),
    "tests/accumulate/test_accumulate_guides.py": "examples run on the CPU",
    "tests/accumulate/test_accumulate_odd_cases.py::test_norms_of_every_kind": _SPARSE,
    "tests/accumulate/test_accumulator_state.py::"
    "test_resumed_between_any_two_micro_batches[sparse": _SPARSE,
    "tests/accumulate/test_exactness.py::test_sparse": _SPARSE,
    "tests/accumulate/test_loops_as_written.py::test_weightless_losses_of_a_sparse": _SPARSE,
    "tests/accumulate/test_low_precision.py::test_sparse": _SPARSE,
    "tests/toolbox/test_clipper.py::test_sparse": _SPARSE,
    "tests/toolbox/test_gradient_map.py::test_sparse": _SPARSE,
    "tests/toolbox/test_toolbox_examples.py": "examples run on the CPU",
    "tests/profiling/test_fake.py::test_without_hardware": "the hardware is the CPU's",
    "tests/fitting/test_audit_plan.py::test_every_value": "its budget is for the CPU's operations",
}

KNOWN_GAPS: dict[str, str] = {
    "tests/fitting/test_fit.py::test_the_budget_is_held_and_the_update_is_exact": (
        "weights that stay on the device: the full batch's gradient up to rounding, not the bits of"
        " scaling by hand"
    ),
    "tests/profiling/test_fake.py::test_the_structure_is_that_of_a_real_run": (
        "on shapes an optimizer's temporaries on an accelerator are counted twice: a bound, not the"
        " number"
    ),
}


def reason_in(table: dict[str, str], name: str) -> str | None:
    """Why a test is in a table; None if it is not."""
    return next((reason for start, reason in table.items() if name.startswith(start)), None)
