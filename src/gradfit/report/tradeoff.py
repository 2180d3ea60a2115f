"""The page's picture of memory against time: what is predicted is drawn as a line, what was
measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from gradfit.planning.api import predicted
from gradfit.planning.plan import Plan, percent
from gradfit.report.charts import Chart, Point, Series, draw
from gradfit.report.report_record import Measured, Report
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
            f"{'Chosen, predicted' if self.chosen else 'Predicted'}: peak"
            f" {format_bytes(self.peak_bytes)}, {format_seconds(self.step_seconds)} per step"
            f" ({percent(plan.extra_fraction)} for recomputation), micro-batch {plan.split_text},"
            f" {plan.kept_values} of {plan.saved_values} values kept"
        )


def chosen_of(report: Report) -> Prediction | None:
    """The chosen plan, predicted as all others are."""
    if report.plan is None:
        return None
    return Prediction(report.plan, *predicted(report.profile, report.plan), chosen=True)


def fastest_for_their_memory(plans: Iterable[Prediction]) -> list[Prediction]:
    """From the smallest to the fastest: those that are faster than everything smaller."""
    front: list[Prediction] = []
    for one in sorted(plans, key=lambda one: (one.peak_bytes, one.step_seconds, not one.chosen)):
        if not front or one.step_seconds < front[-1].step_seconds:
            front.append(one)
    return front


def own_line(report: Report) -> list[Prediction]:
    """The trade-off at the chosen plan's micro-batch, the chosen plan on it."""
    return _with_chosen(report, report.same_size)


def line_of_all(report: Report) -> list[Prediction]:
    """The trade-off over all micro-batches; the chosen plan is on it, unless another size is
    predicted to be faster.
    """
    return _with_chosen(report, report.frontier)


def _with_chosen(report: Report, plans: Iterable[Plan]) -> list[Prediction]:
    chosen = chosen_of(report)
    predictions = [Prediction(plan, plan.peak_bytes, plan.step_seconds) for plan in plans]
    return fastest_for_their_memory(predictions if chosen is None else [*predictions, chosen])


def trade_off(report: Report) -> tuple[str, str] | None:
    """The picture with its table, and a sentence on it; None if there are no plans to compare."""
    if not report.frontier:
        return None
    chosen, front = chosen_of(report), line_of_all(report)
    own = [] if chosen is None or chosen in front else own_line(report)
    points = _points(front, chosen, report.measured)
    chart = Chart(
        name="frontier",
        title="Peak memory against time of a step",
        summary=f"{len(front)} plans from {front[0]} to {front[-1]}. "
        + " ".join(p.text for p in points if p.kind),
        x_label="peak memory (logarithmic)",
        y_label="time of a step (logarithmic)",
        x_unit="bytes",
        y_unit="seconds",
        series=_lines(front, own),
        points=points,
        y_from_zero=False,
        log=True,
    )
    said = f'<output class="said" id="frontier-said">{escape(points[-1].text)}</output>'
    listed = [*front, chosen] if own and chosen is not None else front
    return draw(chart) + said + _table(listed), _lead(report, own)


def _lines(front: list[Prediction], own: list[Prediction]) -> list[Series]:
    lines = [_series("fastest plan for each budget, predicted", "frontier", front)]
    if len(own) > 1:
        size = own[0].plan.micro_batch
        lines.append(_series(f"fastest at micro-batch {size}, predicted", "own", own))
    return lines


def _points(
    front: list[Prediction], chosen: Prediction | None, measured: Measured | None
) -> list[Point]:
    points = [
        Point(float(one.peak_bytes), one.step_seconds, str(one)) for one in front if not one.chosen
    ]
    if chosen is not None:
        points.append(Point(float(chosen.peak_bytes), chosen.step_seconds, str(chosen), "chosen"))
    if measured is not None:
        text = f"Chosen, measured: {measured}"
        points.append(Point(float(measured.peak_bytes), measured.step_seconds, text, "measured"))
    return points


def _series(name: str, kind: str, plans: list[Prediction]) -> Series:
    return Series(name, kind, [(float(one.peak_bytes), one.step_seconds) for one in plans])


def _lead(report: Report, own: list[Prediction]) -> str:
    text = "Each point of the line is the fastest plan for its memory, as predicted."
    if report.plan is not None:
        text += " The filled point is the chosen plan."
    if own:
        text += (
            " Its micro-batch was not chosen by these predictions: by the clock, by arithmetic for"
            " runs that are to be repeatable, or by hand. Among plans of its size it lies on the"
            " second line."
        )
    if report.measured is not None:
        text += " The square is what its steps took, measured."
    return text + " Hover over a point, or reach it with the tab key."


def _table(plans: list[Prediction]) -> str:
    rows = "".join(map(_row, plans))
    heads = ("peak, predicted", "step, predicted", "micro-batch × count", "values kept", "")
    return (
        '<details><summary>The same as a table</summary><div class="scroll" tabindex="0"'
        ' role="region" aria-label="Trade-off as a table"><table><thead><tr>'
        + "".join(f'<th scope="col">{head}</th>' for head in heads)
        + f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _row(one: Prediction) -> str:
    return (
        f"<tr><td>{format_bytes(one.peak_bytes)}</td><td>{format_seconds(one.step_seconds)}</td>"
        f"<td>{one.plan.split_text}</td><td>{one.plan.kept_values} of {one.plan.saved_values}</td>"
        f"<td>{'chosen' if one.chosen else ''}</td></tr>"
    )
