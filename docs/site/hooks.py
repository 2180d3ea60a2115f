"""What the site needs beyond mkdocs: pages for files outside of docs/, and a check that nothing
comes from elsewhere.

The pages are also read in the repository, where they link to examples and results by their paths.
Here each such file becomes a page of its own, and the links are led to it.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# What pages may link to outside of docs/, by folder, and how a file of each ending is shown.
SHOWN = (
    "examples/*.py",
    "benchmarks/*.py",
    "benchmarks/results/*.txt",
    "docs/*.py",
    "tests/tiling/test_losses_as_written.py",
)
LANGUAGE = {".py": "python", ".txt": "text"}
WHOLE_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)]*)?(\))")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|@import\s+(?:url\()?["']?https?://|url\(["']?https?://""",
    re.IGNORECASE,
)

log = logging.getLogger("mkdocs.hooks.gradfit")


def _pages() -> dict[str, str]:
    """Which page of the site shows which file of the repository."""
    listed = [
        path.relative_to(ROOT).as_posix()
        for pattern in SHOWN
        for path in sorted(ROOT.glob(pattern))
    ]
    return {path: f"files/{path}.md" for path in listed} | WHOLE_PAGES


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside of docs/ that may be linked to."""
    for path, page in _pages().items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path not in WHOLE_PAGES:
            text = f"# {path}\n\n````{LANGUAGE[Path(path).suffix]}\n{text.rstrip()}\n````\n"
        files.append(File.generated(config, page, content=text))
    return files


def _redirect(target: str, source: str, pages: dict[str, str]) -> str:
    """Where a link of the page `source` leads on the site."""
    if "://" in target or target.startswith("mailto:"):
        return target
    home = {page: path for path, page in pages.items()}.get(source)
    folder = posixpath.dirname(home if home is not None else f"docs/{source}")
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in pages:
        page = pages[path]
    elif home is not None and path.startswith("docs/"):
        page = path.removeprefix("docs/")
    else:
        return target
    return posixpath.relpath(page, posixpath.dirname(source) or ".")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files of the repository to the pages that show them."""
    pages = _pages()
    source = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        return f"{opening}{_redirect(target, source, pages)}{anchor or ''}{closing}"

    if source.startswith("files/"):
        return markdown  # source text, to be shown as it is
    kept: list[str] = []

    def set_aside(match: re.Match[str]) -> str:
        kept.append(match.group())
        return f"\0{len(kept) - 1}\0"

    prose = LINK.sub(lead, FENCE.sub(set_aside, markdown))
    return re.sub("\0(\\d+)\0", lambda match: kept[int(match.group(1))], prose)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads anything from another place: it is to be read without a network."""
    built = Path(config["site_dir"])
    for path in sorted([*built.rglob("*.html"), *built.rglob("*.css")]):
        foreign = FOREIGN.search(path.read_text(encoding="utf-8"))
        if foreign is not None:
            log.warning("%s loads from elsewhere: %s", path.relative_to(built), foreign.group())
