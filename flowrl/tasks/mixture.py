"""Several sources in one task: `0.7*problems.jsonl:answer=solution + 0.3*arithmetic`.

An epoch holds rows of each source in proportion to its weight, none twice. So it contains all rows of the
source that is smallest relative to its weight; of the others each epoch draws another part. The verifier of
a row's own source, named by its column `of_task`, judges the row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from flowrl.tasks.indexed_rows import sources
from flowrl.tasks.judge import load_judge
from flowrl.tasks.rows import Row
from flowrl.tasks.task import Task

ROUNDING = 1e-9  # `size * weight` may be slightly below an integer; `int` would then lose a row


def mixed_order(rows: Sequence[Row], task: Task, seed: int, epoch: int) -> list[int]:
    """The rows of an epoch of a mixture, by index and in order; (seed, epoch) determine it."""
    rng = random.Random(f"{seed}/{epoch}")
    of_source: dict[str, list[int]] = {term.text: [] for term in task.sources}
    for index, source in enumerate(sources(rows)):
        of_source[source].append(index)
    size = min(len(of_source[term.text]) / term.weight for term in task.sources)
    order: list[int] = []
    for term in task.sources:
        order += rng.sample(of_source[term.text], int(size * term.weight + ROUNDING))
    rng.shuffle(order)
    return order


def score(
    prompts: Sequence[str], responses: Sequence[str], *, of_task: Sequence[str], **columns: Sequence[Any]
) -> dict[str, list[float]]:
    """Score each response with the verifier of its source."""
    rewards, scores = [0.0] * len(responses), [0.0] * len(responses)
    for name in dict.fromkeys(of_task):
        mine = [index for index, of in enumerate(of_task) if of == name]
        verdicts = load_judge(Task(name).own_verifier)(
            [prompts[index] for index in mine],
            [responses[index] for index in mine],
            [{column: values[index] for column, values in columns.items()} for index in mine],
        )
        for index, reward, raw in zip(mine, verdicts.rewards, verdicts.scores, strict=True):
            rewards[index], scores[index] = reward, raw
    return {"rewards": rewards, "scores": scores}
