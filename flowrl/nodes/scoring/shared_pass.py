"""Batches concurrent requests to a model into one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(eq=False)
class _Question(Generic[Q, A]):
    content: Q
    later: bool
    answer: A | None = None


class SharedPass(Generic[Q, A]):
    """Answers concurrent questions: the first caller that finds the model free runs a pass for all waiting questions.

    `answer_all(questions)` returns one answer per question, none of which is None. Each wait ends with the pass that
    answers the question. If a pass is cancelled, the other questions keep waiting for the next pass. A question that is
    asked `later` is answered by the first pass that starts when only questions of that kind wait.
    """

    def __init__(self, answer_all: Callable[[list[Q]], Awaitable[Sequence[A]]]) -> None:
        self._answer_all = answer_all
        self._waiting: list[_Question[Q, A]] = []
        self._model_is_free = asyncio.Lock()

    async def ask(self, content: Q, *, later: bool = False) -> A:
        """Return the answer; raises the exception of the pass."""
        mine: _Question[Q, A] = _Question(content, later)
        self._waiting.append(mine)
        try:
            while mine.answer is None:  # a pass that a `later` question runs may answer only other questions
                async with self._model_is_free:
                    if mine.answer is None:  # else another caller's pass answered it while this one waited
                        await self._pass()
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        assert mine.answer is not None
        return mine.answer

    async def _pass(self) -> None:
        asked = [question for question in self._waiting if not question.later] or list(self._waiting)
        answers = await self._answer_all([question.content for question in asked])
        for question, answer in zip(asked, answers, strict=True):
            question.answer = answer
        self._waiting = [question for question in self._waiting if question.answer is None]
