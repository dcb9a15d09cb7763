"""Responses from a file in place of a generator's, so that rewards can score them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Prompt, Sample
from flowrl.models import Chat, Policy, tokenizer_of
from flowrl.nodes.sources.row_trial import RowTexts, require_rendered
from flowrl.nodes.sources.too_long import DroppedRows
from flowrl.tasks import Row, Task, load_demonstrations
from flowrl.tasks.row_reading.indexed_rows import by_id, joined
from flowrl.tasks.row_reading.shapes import with_messages
from flowrl.tasks.rows import OF_TASK


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
        rows = joined(found.train, found.held_out)
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
        rows = joined(found.train, found.held_out)
        self._rows = by_id(rows)
        self._dropped = DroppedRows(
            len(rows), self.max_tokens, option="max_tokens", task=self.task.name, context=self.context
        )

    async def run(self) -> None:
        async for prompt in self.prompts:
            row = self._rows[prompt.prompt_id]
            sample = await self.blocking(self._dropped.rendered, row, partial(self.sample, prompt))
            if sample is None:
                self.prompts.drop(prompt, "unrendered")
                continue
            self.context.ledger.generated(sample)
            await self.rollouts.send(sample)

    def sample(self, prompt: Prompt) -> Sample:
        """The prompt with its row's response."""
        response: Any = prompt.columns[self.column]
        row = self._rows[prompt.prompt_id]
        token_ids, mask = self._chat.with_tools(row.tools).completion(row.turns, response)
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
