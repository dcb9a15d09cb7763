"""minigrid's environments as text: the whole grid with the agent in it, its direction and what it carries.

A cell is two characters: a letter for the object and one for its colour. The package's own `pprint_grid` uses the same
letter for grey and green, and does not show what the agent carries.
"""

from __future__ import annotations

from typing import Any

from flowrl.environments.adapters.package import imported
from flowrl.environments.environment_row import EnvironmentName

FAMILIES = ("MiniGrid-", "BabyAI-")
"""Beginnings of the names of the package's environments."""
ACTIONS = "left/right/forward/pickup/drop/toggle/done"
FACING = ("right", "down", "left", "up")
AGENT = (">>", "vv", "<<", "^^")
PLAIN = {"wall": "##", "floor": "..", "lava": "~~"}
LETTERS = {"key": "K", "ball": "A", "box": "B", "goal": "G"}
COLOURS = {"red": "r", "green": "g", "blue": "b", "purple": "p", "yellow": "y", "grey": "e"}
LEGEND = (
    "A cell of the grid has two characters: ## is a wall, .. the floor, ~~ lava, and >> vv << ^^ is you, facing right, "
    "down, left or up. Others are a thing and its colour: K a key, A a ball, B a box, G the goal, D a closed door, L a "
    "locked one, O an open one; r red, g green, b blue, p purple, y yellow, e grey."
)


def plays(place: str) -> bool:
    """Whether the name is of one of the package's environments."""
    return place.startswith(FAMILIES)


def register(name: EnvironmentName) -> None:
    """Make the package's names known to gymnasium. Raises ConfigError if the package is missing."""
    imported(name, "minigrid", distribution="minigrid")


def grid_text(env: Any) -> str:
    """The mission, the grid, and the agent's state, of a MiniGridEnv."""
    rows = [" ".join(_cell(env, column, row) for column in range(env.width)) for row in range(env.height)]
    carried = f"a {env.carrying.color} {env.carrying.type}" if env.carrying else "nothing"
    state = f"You face {FACING[env.agent_dir]} and carry {carried}."
    return "\n".join([f"Mission: {env.mission}", "", *rows, "", state])


def _cell(env: Any, column: int, row: int) -> str:
    if (column, row) == tuple(env.agent_pos):
        return AGENT[env.agent_dir]
    thing = env.grid.get(column, row)
    if thing is None:
        return PLAIN["floor"]
    if thing.type in PLAIN:
        return PLAIN[thing.type]
    letter = _door(thing) if thing.type == "door" else LETTERS[thing.type]
    return letter + COLOURS[thing.color]


def _door(door: Any) -> str:
    return "O" if door.is_open else "L" if door.is_locked else "D"
