"""What is said, once, about a batch that is not cut, or is cut although its parts do not make the
whole.
"""

from __future__ import annotations

import warnings

from gradfit.batches.additivity_record import Additivity
from gradfit.errors import ExactnessWarning
from gradfit.fitting.tested_plan import TestedPlan


def warn_about_cutting(tested: TestedPlan, additivity: Additivity | None, *, exact: bool) -> None:
    """Warn where the loss decides how a plan is made, with what was measured and the right call."""
    text = cutting_note(tested, additivity, exact=exact)
    if text:
        warnings.warn(text, ExactnessWarning, stacklevel=3)


def cutting_note(tested: TestedPlan, additivity: Additivity | None, *, exact: bool = True) -> str:
    """The same text; "" if there is nothing to say."""
    plan = tested.plan
    cut = plan.micro_batch < plan.batch_size
    if additivity is None:
        return ""
    measured = f"relative error {additivity.error:.2g} on a few rows"
    if not additivity.adds_up:
        if cut:
            return (
                f"The batch of {plan.batch_size} is cut into micro-batches of {plan.micro_batch},"
                f" and its gradient is not that of the whole batch ({measured}):"
                f" {additivity.reason}."
            )
        if plan.batch_size > 1 and not plan.keeps_everything and exact:
            return (
                f"The batch of {plan.batch_size} is not cut, and recomputing alone holds the"
                f" budget, because its parts do not make the whole ({measured}):"
                f" {additivity.reason}. exact=False cuts it all the same."
            )
    elif cut and additivity.over not in ("rows", "items") and additivity.unread:
        return (
            f"What {', '.join(additivity.unread)} in the loss was divided by cannot be read (the"
            f" loss is {additivity.read}), so micro-batches are weighted by the other terms, which"
            f" was right for the sample ({measured}). If later batches have padding, return"
            " gf.Loss(sum=…, count=…)."
        )
    elif cut and additivity.over == "rows":
        return (
            "What the loss was divided by cannot be read"
            f" ({additivity.read or 'no rule is for its last operations'}), so micro-batches are"
            f" weighted by their rows, which was right for the sample ({measured}). If later"
            " batches have padding, return gf.Loss(sum=…, count=…)."
        )
    elif cut and additivity.uncompared:
        return (
            "The losses of a few rows' parts make that of the rows. Their gradients were not"
            " compared, since the budget has no room for two rows with their gradients, and"
            f" {additivity.uncompared[0]} may change them. Compare them in more memory:"
            " gf.audit(model, loss_fn, batch, plan)."
        )
    return ""
