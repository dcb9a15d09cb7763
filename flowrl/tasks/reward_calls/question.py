"""One sample that waits for its verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.tasks.reward_calls.judge import Verdicts


@dataclass(slots=True, eq=False)
class Question:
    """What a reward is asked about one sample."""

    prompt: str
    response: str
    columns: Mapping[str, Any]
    verdict: asyncio.Future[Verdicts]


def one_of(verdicts: Verdicts, index: int) -> Verdicts:
    """The verdict about one of several samples."""
    logs = {name: (values[index],) for name, values in verdicts.logs.items()}
    return Verdicts((verdicts.rewards[index],), (verdicts.scores[index],), logs, verdicts.heads)


def fail(questions: Iterable[Question], problem: Exception) -> None:
    """Hand `problem` to those of `questions` that still wait."""
    for question in questions:
        if not question.verdict.done():
            question.verdict.set_exception(problem)
