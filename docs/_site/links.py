"""Links of the pages as the site needs them: those out of `docs` lead to pages of the site.

- To a graph: the graph's page. To another file of the repository: a page with its text.
- A link that shows the name of a page shows its title instead.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Page beside `docs` -> its place in the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
NAMED = re.compile(r"\[(?:docs/)?([\w-]+\.md)\](?=\()")
GRAPH = re.compile(r"graphs/(\w+)\.py")


def turned(markdown: str, folder: str) -> str:
    """The text of a page in `folder` of the site's sources ("" for those of `docs`) with its links turned."""
    titled = NAMED.sub(lambda match: f"[{_title(match[1])}]", markdown)
    return LINK.sub(lambda match: _turned(match, folder), titled)


def sources_linked() -> list[str]:
    """Files of the repository that pages link, outside of `docs`, and that have no page of their own."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return sorted({path for page in pages for path in _outside(page.read_text(encoding="utf-8"))})


def _outside(markdown: str) -> Iterator[str]:
    for match in LINK.finditer(markdown):
        found = target(match[2], "")
        if found is not None and found.startswith("source/"):
            yield found.removeprefix("source/").removesuffix(".md")


def target(link: str, folder: str) -> str | None:
    """The place in the site of what a link out of `docs` leads to; None for any other link."""
    path = posixpath.normpath(posixpath.join("docs", folder, link))
    if "://" in link or path.startswith("docs/"):
        return OF_THE_ROOT.get(link)
    if graph := GRAPH.fullmatch(path):
        return f"graphs/{graph[1]}.md"
    if path in OF_THE_ROOT:
        return OF_THE_ROOT[path]
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def _turned(match: re.Match[str], folder: str) -> str:
    opening, link, anchor, closing = match.groups()
    found = target(link, folder)
    return match[0] if found is None else f"{opening}{posixpath.relpath(found, folder or '.')}{anchor or ''}{closing}"


@functools.cache
def _title(page: str) -> str:
    """The first heading of a page of `docs`; of any other, its name."""
    path = ROOT / "docs" / page
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if path.is_file() else page
