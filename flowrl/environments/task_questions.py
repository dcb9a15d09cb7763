"""The questions of a task for environments that ask them, and which question an episode's row asks.

A task's rows are read in a process of their own: the libraries that read Parquet and saved datasets start threads, and
a process with threads cannot fork the processes of episodes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow, environment_rows
from flowrl.environments.protocol import Observation
from flowrl.errors import ConfigError
from flowrl.hub import pinned_commits, take_commits
from flowrl.machine.orphans import die_with_parent, has_ended
from flowrl.tasks import Row, Rows, Task, load_rows, place_of_rows
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.tasks.row_reading.rows_on_disk import join_rows, rows_by_id


def load_rows_apart(task: Task, *, whole: bool = False) -> Rows:
    """Like `load_rows`. Generated tasks stay in this process, where their verifiers find what was generated."""
    if place_of_rows(task) is None:
        return load_rows(task, whole=whole)
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=read_rows_to, args=(task, whole, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    handle = os.pidfd_open(process.pid)
    try:
        wait([mine, handle])  # its end shows in the pipe only if nothing else holds that
        if not mine.poll() and has_ended(handle):
            raise EOFError
        found, commits = pickle.loads(mine.recv_bytes())
    except EOFError:
        raise ConfigError(f"reading task {task.name!r} ended its process; see what it printed") from None
    finally:
        mine.close()
        os.close(handle)
        process.join()
    if isinstance(found, str):
        raise ConfigError(found)
    assert isinstance(found, Rows)
    take_commits(commits)
    return found


def read_rows_to(task: Task, whole: bool, target: Connection) -> None:
    die_with_parent()
    try:
        found: Rows | str = load_rows(task, whole=whole)
    except ConfigError as problem:
        found = str(problem)
    target.send_bytes(pickle.dumps((found, pinned_commits())))


ASKING = ("tools", "openrlhf", "skyrl_gym")
"""Adapters whose environments ask the questions of a task."""
SETS = "evaluate"
"""Option of their names: the sets of which an evaluation asks every question, written as for --evaluate-task."""
SET, QUESTION = "evaluation_set", "question"
"""Options of a row that asks a question of such a set: the set's name, and the id of the question's prompt."""


@dataclass(frozen=True)
class AskedSet:
    """The questions of one evaluation set, all of which may be asked."""

    task: Task
    by_id: Mapping[str, Row]


@dataclass(frozen=True)
class TaskQuestions:
    """A task's rows, and those of the sets that are evaluated."""

    rows: Rows
    sets: Mapping[str, AskedSet] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)
    """Seed of each of the environment's rows -> the row's index within its part."""

    def row_of_question(self, environment_row: EnvironmentRow) -> Row:
        """The question of an environment's row: the one that the row names, else a held-out question for a held-out
        row.

        Successive rows of a part ask successive questions of that part. Members of a group have the same row, and so
        the same question.
        """
        if SET in environment_row.options:
            return self.sets[environment_row.options[SET]].by_id[environment_row.options[QUESTION]]
        held_out = environment_row.held_out and (self.rows.held_out or not self.sets)
        rows = self.rows.held_out if held_out else self.rows.train
        return rows[self.places.get(environment_row.seed, environment_row.seed) % len(rows)]

    @property
    def all(self) -> Iterator[Row]:
        """Every row, including those of the sets."""
        return itertools.chain(
            self.rows.train, self.rows.held_out, *(asked.by_id.values() for asked in self.sets.values())
        )


def with_sets(environment: str, sets: Sequence[str]) -> str:
    """The name of an environment that can also be asked the questions of `sets`. Raises ConfigError."""
    if EnvironmentName(environment).adapter not in ASKING:
        raise ConfigError(
            f"--evaluate-task names questions, and environment {environment!r} asks no questions of a task; leave it "
            "out: --evaluate asks held-out rows of the environment"
        )
    return f"{environment}{',' if EnvironmentName(environment).options else ':'}{SETS}={list(sets)!r}"


def question_row(environment: str, asked_set: str, row: Row) -> EnvironmentRow:
    """The environment's row that asks the question `row` of the set `asked_set`."""
    base = environment_rows(environment, number=1).all[0]
    own = {key: value for key, value in base.options.items() if key != SETS}
    return EnvironmentRow(base.name, {**own, SET: asked_set, QUESTION: row.prompt_id}, int(row.prompt_id[:8], 16))


def named_task(name: EnvironmentName, source: str, *, own: Collection[str]) -> Task:
    """The task at `source` with the options of the name that are not `own`. Raises ConfigError for a mixture."""
    options = ",".join(f"{key}={value!r}" for key, value in name.options.items() if key not in (SETS, *own))
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
    sets = {}
    for text in name.options.get(SETS, ()):
        found = EvaluationSet.parse(text, like=task, samples=1)
        if found.task.reward:
            raise ConfigError(
                f"the evaluation set {found.name!r} has a reward, but environment {name.text!r} scores its answers; "
                "leave reward out, or name a check"
            )
        whole = load_rows_apart(found.task, whole=True)
        sets[found.name] = AskedSet(found.task, rows_by_id(join_rows(whole.train, whole.held_out)))
    rows = load_rows_apart(task, whole=bool(sets))
    if not rows.held_out and not sets:
        raise ConfigError(
            f"the task of environment {name.text!r} has {len(rows.train)} rows, none of them held out, so held-out "
            "episodes would have nothing to ask; add rows"
        )
    # Seeds as indices would skip the questions at the seeds of the other part.
    asking = environment_rows(name.text)
    places = {row.seed: place for part in (asking.train, asking.held_out) for place, row in enumerate(part)}
    questions = TaskQuestions(rows, sets, places)
    for row in questions.all:
        if any(turn["role"] == "assistant" for turn in row.turns):
            raise ConfigError(
                f"a row of the task of environment {name.text!r} has an earlier answer of the assistant, and an "
                "environment cannot speak for it; use rows that ask in messages of the system and the user"
            )
    return questions


def question_of(row: Row) -> Observation:
    """What the policy is shown for a row."""
    if len(row.turns) == 1 and row.turns[0]["role"] == "user":
        return Observation(row.prompt)
    return Observation(messages=row.turns)
