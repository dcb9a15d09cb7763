"""Passes the waiting samples together to a function that expects many: while it works on some, others accumulate.

Waits: a question waits for the call that contains it. If a call with several samples fails, each sample is asked
separately, so that a problem with one sample does not affect the others. A problem that is not due to a sample, such as
a function that no longer loads, is raised for all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from flowrl.tasks.reward_calls.judge import BadReward, RowColumns, Verdicts, joined
from flowrl.tasks.reward_calls.question import Question, fail, one_of
from flowrl.tasks.reward_calls.reward_client import RewardClient

BATCH = 64
"""Maximum number of samples in one call."""


class Gathered:
    """Clients of one function, each with at most one call at a time; they share the waiting questions."""

    def __init__(self, clients: Sequence[RewardClient], *, batch: int = BATCH) -> None:
        self._clients = tuple(clients)
        self._batch = batch
        self._waiting: list[Question] = []
        self._free = list(clients)
        self._num_called = 0
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        loop = asyncio.get_running_loop()
        questions = [
            Question(prompt, response, dict(row), loop.create_future())
            for prompt, response, row in zip(prompts, responses, columns, strict=True)
        ]
        self._waiting += questions
        for _ in questions[: len(self._free)]:
            self._calls.add(loop.create_task(self._call(self._free.pop())))
        try:
            await asyncio.wait([question.verdict for question in questions])
        finally:
            for question in questions:
                if not question.verdict.cancel():
                    question.verdict.exception()  # mark it as retrieved; only the first one is raised
        return joined([question.verdict.result() for question in questions])

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _call(self, client: RewardClient) -> None:
        """Call `client` until nothing waits."""
        try:
            await asyncio.sleep(0)  # what arrives in the same tick goes into one call
            while questions := self._share():
                self._num_called += 1
                try:
                    await self._answer(client, questions)
                finally:
                    self._num_called -= 1
        finally:
            self._free.append(client)
            self._calls.discard(asyncio.current_task())

    def _share(self) -> Sequence[Question]:
        """The waiting questions that one client takes; as many are left for each other client without a call."""
        self._waiting = [question for question in self._waiting if not question.verdict.done()]
        number = min(self._batch, math.ceil(len(self._waiting) / (len(self._clients) - self._num_called)))
        questions, self._waiting = self._waiting[:number], self._waiting[number:]
        return questions

    async def _answer(self, client: RewardClient, questions: Sequence[Question]) -> None:
        try:
            verdicts = await client.ask(
                [question.prompt for question in questions],
                [question.response for question in questions],
                [question.columns for question in questions],
            )
        except BadReward as bad:
            if len(questions) > 1:
                for question in questions:
                    await self._answer(client, [question])
            else:
                fail(questions, bad)
            return
        except Exception as problem:  # every waiting question has to receive the error
            fail(questions, problem)
            return
        for index, question in enumerate(questions):
            if not question.verdict.done():
                question.verdict.set_result(one_of(verdicts, index))
