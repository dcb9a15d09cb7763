"""docs/options.md names nothing of flowrl's that there is not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import flowrl.nodes
from flowrl.graph.command_line import option_names
from flowrl.graph.load import load_file
from flowrl.runtime.driver.options import RunOptions
from flowrl.training import schedule, settings
from flowrl.training.loss import policy_objective, preference_objectives

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "options.md").read_text()
ROWS = [line.rsplit("|", 2)[1] for line in TABLE.splitlines() if line.startswith("| ")]
"""flowrl's column."""
HOMES = (flowrl.nodes, policy_objective, preference_objectives, schedule, settings)


def options() -> set[str]:
    """Every option of `flowrl run` and of the graphs."""
    known = set(option_names(RunOptions))
    for path in (ROOT / "graphs").glob("*.py"):
        known |= set(option_names(load_file(str(path)).config_type))
    return known


def test_every_option_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"--([a-z][a-z.-]*)", row)}
    assert len(named) > 40
    assert named - options() == set()


def test_every_graph_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"graphs/\w+\.py", row)}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("named", sorted({name for row in ROWS for name in re.findall(r"`([A-Z]\w+\(\w+\))`", row)}))
def test_every_argument_exists(named: str) -> None:
    name, argument = named.rstrip(")").split("(")
    (found,) = {getattr(home, name) for home in HOMES if hasattr(home, name)}
    assert argument in inspect.signature(found).parameters
