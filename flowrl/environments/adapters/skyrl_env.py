"""`skyrl_gym/NAME:task=TASK`: an environment of SkyRL gym, which asks the questions of a task and scores the answers.

The row's seed picks the question. The environment receives the row's answer as `reward_spec.ground_truth`; for an
answer with `####`, as in GSM8K, only what follows it. If the row has columns `reward_spec` or `extra_info`, they are
used instead. Options of the adapter are `task` and `max_turns`; all others belong to the task.

Environments that need settings of their own, such as the address of a search engine, cannot be played.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from flowrl.environments.environment_class import close_names, import_package
from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow
from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.environments.task_questions import TaskQuestions, asked_task, load_questions
from flowrl.errors import ConfigError
from flowrl.messages.base import number_in
from flowrl.tasks import Row
from flowrl.tasks.user_code import one_line


class SkyrlEnv(Env):
    """One question."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], SkyrlEnv]:
        """Imports the package and reads the task. Raises ConfigError."""
        package = import_package(name, "skyrl_gym", distribution="skyrl-gym")
        known = list(import_package(name, "skyrl_gym.envs.registration", distribution="skyrl-gym").registry)
        if name.place not in known:
            raise ConfigError(f"skyrl_gym has no environment {name.place!r}; {close_names(name.place, known)}")
        max_turns = name.options.get("max_turns")
        if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
            raise ConfigError(f"environment {name.text!r}: max_turns is {max_turns!r}; it has to be at least 1")
        questions = load_questions(name, asked_task(name, own=("max_turns",)))
        try:
            make_environment(package, name, questions.rows.train[0])
        except Exception as problem:  # the boundary to the environment's code
            raise ConfigError(f"environment {name.text!r} cannot be made: {one_line(problem)}") from None
        return lambda: cls(package, name, questions)

    def __init__(self, package: ModuleType, name: EnvironmentName, questions: TaskQuestions) -> None:
        self._package, self._name, self._questions = package, name, questions
        self._game: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        row = self._questions.row_of_question(EnvironmentRow(task["name"], task["options"], seed))
        self._game = make_environment(self._package, self._name, row)
        messages, _ = self._game.init([dict(turn) for turn in row.turns])
        return read_observation(messages)

    async def step(self, action: Action) -> Step:
        found = self._game.step(action.text)
        metrics = self._game.get_metrics().items()
        told = {key: number for key, value in metrics if (number := number_in(value)) is not None}
        return Step(
            read_observation(found["observations"]),
            float(found["reward"]),
            terminated=bool(found["done"]),
            metrics=told,
        )

    async def close(self) -> None:
        if self._game is not None:
            self._game.close()


def make_environment(package: ModuleType, name: EnvironmentName, row: Row) -> Any:
    """The package's environment for the question `row`."""
    _, mark, answer = (row.answer or "").rpartition("####")
    truth = answer.strip().replace(",", "") if mark else answer
    extras: dict[str, Any] = {
        "reward_spec": {"method": "rule", "ground_truth": truth},
        "extra_info": {},
        **{key: row.columns[key] for key in ("reward_spec", "extra_info") if key in row.columns},
    }
    if "max_turns" in name.options:
        extras["max_turns"] = name.options["max_turns"]
    return package.make(name.place, env_config={}, extras=extras)


def read_observation(messages: Any) -> Observation:
    """A single message of the user is shown as text."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return Observation(messages[0]["content"])
    return Observation(messages=tuple(messages))
