"""The page in a real browser: drawn, sorted, filtered, silent, and within the width of a phone."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradfit as gf
from gradfit.machine import environment
from gradfit.report.curves import measure_curve, plain_peak_bytes, predict_plain, thin
from gradfit.report.page import render, write_page
from gradfit.report.report_record import Measured, Report
from gradfit.report.tradeoff import line_of_all, own_line
from gradfit.runs.batch_stream import Batches
from gradfit.runs.builtin_jobs import gpt
from gradfit.units import format_bytes

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def report() -> Report:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = gpt(layers=2, width=48, length=32, batch_size=8)
    batch = Batches(job.data, batch_size=8).next()
    profile = gf.profile(job.model, job.loss_fn, batch, job.optimizer)
    plan = gf.plan(
        profile, memory=int(plain_peak_bytes(profile, 8) * 0.5), batch_size=8, micro_batch=8
    )
    return Report(
        "gpt <script>alert('no')</script>",
        profile,
        plan.with_step_seconds(3 * plan.step_seconds),
        measured=Measured(plan.peak_bytes, 3 * plan.step_seconds, 5),
        frontier=tuple(gf.frontier(profile, batch_size=8, points=4)),
        plain_curve=measure_curve(job.model, job.optimizer, job.loss_fn, batch).timeline or [],
        planned_curve=measure_curve(
            job.model, job.optimizer, job.loss_fn, batch, plan=plan
        ).timeline
        or [],
        limit_bytes=plan.budget_bytes,
        losses=(5.0, 4.0, 3.5),
        audit=gf.audit(job.model, job.loss_fn, batch, plan=plan),
        environment=environment(job.model),
    )


@pytest.fixture(scope="module")
def page_path(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(report, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Visit:
    """The page opened once, with everything it said and asked for."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str, **more: Any) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **more
        )
        self.page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_nothing_is_said_or_asked_for_and_all_fits(
    browser: Any, page_path: Path, width: int, scheme: str
) -> None:
    visit = Visit(browser, page_path, width, scheme)
    assert visit.said == []
    assert visit.asked == [page_path.as_uri()]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("timeline", "frontier", "loss"):
        shown = visit.page.locator(f"#chart-{name} svg:visible")
        assert shown.count() == 1
        box = shown.bounding_box()
        assert box["width"] > 0.8 * min(width, 960) - 40
        assert (
            visit.page.locator(f"#chart-{name} svg:visible path.line").first.evaluate(
                "e => e.getTotalLength()"
            )
            > 50
        )
        size = shown.locator(".tick").first.evaluate("e => e.getBoundingClientRect().height")
        assert size >= 11, "letters keep their size on a phone"


def test_contrast_is_enough_in_both_schemes(browser: Any, page_path: Path) -> None:
    script = """() => {
        const lum = (c) => { const [r, g, b] = c.match(/\\d+/g).map(Number).map(v => { v /= 255;
            return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
            return 0.2126*r + 0.7152*g + 0.0722*b; };
        const ground = lum(getComputedStyle(document.body).backgroundColor), found = {};
        for (const s of ["h1", "p", "dt", "nav a", ".good", "td", "thead th", ".legend li"]) {
            const l = lum(getComputedStyle(document.querySelector(s)).color);
            found[s] = (Math.max(l, ground) + 0.05) / (Math.min(l, ground) + 0.05); }
        return found; }"""
    for scheme in ("light", "dark"):
        found = Visit(browser, page_path, 1440, scheme).page.evaluate(script)
        assert min(found.values()) >= 4.5, found


def test_the_table_sorts_and_filters(browser: Any, page_path: Path) -> None:
    page = Visit(browser, page_path, 1440, "light").page
    column = "#plan-table tbody tr:visible td:nth-child(7)"

    def sizes() -> list[float]:
        return [
            float(v)
            for v in page.locator(column).evaluate_all("cells => cells.map(c => c.dataset.value)")
        ]

    button = page.locator("#plan-table th:nth-child(7) button")
    button.click()
    assert sizes() == sorted(sizes())
    assert page.locator("#plan-table th:nth-child(7)").get_attribute("aria-sort") == "ascending"
    button.press("Enter")
    assert sizes() == sorted(sizes(), reverse=True)
    everything = len(sizes())
    page.fill("#plan-filter", "blocks.1 addmm")
    rows = page.locator("#plan-table tbody tr:visible").all_inner_texts()
    assert 0 < len(rows) < everything
    assert all("blocks.1" in row and "addmm" in row for row in rows)
    assert page.inner_text("#plan-count") == f"{len(rows)} of {everything} values"
    page.fill("#plan-filter", "")
    page.select_option("#plan-action", "rebuild")
    actions = page.locator("#plan-table tbody tr:visible td:nth-child(5)").all_inner_texts()
    assert actions
    assert set(actions) == {"rebuild"}


def test_points_answer_to_the_mouse_and_the_keyboard(
    browser: Any, page_path: Path, report: Report
) -> None:
    page = Visit(browser, page_path, 1440, "light").page
    assert page.inner_text("#frontier-said").startswith("Chosen, measured: peak")
    points = page.locator("#chart-frontier svg:visible .point")
    assert points.count() == len(line_of_all(report)) + 1
    points.first.hover()
    hovered = page.inner_text("#frontier-said")
    assert hovered == points.first.get_attribute("aria-label")
    assert hovered.startswith("Predicted: peak")
    points.last.focus()
    assert page.inner_text("#frontier-said").startswith("Chosen, measured")
    page.keyboard.press("Shift+Tab")
    assert page.inner_text("#frontier-said").startswith("Chosen, predicted")


def test_what_is_predicted_and_what_was_measured_are_drawn_apart(report: Report) -> None:
    """However slow the machine was: the line and the chosen plan on it are predicted in one way."""
    front = line_of_all(report)
    assert [one.chosen for one in front].count(True) == 1
    assert report.plan is not None
    assert report.plan.seconds_measured
    chosen = next(one for one in front if one.chosen)
    assert chosen.step_seconds == pytest.approx(report.plan.step_seconds / 3)
    text = render(report)
    # wide and narrow
    assert text.count('class="point chosen"') == text.count('class="point measured"') == 2
    assert text.count("<rect ") == 2
    assert "Chosen, measured: peak" in text
    without = render(dataclasses.replace(report, measured=None))
    assert "<rect " not in without
    assert "Chosen, measured" not in without


def test_a_plan_of_another_size_than_the_fastest_lies_on_a_line_of_its_own(report: Report) -> None:
    profile = report.profile
    small = gf.plan(profile, memory="1 GiB", batch_size=8, micro_batch=1)
    alike = tuple(gf.frontier(profile, batch_size=8, points=4, micro_batch=1))
    assert {plan.micro_batch for plan in alike} == {1}
    # As if every other micro-batch were predicted to be free.
    others = tuple(
        dataclasses.replace(plan, step_seconds=plan.step_seconds / 1e3) for plan in report.frontier
    )
    shown = Report("small", profile, small, frontier=others, same_size=alike)
    assert not any(one.chosen for one in line_of_all(shown))
    assert any(one.chosen for one in own_line(shown))
    text = render(shown)
    assert "fastest at micro-batch 1, predicted" in text
    assert text.count('class="point chosen"') == 2


def test_without_a_budget_nothing_is_called_chosen(report: Report) -> None:
    text = render(Report("trade-off", report.profile, frontier=report.frontier))
    assert "Memory against time" in text
    assert 'class="point chosen"' not in text
    assert "hosen" not in text.split("</style>")[1].split("<script>")[0]


def test_a_cut_batch_is_said_in_one_way(report: Report) -> None:
    plan = gf.plan(report.profile, memory="1 GiB", batch_size=8, micro_batch=2)
    text = render(Report("cut", report.profile, plan, frontier=(plan,)))
    assert text.count("2 × 4") > 3
    assert "4 × 2" not in text


def test_without_scripts_it_can_still_be_read(browser: Any, page_path: Path) -> None:
    page = Visit(browser, page_path, 360, "light", java_script_enabled=False).page
    assert page.locator("#chart-timeline svg:visible").count() == 1
    assert page.locator("#plan-table tbody tr:visible").count() > 10


def test_the_page_is_one_small_file_that_refers_to_nothing(report: Report) -> None:
    text = render(report)
    assert len(text) < 600_000
    assert "<script>alert" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "http" not in text.replace("http-equiv", "")
    for heading in (
        "Memory during one step",
        "Memory against time",
        "Memory by module",
        "Memory by source line",
    ):
        assert heading in text
    assert "The replay is bit-identical; the batch is run in one piece." in text
    assert text.count("<title id=") == text.count("<desc id=") == text.count("<svg")


def test_a_page_without_a_plan_is_about_one_batch(report: Report) -> None:
    rows = 4 * report.profile.batch_size
    text = render(Report("many rows", report.profile, batch_size=rows))
    assert f"<dd>{rows} rows</dd>" in text
    assert text.count(f"plain, batch {rows}<") == 2
    assert "activations saved, predicted" in text
    needed = format_bytes(plain_peak_bytes(report.profile, rows))
    assert f"<dt>plain PyTorch, predicted</dt><dd>{needed}</dd>" in text


def test_steps_are_counted_in_whole_numbers(report: Report) -> None:
    text = render(dataclasses.replace(report, losses=(3.0, 2.0, 2.5, 2.0, 1.5)))
    loss = text[text.index('id="loss"') : text.index('id="modules"')]
    marks = re.findall(r'class="tick"[^>]*text-anchor="middle">([^<]*)<', loss)
    assert marks
    assert all(mark.isdigit() for mark in marks), marks


def test_a_page_without_a_plan_has_no_empty_parts(report: Report) -> None:
    text = render(Report("only measured", report.profile))
    assert "plan-table" not in text.split("<script>", maxsplit=1)[0].split("</style>")[1]
    assert "<svg" not in text
    assert "Memory by module" in text


def test_the_predicted_curve_has_the_measured_peak(report: Report) -> None:
    predicted = max(count for _, count in predict_plain(report.profile, 8))
    measured = max(count for _, count in report.plain_curve) + report.profile.optimizer_bytes
    assert predicted == pytest.approx(measured, rel=0.05)


def test_thinning_keeps_the_peak() -> None:
    curve = [(i / 1000, (i * 7919) % 5000) for i in range(5000)]
    thinned = thin(curve, most=100)
    assert len(thinned) <= 102
    assert max(c for _, c in thinned) == max(c for _, c in curve)
    assert thinned[0] == curve[0]
    assert thinned[-1] == curve[-1]
