"""What is said, once, about a batch that is not cut, or is cut although its parts do not make the
whole.
"""

from __future__ import annotations

import warnings

from gradfit.batches.additivity_record import Additivity
from gradfit.errors import ExactnessWarning
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.planning.plan import Plan


def warn_about_cutting(tested: TestedPlan, additivity: Additivity | None, *, exact: bool) -> None:
    """Warn where the loss decides how a plan is made, with what was measured and the right call."""
    text = cutting_note(tested, additivity, exact=exact)
    if text:
        warnings.warn(text, ExactnessWarning, stacklevel=3)


def cutting_note(tested: TestedPlan, additivity: Additivity | None, *, exact: bool = True) -> str:
    """The same text; "" if there is nothing to say."""
    if additivity is None:
        return ""
    if not additivity.adds_up:
        return _note_where_parts_do_not_add_up(tested.plan, additivity, exact=exact)
    return _note_on_weights(additivity) if _is_cut(tested.plan) else ""


def _is_cut(plan: Plan) -> bool:
    return plan.micro_batch < plan.batch_size


def _measured(additivity: Additivity) -> str:
    return f"relative error {additivity.error:.2g} on a few rows"


def _note_where_parts_do_not_add_up(plan: Plan, additivity: Additivity, *, exact: bool) -> str:
    if _is_cut(plan):
        return (
            f"The batch of {plan.batch_size} is cut into micro-batches of {plan.micro_batch},"
            f" and its gradient is not that of the whole batch ({_measured(additivity)}):"
            f" {additivity.reason}."
        )
    if plan.batch_size == 1 or plan.keeps_everything or not exact:
        return ""
    return (
        f"The batch of {plan.batch_size} is not cut, and recomputing alone holds the"
        f" budget, because its parts do not make the whole ({_measured(additivity)}):"
        f" {additivity.reason}.{' exact=False cuts it all the same.' * additivity.runs_parts}"
    )


def _note_on_weights(additivity: Additivity) -> str:
    """What the weights of the parts rest on, where that is not read from every loss."""
    if additivity.over == "rows":
        return (
            "What the loss was divided by cannot be read"
            f" ({additivity.read or 'no rule is for its last operations'}), so micro-batches are"
            f" weighted by their rows, which was right for the sample ({_measured(additivity)}). If"
            " later batches have padding, return gf.Loss(sum=…, count=…)."
        )
    if additivity.over != "items" and additivity.unread:
        return (
            f"What {', '.join(additivity.unread)} in the loss was divided by cannot be read (the"
            f" loss is {additivity.read}), so micro-batches are weighted by the other terms, which"
            f" was right for the sample ({_measured(additivity)}). If later batches have padding,"
            " return gf.Loss(sum=…, count=…)."
        )
    return _note_on_gradients(additivity)


def _note_on_gradients(additivity: Additivity) -> str:
    if not additivity.uncompared:
        return ""
    return (
        "The losses of a few rows' parts make that of the rows. Their gradients were not"
        " compared, since the budget has no room for two rows with their gradients, and"
        f" {additivity.uncompared[0]} may change them. Compare them in more memory:"
        " gf.audit(model, loss_fn, batch, plan)."
    )
