"""Tasks: the sources of prompts, answers and verdicts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from flowrl.errors import ConfigError
from flowrl.tasks import preference_rows
from flowrl.tasks.arithmetic import Arithmetic, demonstrate
from flowrl.tasks.files import Keys, Reading, is_file_task
from flowrl.tasks.files import rows as file_rows
from flowrl.tasks.judge import place_of
from flowrl.tasks.rewards import Part, parse_reward
from flowrl.tasks.rows import OF_TASK, Row, Rows
from flowrl.tasks.sticks import SticksRules, demonstrate_move
from flowrl.tasks.task import Task

__all__ = [
    "Demonstrator",
    "Row",
    "Rows",
    "Task",
    "conversation",
    "demonstrator",
    "load_preferences",
    "load_rows",
    "reward_parts",
    "right_answer",
]

Options = TypeVar("Options")


def reward_parts(task: Task, function: str | Callable[..., Any] | None = None) -> tuple[Part, ...]:
    """The reward that scores responses to `task`: its verifier, or `function` (an object, or a reward as text)."""
    if function is None or isinstance(function, str):
        return parse_reward(function or task.verifier, verifier=task.own_verifier)
    return (Part(place_of(function), name=function.__name__),)


def conversation(task: Task, row: Row) -> list[dict[str, str]]:
    """The messages before the response to `row`, as the model receives them."""
    system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    return [*system, *(dict(turn) for turn in row.turns)]


Demonstrator = Callable[[Row, random.Random], str]


@functools.lru_cache(maxsize=8)
def load_rows(task: Task) -> Rows:
    """Read or generate all rows of `task`, once per process. Raises ConfigError if the task is invalid."""
    reading = _reading(task)
    rows = _mixed(task, reading, load_rows) if len(task.sources) > 1 else _source(task, reading)
    return _split(task, rows, reading)


@functools.lru_cache(maxsize=8)
def load_preferences(task: Task, kind: preference_rows.Kind) -> Rows:
    """The pairs of `task`, or its labelled completions (a pair makes two); the split is by prompt.

    `arithmetic` prefers right answers to answers without carrying.
    """
    reading = _reading(task)
    rows: Iterable[Row]
    if len(task.sources) > 1:
        rows = _mixed(task, reading, functools.partial(load_preferences, kind=kind))
    elif task.source == "arithmetic":
        rows = preference_rows.careless(_source(task, reading), kind)
    elif is_file_task(task.path):
        rows = preference_rows.rows(task.path, _options(Keys, task), reading, kind)
    else:
        raise ConfigError(
            f"task {task.name!r} has no preferences: it is neither arithmetic nor a .jsonl or .parquet file or dataset "
            "directory on this machine; name one with the columns chosen and rejected, or completion and label"
        )
    return _split(task, rows, reading)


def _reading(task: Task) -> Reading:
    return Reading(str(task.options.get("malformed", "stop")) if len(task.sources) == 1 else "stop")


def _split(task: Task, found: Iterable[Row], reading: Reading) -> Rows:
    rows = Rows.split(found)
    if not rows.train and not rows.held_out:
        skipped = f", {len(reading.skipped)} are skipped: {reading.skipped[0]}" if reading.skipped else ""
        raise ConfigError(f"task {task.name!r} has no rows at all{skipped}; write one problem per line")
    if not rows.train:
        raise ConfigError(f"task {task.name!r} has no training rows ({len(rows.held_out)} are held out); add rows")
    return dataclasses.replace(rows, skipped=tuple(reading.skipped))


def _mixed(task: Task, reading: Reading, load: Callable[[Task], Rows]) -> Iterator[Row]:
    """The rows of all sources; a column of each row names its source."""
    for term in task.sources:
        found = load(Task(term.text))
        reading.skipped += found.skipped
        for row in (*found.train, *found.held_out):
            yield dataclasses.replace(row, columns={**row.columns, OF_TASK: term.text})


def demonstrator(task: Task) -> Demonstrator:
    """The function that gives a warm start the answers to imitate: the task's own, at the quality that it provides."""
    if len(task.sources) > 1:
        return lambda row, rng: demonstrator(Task(row.columns[OF_TASK]))(row, rng)
    if task.source == "sticks":
        return functools.partial(demonstrate_move, _options(SticksRules, task))
    return demonstrate if task.source == "arithmetic" else right_answer


def right_answer(row: Row, rng: random.Random) -> str:
    """The answer of a perfect teacher."""
    return str(row.answer)


def _source(task: Task, reading: Reading) -> Iterable[Row]:
    if task.source == "arithmetic":
        return _options(Arithmetic, task).rows()
    if task.source == "sticks":
        return _options(SticksRules, task).rows()
    if task.source.startswith("reasoning_gym/"):
        from flowrl.tasks import reasoning

        return reasoning.rows(task)
    if is_file_task(task.path):
        return file_rows(task.path, _options(Keys, task), reading)
    close = difflib.get_close_matches(task.source, ["arithmetic", "sticks", "reasoning_gym/chain_sum"], 1, 0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"there is no task {task.source!r}: it is neither arithmetic, nor sticks, nor reasoning_gym/NAME, nor a "
        f".jsonl or .parquet file or dataset directory on this machine.{hint}"
    )


def _options(kind: type[Options], task: Task) -> Options:
    """`task.options` as the dataclass `kind`; names and types are checked."""
    fields: Mapping[str, Any] = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in task.options.items():
        if key not in fields:
            raise ConfigError(f"task {task.name!r} has no option {key!r}; it has {', '.join(fields)}")
        wanted = type(fields[key].default)
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise ConfigError(f"task {task.name!r}: option {key} is {value!r} and needs {wanted.__name__}")
    return kind(**task.options)
