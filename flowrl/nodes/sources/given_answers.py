"""Responses of the data in place of a generator's.

`GivenAnswers` replaces some of the student's samples: distillation on both (GKD, arXiv 2306.13649). `GivenResponses`
replaces all, so that rewards can score a file of responses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts
from flowrl.graph.ports import Out
from flowrl.messages import Bool, Int32, Prompt, Sample
from flowrl.models import Chat, Policy
from flowrl.nodes.sources.demonstrations import require_responses
from flowrl.nodes.sources.given_rows import GivenRows, answered_prompt
from flowrl.nodes.sources.row_checks import RowTexts, TooLong, shorten_prompt
from flowrl.nodes.sources.row_source import RowPart
from flowrl.tasks import Row, Task, load_demonstrations, load_rows
from flowrl.tasks.row_reading.message_shapes import reply_text, with_messages
from flowrl.tasks.row_reading.rows_on_disk import join_rows
from flowrl.tasks.rows import OF_TASK


class GivenAnswers(GivenRows[Sample]):
    """Answers a share of the groups with their rows' own answers, and passes on the prompts of the other groups.

    Which groups are answered depends only on the run's seed and the group. Such a group has one sample, that of its
    first member; the other members are filtered as `answer_given`. The sample's tokens have version -1 and no behavior
    logprobs (zeros), because no policy has sampled them; a Teacher's reward of the sample is the mean of the teacher's
    logprobs. `too_long` says what happens to conversations of more than `max_tokens` tokens: they are dropped as
    `too_long`, lose their beginning, or are an error. `part` says which rows the prompts come from.
    """

    rollouts: Out[Sample]
    others: Out[Prompt]

    option = "max_answer_tokens"

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
        super().__init__(task, policy, max_tokens=max_tokens, too_long=too_long)
        self.share = share
        self.part: RowPart = part

    def facts(self) -> Facts:
        return Facts(drops=True)

    def check(self, facts: object) -> list[str]:
        problems = [] if 0 < self.share <= 1 else [f"share is {self.share}; it has to be above 0, and at most 1"]
        return [*problems, *super().check(facts)]

    def check_rows(self) -> str | None:
        found = load_rows(self.task, whole=True)
        require_responses(self.task, join_rows(found.train, found.held_out))
        return None

    def given_rows(self) -> Sequence[Row]:
        found = load_rows(self.task, whole=self.part == "all")
        return join_rows(found.train, found.held_out) if self.part == "all" else found.train

    def row_texts(self, row: Row) -> RowTexts:
        return RowTexts(row.turns, (row.response,), row.tools)

    def render_row(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        token_ids, mask = chat.with_tools(row.tools).encode_completion(row.turns, row.response)
        return shorten_prompt(token_ids, mask, self.max_tokens) if self.too_long == "truncate" else (token_ids, mask)

    def make_samples(self, row: Row, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
        (prompt,) = prompts
        token_ids, mask = self.render_row(self._chat, row)
        generator = f"{self.name}/{self.context.replica}"
        text = reply_text(row.response)
        return (answered_prompt(prompt, token_ids, mask, response_text=text, generator=generator),)

    async def run(self) -> None:
        async for prompt in self.prompts:
            # Whether the group has the data's answer depends on nothing that another run could have otherwise.
            is_given = random.Random(f"{self.context.seed}/{prompt.group_id}").random() < self.share
            if not is_given:
                await self.others.send(prompt)
            elif prompt.member:
                self.prompts.drop(prompt, "answer_given", state="filtered")
            else:
                for sample in self.answer_prompts([prompt]):
                    self.context.metric("answers_given", 1)
                    await self.rollouts.send(sample)


class GivenResponses(GivenRows[Sample]):
    """Sends each prompt with the response in the column `column` of its row, as tokens of `policy`."""

    rollouts: Out[Sample]

    def __init__(self, task: Task, policy: Policy, *, column: str = "response", max_tokens: int = 1 << 20) -> None:
        super().__init__(task, policy, max_tokens=max_tokens, too_long="drop")
        self.column = column

    def facts(self) -> Facts:
        return Facts(longest_response=self.max_tokens, drops=True)

    def check_rows(self) -> str | None:
        for source in self.task.made_sources:
            raise ConfigError(
                f"{source} makes its rows, which have no responses to be scored; name a file of responses with --task"
            )
        rows = self.given_rows()
        if lacking := [row for row in rows if not isinstance(row.columns.get(self.column), str)]:
            columns = ", ".join(lacking[0].columns) or "the prompt alone"
            raise ConfigError(
                f"{len(lacking)} of {len(rows)} rows of {self.task.source!r} have no text to be scored in the column "
                f"{self.column!r} (the first has {columns}); name the column with --response"
            )
        for row in rows:
            source_task = Task(str(row.columns[OF_TASK])) if len(self.task.sources) > 1 else self.task
            told = with_messages(row.columns, (self.column,))[self.column]
            if not isinstance(told, str) and source_task.options.get("text") != "raw":
                raise ConfigError(
                    f"{row.place}: the column {self.column!r} is a list of messages as text, and a response is the "
                    "text of one message; write its content, or score the whole as plain text with FILE:text=raw"
                )
        return None

    def given_rows(self) -> Sequence[Row]:
        found = load_demonstrations(self.task, whole=True)
        return join_rows(found.train, found.held_out)

    def row_texts(self, row: Row) -> RowTexts:
        return RowTexts(row.turns, (row.columns[self.column],), row.tools)

    def render_row(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        return chat.with_tools(row.tools).encode_completion(row.turns, row.columns[self.column])

    def make_samples(self, row: Row, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
        (prompt,) = prompts
        token_ids, mask = self.render_row(self._chat, row)
        sample = answered_prompt(
            prompt,
            token_ids,
            mask,
            response_text=row.columns[self.column],
            versions=np.where(mask, self.context.start_version, -1).astype(np.int32),
            columns={name: value for name, value in prompt.columns.items() if name != self.column},
            generator=f"{self.name}/{self.context.replica}",
        )
        return (sample,)

    async def run(self) -> None:
        async for prompt in self.prompts:
            for sample in self.answer_prompts([prompt]):
                await self.rollouts.send(sample)
