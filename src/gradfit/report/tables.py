"""The page's tables: bytes by module and by source line, and every value of the plan."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from gradfit.planning.plan import Plan
from gradfit.planning.simulate import ACTION_NAMES, KEEP, alive_until
from gradfit.profiling.profile import Operation, Profile
from gradfit.profiling.profile_table import saved_values
from gradfit.units import format_bytes, format_seconds

_ROWS = 14


def fold(module: str) -> str:
    """A module's name with the first index replaced, so that the layers of a stack come together.

    >>> fold("blocks.11.mlp.0"), fold("head"), fold("")
    ('blocks.*.mlp.0', 'head', '(no module)')
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", module, count=1) or "(no module)"


def memory_bars(profile: Profile, plan: Plan | None, attribute: str, rows: int) -> str:
    """A table with a bar in each cell: what plain autograd saves of a batch, and what the plan
    keeps.

    Args:
        profile: Of the step.
        plan: For a column of what it keeps; None for plain autograd alone.
        attribute: What a row is for: "module" or "source", as operations have it.
        rows: Of the batch.
    """
    places = _Places(profile, attribute)
    plain, planned = places.bytes_of(saved_values(profile), rows), dict[str, int]()
    heads = ["module" if attribute == "module" else "source line", f"plain, batch {rows}"]
    if plan is not None:
        planned = places.bytes_of(kept_values(profile, plan), plan.micro_batch)
        heads.append(f"kept by the plan, micro-batch {plan.micro_batch}")
    return _bar_table(heads, _largest_rows(places, plain, planned))


def _bar_table(heads: Sequence[str], rows: list[tuple[str, int, int]]) -> str:
    kinds = ("plain", "planned")[: len(heads) - 1]
    top = max((max(a, b) for _, a, b in rows), default=0) or 1
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = "".join(_bar_row(label, counts, kinds, top) for label, *counts in rows)
    return f'<table class="bars"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _bar_row(label: str, counts: Sequence[int], kinds: Sequence[str], top: int) -> str:
    bars = "".join(_bar(count, top, kind) for count, kind in zip(counts, kinds, strict=False))
    return f'<tr><th scope="row">{escape(label)}</th>{bars}</tr>'


class _Places:
    """Where values are made: layers of a stack under one name, and how many they are."""

    def __init__(self, profile: Profile, attribute: str) -> None:
        self._profile, self._attribute = profile, attribute
        self.members: dict[str, set[str]] = defaultdict(set)

    def bytes_of(self, values: Iterable[int], batch_size: int) -> dict[str, int]:
        """Bytes by place of these values, at so many rows."""
        sums: dict[str, int] = defaultdict(int)
        for number in values:
            value = self._profile.values[number]
            place = getattr(self._profile.operations[value.operation or 0], self._attribute)
            name = self._name(place)
            sums[name] += round(value.nbytes.at(batch_size))
            self.members[name].add(place)
        return sums

    def _name(self, place: str) -> str:
        if self._attribute == "module":
            return fold(place)
        return place or "(no source line)"

    def label(self, name: str) -> str:
        count = len(self.members[name])
        return f"{name} (×{count})" if count > 1 else name


def _largest_rows(
    places: _Places, plain: dict[str, int], planned: dict[str, int]
) -> list[tuple[str, int, int]]:
    """Label and bytes of the largest places, and the others together in a last row."""
    pairs = {name: (plain.get(name, 0), planned.get(name, 0)) for name in places.members}
    order = sorted(pairs, key=lambda name: (-max(pairs[name]), name))
    rows = [(places.label(name), *pairs[name]) for name in order[:_ROWS]]
    if rest := order[_ROWS:]:
        sums = (sum(column) for column in zip(*(pairs[name] for name in rest), strict=True))
        rows.append((f"{len(rest)} others", *sums))
    return rows


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
    """Every value that matters to the backward pass: what is done with it, what it weighs, what it
    costs to make.
    """
    graph = profile.at(plan.micro_batch)
    actions = _actions(plan)
    until = alive_until(graph, actions)
    saved, nbytes = set(saved_values(profile)), graph.nbytes
    rows = [
        _plan_row(plan, profile.operations[op], op, actions[value], value in saved, nbytes[value])
        for value, op in enumerate(graph.producer)
        if op >= 0 and (until[value] >= 0 or value in saved)
    ]
    heads = (
        "#",
        "operation",
        "module",
        "source line",
        "action",
        "autograd saves it",
        "bytes",
        "seconds to make",
    )
    return sortable("plan-table", heads, rows)


def _plan_row(
    plan: Plan, operation: Operation, number: int, action: int, is_saved: bool, nbytes: int
) -> str:
    seconds = operation.seconds.at(plan.micro_batch)
    cells = (
        (str(number), number),
        (operation.name.removeprefix("aten.").removesuffix(".default"), None),
        (operation.module or "–", None),
        (operation.source or "–", None),
        (ACTION_NAMES[action], None),
        ("yes" if is_saved else "no", None),
        (format_bytes(nbytes), nbytes),
        (format_seconds(seconds), seconds),
    )
    return f'<tr data-action="{ACTION_NAMES[action]}">{"".join(_cell(*one) for one in cells)}</tr>'


def sortable(name: str, heads: Sequence[str], rows: Iterable[str]) -> str:
    """A table whose heads are buttons; the page's script sorts by them."""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(text)}<span'
        ' aria-hidden="true"></span></button></th>'
        for text in heads
    )
    return (
        '<div class="scroll" role="region" aria-label="Table, scrolls sideways"'
        f' tabindex="0"><table id="{name}" '
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
