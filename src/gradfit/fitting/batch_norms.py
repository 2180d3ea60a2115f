"""What micro-batches cannot be exact about, named: modules that look across the batch."""

from __future__ import annotations


def batch_norm_note(names: list[str], micro_batch: int) -> str:
    """What it means that these modules are trained in micro-batches."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm ({shown}) takes its statistics over each micro-batch of {micro_batch}, not over"
        " the whole batch, so these gradients are those of the micro-batches. Use GroupNorm or"
        " LayerNorm, freeze the statistics with module.eval(), or raise `memory` until the batch"
        " fits in one piece."
    )
