"""docs/seeds.md says where each thing is and what shows it: every name, example and test in it
exists.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_process import run_warm

import gradfit as gf

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
DOCUMENTS = 5


def rows() -> list[tuple[str, str, str]]:
    """What each row of each table says: in the document, here, shown by."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in PAGE.splitlines()
        if line[:1] == "|"
    ]
    plain = [row for row in cells if not row[0].startswith(("**", "---", "in the document"))]
    assert all(len(row) == 3 for row in plain), [row for row in plain if len(row) != 3]
    return [(row[0], row[1], row[2].strip(" |")) for row in plain]


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def problem_with_function(reference: str) -> str | None:
    """What is wrong with `path/to/file.py` or `path/to/file.py::function`; None if it is there."""
    path, _, name = reference.partition("::")
    if not (ROOT / path).is_file():
        return f"there is no file {path}"
    if name and name not in functions_of(ROOT / path):
        return f"{path} has no {name}"
    return None


def problem_with_name(name: str) -> str | None:
    """What is wrong with a public name, `Class` or `Class.member`; None if it is there."""
    owner, _, member = name.partition(".")
    if owner not in gf.__all__:
        return f"gradfit has no {owner}"
    found: Any = getattr(gf, owner)
    if not member or hasattr(found, member):
        return None
    if member in getattr(found, "__annotations__", {}) or re.search(
        rf"self\.{member}\b", source_of_init(found)
    ):
        return None
    return f"{owner} has no {member}"


def source_of_init(kind: type) -> str:
    """Where attributes of instances are set; a dataclass has its fields as annotations instead."""
    inits = [
        one.__init__
        for one in kind.__mro__
        if "__init__" in vars(one) and not hasattr(one, "__dataclass_fields__")
    ]
    return "".join(inspect.getsource(init) for init in inits if inspect.isfunction(init))


def problems_with(here: str, shown_by: str) -> list[str]:
    names = [
        name for name in re.findall(r"`([^`]+)`", here) if re.fullmatch(r"[\w.]+|examples/.*", name)
    ]
    tests = re.findall(r"`([^`]+)`", shown_by)
    found = [
        *(
            problem_with_function(name) if "/" in name else problem_with_name(name)
            for name in names
            if name != "x"
        ),
        *map(problem_with_function, tests),
        None if names else "no name",
        None if tests and all(re.search(r"::test_\w+$", test) for test in tests) else "no test",
    ]
    return [one for one in found if one is not None]


def test_the_page_has_a_table_for_each_document() -> None:
    assert len(re.findall(r"^## \d\. ", PAGE, re.MULTILINE)) == DOCUMENTS
    assert PAGE.count("| in the document | here | shown by |") == DOCUMENTS
    assert len(rows()) >= 150


def test_every_row_has_a_name_and_a_test_that_exist() -> None:
    wrong = {row[0]: problems for row in rows() if (problems := problems_with(row[1], row[2]))}
    assert not wrong


@pytest.mark.parametrize(
    ("here", "shown_by"),
    [
        ("`NoSuchClass`", "`tests/docs/test_seeds.py::test_example`"),
        ("`GradAccumulator.no_such_member`", "`tests/docs/test_seeds.py::test_example`"),
        ("`GradAccumulator`", "`tests/docs/test_seeds.py::test_no_such_test`"),
        ("`GradAccumulator`", "`tests/docs/no_such_file.py::test_example`"),
        ("`GradAccumulator`", "`tests/docs/test_seeds.py::rows`"),
        (
            "`examples/document_autograd.py::no_such_function`",
            "`tests/docs/test_seeds.py::test_example`",
        ),
        ("`GradAccumulator`", ""),
        ("", "`tests/docs/test_seeds.py::test_example`"),
    ],
)
def test_a_row_that_does_not_exist_is_noticed(here: str, shown_by: str) -> None:
    assert len(problems_with(here, shown_by)) == 1


EXAMPLES = [*sorted((ROOT / "examples").glob("document_*.py")), ROOT / "examples" / "lbfgs.py"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    """In a process of its own: some examples measure all graphs that are alive."""
    assert path.stem == "lbfgs" or f"examples/{path.name}" in PAGE
    child = run_warm([sys.executable, str(path)], timeout=200)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()
