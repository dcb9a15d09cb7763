"""The questions of a task, for environments that ask them: which one an episode's row asks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow
from flowrl.environments.protocol import Observation
from flowrl.environments.rows_apart import load_rows_apart
from flowrl.errors import ConfigError
from flowrl.tasks import Row, Rows, Task


@dataclass(frozen=True)
class TaskQuestions:
    """A task's rows."""

    rows: Rows

    def row(self, environment_row: EnvironmentRow) -> Row:
        """The question of an environment's row: a held-out one for a held-out row.

        Members of a group have one row, and so one question.
        """
        rows = self.rows.held_out if environment_row.held_out else self.rows.train
        return rows[environment_row.seed % len(rows)]


def named_task(name: EnvironmentName, source: str, *, own: Collection[str]) -> Task:
    """The task at `source` with the options of the name that are not `own`. Raises ConfigError for a mixture."""
    options = ",".join(f"{key}={value!r}" for key, value in name.options.items() if key not in own)
    task = Task(f"{source}:{options}" if options else source)
    if len(task.sources) > 1:
        raise ConfigError(f"environment {name.text!r} mixes several tasks; name one")
    return task


def asked_task(name: EnvironmentName, *, own: Collection[str] = ()) -> Task:
    """The task that the option `task` names. Raises ConfigError."""
    source = name.options.get("task")
    if not source or not isinstance(source, str):
        raise ConfigError(f"environment {name.text!r} has no questions; write :task=arithmetic, or task=FILE.jsonl")
    return named_task(name, source, own=("task", *own))


def load_questions(name: EnvironmentName, task: Task) -> TaskQuestions:
    """Reads the task. Raises ConfigError for rows that an environment cannot ask."""
    rows = load_rows_apart(task)
    if not rows.held_out:
        raise ConfigError(
            f"the task of environment {name.text!r} has {len(rows.train)} rows, none of them held out, so held-out "
            "episodes would have nothing to ask; add rows"
        )
    for row in (*rows.train, *rows.held_out):
        if any(turn["role"] == "assistant" for turn in row.turns):
            raise ConfigError(
                f"a row of the task of environment {name.text!r} has an earlier answer of the assistant, and an "
                "environment cannot speak for it; use rows that ask in messages of the system and the user"
            )
    return TaskQuestions(rows)


def question_of(row: Row) -> Observation:
    """What the policy is shown of a row."""
    if len(row.turns) == 1 and row.turns[0]["role"] == "user":
        return Observation(row.prompt)
    return Observation(messages=row.turns)
