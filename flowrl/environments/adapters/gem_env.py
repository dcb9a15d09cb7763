"""`gem/KIND:NAME`: an environment of GEM, as `gem/game:GuessTheNumber-v0-easy`.

An observation is the environment's answer, with the sentence that the environment puts below each of its answers.
Options are those of the package: `gem/game:GuessTheNumber-v0-easy:max_turns=6`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowrl.environments.environment_class import close_names, import_package
from flowrl.environments.environment_row import EnvironmentName
from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.errors import ConfigError


class GemEnv(Env):
    """One environment of the package, for one episode."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], GemEnv]:
        """Imports the package. Raises ConfigError if the package or the environment is missing."""
        package = import_package(name, "gem", distribution="gem-llm")
        import_package(name, "gem.envs", distribution="gem-llm")  # fills the registry
        registry = package.envs.registration.ENV_REGISTRY
        if name.place not in registry:
            raise ConfigError(f"gem has no environment {name.place!r}; {close_names(name.place, list(registry))}")
        entry_point = registry[name.place].entry_point
        if isinstance(entry_point, str):
            import_package(name, entry_point.partition(":")[0], distribution="gem-llm")  # once, and not in each episode
        return lambda: cls(package.make(name.place, **name.options))

    def __init__(self, game: Any) -> None:
        self._game = game

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        found, told = self._game.reset(seed=seed)
        return Observation(observation_text(found, told))

    async def step(self, action: Action) -> Step:
        found, reward, terminated, truncated, told = self._game.step(action.text)
        over = bool(terminated or truncated)
        return Step(
            Observation(str(found) if over else observation_text(found, told)),
            float(reward),
            terminated=bool(terminated and not truncated),
            truncated=bool(truncated),
        )


def observation_text(found: Any, told: Mapping[str, Any]) -> str:
    """An observation between the prefix and the suffix that the package reports with it."""
    parts = (told.get("prefix", ""), found, told.get("suffix", ""))
    return "\n".join(part for part in (str(part).strip() for part in parts) if part)
