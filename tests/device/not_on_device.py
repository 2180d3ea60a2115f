"""What `make test-device` leaves out, and why: what exists on the CPU alone, and gaps that are
known and not closed.
"""

from __future__ import annotations

_SPARSE = "the simulated device has no sparse tensors"
_NESTED = "the simulated device has no nested tensors"
_ONE_DROPOUT = "on the CPU a mask is two operations, on an accelerator dropout is one"
_NUMPY = "NumPy, and memory that is shared with it, is the host's"
_NO_FILE = "a file is where the CPU offloads to; a device offloads to the host's memory"

# By the beginning of a test's name.
CPU_ALONE: dict[str, str] = {
    "tests/tape/test_compiled.py": "inductor makes no code for the simulated device",
    "tests/tape/test_writes.py::test_a_nested_tensor": _NESTED,
    "tests/tape/test_allocate.py::test_a_mask_of_dropout": _ONE_DROPOUT,
    "tests/tape/test_generators.py::test_an_accelerators_generator": (
        "an accelerator that the CPU's generator plays; tests/device has a real one"
    ),
    "tests/tape/test_interrupted.py::test_a_constant_whose_check_failed": _NUMPY,
    "tests/tape/test_held_content.py::test_a_write_through_an_alias": _NUMPY,
    "tests/tape/test_held_content.py::test_reading_through_an_alias": _NUMPY,
    "tests/tape/test_held_content.py::test_an_input_that_is_refilled_unseen[numpy": _NUMPY,
    "tests/tape/test_held_content.py::test_an_input_that_is_refilled_unseen[buffer": _NUMPY,
    "tests/tape/test_held_content.py::test_an_input_that_is_refilled_unseen[shared": _NUMPY,
    "tests/tape/test_held_content.py::test_a_large_input": _NUMPY,
    "tests/tape/test_held_content.py::test_a_small_input_that_is_read_often": _NUMPY,
    "tests/tape/test_held_content.py::test_which_memory_is_watched": _NUMPY,
    "tests/tape/test_held_content.py::test_memory_filled_by_numpy": _NUMPY,
    "tests/tape/test_held_content.py::"
    "test_a_write_that_nobody_sees_is_seen_in_what_is_kept_as_in_plain[dlpack": _NUMPY,
    "tests/tape/test_held_content.py::"
    "test_a_write_that_nobody_sees_is_seen_in_what_is_kept_as_in_plain[numpy": _NUMPY,
    "tests/tape/test_held_content.py::test_a_saved_tensor_of_another_layout": _SPARSE,
    "tests/tape/test_unusual.py::test_layouts_without_a_storage": _SPARSE,
    "tests/tape/test_unusual.py::test_nested_tensors": _NESTED,
    "tests/tape/test_unusual.py::test_a_sparse_embedding": _SPARSE,
    "tests/tape/test_saved_classes.py::test_the_error_for_a_nested": _NESTED,
    "tests/recompute/test_masks.py::test_bits_that_are_kept": _ONE_DROPOUT,
    "tests/recompute/test_hard_cases.py::test_custom_functions": _NUMPY,
    "tests/recompute/test_hard_cases.py::test_sparse": _SPARSE,
    "tests/recompute/test_hard_cases.py::test_a_learned_sparse": _SPARSE,
    "tests/recompute/test_hard_cases.py::test_a_mark_outside": _SPARSE,
    "tests/recompute/test_names.py::test_parameters_inputs_and_sparse": _SPARSE,
    "tests/recompute/test_one_stream.py::test_a_plan_fits_its_own_profile[AddsSparse]": _SPARSE,
    "tests/recompute/test_one_stream.py::test_profiles_are_not_made_under": (
        "a pooling that has a short way on the CPU alone"
    ),
    "tests/recompute/test_planned.py::test_offloaded_values": _NO_FILE,
    "tests/recompute/test_offload_beside.py::test_a_full_disk": _NO_FILE,
    "tests/recompute/test_offload_beside.py::test_what_goes_wrong": _NO_FILE,
    "tests/recompute/test_offload_beside.py::test_a_limit_on_the_size_of_files": _NO_FILE,
    "tests/recompute/test_offload_beside.py::test_a_forked_process": (
        "a process that was forked cannot use a device that its parent has used"
    ),
    "tests/recompute/test_hard_cases.py::test_a_sparse": _SPARSE,
    "tests/recompute/test_most_bytes.py::"
    "test_an_operation_never_takes_more[_scaled_dot_product_flash_attention_for_cpu": (
        "the CPU's own attention"
    ),
    "tests/batches/test_nests.py::test_what_goes_into_every_part_may_be_sparse": _SPARSE,
    "tests/batches/test_weights.py::test_a_sum_divided_by_nothing": (
        "a weight that is read at once; on a device all are read at the step's end"
    ),
    "tests/profiling/test_measure.py::test_a_deep_network_is_watched": (
        "its room is for the CPU's attention, which never holds the matrix of all scores"
    ),
    "tests/profiling/test_clock.py::test_what_others_take": "a thread's own time is the CPU's",
    "tests/planning/test_real_graphs.py::test_gates_that_are_written_side_by_side": (
        "the CPU's recurrent cells; an accelerator's are one operation"
    ),
    "tests/accumulate/test_accumulate_odd_cases.py::test_a_clipper_that_refuses": _SPARSE,
    "tests/accumulate/test_loops_as_written.py::"
    "test_what_counts_as_one_pass_wherever_it_runs[engine]": (
        "an engine's thread that the CPU plays; on a device `here` runs in a real one"
    ),
    "tests/accumulate/test_usual_plain_pass.py": (
        "the short way of plain passes; on a device their hooks run in a thread of the engine's, so"
        " that all take the long one"
    ),
    "tests/accumulate/test_accumulate_guides.py": "examples run on the CPU",
    "tests/accumulate/test_accumulate_odd_cases.py::test_norms_of_every_kind": _SPARSE,
    "tests/accumulate/test_accumulator_state.py::"
    "test_resumed_between_any_two_micro_batches[sparse": _SPARSE,
    "tests/accumulate/test_accumulator_state.py::test_tensors_where_numbers_belong": _SPARSE,
    "tests/accumulate/test_exactness.py::test_sparse": _SPARSE,
    "tests/accumulate/test_loops_as_written.py::test_weightless_losses_of_a_sparse": _SPARSE,
    "tests/accumulate/test_low_precision.py::test_sparse": _SPARSE,
    "tests/toolbox/test_clipper.py::test_sparse": _SPARSE,
    "tests/toolbox/test_gradient_map.py::test_sparse": _SPARSE,
    "tests/toolbox/test_toolbox_examples.py": "examples run on the CPU",
    "tests/tiling/test_lazy_logits.py::test_copies_and_files_hold_numbers": _NUMPY,
    "tests/tiling/test_planned_tiles.py::test_the_example_runs": "examples run on the CPU",
    "tests/profiling/test_fake.py::test_without_hardware": "the hardware is the CPU's",
    "tests/fitting/test_write_watch.py::test_nobody_listens_to_torchs_own_steps": (
        "on an accelerator steps are listened to: an operation may find memory when run again"
    ),
    "tests/fitting/test_fit_boundary.py::test_a_loss_that_can_be_read_only_uncompiled": (
        "its attempts; on a device a part without items takes one more"
    ),
    "tests/fitting/test_sparse_gradients.py": _SPARSE,
    "tests/fitting/test_walk.py::test_a_batch_takes_the_walk": (
        "weights that are read at once; on a device they are read at the step's end"
    ),
    "tests/fitting/test_update_groups.py::test_a_sparse_gradient": _SPARSE,
    "tests/fitting/test_trial.py::"
    "test_two_are_run_where_not_all_gradients_are_as_large_as_their_parameters[True": _SPARSE,
    "tests/fitting/test_audit_plan.py::test_every_value": "its budget is for the CPU's operations",
}

KNOWN_GAPS: dict[str, str] = {
    "tests/tiling/test_planned_tiles.py::test_predictions_have_lazy_logits_too": (
        "on shapes the gradients of a tile come in the backward, which takes as much as in the"
        " forward on the CPU, and 18 % less on a device"
    ),
    "tests/fitting/test_any_loop.py::test_a_plan_for_each_length": (
        "bits and budget are as they must be; with fused dropouts three of nine forwards go by a"
        " plan, the bar is four: for the room of one that comes again there is none"
    ),
    "tests/planning/test_real_graphs.py::"
    "test_real_models_are_planned_near_the_optimum_at_every_budget": (
        "with fused dropouts one of 70 plans was seen 33 % above the exact solver's, the bar is 20"
    ),
}


def reason_in(table: dict[str, str], name: str) -> str | None:
    """Why a test is in a table; None if it is not."""
    return next((reason for start, reason in table.items() if name.startswith(start)), None)
