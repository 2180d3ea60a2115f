"""The page's tables: bytes by module and by source line, and every value of the plan."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape

from gradfit.planning.plan import Plan
from gradfit.planning.simulate import ACTION_NAMES, KEEP, alive_until
from gradfit.profiling.profile import Profile
from gradfit.profiling.profile_table import saved_values
from gradfit.units import format_bytes, format_seconds

_ROWS = 14


def fold(module: str) -> str:
    """A module's name with the first index replaced, so that the layers of a stack come together.

    >>> fold("blocks.11.mlp.0"), fold("head"), fold("")
    ('blocks.*.mlp.0', 'head', '(no module)')
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", module, count=1) or "(no module)"


def memory_bars(profile: Profile, plan: Plan | None, attribute: str) -> str:
    """A table with a bar in each cell: what plain autograd saves for the whole batch, and what the plan keeps."""
    batch = plan.batch_size if plan is not None else profile.batch_size
    name: Callable[[str], str] = fold if attribute == "module" else (lambda source: source or "(no source line)")
    plain: dict[str, int] = defaultdict(int)
    planned: dict[str, int] = defaultdict(int)
    members: dict[str, set[str]] = defaultdict(set)
    for value in saved_values(profile):
        place = getattr(profile.operations[profile.values[value].operation or 0], attribute)
        plain[name(place)] += round(profile.values[value].nbytes.at(batch))
        members[name(place)].add(place)
    for value in kept_values(profile, plan) if plan is not None else ():
        place = getattr(profile.operations[profile.values[value].operation or 0], attribute)
        planned[name(place)] += round(profile.values[value].nbytes.at(plan.micro_batch if plan else 1))
        members[name(place)].add(place)
    order = sorted(members, key=lambda n: (-max(plain[n], planned[n]), n))
    shown, rest = order[:_ROWS], order[_ROWS:]
    rows = [(n + (f" (×{len(members[n])})" if len(members[n]) > 1 else ""), plain[n], planned[n]) for n in shown]
    if rest:
        rows.append((f"{len(rest)} others", sum(plain[n] for n in rest), sum(planned[n] for n in rest)))
    top = max((max(a, b) for _, a, b in rows), default=0) or 1
    title = "module" if attribute == "module" else "source line"
    head = f'<th scope="col">{title}</th><th scope="col">plain, batch {batch}</th>'
    if plan is not None:
        head += f'<th scope="col">kept by the plan, micro-batch {plan.micro_batch}</th>'
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>{_bar(a, top, "plain")}'
        + (_bar(b, top, "planned") if plan is not None else "")
        + "</tr>"
        for label, a, b in rows
    )
    return f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def kept_values(profile: Profile, plan: Plan) -> list[int]:
    """The values that the plan holds between the passes."""
    actions = _actions(plan)
    until = alive_until(profile.at(plan.micro_batch), actions)
    return [
        v
        for v, value in enumerate(profile.values)
        if value.operation is not None and actions[v] == KEEP and until[v] >= 0
    ]


def plan_table(profile: Profile, plan: Plan) -> str:
    """Every value that matters to the backward pass: what is done with it, what it weighs, what it costs to make."""
    graph = profile.at(plan.micro_batch)
    actions = _actions(plan)
    until = alive_until(graph, actions)
    saved = set(saved_values(profile))
    body = []
    for value, op in enumerate(graph.producer):
        if op < 0 or (until[value] < 0 and value not in saved):
            continue
        operation = profile.operations[op]
        cells = (
            (str(op), op),
            (operation.name.removeprefix("aten.").removesuffix(".default"), None),
            (operation.module or "–", None),
            (operation.source or "–", None),
            (ACTION_NAMES[actions[value]], None),
            ("yes" if value in saved else "no", None),
            (format_bytes(graph.nbytes[value]), graph.nbytes[value]),
            (format_seconds(operation.seconds.at(plan.micro_batch)), operation.seconds.at(plan.micro_batch)),
        )
        body.append(f'<tr data-action="{ACTION_NAMES[actions[value]]}">{"".join(_cell(*cell) for cell in cells)}</tr>')
    heads = ("#", "operation", "module", "source line", "action", "autograd saves it", "bytes", "seconds to make")
    return sortable("plan-table", heads, body)


def sortable(name: str, heads: Sequence[str], rows: Iterable[str]) -> str:
    """A table whose heads are buttons; the page's script sorts by them."""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(text)}<span aria-hidden="true"></span>'
        "</button></th>"
        for text in heads
    )
    return (
        f'<div class="scroll" role="region" aria-label="Table, scrolls sideways" tabindex="0"><table id="{name}" '
        f'class="sortable"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _actions(plan: Plan) -> list[int]:
    numbers = {name: number for number, name in enumerate(ACTION_NAMES)}
    return [numbers.get(action, KEEP) for action in plan.actions]


def _cell(text: str, number: float | None) -> str:
    if number is None:
        return f"<td>{escape(text)}</td>"
    return f'<td class="number" data-value="{number!r}">{escape(text)}</td>'


def _bar(count: int, top: int, kind: str) -> str:
    width = 100 * count / top
    return (
        f'<td><span class="bar {kind}" style="width:{width:.1f}%" aria-hidden="true"></span>'
        f"<span>{format_bytes(count)}</span></td>"
    )
