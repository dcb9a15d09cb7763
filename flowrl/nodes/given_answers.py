"""Answers of the data in the place of the student's samples, for distillation on both (GKD, arXiv 2306.13649)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Prompt, Sample
from flowrl.models import Chat, Policy, check_model, tokenizer_of
from flowrl.tasks import Row, Task, load_rows
from flowrl.tasks.indexed_rows import by_id, joined


class GivenAnswers(Node):
    """Answers a share of the groups with their rows' own answers, and passes the prompts of the others on.

    Which groups depends on the run's seed and the group alone. Such a group has one sample, of its first member: the
    others are filtered as `answer_given`. Its tokens bear version -1 and no behavior logprobs, for no policy has
    sampled them; a Teacher's reward of it is the mean of the teacher's logprobs. Conversations of more than
    `max_tokens` are dropped as `too_long`.
    """

    prompts: In[Prompt]
    rollouts: Out[Sample]
    others: Out[Prompt]

    def __init__(self, task: Task, policy: Policy, *, share: float, max_tokens: int = 2048) -> None:
        self.task = task
        self.policy = policy
        self.share = share
        self.max_tokens = max_tokens

    def facts(self) -> Facts:
        return Facts(drops=True)

    def check(self, facts: object) -> list[str]:
        problems = [] if 0 < self.share <= 1 else [f"share is {self.share}; it has to be above 0, and at most 1"]
        return problems + ([f"max_tokens is {self.max_tokens}; it needs at least 2"] if self.max_tokens < 2 else [])

    def preflight(self) -> None:
        check_model(self.policy)
        if without := sum(row.answer is None for row in self._all_rows()):
            raise ConfigError(
                f"{without} rows of {self.task.name!r} have no answer to learn from; set the option answer= of the "
                "task to the column that holds it, or take rows without one out of the data (malformed=skip does not)"
            )

    def _all_rows(self) -> Sequence[Row]:
        found = load_rows(self.task, whole=True)
        return joined(found.train, found.held_out)

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        self._rows = by_id(await self.blocking(self._all_rows))

    async def run(self) -> None:
        async for prompt in self.prompts:
            if not self.is_given(prompt.group_id):
                await self.others.send(prompt)
            elif prompt.member:
                self.prompts.drop(prompt, "answer_given", state="filtered")
            else:
                await self._give(prompt)

    def is_given(self, group_id: str) -> bool:
        """Whether the group has the data's answer."""
        return random.Random(f"{self.context.seed}/{group_id}").random() < self.share

    async def _give(self, prompt: Prompt) -> None:
        sample = self.sample(prompt)
        if len(sample.token_ids) > self.max_tokens:
            self.prompts.drop(prompt, "too_long")
            return
        self.context.metric("answers_given", 1)
        self.context.metric("tokens_generated", sample.response_tokens)
        self.context.ledger.generated(sample)
        await self.rollouts.send(sample)

    def sample(self, prompt: Prompt) -> Sample:
        """The sample of a model that gives the row's answer."""
        row = self._rows[prompt.prompt_id]
        token_ids, mask = self._chat.with_tools(row.tools).completion(row.turns, row.response)
        return Sample.of(
            prompt,
            response_text=str(row.answer),
            token_ids=token_ids,
            policy_mask=mask,
            behavior_logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.full(len(token_ids), -1, np.int32),
            prompt_tokens=int(np.flatnonzero(mask)[0]),
            truncated=False,
            generator=f"{self.name}/{self.context.replica}",
            generated_s=time.time(),
        )
