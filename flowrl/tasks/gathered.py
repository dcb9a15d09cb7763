"""Gives a function that expects many samples those that wait: while it works on some, further ones accumulate.

Waits: a question waits for the call that has it. If a call with several samples fails, each of them is asked alone,
so that a problem with one sample does not affect the others. What is no problem with a sample, such as a function that
no longer loads, is handed to all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowrl.tasks.judge import BadReward, Columns, Verdicts, joined
from flowrl.tasks.question import Question, fail, one_of
from flowrl.tasks.reward_client import RewardClient

BATCH = 64
"""Most samples of one call."""


class Gathered:
    """A client of one function, which is called once at a time."""

    def __init__(self, client: RewardClient, *, batch: int = BATCH) -> None:
        self._client = client
        self._batch = batch
        self._waiting: list[Question] = []
        self._calls: asyncio.Task[None] | None = None

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns) -> Verdicts:
        loop = asyncio.get_running_loop()
        questions = [
            Question(prompt, response, dict(row), loop.create_future())
            for prompt, response, row in zip(prompts, responses, columns, strict=True)
        ]
        self._waiting += questions
        if self._calls is None:
            self._calls = loop.create_task(self._call())
        try:
            await asyncio.wait([question.verdict for question in questions])
        finally:
            for question in questions:
                if not question.verdict.cancel():
                    question.verdict.exception()  # mark it as retrieved; only the first one is raised
        return joined([question.verdict.result() for question in questions])

    async def close(self) -> None:
        if self._calls is not None:
            self._calls.cancel()
            await asyncio.gather(self._calls, return_exceptions=True)
        await self._client.close()

    async def _call(self) -> None:
        """Call until nothing waits."""
        try:
            await asyncio.sleep(0)  # what arrives in the same tick goes into one call
            while self._waiting:
                self._waiting = [question for question in self._waiting if not question.verdict.done()]
                questions, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
                if questions:
                    await self._answer(questions)
        finally:
            self._calls = None

    async def _answer(self, questions: Sequence[Question]) -> None:
        try:
            verdicts = await self._client.ask(
                [question.prompt for question in questions],
                [question.response for question in questions],
                [question.columns for question in questions],
            )
        except BadReward as bad:
            if len(questions) > 1:
                for question in questions:
                    await self._answer([question])
            else:
                fail(questions, bad)
            return
        except Exception as problem:  # whatever it is, those who wait have to learn of it
            fail(questions, problem)
            return
        for index, question in enumerate(questions):
            if not question.verdict.done():
                question.verdict.set_result(one_of(verdicts, index))
