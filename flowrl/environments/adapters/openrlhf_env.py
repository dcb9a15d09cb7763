"""`openrlhf/FILE.py:task=TASK`: an agent's file of OpenRLHF, played without that package.

The file defines `AgentInstance`, a class with `reset(states)` and `step(states)`, or another class that derives from
`AgentInstanceBase`. What the file imports from `openrlhf.utils.agent` is a stand-in.

The states have the names that all releases of the package use. `reset` receives the question of a task as `observation`
and `prompt`, and the row's answer as `label`. `step` receives `prompt` and `label` again, everything said so far as
`observation_text` and `observation`, the reply as `action_text` and `action`, and `sampling_params` (None, or the value
that the last step returned), which is also passed as an argument if the method takes it. The `environment_feedback`
that `step` returns is the user's next message: the model's own chat template renders it, so the file adds no markup.
`rewards` add up, `scores` and the numbers of `extra_logs` are metrics, and the fields `max_tokens` and `stop` of
`sampling_params` apply to the next reply. Images are refused. All options except `task` belong to the task.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow
from flowrl.environments.protocol import Action, Env, MalformedValue, Observation, Step
from flowrl.environments.task_questions import TaskQuestions, asked_task, load_questions, question_of
from flowrl.errors import ConfigError
from flowrl.messages.base import number_in
from flowrl.tasks.user_code import load_user_module

MODULES = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
RETURNED = ("rewards", "environment_feedback", "done")
"""What `step` has to return."""


class AgentInstanceBase:
    """The base of an agent's class, in place of the package's."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The first observation: the question, unchanged."""
        return states


class AgentExecutorBase:
    """A base from which a file may derive a class that executes its agent. Here the environment's node executes it."""


class OpenrlhfEnv(Env):
    """One question, asked by an agent's file."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], OpenrlhfEnv]:
        """Imports the file and reads the task. Raises ConfigError."""
        for module in MODULES:
            sys.modules[module] = ModuleType(module)
        bases = {base.__name__: base for base in (AgentInstanceBase, AgentExecutorBase)}
        executors = dict.fromkeys(("SingleTurnAgentExecutor", "MultiTurnAgentExecutor"), AgentExecutorBase)
        vars(sys.modules[MODULES[-1]]).update(bases | executors)
        found = vars(load_user_module(name.place, owner="environment"))
        agents = [one for one in found.values() if isinstance(one, type) and issubclass(one, AgentInstanceBase)]
        agents = [one for one in agents if one is not AgentInstanceBase]
        kind = found.get("AgentInstance", agents[0] if len(agents) == 1 else None)
        if not isinstance(kind, type) or not inspect.iscoroutinefunction(getattr(kind, "step", None)):
            raise ConfigError(
                f"{name.place} has no agent; define class AgentInstance(AgentInstanceBase) with async def reset and "
                "step"
            )
        questions = load_questions(name, asked_task(name))
        return lambda: cls(kind, questions)

    def __init__(self, kind: Any, questions: TaskQuestions) -> None:
        self._kind, self._questions = kind, questions
        self._sampling: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        row = self._questions.row_of_question(EnvironmentRow(task["name"], task["options"], seed))
        if inspect.iscoroutinefunction(self._kind.__init__):  # Ray, with which the package makes it, allows that
            self._agent = self._kind.__new__(self._kind)
            await self._agent.__init__()
        else:
            self._agent = self._kind()
        self._asked = {"prompt": row.prompt, "label": row.columns.get("answer", "")}
        found = await self._agent.reset({"observation": row.prompt, **self._asked})
        self._said = observation_text("reset", found, "observation", ("observation",))
        return question_of(row) if self._said == row.prompt else Observation(self._said)

    async def step(self, action: Action) -> Step:
        told = {"observation": self._said, "action": action.text}
        texts = {f"{name}_text": text for name, text in told.items()}
        sampling = {"sampling_params": self._sampling}
        kinds = {one.name: one.kind for one in inspect.signature(self._agent.step).parameters.values()}
        taken = "sampling_params" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
        found = await self._agent.step(told | texts | self._asked | sampling, **(sampling if taken else {}))
        feedback = observation_text("step", found, "environment_feedback", RETURNED)
        if found.get("environment_images"):
            raise MalformedValue("the agent's step returned environment_images; images are not supported")
        self._said += action.text + feedback
        self._sampling = found.get("sampling_params")
        stop = getattr(self._sampling, "stop", None) or ()
        logs = {**(found.get("extra_logs") or {}), **({"score": found["scores"]} if "scores" in found else {})}
        return Step(
            Observation(feedback),
            found["rewards"],
            terminated=bool(found["done"]),
            metrics={str(key): value for key, one in logs.items() if (value := number_in(one)) is not None},
            max_tokens=getattr(self._sampling, "max_tokens", None),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )


def observation_text(method: str, found: Any, key: str, needed: tuple[str, ...]) -> str:
    """The text that a method returned under `key`. Raises MalformedValue if it is no text, or a `needed` key is
    missing."""
    if not isinstance(found, Mapping) or any(name not in found for name in needed):
        raise MalformedValue(f"the agent's {method} did not return a mapping with {', '.join(needed)}")
    if not isinstance(found[key], str):
        raise MalformedValue(f"the agent's {method} returned {type(found[key]).__name__} as {key}; it has to be text")
    return str(found[key])
