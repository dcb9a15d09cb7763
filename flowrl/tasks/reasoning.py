"""Every task of the `reasoning_gym` package, with its own verifier.

A row carries its index instead of the entry's metadata: whoever scores generates the entry again from
the task's name, which is exact and keeps messages small.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row
from flowrl.tasks.spec import Task

DEFAULT_SIZE = 5120
"""Entries generated, held-out ones included, unless the option `size` says otherwise."""


def rows(task: Task) -> Iterator[Row]:
    """The entries of `task`, in the order of the package."""
    for index, entry in enumerate(_dataset(task.name)):
        yield Row.ask(entry["question"], answer=entry["answer"], task=task.name, entry=index)


def score(
    prompts: Sequence[str], responses: Sequence[str], *, task: Sequence[str], entry: Sequence[int]
) -> list[float]:
    """The verifier of each row's task: 1 for right, 0 for wrong, in between where the task gives partial credit."""
    return [
        float(_dataset(name).score_answer(response.strip(), entry=_dataset(name)[index]))
        for response, name, index in zip(responses, task, entry, strict=True)
    ]


def check(task: Task) -> None:
    """Raise ConfigError if the task does not exist or refuses its options."""
    _dataset(task.name)


@functools.lru_cache(maxsize=8)
def _dataset(name: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(f"task {name!r} needs the package reasoning-gym; pip install reasoning-gym") from None
    task = Task(name)
    dataset = task.source.removeprefix("reasoning_gym/")
    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, 3) or sorted(DATASETS)[:5]
        raise ConfigError(f"reasoning_gym has no task {dataset!r} among its {len(DATASETS)}; try {', '.join(close)}")
    try:
        return reasoning_gym.create_dataset(dataset, **{"size": DEFAULT_SIZE, "seed": 0, **task.options})
    except (TypeError, AssertionError, ValueError) as refusal:
        raise ConfigError(f"task {name!r}: reasoning_gym refuses these options: {refusal}") from None
