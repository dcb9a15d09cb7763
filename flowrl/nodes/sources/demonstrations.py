"""Demonstrations for SFT: the task's own answers replace a generator's responses.

No policy has sampled their tokens. They are recorded in the same ledger as rollouts, so an SFT run can be audited like
any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.machine.cache import Progress
from flowrl.messages import Batch, Bool, Group, Int32, Prompt, Trainable
from flowrl.models import Chat, Policy, check_model, check_tools, end_problem, tokenizer_of
from flowrl.nodes.sources.row_checks import (
    DroppedRows,
    RowTexts,
    TooLong,
    refuse_long_rows,
    rendered_alone,
    require_rendered,
    shorten_prompt,
)
from flowrl.nodes.sources.row_source import PromptSource, RowPart
from flowrl.tasks import Row, Rows, Task, load_demonstrations
from flowrl.tasks.row_reading.message_shapes import reply_text
from flowrl.tasks.row_reading.row_loading import RowUse
from flowrl.tasks.row_reading.rows_on_disk import join_rows, lowest_rows, rows_by_id

Trained = Literal["all", "last"]


class DemonstrationSource(PromptSource):
    """Sends the prompt of every row of a task, including rows that answer the same prompt in different ways."""

    row_noun = "conversations"
    row_use: RowUse = "responses"

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        epochs: int | None = None,
        max_tokens: int = 2048,
        part: RowPart = "train",
        too_long: TooLong = "drop",
    ) -> None:
        # With "error", `Demonstrations` finds what is too long, because it has the whole conversation.
        passed: TooLong = "truncate" if too_long == "truncate" else "drop"
        super().__init__(task, policy, epochs=epochs, max_prompt_tokens=max_tokens, part=part, too_long=passed)

    def facts(self) -> Facts:
        return replace(super().facts(), longest_prompt=None)  # the limit is that of the whole conversation

    def read(self) -> Rows:
        return load_demonstrations(self.task, whole=self.part == "all")

    def _try_rows(self, rows: Sequence[Row]) -> None:
        """Nothing: the node that renders whole rows tries them."""


class Demonstrations(Node):
    """Turns each prompt into a conversation that ends with its row's answer.

    `trained` says which assistant turns are trained: all, or the last, which is the answer. `too_long` says what
    happens to rows of more than `max_tokens` tokens: they are dropped with the reason `too_long`, lose their beginning,
    or are an error.
    """

    prompts: In[Prompt]
    groups: Out[Group]

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        max_tokens: int = 2048,
        part: RowPart = "train",
        trained: Trained = "all",
        too_long: TooLong = "drop",
    ) -> None:
        self.task = task
        self.policy = policy
        self.max_tokens = max_tokens
        self.part: RowPart = part
        self.trained: Trained = trained
        self.too_long: TooLong = too_long

    def facts(self) -> Facts:
        return Facts(group_size=1, longest_response=self.max_tokens, drops=True, keeps_lineage=False)

    def check(self, facts: object) -> list[str]:
        return [f"max_tokens is {self.max_tokens}; it needs at least 2"] if self.max_tokens < 2 else []

    def preflight(self) -> str | None:
        check_model(self.policy)
        rows = self._read_rows()
        require_responses(self.task, rows)
        check_tools(self.policy, rows)
        if self.too_long == "error" and not self.policy.built_in:
            self._refuse_long(Chat(tokenizer_of(self.policy), self.task.system_prompt))
        tried = join_rows(rows, load_demonstrations(self.task).held_out) if self.part == "train" else rows
        said = (require_rendered(self.policy, self.task, tried, self._row_texts), end_problem(self.policy))
        return "; ".join(text for text in said if text) or None

    def _row_texts(self, row: Row) -> RowTexts:
        return RowTexts(row.turns, (row.response,), row.tools, every_turn=self.trained == "all")

    def _refuse_long(self, chat: Chat) -> None:
        lengths = rendered_alone(
            self._read_rows(),
            lambda row: len(chat.with_tools(row.tools).encode_completion(row.turns, row.response)[0]),
        )
        refuse_long_rows(lengths, self.max_tokens, option="max_tokens", task=self.task.name)

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        if self.too_long == "error":
            await self.blocking(self._refuse_long, self._chat)
        rows = await self.blocking(self._read_rows)
        self._rows = rows_by_id(rows)
        self._dropped = DroppedRows(
            len(rows), self.max_tokens, option="max_tokens", task=self.task.name, context=self.context
        )

    def _read_rows(self) -> Sequence[Row]:
        found = load_demonstrations(self.task, whole=self.part == "all")
        if self.part == "all":
            return join_rows(found.train, found.held_out)
        return found.train if self.part == "train" else found.held_out

    async def run(self) -> None:
        async for prompt in self.prompts:
            sample = self._dropped.render_row(self._rows[prompt.prompt_id], partial(self.make_sample, prompt))
            if sample is None or not self._dropped.samples_fit([sample]):
                self.prompts.drop(prompt, "unrendered" if sample is None else "too_long")
                continue
            self.context.metric("tokens_generated", sample.response_tokens)
            self.context.ledger.generated(sample)
            await self.groups.send(Group(prompt.group_id, (sample,), 1))

    def render_conversation(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        """(ids, mask) of a conversation with its answer; the mask marks what is trained."""
        chat = chat.with_tools(row.tools)
        encode = chat.encode_demonstration if self.trained == "all" else chat.encode_completion
        token_ids, mask = encode(row.turns, row.response)
        return shorten_prompt(token_ids, mask, self.max_tokens) if self.too_long == "truncate" else (token_ids, mask)

    def make_sample(self, prompt: Prompt) -> Trainable:
        """The sample that a model would make by giving the row's answer."""
        row = self._rows[prompt.prompt_id]
        token_ids, mask = self.render_conversation(self._chat, row)
        return given_sample(
            token_ids,
            mask,
            sample_id=prompt.sample_id,
            group_id=prompt.group_id,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            member=prompt.member,
            prompt_text=prompt.text,
            response_text=reply_text(row.response),
            generator=f"{self.name}/{self.context.replica}",
            columns=prompt.columns,
        )

    def require_held_out(self) -> None:
        if not load_demonstrations(self.task).held_out:
            raise ConfigError(
                f"{self.task.name!r} has no held-out rows to measure the loss on (one prompt in eight is held out); "
                "add rows, or leave held_out out"
            )

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        chat = Chat(tokenizer_of(self.policy, progress=progress), self.task.system_prompt)
        rows = load_demonstrations(self.task).held_out
        answered = [row for row in lowest_rows(rows, most) if row.has_response]

        def held_out_sample(row: Row) -> Trainable:
            return given_sample(
                *self.render_conversation(chat, row),
                sample_id=row.prompt_id,
                group_id=row.prompt_id,
                prompt_id=row.prompt_id,
                prompt_text=row.prompt,
                response_text=reply_text(row.response),
            )

        samples = rendered_alone(answered, held_out_sample)
        return [sample for sample in samples if len(sample.token_ids) <= self.max_tokens]


class HeldOutBatch(Node):
    """The common part of nodes that send held-out samples as one batch, on which trainers are evaluated, never trained.

    Subclasses render the samples. `max_tokens` is the longest sample of the data, and `option` the option that says so.
    """

    batch: Out[Batch]

    group_size = 1
    """Samples of a row."""
    option = "max_tokens"

    def __init__(self, *, num_rows: int, token_budget: int, max_tokens: int) -> None:
        self.num_rows = num_rows
        self.token_budget = token_budget
        self.max_tokens = max_tokens

    def facts(self) -> Facts:
        return Facts(keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        ranges = (("num_rows", self.num_rows), ("token_budget", self.token_budget))
        return [f"{name} is {value}; it needs at least 1" for name, value in ranges if value < 1]

    def render_samples(self) -> list[Trainable]:
        """The samples of up to `num_rows` rows; the choice does not depend on the order of the data."""
        raise NotImplementedError

    async def setup(self) -> None:
        self._samples = await self.blocking(self.render_samples)

    async def run(self) -> None:
        if not self._samples:
            raise ConfigError(f"all held-out rows have more than {self.max_tokens} tokens; raise {self.option}")
        number = len(self._samples) // self.group_size
        await self.batch.send(batch_of_samples(self._samples, number, self.token_budget))


class HeldOutDemonstrations(HeldOutBatch):
    """Sends up to `num_rows` rows that `data` holds out from training; for texts, up to `num_rows` sequences.

    The choice does not depend on the order of the data. Rows that are too long for `data` are left out.
    """

    def __init__(self, data: HeldOutSource, *, num_rows: int = 512, token_budget: int = 8192) -> None:
        super().__init__(num_rows=num_rows, token_budget=token_budget, max_tokens=data.max_tokens)
        self.data = data

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if self.data.part != "train":
            problems.append(f"its data trains on part={self.data.part!r}; set part='train', so that rows are held out")
        return problems

    def preflight(self) -> None:
        self.data.require_held_out()

    def render_samples(self) -> list[Trainable]:
        return self.data.held_out_samples(self.num_rows, self.context.progress)


class HeldOutSource(Protocol):
    """A node whose rows are trained, except the rows that it holds out."""

    @property
    def part(self) -> str:
        """Which rows it trains."""
        ...

    @property
    def max_tokens(self) -> int: ...

    def require_held_out(self) -> None:
        """Raise ConfigError if it holds out no row."""
        ...

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        """Up to `most` samples of what it holds out; the choice does not depend on the order of the data."""
        ...


def given_sample(token_ids: Int32, mask: Bool, *, response_text: str, **fields: Any) -> Trainable:
    """A sample whose tokens in `mask` are trained; `fields` are further fields of `Trainable`."""
    alone: dict[str, Any] = {"epoch": 0, "member": 0, "generator": ""}
    return Trainable(
        **(alone | fields),
        group_size=1,
        response_text=response_text,
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), -1, np.int32),  # no version of the policy has sampled them
        prompt_tokens=int((~mask).sum()),
        truncated=False,
        generated_s=time.time(),
        advantages=mask.astype(np.float32),
    )


def require_responses(task: Task, rows: Sequence[Row]) -> None:
    """Raise ConfigError unless every row has a response to learn from: text, or the assistant's turns."""
    if without := [row for row in rows if not row.has_response]:
        unread = next((row.unread for row in without if row.unread), "")
        other = f", or messages={unread} to learn from the conversations in that column" if unread else ""
        raise ConfigError(
            f"{len(without)} of {len(rows)} training rows of {task.name!r} have no answer to learn from, the first at "
            f"{without[0].place or 'its beginning'}; set the option answer= of the task to the column that holds it"
            f"{other}, or take rows without one out of the data (malformed=skip does not)"
        )
    if other_row := next((row for row in rows if not row.reply and not row.text_answer), None):
        raise ConfigError(
            f"{other_row.place}: the answer is {str(other_row.answer)[:60]!r}; to learn from it needs text, or the "
            "assistant's turns; name the column that has them with answer="
        )


def batch_of_samples(samples: Sequence[Trainable], num_groups: int, token_budget: int) -> Batch:
    """All samples as one batch."""
    return Batch(
        samples=tuple(samples),
        micro_batches=(),
        num_sequences=len(samples),
        num_tokens=sum(sample.response_tokens for sample in samples),
        num_groups=num_groups,
        token_budget=token_budget,
    )
