"""Every Python snippet of every page runs, each page from its first to its last."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from page_setups import CHECKS, IN_PROCESSES_OF_THEIR_OWN, SETUPS
from warm_process import run_warm

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
# What the other fences hold: commands, file contents, output. Python under another name would not
# be run.
OTHER_LANGUAGES = {"", "bash", "console", "text", "toml", "json"}


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    return [
        code
        for language, code in FENCE.findall(page.read_text(encoding="utf-8"))
        if language == "python"
    ]


def program(page: Path) -> list[tuple[str, str]]:
    """The page's pieces of code in order, each with what it is called in a traceback."""
    name = page_id(page)
    pieces = [
        (f"{name}, snippet {number}", code) for number, code in enumerate(snippets(page), start=1)
    ]
    before = [(f"{name}, set-up", SETUPS[name])] if name in SETUPS else []
    after = [(f"{name}, check", CHECKS[name])] if name in CHECKS else []
    return before + pieces + after


def run(page: Path) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for name, code in program(page):
        exec(compile(code, name, "exec"), names)
    # all accelerators of a process share one state: the next page begins anew
    if "accelerate" in sys.modules:
        state: Any = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


APART = {name for names in IN_PROCESSES_OF_THEIR_OWN for name in names}


@pytest.mark.parametrize(
    "page", [page for page in pages() if snippets(page) and page_id(page) not in APART], ids=page_id
)
def test_the_snippets_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("names", IN_PROCESSES_OF_THEIR_OWN, ids=lambda names: names[0])
def test_the_snippets_of_pages_run_in_a_process(names: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, __file__, *(str(ROOT / name) for name in names)]
    child = run_warm(command, cwd=tmp_path, timeout=800)
    assert child.returncode == 0, child.stderr


def test_no_python_hides_behind_another_fence() -> None:
    languages = {
        (page_id(page), language)
        for page in pages()
        for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))
        if language != "python"
    }
    assert not {(name, language) for name, language in languages if language not in OTHER_LANGUAGES}


def test_set_ups_are_of_pages_that_exist() -> None:
    for name in {*SETUPS, *CHECKS, *APART}:
        assert snippets(ROOT / name), name


def test_a_page_that_fails_is_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run(wrong)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
