"""The rules of the house that a machine can check: who imports whom, where private torch API is,
links in the docs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gradfit"

# The rooms in the order of the flow, each with the rooms it imports from: earlier ones, and no edge
# that nobody uses. Files at the top (errors, units, …) are open to all.
ALLOWED = {
    "tape": set(),
    "tiling": set(),
    "batches": set(),
    "profiling": {"tape", "batches", "tiling"},
    "planning": {"profiling", "tiling"},
    "recompute": {"tape", "profiling", "planning", "tiling"},
    "accumulate": {"batches", "distributed"},
    "distributed": {"accumulate"},
    "fitting": {
        "tape",
        "tiling",
        "batches",
        "profiling",
        "planning",
        "recompute",
        "accumulate",
        "distributed",
    },
    "runs": {"batches", "profiling", "planning", "accumulate", "distributed", "fitting"},
    "toolbox": {"tape", "accumulate"},
    "report": {"batches", "profiling", "planning", "recompute"},
    "cli": {"profiling", "planning", "distributed", "fitting", "runs", "report"},
}
PRIVATE = re.compile(r"torch\._[^_]|from torch\.[a-z_.]*\._|torch\.utils\._")


def modules() -> Iterator[Path]:
    yield from sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The gradfit modules that a file imports when it is run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradfit."):
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_from_earlier_rooms_only(room: str) -> None:
    wrong, used = [], set()
    for path in sorted((SOURCE / room).rglob("*.py")):
        for name in imported(path):
            other = name.split(".")[1]
            if (SOURCE / other).is_dir() and other != room:
                used.add(other)
                if other not in ALLOWED[room]:
                    wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong
    assert used == ALLOWED[room]


def test_planning_is_pure() -> None:
    """It works on records: no torch, and of profiling nothing but the records."""
    for path in sorted((SOURCE / "planning").glob("*.py")):
        text = path.read_text()
        assert "import torch" not in text, path.name
        rooms = {name for name in imported(path) if name.startswith("gradfit.profiling.")}
        assert all(name.split(".")[2] in ("profile", "step_graph") for name in rooms), path.name


def test_private_torch_api_is_in_one_place() -> None:
    outside = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in modules()
        if not path.name.startswith("_torch")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert not outside


def test_no_two_modules_or_classes_have_one_name() -> None:
    """A reader who looks for a name finds one thing."""
    names = [path.stem for path in modules() if path.stem not in ("__init__", "__main__")]
    classes = [
        node.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for found in (names, classes):
        assert [name for name, count in Counter(found).items() if count > 1] == []


def test_links_in_the_docs_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
        missing = [
            target
            for target in targets
            if "://" not in target and not (page.parent / target).exists()
        ]
        broken += [f"{page.relative_to(ROOT)}: {target}" for target in missing]
    assert not broken


def test_public_names_are_listed_once_and_exist() -> None:
    import gradfit

    assert len(gradfit.__all__) == len(set(gradfit.__all__))
    assert all(hasattr(gradfit, name) for name in gradfit.__all__)


def test_the_readme_shows_the_two_commands_and_make_knows_them() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert re.search(rf"^{command}: setup", makefile, re.MULTILINE)


def test_versions_agree() -> None:
    import gradfit

    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared.group(1) == gradfit.__version__


def test_the_range_of_torch_is_the_tested_one() -> None:
    from gradfit._torch_versions import NEWEST, OLDEST

    declared = re.search(
        r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert declared is not None
    oldest, beyond = tuple(map(int, declared.groups()[:2])), tuple(map(int, declared.groups()[2:]))
    assert (oldest, beyond) == (OLDEST, (NEWEST[0], NEWEST[1] + 1))


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.9.1", False),
        ("2.10.0+cu128", True),
        ("2.13.0+cpu", True),
        ("2.15.1", True),
        ("2.16.0.dev20261101", False),
        ("3.0.0", False),
        ("1.13.1", False),
    ],
)
def test_which_versions_of_torch_are_tested(version: str, is_tested: bool) -> None:
    from gradfit._torch_versions import untested

    assert (untested(version) is None) == is_tested


def test_another_version_of_torch_gets_one_warning() -> None:
    program = "import torch; torch.__version__ = '2.9.1'\nimport gradfit, gradfit.tape.recorder"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (
        done.stderr.count("gradfit is tested with torch 2.10 to 2.15, and this is torch 2.9.1") == 1
    )
    assert done.stderr.startswith("<string>:2: ")


def test_the_front_door_is_ten_names_in_the_order_of_use() -> None:
    import gradfit

    described = re.findall(r"^    (\w+)  +\S", gradfit.__doc__ or "", re.MULTILINE)
    assert described == gradfit.__all__[:10]
    assert gradfit.__dir__()[:10] == described
    assert "planning" not in dir(gradfit)
    reference = (ROOT / "docs" / "api" / "index.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\]", reference, re.MULTILINE) == described


def test_mypy_finds_every_room_of_the_tests() -> None:
    listed = re.findall(
        r"^    \$MYPY_CONFIG_FILE_DIR/(\w+),?$",
        (ROOT / "tests" / "mypy.ini").read_text(),
        re.MULTILINE,
    )
    assert sorted(listed) == sorted({path.parent.name for path in (ROOT / "tests").glob("*/*.py")})
