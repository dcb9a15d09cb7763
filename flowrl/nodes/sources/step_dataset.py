"""Responses whose steps are labelled right or wrong, as samples that a process reward model is trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Group, Prompt, Trainable
from flowrl.models import Chat, Policy, check_model, tokenizer_of
from flowrl.models.tokens.text_tokens import require_steps, separator_of, split_steps, step_tokens
from flowrl.nodes.sources.demonstrations import HeldOutBatch
from flowrl.nodes.sources.row_checks import (
    DroppedRows,
    RowTexts,
    TooLong,
    refuse_long_rows,
    rendered_alone,
    require_rendered,
)
from flowrl.tasks import Row, Task, load_demonstrations
from flowrl.tasks.row_reading.rows_on_disk import join_rows, lowest_rows, rows_by_id

STEPS, LABELS = ("steps", "completions"), "labels"
"""Columns of a row: its steps, a list of texts or one text with separators, and a label for each."""


class StepDataset(Node):
    """Sends each prompt with the steps of its row.

    `too_long` says what happens to samples of more than `max_tokens` tokens: they are dropped as `too_long`, lose the
    beginning of their prompt, or are an error.
    """

    prompts: In[Prompt]
    groups: Out[Group]

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        separator: str = "\\n",
        max_tokens: int = 2048,
        too_long: TooLong = "drop",
    ) -> None:
        self.task = task
        self.policy = policy
        self.separator = separator_of(separator)
        self.max_tokens = max_tokens
        self.too_long: TooLong = too_long

    def facts(self) -> Facts:
        return Facts(group_size=1, longest_response=self.max_tokens, drops=True, keeps_lineage=False)

    def preflight(self) -> str | None:
        check_model(self.policy)
        found = load_demonstrations(self.task)
        rows = join_rows(found.train, found.held_out)
        for row in rows:
            labelled_steps(row, self.separator)
        if self.too_long == "error" and not self.policy.built_in:
            self._refuse_long(Chat(tokenizer_of(self.policy), self.task.system_prompt))
        return require_rendered(self.policy, self.task, rows, self.row_texts)

    def row_texts(self, row: Row) -> RowTexts:
        """What is rendered of a row."""
        return RowTexts(row.turns, tools=row.tools, steps=tuple(labelled_steps(row, self.separator)[0]))

    def _refuse_long(self, chat: Chat) -> None:
        found = load_demonstrations(self.task)
        rows = join_rows(found.train, found.held_out)
        lengths = rendered_alone(
            rows, lambda row: len(self.make_sample(chat, row, sample_id="", group_id="").token_ids)
        )
        refuse_long_rows(lengths, self.max_tokens, option="max_length", task=self.task.name)

    def make_sample(self, chat: Chat, row: Row, **fields: Any) -> Trainable:
        """The sample of a row; with `too_long="truncate"`, without as much of its prompt's beginning as is too long."""
        most = self.max_tokens if self.too_long == "truncate" else None
        return step_sample(chat, row, self.separator, most=most, **fields)

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        if self.too_long == "error":
            await self.blocking(self._refuse_long, self._chat)
        found = await self.blocking(load_demonstrations, self.task)
        self._rows = rows_by_id(found.train)
        self._dropped = DroppedRows(
            len(found.train), self.max_tokens, option="max_length", task=self.task.name, context=self.context
        )

    async def run(self) -> None:
        async for prompt in self.prompts:
            fields = {name: getattr(prompt, name) for name in ("sample_id", "group_id", "epoch", "member")}
            row = self._rows[prompt.prompt_id]
            sample = self._dropped.render_row(row, partial(self.make_sample, self._chat, row, **fields))
            if sample is None or not self._dropped.samples_fit([sample]):
                self.prompts.drop(prompt, "unrendered" if sample is None else "too_long")
                continue
            self.context.metric("tokens_generated", sample.response_tokens)
            self.context.ledger.generated(sample)
            await self.groups.send(Group(prompt.group_id, (sample,), 1))


class HeldOutSteps(HeldOutBatch):
    """Sends up to `num_rows` held-out rows as one batch, on which a trainer is evaluated."""

    option = "max_length"

    def __init__(self, data: StepDataset, *, num_rows: int = 256, token_budget: int = 8192) -> None:
        super().__init__(num_rows=num_rows, token_budget=token_budget, max_tokens=data.max_tokens)
        self.data = data

    def preflight(self) -> None:
        if not load_demonstrations(self.data.task).held_out:
            raise ConfigError(
                f"{self.data.task.name!r} has no held-out rows to judge by (one prompt in eight is held out); add rows"
            )

    def render_samples(self) -> list[Trainable]:
        chat = Chat(tokenizer_of(self.data.policy, progress=self.context.progress), self.data.task.system_prompt)
        rows = lowest_rows(load_demonstrations(self.data.task).held_out, self.num_rows)
        made = rendered_alone(
            rows, lambda row: self.data.make_sample(chat, row, sample_id=row.prompt_id, group_id=row.prompt_id)
        )
        return [sample for sample in made if len(sample.token_ids) <= self.data.max_tokens]


def labelled_steps(row: Row, separator: str) -> tuple[list[str], list[float]]:
    """The steps of a row and their labels. Raises ConfigError for a row without valid columns for them."""
    steps: Any = next((row.columns[name] for name in STEPS if name in row.columns), None)
    if isinstance(steps, str):
        steps = split_steps(steps, separator)
    labels: Any = row.columns.get(LABELS)
    listed = isinstance(steps, Sequence) and bool(steps) and all(isinstance(step, str) for step in steps)
    if not listed or not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != len(steps):
        raise ConfigError(
            f"the row of the prompt {row.prompt[:60]!r} has no `steps` (a list of texts, or one text with separators) "
            f"and as many `labels`: it has {', '.join(row.columns) or 'the prompt alone'}"
        )
    if not all(isinstance(label, bool | int | float) and 0 <= label <= 1 for label in labels):
        raise ConfigError(f"the row of the prompt {row.prompt[:60]!r} has the labels {list(labels)}; they are 0 to 1")
    return list(steps), [float(label) for label in labels]


def step_sample(chat: Chat, row: Row, separator: str, *, most: int | None = None, **fields: Any) -> Trainable:
    """The sample of a row: its mask marks one token for each step, and `returns` has the labels there. Raises
    Unrendered.

    If it has more than `most` tokens, it loses the excess at its beginning, unless that is the whole prompt or more.
    """
    steps, labels = labelled_steps(row, separator)
    chat = chat.with_tools(row.tools)
    require_steps(chat.tokenizer, steps)
    token_ids, mask = step_tokens(chat, row.turns, steps, separator)
    excess = 0 if most is None else len(token_ids) - most
    if 0 < excess < len(chat.encode_prompt(row.turns)[1]):
        token_ids, mask = token_ids[excess:], mask[excess:]
    returns = np.zeros(token_ids.size, np.float32)
    returns[mask] = labels
    return Trainable(
        prompt_id=row.prompt_id,
        epoch=fields.pop("epoch", 0),
        member=fields.pop("member", 0),
        group_size=1,
        prompt_text=row.prompt,
        response_text=separator.join(steps),
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=np.zeros(token_ids.size, np.float32),
        versions=np.full(token_ids.size, -1, np.int32),
        prompt_tokens=int(np.argmax(mask)),
        truncated=False,
        generator="",
        generated_s=time.time(),
        advantages=mask.astype(np.float32),
        returns=returns,
        **fields,
    )
