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
    def maker(cls, name: EnvironmentName) -> Callable[[], OpenrlhfEnv]:
        """Imports the file and reads the task. Raises ConfigError."""
        kind = _agent_class(name)
        questions = load_questions(name, asked_task(name))
        return lambda: cls(kind, questions)

    def __init__(self, kind: type, questions: TaskQuestions) -> None:
        self._kind, self._questions = kind, questions
        self._sampling: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        row = self._questions.row_of_question(EnvironmentRow(task["name"], task["options"], seed))
        self._agent = await make_agent(self._kind)
        self._asked = {"prompt": row.prompt, "label": row.columns.get("answer", "")}
        found = await self._agent.reset({"observation": row.prompt, **self._asked})
        self._said = observation_text("reset", found, "observation", ("observation",))
        return question_of(row) if self._said == row.prompt else Observation(self._said)

    async def step(self, action: Action) -> Step:
        told = {"observation": self._said, "action": action.text}
        texts = {f"{name}_text": text for name, text in told.items()}
        sampling = {"sampling_params": self._sampling}
        step = self._agent.step
        found = await step(
            told | texts | self._asked | sampling, **(sampling if takes_argument(step, *sampling) else {})
        )
        feedback = observation_text("step", found, "environment_feedback", RETURNED)
        if found.get("environment_images"):
            raise MalformedValue("the agent's step returned environment_images; images are not supported")
        self._said += action.text + feedback
        self._sampling = found.get("sampling_params")
        return Step(
            Observation(feedback),
            found["rewards"],
            terminated=bool(found["done"]),
            metrics=step_metrics(found),
            max_tokens=getattr(self._sampling, "max_tokens", None),
            stop=stop_texts(self._sampling),
        )


def _agent_class(name: EnvironmentName) -> type:
    for module in MODULES:
        sys.modules[module] = ModuleType(module)
    agent = sys.modules[MODULES[-1]]
    for base in (AgentInstanceBase, AgentExecutorBase):
        setattr(agent, base.__name__, base)
    for executor in ("SingleTurnAgentExecutor", "MultiTurnAgentExecutor"):
        setattr(agent, executor, AgentExecutorBase)
    found = vars(load_user_module(name.place, owner="environment"))
    kinds = [kind for kind in found.values() if _is_agent(kind)]
    kind = found.get("AgentInstance", kinds[0] if len(kinds) == 1 else None)
    if not isinstance(kind, type) or not inspect.iscoroutinefunction(getattr(kind, "step", None)):
        raise ConfigError(
            f"{name.place} has no agent; define class AgentInstance(AgentInstanceBase) with async def reset and step"
        )
    return kind


def _is_agent(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AgentInstanceBase) and value is not AgentInstanceBase


async def make_agent(kind: Any) -> Any:
    """An object of the class. Its `__init__` may be async: Ray, with which the package makes the object, allows
    that."""
    if not inspect.iscoroutinefunction(kind.__init__):
        return kind()
    agent = kind.__new__(kind)
    await agent.__init__()
    return agent


def takes_argument(method: Callable[..., Any], name: str) -> bool:
    """Whether `method` takes a keyword argument of that name."""
    kinds = {one.name: one.kind for one in inspect.signature(method).parameters.values()}
    return name in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def observation_text(method: str, found: Any, key: str, needed: tuple[str, ...]) -> str:
    """The text that a method returned under `key`. Raises MalformedValue if it is no text, or a `needed` key is
    missing."""
    if not isinstance(found, Mapping) or any(name not in found for name in needed):
        raise MalformedValue(f"the agent's {method} did not return a mapping with {', '.join(needed)}")
    if not isinstance(found[key], str):
        raise MalformedValue(f"the agent's {method} returned {type(found[key]).__name__} as {key}; it has to be text")
    return str(found[key])


def step_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    told = dict(found.get("extra_logs") or {})
    if "scores" in found:
        told["score"] = found["scores"]
    return {str(key): number for key, value in told.items() if (number := number_in(value)) is not None}


def stop_texts(sampling: Any) -> tuple[str, ...]:
    stop = getattr(sampling, "stop", None) or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
