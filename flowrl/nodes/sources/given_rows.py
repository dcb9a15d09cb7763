"""Rows with their own answers in place of a generator's: what all nodes that render such rows have in common.

No policy has sampled these tokens. They are recorded in the same ledger as rollouts, so that such a run can be audited
like any other: their version is -1, and their behavior logprobs are zeros.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.machine.cache import Progress
from flowrl.messages import Batch, Bool, Int32, Prompt, Sample, Trainable
from flowrl.models import Chat, Policy, check_model
from flowrl.nodes.sources.row_checks import (
    DroppedRows,
    RowTexts,
    TooLong,
    open_chat,
    refuse_long_rows,
    rendered_alone,
    require_rendered,
)
from flowrl.tasks import Row, Task
from flowrl.tasks.row_reading.rows_on_disk import rows_by_id

S = TypeVar("S", bound=Sample)


class GivenRows(Node, Generic[S]):
    """The common part of nodes that answer a prompt with what its row has. Subclasses say how a row is rendered.

    `too_long` says what happens to rows of more than `max_tokens` tokens: they are dropped with the reason `too_long`,
    lose the beginning of their prompt, or are an error before the run.
    """

    prompts: In[Prompt]

    option = "max_tokens"
    """The option with which a user raises `max_tokens`."""
    group_size = 1
    """Samples of a row."""

    def __init__(self, task: Task, policy: Policy, *, max_tokens: int, too_long: TooLong) -> None:
        self.task = task
        self.policy = policy
        self.max_tokens = max_tokens
        self.too_long: TooLong = too_long

    def check(self, facts: object) -> list[str]:
        return [f"max_tokens is {self.max_tokens}; it needs at least 2"] if self.max_tokens < 2 else []

    def given_rows(self) -> Sequence[Row]:
        """The rows that prompts come from; a process reads them only once."""
        raise NotImplementedError

    def tried_rows(self) -> Sequence[Row]:
        """The rows that are rendered as a trial before the run."""
        return self.given_rows()

    def check_rows(self) -> str | None:
        """Raise ConfigError for rows that cannot be used; returns what is to be said of them."""
        return None

    def row_texts(self, row: Row) -> RowTexts:
        """What is rendered of a row."""
        raise NotImplementedError

    def render_row(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        """(ids, mask) of a row's conversation; the mask marks what is trained. Raises Unrendered."""
        raise NotImplementedError

    def make_samples(self, row: Row, prompts: Sequence[Prompt]) -> tuple[S, ...]:
        """The samples with which the row answers the prompts of its group. Raises Unrendered."""
        raise NotImplementedError

    def row_lengths(self, chat: Chat) -> Iterator[int]:
        """The number of tokens of each row that may be too long."""
        return rendered_alone(self.given_rows(), lambda row: len(self.render_row(chat, row)[0]))

    def refuse_long(self, chat: Chat) -> None:
        """Raise ConfigError if a row is too long."""
        refuse_long_rows(self.row_lengths(chat), self.max_tokens, option=self.option, task=self.task.name)

    def preflight(self) -> str | None:
        check_model(self.policy)
        said = self.check_rows()
        if self.too_long == "error" and not self.policy.built_in:
            self.refuse_long(open_chat(self.task, self.policy))
        rendered = require_rendered(self.policy, self.task, self.tried_rows(), self.row_texts)
        return "; ".join(filter(None, (rendered, said))) or None

    async def setup(self) -> None:
        self._chat = await self.blocking(open_chat, self.task, self.policy, self.context.progress)
        rows = await self.blocking(self.given_rows)
        self._rows = rows_by_id(rows)
        if self.too_long == "error":
            await self.blocking(self.refuse_long, self._chat)
        self._dropped = DroppedRows(
            len(rows), self.max_tokens, option=self.option, task=self.task.name, context=self.context
        )

    def answer_prompts(self, prompts: Sequence[Prompt]) -> tuple[S, ...]:
        """The samples of the row that `prompts` ask for, recorded in the ledger; none if the row is dropped."""
        row = self._rows[prompts[0].prompt_id]
        samples = self._dropped.render_row(row, lambda: self.make_samples(row, prompts))
        if samples is None or not self._dropped.lengths_fit(len(sample.token_ids) for sample in samples):
            for prompt in prompts:
                self.prompts.drop(prompt, "unrendered" if samples is None else "too_long")
            return ()
        for sample in samples:
            self.context.metric("tokens_generated", sample.response_tokens)
            self.context.ledger.generated(sample)
        return samples


def given_sample(token_ids: Int32, mask: Bool, *, response_text: str, **fields: Any) -> Trainable:
    """A sample whose tokens in `mask` are trained; `fields` are further fields of `Trainable`."""
    defaults: dict[str, Any] = {
        "epoch": 0,
        "member": 0,
        "group_size": 1,
        "generator": "",
        "prompt_tokens": int((~mask).sum()),
    }
    return Trainable(
        **(defaults | fields),
        response_text=response_text,
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), -1, np.int32),  # no version of the policy has sampled them
        truncated=False,
        generated_s=time.time(),
        advantages=mask.astype(np.float32),
    )


def answered_prompt(prompt: Prompt, token_ids: Int32, mask: Bool, **fields: Any) -> Sample:
    """The rollout of a prompt whose answer is given: the tokens in `mask`. `fields` are further fields of `Sample`."""
    defaults: dict[str, Any] = {"versions": np.full(len(token_ids), -1, np.int32)}
    return Sample.of_prompt(
        prompt,
        **(defaults | fields),
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        prompt_tokens=int(np.argmax(mask)),
        truncated=False,
        generated_s=time.time(),
    )


class HeldOutData(Protocol):
    """What a node trains on, except the rows that it holds out."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def option(self) -> str:
        """The option with which a user raises `max_tokens`."""
        ...

    @property
    def group_size(self) -> int:
        """Samples of a row."""
        ...

    def require_held_out(self) -> None:
        """Raise ConfigError if no row is held out."""
        ...

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        """The samples of up to `most` held-out rows, without those that are too long."""
        ...


class HeldOutBatch(Node):
    """Sends up to `num_rows` rows that `data` holds out as one batch: trainers are evaluated on it, never trained.

    `data` is the node that renders the rows, or `Preferences`; of texts, up to `num_rows` sequences are sent. The
    choice does not depend on the order of the data. Rows that are too long for `data` are left out.
    """

    batch: Out[Batch]

    def __init__(self, data: HeldOutData, *, num_rows: int = 512, token_budget: int = 8192) -> None:
        self.data = data
        self.num_rows = num_rows
        self.token_budget = token_budget

    def facts(self) -> Facts:
        return Facts(keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        ranges = (("num_rows", self.num_rows), ("token_budget", self.token_budget))
        problems = [f"{name} is {value}; it needs at least 1" for name, value in ranges if value < 1]
        if (part := getattr(self.data, "part", "train")) != "train":
            problems.append(f"its data trains on part={part!r}; set part='train', so that rows are held out")
        return problems

    def preflight(self) -> None:
        self.data.require_held_out()

    async def setup(self) -> None:
        self._samples = await self.blocking(self.data.held_out_samples, self.num_rows, self.context.progress)

    async def run(self) -> None:
        if not self._samples:
            most, option = self.data.max_tokens, self.data.option
            raise ConfigError(f"all held-out rows have more than {most} tokens; raise {option}")
        number = len(self._samples) // self.data.group_size
        await self.batch.send(batch_of_samples(self._samples, number, self.token_budget))


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
