"""Rows to imitate: demonstrations for SFT, and responses with labelled steps for a process reward model.

The task's own answers replace a generator's responses, see `flowrl.nodes.sources.given_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts
from flowrl.graph.ports import Out
from flowrl.machine.cache import Progress
from flowrl.messages import Bool, Group, Int32, Prompt, Trainable
from flowrl.models import Chat, Policy, check_tools, end_problem
from flowrl.models.tokens.chat import Unrendered
from flowrl.models.tokens.text_tokens import require_steps, separator_of, split_steps, step_tokens
from flowrl.nodes.sources.given_rows import GivenRows, given_sample
from flowrl.nodes.sources.row_checks import RowTexts, TooLong, open_chat, rendered_alone, shorten_prompt
from flowrl.nodes.sources.row_source import PromptSource, RowPart
from flowrl.tasks import Row, Rows, Task, load_demonstrations
from flowrl.tasks.row_reading.message_shapes import reply_text
from flowrl.tasks.row_reading.row_loading import RowUse
from flowrl.tasks.row_reading.rows_on_disk import join_rows, lowest_rows

Trained = Literal["all", "last"]
STEPS, LABELS = ("steps", "completions"), "labels"
"""Columns of a row: its steps, a list of texts or one text with separators, and a label for each."""


class DemonstrationSource(PromptSource):
    """Sends the prompt of every row of a task, including rows that answer the same prompt in different ways."""

    row_noun = "conversations"
    row_use: RowUse = "responses"
    prompts_alone = False

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

    def read_rows(self) -> Rows:
        return load_demonstrations(self.task, whole=self.part == "all")


class Demonstrations(GivenRows[Trainable]):
    """Turns each prompt into a conversation that ends with its row's answer.

    `trained` says which assistant turns are trained: all, or the last, which is the answer. `too_long` says what
    happens to rows of more than `max_tokens` tokens: they are dropped with the reason `too_long`, lose their beginning,
    or are an error.
    """

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
        super().__init__(task, policy, max_tokens=max_tokens, too_long=too_long)
        self.part: RowPart = part
        self.trained: Trained = trained

    def facts(self) -> Facts:
        return Facts(group_size=1, longest_response=self.max_tokens, drops=True, keeps_lineage=False)

    def check_rows(self) -> str | None:
        rows = self.given_rows()
        require_responses(self.task, rows)
        check_tools(self.policy, rows)
        return end_problem(self.policy)

    def given_rows(self) -> Sequence[Row]:
        found = load_demonstrations(self.task, whole=self.part == "all")
        if self.part == "all":
            return join_rows(found.train, found.held_out)
        return found.train if self.part == "train" else found.held_out

    def tried_rows(self) -> Sequence[Row]:
        rows = self.given_rows()
        return join_rows(rows, load_demonstrations(self.task).held_out) if self.part == "train" else rows

    def row_texts(self, row: Row) -> RowTexts:
        return RowTexts(row.turns, (row.response,), row.tools, every_turn=self.trained == "all")

    def render_row(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        chat = chat.with_tools(row.tools)
        encode = chat.encode_demonstration if self.trained == "all" else chat.encode_completion
        token_ids, mask = encode(row.turns, row.response)
        return shorten_prompt(token_ids, mask, self.max_tokens) if self.too_long == "truncate" else (token_ids, mask)

    async def run(self) -> None:
        async for prompt in self.prompts:
            if samples := self.answer_prompts([prompt]):
                await self.groups.send(Group(prompt.group_id, samples, 1))

    def make_samples(self, row: Row, prompts: Sequence[Prompt]) -> tuple[Trainable, ...]:
        (prompt,) = prompts
        own = {name: getattr(prompt, name) for name in ("sample_id", "group_id", "epoch", "member", "columns")}
        generator = f"{self.name}/{self.context.replica}"
        return (self.make_sample(self._chat, row, prompt_text=prompt.text, generator=generator, **own),)

    def make_sample(self, chat: Chat, row: Row, **fields: Any) -> Trainable:
        """The sample that a model would make by giving the row's answer; `fields` are further fields of it."""
        if not row.has_response:  # `require_responses` refuses such rows, except among those that are held out
            raise Unrendered("it has no answer")
        fields = {"prompt_text": row.prompt, "response_text": reply_text(row.response), **fields}
        return given_sample(*self.render_row(chat, row), prompt_id=row.prompt_id, **fields)

    # Rows that are held out, for a HeldOutBatch

    def require_held_out(self) -> None:
        if not load_demonstrations(self.task).held_out:
            raise ConfigError(
                f"{self.task.name!r} has no held-out rows to measure the loss on (one prompt in eight is held out); "
                "add rows, or leave held_out out"
            )

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        chat = open_chat(self.task, self.policy, progress)
        rows = lowest_rows(load_demonstrations(self.task).held_out, most)
        made = rendered_alone(
            rows, lambda row: self.make_sample(chat, row, sample_id=row.prompt_id, group_id=row.prompt_id)
        )
        return [sample for sample in made if len(sample.token_ids) <= self.max_tokens]


class StepDataset(Demonstrations):
    """Sends each prompt with the steps of its row.

    `too_long` says what happens to samples of more than `max_tokens` tokens: they are dropped as `too_long`, lose the
    beginning of their prompt, or are an error.
    """

    option = "max_length"

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        separator: str = "\\n",
        max_tokens: int = 2048,
        too_long: TooLong = "drop",
    ) -> None:
        super().__init__(task, policy, max_tokens=max_tokens, too_long=too_long)
        self.separator = separator_of(separator)

    def check_rows(self) -> str | None:
        for row in self.tried_rows():
            labelled_steps(row, self.separator)
        return None

    def row_lengths(self, chat: Chat) -> Iterator[int]:
        return rendered_alone(self.tried_rows(), lambda row: len(self.render_row(chat, row)[0]))

    def row_texts(self, row: Row) -> RowTexts:
        return RowTexts(row.turns, tools=row.tools, steps=tuple(labelled_steps(row, self.separator)[0]))

    def render_row(self, chat: Chat, row: Row) -> tuple[Int32, Bool]:
        """(ids, mask) of a row; the mask marks one token for each step. Raises Unrendered.

        With `too_long="truncate"`, a row of too many tokens loses the excess at its beginning, unless that is the whole
        prompt or more.
        """
        steps, _ = labelled_steps(row, self.separator)
        chat = chat.with_tools(row.tools)
        require_steps(chat.tokenizer, steps)
        token_ids, mask = step_tokens(chat, row.turns, steps, self.separator)
        excess = len(token_ids) - self.max_tokens if self.too_long == "truncate" else 0
        if 0 < excess < len(chat.encode_prompt(row.turns)[1]):
            token_ids, mask = token_ids[excess:], mask[excess:]
        return token_ids, mask

    def make_samples(self, row: Row, prompts: Sequence[Prompt]) -> tuple[Trainable, ...]:
        (prompt,) = prompts
        own = {name: getattr(prompt, name) for name in ("sample_id", "group_id", "epoch", "member")}
        return (self.make_sample(self._chat, row, **own),)

    def make_sample(self, chat: Chat, row: Row, **fields: Any) -> Trainable:
        """The sample of a row, in which `returns` has the labels of the steps; `fields` are further fields of it."""
        steps, labels = labelled_steps(row, self.separator)
        token_ids, mask = self.render_row(chat, row)
        returns = np.zeros(token_ids.size, np.float32)
        returns[mask] = labels
        return given_sample(
            token_ids,
            mask,
            prompt_id=row.prompt_id,
            prompt_text=row.prompt,
            response_text=self.separator.join(steps),
            prompt_tokens=int(np.argmax(mask)),
            returns=returns,
            **fields,
        )


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
