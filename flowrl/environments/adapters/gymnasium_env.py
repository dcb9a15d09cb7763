"""`gymnasium/NAME`: environments with discrete actions and discrete observations, as text.

An observation is what the environment renders as text (`render_mode="ansi"`), with the marked characters in brackets,
else its value. The first observation also lists the actions. An action is the last whole number or name of an action in
the reply; a reply without one changes nothing, and the third in a row truncates the episode.

The option `actions` names the actions: `gymnasium/FrozenLake-v1:actions=left/down/right/up`. All other options are
those of the package. Environments of minigrid are shown as their whole grid with the agent in it, its direction and
what it carries, and their actions have names. A cell is two characters: a letter for the object and one for its colour.
The package's own `pprint_grid` uses the same letter for grey and green, and does not show what the agent carries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.environments.environment_row import EnvironmentName, import_package
from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.errors import ConfigError

FAMILIES = ("MiniGrid-", "BabyAI-")
"""Beginnings of the names of the package's environments."""
GRID_ACTIONS = "left/right/forward/pickup/drop/toggle/done"
FACING = ("right", "down", "left", "up")
AGENT = (">>", "vv", "<<", "^^")
PLAIN = {"wall": "##", "floor": "..", "lava": "~~"}
LETTERS = {"key": "K", "ball": "A", "box": "B", "goal": "G"}
COLOURS = {"red": "r", "green": "g", "blue": "b", "purple": "p", "yellow": "y", "grey": "e"}
GRID_LEGEND = (
    "A cell of the grid has two characters: ## is a wall, .. the floor, ~~ lava, and >> vv << ^^ is you, facing right, "
    "down, left or up. Others are a thing and its colour: K a key, A a ball, B a box, G the goal, D a closed door, L a "
    "locked one, O an open one; r red, g green, b blue, p purple, y yellow, e grey."
)


def is_minigrid(place: str) -> bool:
    """Whether the name is of one of the package's environments."""
    return place.startswith(FAMILIES)


def register_minigrid(name: EnvironmentName) -> None:
    """Make the package's names known to gymnasium. Raises ConfigError if the package is missing."""
    import_package(name, "minigrid", distribution="minigrid")


def grid_text(env: Any) -> str:
    """The mission, the grid, and the agent's state, of a MiniGridEnv."""
    rows = [" ".join(cell_text(env, column, row) for column in range(env.width)) for row in range(env.height)]
    carried = f"a {env.carrying.color} {env.carrying.type}" if env.carrying else "nothing"
    state = f"You face {FACING[env.agent_dir]} and carry {carried}."
    return "\n".join([f"Mission: {env.mission}", "", *rows, "", state])


def cell_text(env: Any, column: int, row: int) -> str:
    if (column, row) == tuple(env.agent_pos):
        return AGENT[env.agent_dir]
    thing = env.grid.get(column, row)
    if thing is None:
        return PLAIN["floor"]
    if thing.type in PLAIN:
        return PLAIN[thing.type]
    letter = door_text(thing) if thing.type == "door" else LETTERS[thing.type]
    return letter + COLOURS[thing.color]


def door_text(door: Any) -> str:
    return "O" if door.is_open else "L" if door.is_locked else "D"


MOST_MALFORMED = 3
"""Replies in a row without an action; this many truncate the episode."""
MARKED = re.compile(r"(?:\x1b\[[0-9;]*m)+([^\x1b]*)\x1b\[0m")
"""Coloured text: an environment marks the player's place with it."""
CODE = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEnv(Env):
    """One environment of the package, for one episode."""

    @classmethod
    def maker(cls, name: EnvironmentName) -> Callable[[], GymnasiumEnv]:
        """Imports the package. Raises ConfigError if the package or the environment is missing."""
        gymnasium = import_package(name, "gymnasium", distribution="gymnasium")
        if is_minigrid(name.place):
            register_minigrid(name)
        try:
            spec = gymnasium.spec(name.place)
            if isinstance(spec.entry_point, str):
                gymnasium.envs.registration.load_env_creator(spec.entry_point)  # once, and not in each episode
        except (gymnasium.error.Error, ImportError) as problem:
            raise ConfigError(f"environment {name.text!r}: {problem}") from None
        return lambda: cls(name)

    def __init__(self, name: EnvironmentName) -> None:
        options = dict(name.options)
        self._is_grid = is_minigrid(name.place)
        names = str(options.pop("actions", GRID_ACTIONS if self._is_grid else ""))
        self._env = make_environment(name, options)
        self._first, self._number = _discrete_actions(name, self._env)
        self._names = tuple(part.strip() for part in names.split("/")) if names else ()
        if self._names and len(self._names) != self._number:
            raise ConfigError(
                f"environment {name.text!r}: actions has {len(self._names)} name(s) and the environment "
                f"{self._number} actions; write one for each, as actions=left/right"
            )
        if not self._is_grid:
            _check_observations(name, self._env.observation_space)
        self._malformed = self._malformed_in_a_row = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        found, _ = self._env.reset(seed=seed)
        legend = f"{GRID_LEGEND}\n\n" if self._is_grid else ""
        return Observation(f"{legend}{self._render_text(found)}\n\n{self._actions}")

    async def step(self, action: Action) -> Step:
        chosen = self._choose_action(action.text)
        if chosen is None:
            self._malformed += 1
            self._malformed_in_a_row += 1
            return Step(
                Observation(f"There is no action in this reply. {self._actions}"),
                truncated=self._malformed_in_a_row == MOST_MALFORMED,
                metrics=self._metrics,
            )
        self._malformed_in_a_row = 0
        found, reward, terminated, truncated, _ = self._env.step(chosen)
        return Step(Observation(self._render_text(found)), float(reward), terminated, truncated, self._metrics)

    @property
    def _metrics(self) -> dict[str, float]:
        return {"malformed": self._malformed}

    async def close(self) -> None:
        self._env.close()

    @property
    def _actions(self) -> str:
        last = self._first + self._number - 1
        if not self._names:
            return f"Answer with the number of an action, {self._first} to {last}."
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(self._names, self._first))
        return f"Answer with one action: {listed}."

    def _choose_action(self, text: str) -> int | None:
        known = {str(number): number for number in range(self._first, self._first + self._number)}
        known |= {name.lower(): number for number, name in enumerate(self._names, self._first)}
        words = re.findall(r"-?\d+|" + "|".join(rf"\b{re.escape(name)}\b" for name in known), text.lower())
        return known.get(words[-1]) if words else None

    def _render_text(self, found: Any) -> str:
        if self._is_grid:
            return grid_text(self._env.unwrapped)
        if self._env.render_mode != "ansi":
            return f"Observation: {plain_value(found)}"
        rendered = CODE.sub("", MARKED.sub(r"[\1]", str(self._env.render())))
        return f"{rendered.strip()}\n\nObservation: {plain_value(found)}"


def make_environment(name: EnvironmentName, options: Mapping[str, Any]) -> Any:
    import gymnasium

    try:
        if _renders_text(gymnasium.spec(name.place).entry_point):
            options = {"render_mode": "ansi", **options}
        return gymnasium.make(name.place, **options)
    except (TypeError, gymnasium.error.Error) as problem:
        raise ConfigError(f"environment {name.text!r}: gymnasium refuses it: {problem}") from None


def _renders_text(entry_point: Any) -> bool:
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())


def _discrete_actions(name: EnvironmentName, env: Any) -> tuple[int, int]:
    """The number of the first action, and how many actions there are."""
    from gymnasium.spaces import Discrete

    space = env.action_space
    if not isinstance(space, Discrete):
        raise ConfigError(f"environment {name.text!r} has the actions {space}; only discrete ones can be said as text")
    return int(space.start), int(space.n)


def _check_observations(name: EnvironmentName, space: Any) -> None:
    from gymnasium import spaces

    parts = space.spaces if isinstance(space, spaces.Tuple | spaces.Dict) else None
    if parts is not None:
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            _check_observations(name, part)
    elif isinstance(space, spaces.Box) and len(space.shape) > 1:
        raise ConfigError(
            f"environment {name.text!r} shows images, {space.dtype} of the shape {space.shape}; images are not "
            "supported: choose an environment of discrete observations, or describe it in words in an Env of your own"
        )
    elif not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text):
        raise ConfigError(f"environment {name.text!r} has observations in {space}; only discrete ones become text")


def plain_value(found: Any) -> Any:
    """The value with plain Python numbers, lists and mappings."""
    if isinstance(found, Mapping):
        return {key: plain_value(value) for key, value in found.items()}
    if isinstance(found, tuple):
        return tuple(plain_value(value) for value in found)
    return found.tolist() if hasattr(found, "tolist") else found
