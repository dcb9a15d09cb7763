"""Responses of the data in place of a generator's.

`GivenAnswers` replaces some of the student's samples: distillation on both (GKD, arXiv 2306.13649). `GivenResponses`
replaces all, so that rewards can score a file of responses.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Bool, Int32, Prompt, Sample
from flowrl.models import Chat, Policy, check_model, tokenizer_of
from flowrl.nodes.sources.demonstrations import require_responses
from flowrl.nodes.sources.row_checks import (
    DroppedRows,
    RowTexts,
    TooLong,
    refuse_long_rows,
    rendered_alone,
    require_rendered,
    shorten_prompt,
)
from flowrl.nodes.sources.row_source import RowPart
from flowrl.tasks import Row, Task, load_demonstrations, load_rows
from flowrl.tasks.row_reading.message_shapes import reply_text, with_messages
from flowrl.tasks.row_reading.rows_on_disk import join_rows, rows_by_id
from flowrl.tasks.rows import OF_TASK


class GivenAnswers(Node):
    """Answers a share of the groups with their rows' own answers, and passes on the prompts of the other groups.

    Which groups are answered depends only on the run's seed and the group. Such a group has one sample, that of its
    first member; the other members are filtered as `answer_given`. The sample's tokens have version -1 and no behavior
    logprobs (zeros), because no policy has sampled them; a Teacher's reward of the sample is the mean of the teacher's
    logprobs. `too_long` says what happens to conversations of more than `max_tokens` tokens: they are dropped as
    `too_long`, lose their beginning, or are an error. `part` says which rows the prompts come from.
    """

    prompts: In[Prompt]
    rollouts: Out[Sample]
    others: Out[Prompt]

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        share: float,
        max_tokens: int = 2048,
        too_long: TooLong = "drop",
        part: RowPart = "all",
    ) -> None:
        self.task = task
        self.policy = policy
        self.share = share
        self.max_tokens = max_tokens
        self.too_long: TooLong = too_long
        self.part: RowPart = part

    def facts(self) -> Facts:
        return Facts(drops=True)

    def check(self, facts: object) -> list[str]:
        problems = [] if 0 < self.share <= 1 else [f"share is {self.share}; it has to be above 0, and at most 1"]
        return problems + ([f"max_tokens is {self.max_tokens}; it needs at least 2"] if self.max_tokens < 2 else [])

    def preflight(self) -> str | None:
        check_model(self.policy)
        require_responses(self.task, self._all_rows())
        if self.too_long == "error" and not self.policy.built_in:
            self._refuse_long(Chat(tokenizer_of(self.policy), self.task.system_prompt))
        return require_rendered(
            self.policy, self.task, self._asked_rows(), lambda row: RowTexts(row.turns, (row.response,), row.tools)
        )

    def _asked_rows(self) -> Sequence[Row]:
        """The rows whose prompts come."""
        found = load_rows(self.task, whole=self.part == "all")
        return join_rows(found.train, found.held_out) if self.part == "all" else found.train

    def _refuse_long(self, chat: Chat) -> None:
        lengths = rendered_alone(self._asked_rows(), lambda row: len(self._render_answer(chat, row)[0]))
        refuse_long_rows(lengths, self.max_tokens, option="max_answer_tokens", task=self.task.name)

    def _all_rows(self) -> Sequence[Row]:
        found = load_rows(self.task, whole=True)
        return join_rows(found.train, found.held_out)

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        if self.too_long == "error":
            await self.blocking(self._refuse_long, self._chat)
        rows = await self.blocking(self._all_rows)
        self._rows = rows_by_id(rows)
        self._dropped = DroppedRows(
            len(rows), self.max_tokens, option="max_answer_tokens", task=self.task.name, context=self.context
        )

    async def run(self) -> None:
        async for prompt in self.prompts:
            if not self.is_given(prompt.group_id):
                await self.others.send(prompt)
            elif prompt.member:
                self.prompts.drop(prompt, "answer_given", state="filtered")
            else:
                await self._give_answer(prompt)

    def is_given(self, group_id: str) -> bool:
        """Whether the group has the data's answer."""
        return random.Random(f"{self.context.seed}/{group_id}").random() < self.share

    async def _give_answer(self, prompt: Prompt) -> None:
        sample = self._dropped.render_row(self._rows[prompt.prompt_id], partial(self.make_sample, prompt))
        if sample is None or not self._dropped.samples_fit([sample]):
            self.prompts.drop(prompt, "unrendered" if sample is None else "too_long")
            return
        self.context.metric("answers_given", 1)
        self.context.metric("tokens_generated", sample.response_tokens)
        self.context.ledger.generated(sample)
        await self.rollouts.send(sample)

    def _render_answer(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        """(ids, mask) of a prompt with its answer; the mask marks the answer."""
        token_ids, mask = chat.with_tools(row.tools).encode_completion(row.turns, row.response)
        return shorten_prompt(token_ids, mask, self.max_tokens) if self.too_long == "truncate" else (token_ids, mask)

    def make_sample(self, prompt: Prompt) -> Sample:
        """The sample that a model would make by giving the row's answer."""
        row = self._rows[prompt.prompt_id]
        token_ids, mask = self._render_answer(self._chat, row)
        return Sample.of(
            prompt,
            response_text=reply_text(row.response),
            token_ids=token_ids,
            policy_mask=mask,
            behavior_logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.full(len(token_ids), -1, np.int32),
            prompt_tokens=int(np.flatnonzero(mask)[0]),
            truncated=False,
            generator=f"{self.name}/{self.context.replica}",
            generated_s=time.time(),
        )


class GivenResponses(Node):
    """Sends each prompt with the response in the column `column` of its row, as tokens of `policy`."""

    prompts: In[Prompt]
    rollouts: Out[Sample]

    def __init__(self, task: Task, policy: Policy, *, column: str = "response", max_tokens: int = 1 << 20) -> None:
        self.task = task
        self.policy = policy
        self.column = column
        self.max_tokens = max_tokens

    def facts(self) -> Facts:
        return Facts(longest_response=self.max_tokens, drops=True)

    def preflight(self) -> str | None:
        for source in self.task.made_sources:
            raise ConfigError(
                f"{source} makes its rows, which have no responses to be scored; name a file of responses with --task"
            )
        found = load_demonstrations(self.task, whole=True)
        rows = join_rows(found.train, found.held_out)
        if lacking := [row for row in rows if not isinstance(row.columns.get(self.column), str)]:
            columns = ", ".join(lacking[0].columns) or "the prompt alone"
            raise ConfigError(
                f"{len(lacking)} of {len(rows)} rows of {self.task.source!r} have no text to be scored in the column "
                f"{self.column!r} (the first has {columns}); name the column with --response"
            )
        self._require_text(rows)
        return require_rendered(
            self.policy, self.task, rows, lambda row: RowTexts(row.turns, (row.columns[self.column],), row.tools)
        )

    def _require_text(self, rows: Sequence[Row]) -> None:
        """Raise ConfigError for a response that is a list of messages, written as text."""
        for row in rows:
            source = Task(str(row.columns[OF_TASK])) if len(self.task.sources) > 1 else self.task
            told = with_messages(row.columns, (self.column,))[self.column]
            if not isinstance(told, str) and source.options.get("text") != "raw":
                raise ConfigError(
                    f"{row.place}: the column {self.column!r} is a list of messages as text, and a response is the "
                    "text of one message; write its content, or score the whole as plain text with FILE:text=raw"
                )

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        found = await self.blocking(load_demonstrations, self.task, whole=True)
        rows = join_rows(found.train, found.held_out)
        self._rows = rows_by_id(rows)
        self._dropped = DroppedRows(
            len(rows), self.max_tokens, option="max_tokens", task=self.task.name, context=self.context
        )

    async def run(self) -> None:
        async for prompt in self.prompts:
            row = self._rows[prompt.prompt_id]
            sample = await self.blocking(self._dropped.render_row, row, partial(self.make_sample, prompt))
            if sample is None:
                self.prompts.drop(prompt, "unrendered")
                continue
            self.context.ledger.generated(sample)
            await self.rollouts.send(sample)

    def make_sample(self, prompt: Prompt) -> Sample:
        """The prompt with its row's response."""
        response: Any = prompt.columns[self.column]
        row = self._rows[prompt.prompt_id]
        token_ids, mask = self._chat.with_tools(row.tools).encode_completion(row.turns, response)
        columns = {name: value for name, value in prompt.columns.items() if name != self.column}
        return Sample.of(
            prompt,
            response_text=response,
            token_ids=token_ids,
            policy_mask=mask,
            behavior_logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.where(mask, self.context.start_version, -1).astype(np.int32),
            prompt_tokens=int((~mask).sum()),
            truncated=False,
            generator=f"{self.name}/{self.context.replica}",
            columns=columns,
            generated_s=time.time(),
        )
