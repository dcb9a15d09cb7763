"""`reasoning_gym/NAME`: a problem of the package, with several tries and feedback on each.

The row's seed determines the problem. A try that is not right is answered with feedback and the number of tries left.
The episode ends with the first right try or the last one, and its reward is that try's score: 1 is right, values in
between are partial credit.

Options of the adapter are `tries` (3), `feedback` (`wrong`, the default, says that a try is wrong; `score` also gives
its score) and `extract`, as for tasks. All other options are those of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowrl.environments.environment_row import EnvironmentName
from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.errors import ConfigError
from flowrl.tasks.reasoning import check_reasoning_task, make_problem
from flowrl.tasks.task import Task

OWN = ("tries", "feedback")
OF_ROWS = ("seed", "size")
FEEDBACKS = ("wrong", "score")


class ReasoningEnv(Env):
    """One problem."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], ReasoningEnv]:
        """Imports the package. Raises ConfigError if the package, the problem or an option does not exist."""
        cls(name)
        check_reasoning_task(reasoning_task(name))
        return lambda: cls(name)

    def __init__(self, name: EnvironmentName) -> None:
        self._task = reasoning_task(name)
        for key in OF_ROWS:
            if key in name.options:
                raise ConfigError(f"environment {name.text!r} has the option {key}, which its rows decide; remove it")
        self._tries = name.options.get("tries", 3)
        self._feedback = name.options.get("feedback", "wrong")
        if not isinstance(self._tries, int) or self._tries < 1:
            raise ConfigError(f"environment {name.text!r}: tries is {self._tries!r}; it has to be at least 1")
        if self._feedback not in FEEDBACKS:
            raise ConfigError(
                f"environment {name.text!r}: feedback is {self._feedback!r}; it has to be {' or '.join(FEEDBACKS)}"
            )

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._problem = make_problem(self._task, seed)
        self._left = self._tries
        return Observation(self._problem.question)

    async def step(self, action: Action) -> Step:
        self._left -= 1
        score = self._problem.score(action.text)
        over = score >= 1.0 or self._left == 0
        told = f" Its score is {score:.2f} of 1." if self._feedback == "score" else ""
        return Step(
            Observation("" if over else f"That is not right.{told} Tries left: {self._left}."),
            reward=score if over else 0.0,
            terminated=over,
            metrics={"score": score, "tries": float(self._tries - self._left)},
        )


def reasoning_task(name: EnvironmentName) -> Task:
    """The task with the package's own options."""
    options = ",".join(f"{key}={value!r}" for key, value in name.options.items() if key not in OWN)
    return Task(f"reasoning_gym/{name.place}:{options}" if options else f"reasoning_gym/{name.place}")
