"""Links lead to pages and headings that are there; every public name is on one page of the
reference.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_snippets import FENCE, page_id, pages

import gradfit as gf

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def slug(heading: str) -> str:
    """As the site and code forges make an anchor of a heading."""
    plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip())


def anchors(page: Path) -> set[str]:
    text = prose(page)
    headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    return headings | set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


def broken(page: Path) -> list[str]:
    wrong = []
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_the_site_has_a_page_for_every_file_outside_of_docs_that_is_linked_to() -> None:
    hooks = ast.parse((DOCS / "site" / "hooks.py").read_text(encoding="utf-8"))
    (shown,) = (
        ast.literal_eval(node.value)
        for node in hooks.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHOWN"
    )
    found = {path.resolve() for pattern in shown for path in DOCS.parent.glob(pattern)}
    found |= {DOCS.parent / "CONTRIBUTING.md", DOCS.parent / "CHANGELOG.md"}
    for page in sorted(DOCS.rglob("*.md")):
        for target in LINK.findall(prose(page)):
            path = target.partition("#")[0]
            file = (page.parent / path).resolve() if path and "://" not in path else page
            assert DOCS in file.parents or file in found, (page, target)


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# What it is\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#what-it-is) [b](other.md#no) [c](gone.md) [d](https://example.org)"
        " [e](#here)\n\n## Here\n"
    )
    assert broken(page) == ["other.md#no", "gone.md"]


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    listed = Counter(
        name.rsplit(".", 1)[-1]
        for page in sorted((DOCS / "api").glob("*.md"))
        if page.name != "integrations.md"
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert listed == Counter(gf.__all__)


def test_paths_that_contributing_names_exist() -> None:
    root = DOCS.parent
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./]+)`", text)
    assert len(named) > 15
    assert not [path for path in named if not (root / path).exists()]


def test_the_glossary_is_short_and_its_words_are_used() -> None:
    table = (DOCS / "words.md").read_text(encoding="utf-8")
    words = [
        cell
        for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
        if cell not in ("word", "---")
    ]
    assert 0 < len(words) <= 30
    guides = "".join(
        path.read_text(encoding="utf-8") for path in sorted((DOCS / "guides").glob("*.md"))
    )
    sources = "".join(
        path.read_text(encoding="utf-8") for path in sorted((DOCS.parent / "src").rglob("*.py"))
    )
    everything = (guides + sources).lower()
    assert not [
        word for entry in words for word in entry.split(", ") if word.split()[0] not in everything
    ]


def test_every_page_is_in_the_site_s_navigation() -> None:
    listed: list[str] = []

    def collect(entry: Any) -> None:
        if isinstance(entry, str):
            listed.append(entry)
        else:
            for one in entry.values() if isinstance(entry, dict) else entry:
                collect(one)

    collect(yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    made = {"contributing.md", "changelog.md"}  # from the files at the root, by docs/site/hooks.py
    assert sorted(listed) == sorted(
        {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | made
    )
