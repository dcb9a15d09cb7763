"""Several sources in one task: `0.7*problems.jsonl:answer=solution + 0.3*arithmetic`.

An epoch holds rows of each source in proportion to its weight, and no row twice. So it contains all rows of the source
that is smallest relative to its weight, and a random part of each other source, drawn anew for each epoch. If a share
is not a whole number of rows, some epochs have one row more than others; the first epoch has rows of every source. A
row is judged by the verifier of its own source, which its column `of_task` names.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.reward_calls.judge import Judge, load_judge
from flowrl.tasks.row_reading.rows_on_disk import pick_rows, row_sources
from flowrl.tasks.rows import OF_TASK, Row
from flowrl.tasks.task import Task

ROUNDING = 1e-9  # rounding may put `size * weight` slightly above or below an integer


def mixed_order(rows: Sequence[Row], task: Task, seed: int, epoch: int) -> list[int]:
    """The indices of the rows of one epoch of a mixture, in order; (seed, epoch) determine them."""
    rng = random.Random(f"{seed}/{epoch}")
    of_source = _indices_by_source(rows, task)
    size = min(len(of_source[term.text]) / term.weight for term in task.sources)
    order: list[int] = []
    for term in task.sources:
        order += rng.sample(of_source[term.text], _num_rows_in(epoch, size * term.weight))
    rng.shuffle(order)
    return order


def _num_rows_in(epoch: int, share: float) -> int:
    """Number of rows of a source in this epoch. The sum over all epochs so far is that of the shares, rounded up."""
    if abs(share - round(share)) < ROUNDING:
        return round(share)
    return math.ceil((epoch + 1) * share - ROUNDING) - math.ceil(epoch * share - ROUNDING)


def first_rows(rows: Sequence[Row], task: Task, most: int | None) -> Sequence[Row]:
    """The first `most` rows; from a mixture the first ones of each source, in shares by weight, at least one of each.

    Raises ConfigError for a mixture with a source that has no row.
    """
    if len(task.sources) < 2:
        return rows[:most]
    of_source = _indices_by_source(rows, task)
    if without := [name for name, indices in of_source.items() if not indices]:
        raise ConfigError(
            f"task {task.name!r} has no row of {without[0]} to ask: they are all held out, or left out because they "
            "repeat prompts of another source; add rows to it, or leave it out"
        )
    if most is None or most >= len(rows):
        return rows
    shares = _rows_by_share(task, most)
    return pick_rows(rows, [n for term in task.sources for n in of_source[term.text][: shares[term.text]]])


def _rows_by_share(task: Task, most: int) -> dict[str, int]:
    """How many of `most` rows each source has. Raises ConfigError if there is not one for each."""
    if most < len(task.sources):
        raise ConfigError(
            f"num_prompts is {most}, and task {task.name!r} has {len(task.sources)} sources; ask for as many, or more"
        )
    whole = sum(term.weight for term in task.sources)
    exact = {term.text: most * term.weight / whole for term in task.sources}
    found = {name: max(1, int(share + ROUNDING)) for name, share in exact.items()}
    while (more := most - sum(found.values())) != 0:
        step = 1 if more > 0 else -1
        may_change = [name for name in found if found[name] + step >= 1]
        found[max(may_change, key=lambda name: step * (exact[name] - found[name]))] += step
    return found


def _indices_by_source(rows: Sequence[Row], task: Task) -> dict[str, list[int]]:
    """The indices of the rows of each source."""
    found: dict[str, list[int]] = {term.text: [] for term in task.sources}
    for index, source in enumerate(row_sources(rows)):
        found[source].append(index)
    return found


def score(
    prompts: Sequence[str], responses: Sequence[str], *, of_task: Sequence[str], **columns: Sequence[Any]
) -> dict[str, Any]:
    """Score each response with the verifier of its source; its logs are 0 for responses to other sources."""
    rewards, scores = [0.0] * len(responses), [0.0] * len(responses)
    logs: dict[str, list[float]] = {}
    for name in dict.fromkeys(of_task):
        mine = [index for index, of in enumerate(of_task) if of == name]
        verdicts = _judge_of(name)(
            [prompts[index] for index in mine],
            [responses[index] for index in mine],
            [{column: values[index] for column, values in columns.items()} for index in mine],
        )
        for index, reward, raw in zip(mine, verdicts.rewards, verdicts.scores, strict=True):
            rewards[index], scores[index] = reward, raw
        for figure, values in verdicts.logs.items():
            of_all = logs.setdefault(figure, [0.0] * len(responses))
            for index, value in zip(mine, values, strict=True):
                of_all[index] = value
    return {"rewards": rewards, "scores": scores, "logs": logs}


@functools.cache
def _judge_of(source: str) -> Judge:
    return load_judge(Task(source).own_verifier)


def _check_columns(columns: Mapping[str, Any], place: str) -> None:
    """Raise ConfigError if a row lacks a column that the verifier of its source needs."""
    _judge_of(columns[OF_TASK]).check_columns(columns, place)


score.check_columns = _check_columns  # type: ignore[attr-defined]
score_with_code = score
"""The same function for a mixture with check=code, whose programs may run longer, and several at a time."""
