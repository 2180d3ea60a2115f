"""Random loops: every update is exact, every refusal names the next call."""

from __future__ import annotations

import pytest
from window_programs import Program


def run(seeds: range) -> tuple[int, int, int]:
    updates = refusals = quiet = 0
    for seed in seeds:
        program = Program(seed)
        try:
            program.run()
        except BaseException as error:
            error.add_note(f"seed {seed}, {program.style}, {program.kind}, {program.options}:")
            error.add_note("\n".join(program.log))
            raise
        updates += len(program.updates)
        refusals += program.refused
        quiet += not program.refused
    return updates, refusals, quiet


def test_some_programs() -> None:
    updates, refusals, quiet = run(range(150))
    assert updates > 150  # they are not all refused
    assert refusals > 50
    assert quiet > 50


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_programs(part: int) -> None:
    run(range(1000 * (part + 1), 1000 * (part + 2)))
