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

from flowrl.environments.environment_class import import_package
from flowrl.environments.environment_row import EnvironmentName
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


def grid_text(env: Any) -> str:
    """The mission, the grid, and the agent's state, of a MiniGridEnv."""
    rows = []
    for row in range(env.height):
        cells = []
        for column in range(env.width):
            thing = env.grid.get(column, row)
            if (column, row) == tuple(env.agent_pos):
                cells.append(AGENT[env.agent_dir])
            elif thing is None or thing.type in PLAIN:
                cells.append(PLAIN["floor" if thing is None else thing.type])
            elif thing.type == "door":
                cells.append(("O" if thing.is_open else "L" if thing.is_locked else "D") + COLOURS[thing.color])
            else:
                cells.append(LETTERS[thing.type] + COLOURS[thing.color])
        rows.append(" ".join(cells))
    carried = f"a {env.carrying.color} {env.carrying.type}" if env.carrying else "nothing"
    state = f"You face {FACING[env.agent_dir]} and carry {carried}."
    return "\n".join([f"Mission: {env.mission}", "", *rows, "", state])


MOST_MALFORMED = 3
"""Replies in a row without an action; this many truncate the episode."""
MARKED = re.compile(r"(?:\x1b\[[0-9;]*m)+([^\x1b]*)\x1b\[0m")
"""Coloured text: an environment marks the player's place with it."""
CODE = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumEnv(Env):
    """One environment of the package, for one episode."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], GymnasiumEnv]:
        """Imports the package. Raises ConfigError if the package or the environment is missing."""
        gymnasium = import_package(name, "gymnasium", distribution="gymnasium")
        if name.place.startswith(FAMILIES):
            import_package(name, "minigrid", distribution="minigrid")  # makes its names known to gymnasium
        try:
            spec = gymnasium.spec(name.place)
            if isinstance(spec.entry_point, str):
                gymnasium.envs.registration.load_env_creator(spec.entry_point)  # once, and not in each episode
        except (gymnasium.error.Error, ImportError) as problem:
            raise ConfigError(f"environment {name.text!r}: {problem}") from None
        return lambda: cls(name)

    def __init__(self, name: EnvironmentName) -> None:
        from gymnasium.spaces import Discrete

        options = dict(name.options)
        self._is_grid = name.place.startswith(FAMILIES)
        names = str(options.pop("actions", GRID_ACTIONS if self._is_grid else ""))
        self._env = make_environment(name, options)
        space = self._env.action_space
        if not isinstance(space, Discrete):
            raise ConfigError(
                f"environment {name.text!r} has the actions {space}; only discrete ones can be said as text"
            )
        self._first, self._number = int(space.start), int(space.n)
        self._names = tuple(part.strip() for part in names.split("/")) if names else ()
        if self._names and len(self._names) != self._number:
            raise ConfigError(
                f"environment {name.text!r}: actions has {len(self._names)} name(s) and the environment "
                f"{self._number} actions; write one for each, as actions=left/right"
            )
        if not self._is_grid:
            check_observations(name, self._env.observation_space)
        last = self._first + self._number - 1
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(self._names, self._first))
        self._actions = f"Answer with the number of an action, {self._first} to {last}."
        if listed:
            self._actions = f"Answer with one action: {listed}."
        self._malformed = self._malformed_in_a_row = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        found, _ = self._env.reset(seed=seed)
        legend = f"{GRID_LEGEND}\n\n" if self._is_grid else ""
        return Observation(f"{legend}{self._render_text(found)}\n\n{self._actions}")

    async def step(self, action: Action) -> Step:
        known = {str(number): number for number in range(self._first, self._first + self._number)}
        known |= {name.lower(): number for number, name in enumerate(self._names, self._first)}
        words = re.findall(r"-?\d+|" + "|".join(rf"\b{re.escape(name)}\b" for name in known), action.text.lower())
        chosen = known.get(words[-1]) if words else None
        if chosen is None:
            self._malformed += 1
            self._malformed_in_a_row += 1
            return Step(
                Observation(f"There is no action in this reply. {self._actions}"),
                truncated=self._malformed_in_a_row == MOST_MALFORMED,
                metrics={"malformed": self._malformed},
            )
        self._malformed_in_a_row = 0
        found, reward, terminated, truncated, _ = self._env.step(chosen)
        metrics = {"malformed": self._malformed}
        return Step(Observation(self._render_text(found)), float(reward), terminated, truncated, metrics)

    async def close(self) -> None:
        self._env.close()

    def _render_text(self, found: Any) -> str:
        if self._is_grid:
            return grid_text(self._env.unwrapped)
        if self._env.render_mode != "ansi":
            return f"Observation: {plain_value(found)}"
        rendered = CODE.sub("", MARKED.sub(r"[\1]", str(self._env.render())))
        return f"{rendered.strip()}\n\nObservation: {plain_value(found)}"


def make_environment(name: EnvironmentName, options: Mapping[str, Any]) -> Any:
    """The package's environment, which renders text if it can."""
    import gymnasium

    try:
        creator: Any = gymnasium.spec(name.place).entry_point
        if isinstance(creator, str):
            creator = gymnasium.envs.registration.load_env_creator(creator)
        if "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()):
            options = {"render_mode": "ansi", **options}
        return gymnasium.make(name.place, **options)
    except (TypeError, gymnasium.error.Error) as problem:
        raise ConfigError(f"environment {name.text!r}: gymnasium refuses it: {problem}") from None


def check_observations(name: EnvironmentName, space: Any) -> None:
    from gymnasium import spaces

    parts = space.spaces if isinstance(space, spaces.Tuple | spaces.Dict) else None
    if parts is not None:
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            check_observations(name, part)
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
