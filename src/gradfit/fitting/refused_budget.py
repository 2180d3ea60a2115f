"""What is said of a budget that no plan holds: the smallest that one does, and what takes it."""

from __future__ import annotations

from gradfit.errors import BudgetInfeasible
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.planning.plan import Plan, fixed_text
from gradfit.units import format_bytes


def refused_budget(tools: PlanTools, plan: Plan, least: int, *, cut: bool) -> BudgetInfeasible:
    """The error to raise.

    Args:
        tools: the step and its loss.
        plan: the smallest.
        least: bytes that it takes.
        cut: a batch may be cut.
    """
    step = tools.step
    parts = _parts_of(step, plan, least)
    least += step.beside_bytes
    listed = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=_size) if size
    )
    return BudgetInfeasible(
        f"Smallest feasible peak is {format_bytes(least)} ({listed}) at micro-batch"
        f" {plan.micro_batch}, the budget is {format_bytes(step.budget_bytes)}. Raise `memory`"
        f" to at least {least} bytes, {_hint(tools, plan, cut=cut)}{fixed_text(plan)}",
        min_bytes=least,
        breakdown=parts,
    )


def _parts_of(step: StepToPlan, plan: Plan, least: int) -> dict[str, int]:
    """What takes the bytes of the smallest budget."""
    parts = {name: count for name, count in plan.breakdown.items() if count}
    if plan.reserved_bytes > plan.peak_bytes:
        parts["segments of the device's allocator, beyond their tensors"] = (
            plan.reserved_bytes - plan.peak_bytes
        )
    planned = max(plan.peak_bytes, plan.reserved_bytes)
    if least > planned:  # what only measuring shows
        parts["measuring a few rows, before the first step"] = least - planned
    return parts | {
        "copies of buffers": step.own_bytes,
        "communication buckets": step.reserved_bytes,
    }


def _hint(tools: PlanTools, plan: Plan, *, cut: bool) -> str:
    """What can be done beside raising the budget."""
    if not cut and plan.batch_size > 1:
        hint = (
            f"or lower the batch size. The batch of {plan.batch_size} is not cut:"
            f" {tools.loss.why_whole}."
        )
        may_be_cut = tools.loss.runs_parts and not tools.step.whole
        return f"{hint} exact=False cuts it all the same." if may_be_cut else hint
    if tools.step.micro_batch is not None and plan.micro_batch > 1:
        return "or leave out micro_batch, so that it can be smaller."
    return "or make the model or an item of the batch smaller."


def _size(part: tuple[str, int]) -> int:
    return -part[1]


def with_tiles_named(error: BudgetInfeasible, least: int) -> BudgetInfeasible:
    """The same error, which says that with tiles so many bytes would be enough, if that is less."""
    if least >= error.min_bytes:
        return error
    text = f"{error} With tile=True, about {format_bytes(least)} would be enough."
    return BudgetInfeasible(text, min_bytes=error.min_bytes, breakdown=error.breakdown)
