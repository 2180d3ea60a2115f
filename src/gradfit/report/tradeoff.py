"""The page's picture of memory against time: what is predicted is drawn as a line, what was measured beside it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from gradfit.planning.api import predicted
from gradfit.planning.record import Plan, percent
from gradfit.report.charts import Chart, Point, Series, draw
from gradfit.report.record import Report
from gradfit.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Prediction:
    """A plan with the peak and the seconds that the profile predicts for it."""

    plan: Plan
    peak_bytes: int
    step_seconds: float
    chosen: bool = False

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{'Chosen, predicted' if self.chosen else 'Predicted'}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.step_seconds)} per step ({percent(plan.extra_fraction)} for recomputation), "
            f"micro-batch {plan.split_text}, {plan.kept_values} of {plan.saved_values} values kept"
        )


def predictions(report: Report) -> list[Prediction]:
    """All plans of the page from the smallest to the fastest, the chosen one among them, each predicted in one way."""
    plans = [Prediction(plan, plan.peak_bytes, plan.step_seconds) for plan in report.frontier]
    if report.plan is not None:
        plans.append(Prediction(report.plan, *predicted(report.profile, report.plan), chosen=True))
    return sorted(plans, key=lambda one: (one.peak_bytes, one.step_seconds, not one.chosen))


def fastest_for_their_memory(plans: list[Prediction]) -> list[Prediction]:
    """Those that are faster than everything smaller; `plans` are sorted by memory."""
    front: list[Prediction] = []
    for one in plans:
        if not front or one.step_seconds < front[-1].step_seconds:
            front.append(one)
    return front


def trade_off(report: Report) -> tuple[str, str] | None:
    """The picture with its table, and a sentence on it; None if there are no plans to compare."""
    if not report.frontier:
        return None
    plans = predictions(report)
    front = fastest_for_their_memory(plans)
    chosen = next((one for one in plans if one.chosen), None)
    shown = front if chosen is None or chosen in front else [*front, chosen]
    points = [
        Point(float(one.peak_bytes), one.step_seconds, str(one), "chosen" if one.chosen else "")
        for one in sorted(shown, key=lambda one: one.chosen)
    ]
    if report.measured is not None:
        took = report.measured
        points.append(Point(float(took.peak_bytes), took.step_seconds, f"Chosen, measured: {took}", "measured"))
    chart = Chart(
        name="frontier",
        title="Peak memory against time of a step",
        summary=f"{len(front)} plans from {front[0]} to {front[-1]}. " + " ".join(p.text for p in points if p.kind),
        x_label="peak memory (logarithmic)",
        y_label="time of a step (logarithmic)",
        x_unit="bytes",
        y_unit="seconds",
        series=[
            Series(
                "fastest plan for each budget, predicted",
                "frontier",
                [(float(one.peak_bytes), one.step_seconds) for one in front],
            )
        ],
        points=points,
        y_from_zero=False,
        log=True,
    )
    said = f'<output class="said" id="frontier-said">{escape(points[-1].text)}</output>'
    return draw(chart) + said + _table(front), _lead(report, chosen, front)


def _lead(report: Report, chosen: Prediction | None, front: list[Prediction]) -> str:
    text = "Each point of the line is the fastest plan for its memory, as predicted."
    if chosen is not None:
        text += " The filled point is the chosen plan."
        better = [one for one in front if one.peak_bytes <= chosen.peak_bytes]
        if chosen not in front and better:
            slower = percent(chosen.step_seconds / better[-1].step_seconds - 1)
            text += f" It is predicted to take {slower} time against the line; measured, it was the faster one."
    if report.measured is not None:
        text += " The square is what its steps took, measured."
    return text + " Hover over a point, or reach it with the tab key."


def _table(front: list[Prediction]) -> str:
    rows = "".join(
        f"<tr><td>{format_bytes(one.peak_bytes)}</td><td>{format_seconds(one.step_seconds)}</td>"
        f"<td>{one.plan.split_text}</td><td>{one.plan.kept_values} of {one.plan.saved_values}</td>"
        f"<td>{'chosen' if one.chosen else ''}</td></tr>"
        for one in front
    )
    heads = ("peak, predicted", "step, predicted", "micro-batch × count", "values kept", "")
    return (
        '<details><summary>The same as a table</summary><div class="scroll" tabindex="0" role="region" '
        'aria-label="Trade-off as a table"><table><thead><tr>'
        + "".join(f'<th scope="col">{head}</th>' for head in heads)
        + f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
