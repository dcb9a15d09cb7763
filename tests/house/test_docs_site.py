"""The site of the documents without mkdocs: every page has a place, and the pages made from the code are whole.

`make docs` builds the site itself, strictly.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import flowrl.nodes
from docs._site import graph_pages, links, reference_pages
from docs._site.made_pages import made_pages
from docs._site.option_tables import option_row
from flowrl.cli import COMMANDS
from flowrl.graph.command_line import option_names
from flowrl.graph.load import load_file, shipped_names
from flowrl.graph.option_help import option_groups
from tests.house.documents import PAGES, ROOT
from tests.house.test_requirements import pins

WITHOUT_OPTIONS = {"setup", "graphs", "new", "audit", "show", "version"}
ARE_GRAPHS = {"evaluate", "generate", "score"}


@functools.cache
def made() -> Mapping[str, str]:
    """Place in the site -> what is made for it."""
    return dict(made_pages())


@functools.cache
def in_the_nav() -> list[str]:
    return list(places(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def places(nav: Any) -> Iterator[str]:
    """All pages below an entry of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from places(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    found = in_the_nav()
    assert len(found) == len(set(found))
    assert {page.name for page in PAGES} - set(found) == set()
    made_for_it = {place for place in made() if place.startswith("reference/")} | set(links.OF_THE_ROOT.values())
    assert set(found) == {page.name for page in PAGES} | made_for_it | {"graphs/index.md"}


@pytest.mark.parametrize("name", shipped_names())
def test_the_page_of_a_graph_has_every_option_with_its_meaning(name: str) -> None:
    page, config_type = made()[f"graphs/{name}.md"], load_file(name).config_type
    shown = {option.name: option for group in option_groups(config_type) for option in group.options}
    no = {name for name in option_names(config_type) if re.search(r"(^|\.)no-", name)}
    leaves = set(option_names(config_type).values()) - no
    assert shown.keys() == leaves
    assert [option for option in leaves if f"| `--{option}`" not in page] == []
    assert [option.name for option in shown.values() if not option.meaning] == []
    assert made()[f"pictures/graphs/{name}.svg"].startswith("<svg")


def test_every_graph_has_a_place_in_the_overview() -> None:
    named = [name for names in graph_pages.grouped().values() for name in names]
    assert sorted(named) == shipped_names()
    assert all(f"({name}.md)" in made()["graphs/index.md"] for name in named)


def test_every_node_is_on_the_page_of_nodes_with_its_ports() -> None:
    named = [name for names in reference_pages.NODES.values() for name in names]
    assert sorted([*named, *reference_pages.CHOICES]) == sorted(flowrl.nodes.__all__)
    assert reference_pages.nodes_page().endswith("- `TooLong`: `drop`, `truncate`, `error`\n")
    assert reference_pages.ports(flowrl.nodes.Reward) == [("rollouts", "in", "Sample"), ("scored", "out", "Scored")]
    assert ("requests", "answers", "Prompt → Sample") in reference_pages.ports(flowrl.nodes.Generator)


@pytest.mark.parametrize("target", [target for _, _, targets in reference_pages.API.values() for target in targets])
def test_what_the_reference_names_is_there(target: str) -> None:
    try:
        found: Any = importlib.import_module(target)
    except ModuleNotFoundError:
        module, _, name = target.rpartition(".")
        found = getattr(importlib.import_module(module), name)
    assert (found.__doc__ or "").strip()


def test_every_command_with_options_is_on_the_page_of_commands() -> None:
    assert set(COMMANDS) == set(reference_pages.COMMANDS) | WITHOUT_OPTIONS | ARE_GRAPHS
    page = made()["reference/commands.md"]
    assert "| `--resume` *flag* | off | Go on from the newest checkpoint" in page
    assert "| `--alarms.kl` *number* |" in page


@dataclass(frozen=True)
class Base:
    size: int = 1
    """How large | how small."""
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Derived(Base):
    """Some options."""

    size: int = 2
    paths: tuple[Path, ...] = ()
    """Files."""
    range: tuple[float, float] = (0.0, 2.0)
    inner: Base = Base()
    """An inner block."""
    limit: float | None = None


def test_options_are_told_with_inherited_meanings_and_own_defaults() -> None:
    rows = {option.name: option_row(option) for group in option_groups(Derived) for option in group.options}
    assert rows == {
        "paths": "| `--paths` *path ...* | – | Files. |\n",
        "range": "| `--range` *number number* | `0.0 2.0` |  |\n",
        "limit": "| `--limit` *number* | – |  |\n",
        "size": "| `--size` *integer* | `2` | How large \\| how small. |\n",
        "kind": "| `--kind` *a\\|b* | `a` |  |\n",
        "inner.size": "| `--inner.size` *integer* | `1` | How large \\| how small. |\n",
        "inner.kind": "| `--inner.kind` *a\\|b* | `a` |  |\n",
    }


def test_links_out_of_the_documents_lead_to_pages_of_the_site() -> None:
    file = "flowrl/options/online.py"
    text = f"[graphs/grpo.py](../graphs/grpo.py), [b](../{file}#x), [data.md](data.md#checks), [c](http://a.b)"
    expected = f"[graphs/grpo.py](graphs/grpo.md), [b](source/{file}.md#x), [Data](data.md#checks), [c](http://a.b)"
    assert links.turned(text, "") == expected
    assert links.turned("[data.md](../data.md)", "reference") == "[Data](../data.md)"
    assert links.turned("[x](CHANGELOG.md)", "") == "[x](changelog.md)"
    assert file in links.sources_linked()


def test_the_site_is_built_with_packages_of_the_same_versions() -> None:
    both = pins("docs").keys() & pins("base").keys()
    assert {"numpy", "msgpack", "tokenizers", "uvloop", "ruff"} <= both
    differing = {name: (pins("docs")[name], pins("base")[name]) for name in both}
    assert {name for name, (mine, other) in differing.items() if mine != other} == set()
