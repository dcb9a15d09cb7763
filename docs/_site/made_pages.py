"""All pages of the site that do not lie in `docs`."""

from __future__ import annotations

from collections.abc import Iterator

from docs._site import graph_pages, reference_pages
from docs._site.links import OF_THE_ROOT, ROOT, sources_linked
from flowrl.cli import USAGE
from flowrl.graph.load import shipped_names


def made_pages() -> Iterator[tuple[str, str]]:
    """(place in the site's sources, content)"""
    yield "graphs/index.md", graph_pages.overview()
    for name in shipped_names():
        yield f"graphs/{name}.md", graph_pages.page(name)
        yield f"pictures/graphs/{name}.svg", graph_pages.picture(name)
    yield "reference/nodes.md", reference_pages.nodes_page()
    yield "reference/commands.md", reference_pages.commands_page(USAGE)
    for name in reference_pages.API:
        yield f"reference/{name}.md", reference_pages.api_page(name)
    for name, place in OF_THE_ROOT.items():
        yield place, (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for path in sources_linked():
        language = "python" if path.endswith(".py") else "text"
        text = (ROOT / path).read_text(encoding="utf-8").rstrip()
        yield f"source/{path}.md", f"# {path}\n\n```{language}\n{text}\n```\n"
