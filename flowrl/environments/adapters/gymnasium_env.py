"""`gymnasium/NAME`: environments with discrete actions and discrete observations, as text.

An observation is what the environment renders as text (`render_mode="ansi"`), with the marked characters in brackets,
else its value. The first observation also lists the actions. An action is the last whole number or name of an action in
the reply; a reply without one changes nothing, and the third in a row truncates the episode.

The option `actions` names the actions: `gymnasium/FrozenLake-v1:actions=left/down/right/up`. All other options are
those of the package. Environments of minigrid are shown as their grid, and their actions have names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.environments.adapters import minigrid_text
from flowrl.environments.adapters.package import imported
from flowrl.environments.environment_row import EnvironmentName
from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.errors import ConfigError

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
        gymnasium = imported(name, "gymnasium", distribution="gymnasium")
        if minigrid_text.plays(name.place):
            minigrid_text.register(name)
        try:
            spec = gymnasium.spec(name.place)
            if isinstance(spec.entry_point, str):
                gymnasium.envs.registration.load_env_creator(spec.entry_point)  # once, and not in each episode
        except (gymnasium.error.Error, ImportError) as problem:
            raise ConfigError(f"environment {name.text!r}: {problem}") from None
        return lambda: cls(name)

    def __init__(self, name: EnvironmentName) -> None:
        options = dict(name.options)
        self._is_grid = minigrid_text.plays(name.place)
        names = str(options.pop("actions", minigrid_text.ACTIONS if self._is_grid else ""))
        self._env = _made(name, options)
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
        legend = f"{minigrid_text.LEGEND}\n\n" if self._is_grid else ""
        return Observation(f"{legend}{self._text(found)}\n\n{self._actions}")

    async def step(self, action: Action) -> Step:
        chosen = self._chosen(action.text)
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
        return Step(Observation(self._text(found)), float(reward), terminated, truncated, self._metrics)

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

    def _chosen(self, text: str) -> int | None:
        known = {str(number): number for number in range(self._first, self._first + self._number)}
        known |= {name.lower(): number for number, name in enumerate(self._names, self._first)}
        words = re.findall(r"-?\d+|" + "|".join(rf"\b{re.escape(name)}\b" for name in known), text.lower())
        return known.get(words[-1]) if words else None

    def _text(self, found: Any) -> str:
        if self._is_grid:
            return minigrid_text.grid_text(self._env.unwrapped)
        if self._env.render_mode != "ansi":
            return f"Observation: {_plain(found)}"
        rendered = CODE.sub("", MARKED.sub(r"[\1]", str(self._env.render())))
        return f"{rendered.strip()}\n\nObservation: {_plain(found)}"


def _made(name: EnvironmentName, options: Mapping[str, Any]) -> Any:
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


def _plain(found: Any) -> Any:
    """The value with plain Python numbers, lists and mappings."""
    if isinstance(found, Mapping):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, tuple):
        return tuple(_plain(value) for value in found)
    return found.tolist() if hasattr(found, "tolist") else found
