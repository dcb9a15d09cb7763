"""What mkdocs does besides building the pages of `docs`: pages made from the code, and links out of `docs`."""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

if (ROOT := str(Path(__file__).resolve().parents[2])) not in sys.path:
    sys.path.insert(0, ROOT)

from docs._site.graph_pages import grouped
from docs._site.links import turned
from docs._site.made_pages import made_pages

GRAPHS = "graphs/index.md"


def on_config(config: Any) -> Any:
    """Put the pages of the graphs into the navigation, below that of all of them."""
    entries = [{name: f"graphs/{name}.md"} for names in grouped().values() for name in names]
    (section,) = [pages for entry in config.nav for pages in entry.values() if GRAPHS in pages]
    section += entries
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the code."""
    for place, content in made_pages():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that leave `docs` into links within the site."""
    return turned(markdown, posixpath.dirname(page.file.src_uri))
