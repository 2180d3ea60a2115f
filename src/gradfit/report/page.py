"""One page that holds everything and asks the network for nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path

from gradfit.errors import MisuseError
from gradfit.planning.plan import Plan, percent
from gradfit.profiling.profile import Profile
from gradfit.report.charts import Chart, Series, draw
from gradfit.report.curves import plain_peak_bytes, thin
from gradfit.report.exactness import exactness_tile
from gradfit.report.report_record import Curve, Report
from gradfit.report.tables import memory_bars, plan_table
from gradfit.report.tradeoff import trade_off
from gradfit.units import format_bytes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(report: Report, path: str | Path) -> Path:
    """Write the page, whole or not at all."""
    target, content = Path(path), render(report)
    try:
        # A name that nobody could know, so that no link lies there to be followed.
        descriptor, temporary = tempfile.mkstemp(
            prefix=f".{target.name[:32]}.", suffix=".tmp", dir=target.parent
        )
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MisuseError(
            f"Cannot write the page to {str(path)!r}: {error.strerror}. Pass another path."
        ) from None
    return target


def _umask() -> int:
    """What new files may not be, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def render(report: Report) -> str:
    """The page as HTML text."""
    data = resources.files("gradfit").joinpath("data")
    sections = [
        _headline(report),
        _timeline(report),
        _frontier(report),
        _loss(report),
        _section(
            "modules",
            "Memory by module",
            memory_bars(report.planned_profile, report.plan, "module", report.rows),
            "Activations held for the backward pass, predicted. Layers of one stack are taken"
            " together.",
        ),
        _section(
            "lines",
            "Memory by source line",
            memory_bars(report.planned_profile, report.plan, "source", report.rows),
            "The same by the line of code that made them.",
        ),
        _plan(report),
        _audit(report),
        _environment(report),
    ]
    links = "".join(
        f'<a href="#{name}">{title}</a>'
        for name, title in _TITLES
        if f'id="{name}"' in "".join(sections)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta'
        ' name="color-scheme" '
        'content="light dark"><link rel="icon" href="data:,"><title>gradfit:'
        f" {escape(report.title)}</title>"
        f"<style>{data.joinpath('report.css').read_text()}</style></head><body>"
        f'<a class="skip" href="#main">To the content</a><header><h1>{escape(report.title)}</h1>'
        f'<nav aria-label="Sections">{links}</nav></header><main'
        f' id="main">{"".join(sections)}</main>'
        f"<script>{data.joinpath('report.js').read_text()}</script></body></html>\n"
    )


_TITLES = (
    ("timeline", "Timeline"),
    ("frontier", "Trade-off"),
    ("loss", "Loss"),
    ("modules", "Modules"),
    ("lines", "Lines"),
    ("plan", "Plan"),
    ("audit", "Audit"),
    ("environment", "Environment"),
)


def _section(name: str, title: str, body: str, text: str = "") -> str:
    lead = f"<p>{text}</p>" if text else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-h"><h2'
        f' id="{name}-h">{title}</h2>{lead}{body}</section>'
    )


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs
    )


def _headline(report: Report) -> str:
    profile, plan = report.profile, report.plan
    facts = (
        _facts_of_profile(profile, report.rows) if plan is None else _facts_of_plan(report, plan)
    )
    facts.append(("parameters", format_bytes(profile.parameter_bytes)))
    facts += _facts_of_exactness(report)
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return f'<section aria-label="Summary"><dl class="facts">{_facts(facts)}</dl>{notes}</section>'


def _facts_of_exactness(report: Report) -> list[tuple[str, str]]:
    if report.audit is not None:
        return [
            ("replay", "bit-identical" if report.audit.identical else "DIFFERENT"),
            ("error against the full batch", _full_batch_error(report)),
        ]
    if report.plan is None:
        return []
    return [("error against the full batch", exactness_tile(report.profile))]


def _facts_of_profile(profile: Profile, size: int) -> list[tuple[str, str]]:
    how = "measured" if size == profile.batch_size else "predicted"
    return [
        (f"activations saved, {how}", format_bytes(profile.saved_bytes(size))),
        ("plain PyTorch, predicted", format_bytes(plain_peak_bytes(profile, size))),
        ("batch", f"{size} rows"),
    ]


def _facts_of_plan(report: Report, plan: Plan) -> list[tuple[str, str]]:
    facts = []
    if report.limit_bytes is not None:
        facts.append(("budget", format_bytes(report.limit_bytes)))
    facts.append(("peak, predicted", format_bytes(plan.peak_bytes)))
    if report.measured is not None:
        facts.append(("peak, measured", format_bytes(report.measured.peak_bytes)))
    plain = plain_peak_bytes(report.profile, plan.batch_size)
    facts += [
        ("plain PyTorch, predicted", format_bytes(plain)),
        ("micro-batch × count", plan.split_text),
        ("extra time, predicted", percent(plan.extra_fraction)),
        ("values kept", f"{plan.kept_values} of {plan.saved_values}"),
    ]
    if plan.tiles is not None:
        facts.append(("tiles", str(plan.tiles)))
    return facts


def _curve(name: str, kind: str, curve: Curve) -> Series:
    return Series(name, kind, [(s, float(b)) for s, b in thin(curve)], steps=True)


def _timeline(report: Report) -> str:
    curves = [
        _curve(report.plain_label, "plain", report.plain_curve),
        _curve(report.planned_label, "planned", report.planned_curve),
    ]
    series = [one for one in curves if one.points]
    if not series:
        return ""
    peaks = "; ".join(map(_peak_of, series))
    limit = None
    if report.limit_bytes:
        limit = report.limit_bytes, f"{report.limit_label} {format_bytes(report.limit_bytes)}"
    chart = Chart(
        name="timeline",
        title="Bytes of live tensors during one step",
        summary=peaks if limit is None else f"{peaks}; {limit[1]}",
        x_label="time since the step began",
        y_label="live tensors",
        series=series,
        limit=limit,
    )
    return _section("timeline", "Memory during one step", draw(chart), escape(peaks) + ".")


def _peak_of(series: Series) -> str:
    return f"{series.name}: peak {format_bytes(max(y for _, y in series.points))}"


def _frontier(report: Report) -> str:
    drawn = trade_off(report)
    return "" if drawn is None else _section("frontier", "Memory against time", drawn[0], drawn[1])


def _loss(report: Report) -> str:
    if len(report.losses) < 2:
        return ""
    first, last = report.losses[0], report.losses[-1]
    chart = Chart(
        name="loss",
        title="Training loss",
        summary=f"from {first:.4g} to {last:.4g} in {len(report.losses)} steps",
        x_label="step",
        y_label="loss",
        x_unit="",
        y_unit="",
        series=[
            Series(
                "loss",
                "planned",
                [(float(i), loss) for i, loss in enumerate(report.losses, start=1)],
            )
        ],
        y_from_zero=False,
    )
    return _section(
        "loss",
        "Loss",
        draw(chart),
        f"From {first:.4g} to {last:.4g} in {len(report.losses)} steps.",
    )


def _plan(report: Report) -> str:
    if report.plan is None:
        return ""
    tools = (
        '<div class="tools"><label>Filter <input type="search" id="plan-filter"'
        ' placeholder="operation, module, line"></label><label>Action <select'
        ' id="plan-action"><option'
        ' value="">all</option><option>keep</option><option>rebuild</option>'
        "<option>offload</option></select>"
        "</label><output"
        ' id="plan-count" aria-live="polite"></output></div>'
    )
    text = (
        f"{escape(str(report.plan).splitlines()[0])}. The predicted peak is"
        f" {escape(report.plan.peak_at)}."
    )
    text += " Bytes and seconds of the values are predicted from the profile."
    return _section(
        "plan",
        "The plan, value by value",
        tools + plan_table(report.planned_profile, report.plan),
        text,
    )


def _audit(report: Report) -> str:
    if report.audit is None:
        return ""
    kind = "good" if report.audit else "bad"
    return _section(
        "audit",
        "Audit",
        f'<p class="{kind}">{_verdict(report)}</p><pre'
        f' tabindex="0">{escape(str(report.audit))}</pre>',
        "The batch was run plainly and as planned from the same state. Two questions: is what was"
        " rebuilt what it was, bit by bit? And how far is the gradient from that of the whole batch"
        " in one piece?",
    )


def _verdict(report: Report) -> str:
    replay = "The replay is bit-identical" if report.audit.identical else "The replay differs"
    if report.audit.full_batch is None:
        return f"{replay}; the batch is run in one piece."
    if report.audit.full_batch.exact:
        return f"{replay}; the parts give the whole batch's gradient, up to rounding."
    said = "was not measured" if report.audit.full_batch.error is None else "is another one"
    return f"{replay}; the gradient of the whole batch {said}."


def _full_batch_error(report: Report) -> str:
    checked = report.audit.full_batch
    if checked is None:
        return "none, in one piece"
    return (
        "not measured"
        if checked.error is None
        else f"{checked.error:.2g} (by {checked.weighted_by})"
    )


def _environment(report: Report) -> str:
    return _section(
        "environment",
        "Environment",
        f'<dl class="facts small">{_facts(report.environment.items())}</dl>',
    )
