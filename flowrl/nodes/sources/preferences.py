"""Preference data as samples instead of rollouts: pairs of completions, or single completions with a label.

They are recorded in the same ledger as rollouts: each completion is a member of its row's group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts
from flowrl.graph.ports import Out
from flowrl.machine.cache import Progress
from flowrl.messages import Group, Mismatched, Prompt, Trainable
from flowrl.models import Chat, Policy, check_tools, end_problem
from flowrl.models.tokens.chat import ReplyMessage, Unrendered
from flowrl.nodes.sources.given_rows import GivenRows, given_sample
from flowrl.nodes.sources.row_checks import RowTexts, TooLong, open_chat, rendered_alone, shorten_prompt
from flowrl.nodes.sources.row_source import PromptSource
from flowrl.tasks import Row, Rows, Task, load_preferences
from flowrl.tasks.row_reading.message_shapes import reply_text
from flowrl.tasks.row_reading.row_loading import RowUse
from flowrl.tasks.row_reading.rows_on_disk import (
    asked_ids,
    join_rows,
    lowest_asked,
    match_rows,
    prompt_ids,
    rows_by_id,
)


@dataclass(frozen=True)
class Preferences:
    """Which preferences to train on: plain data, for the nodes that need it."""

    task: Task
    """Rows with `chosen` and `rejected`, or with `completion` and `label`."""
    policy: Policy
    """Its tokenizer and chat template render the rows."""
    kind: Literal["pairs", "labelled"] = "pairs"
    max_tokens: int = 1024
    """Longest conversation, prompt and completion together."""
    too_long: TooLong = "drop"
    """What happens to rows of longer conversations: they are dropped, lose the prompt's beginning, or are an error."""
    scored: bool = False
    """Whether a reward model is trained: completions then end as those that it scores (`Chat.encode_scored`)."""

    option = "max_tokens"
    """The option with which a user raises `max_tokens`."""

    def __post_init__(self) -> None:
        if self.kind not in ("pairs", "labelled"):
            raise ConfigError(f"kind is {self.kind!r}; choose pairs or labelled")
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens is {self.max_tokens}; a conversation needs at least 2")

    @property
    def group_size(self) -> int:
        """The number of completions of one row."""
        return 2 if self.kind == "pairs" else 1

    def read_rows(self) -> Rows:
        """All rows; a process reads them only once."""
        return load_preferences(self.task, self.kind)

    def row_texts(self, row: Row) -> RowTexts:
        """What is rendered of a row."""
        names = ("chosen", "rejected") if self.kind == "pairs" else ("completion",)
        return RowTexts(row.turns, tuple(row.columns[name] for name in names), row.tools)

    def require_held_out(self) -> None:
        """Raise ConfigError if no row is held out."""
        if not self.read_rows().held_out:
            raise ConfigError(
                f"{self.task.name!r} has no held-out rows to judge by (one prompt in eight is held out); add rows"
            )

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        """The samples of up to `most` held-out rows, without those with a conversation that is too long."""
        chat = open_chat(self.task, self.policy, progress)
        rendered = Renderer(self, chat, lowest_asked(self.read_rows().held_out, most))
        return [sample for samples in rendered if self.keeps_row(samples) for sample in samples]

    def keeps_row(self, samples: Sequence[Trainable]) -> bool:
        """Whether all samples of a row are short enough: else the whole row is left out."""
        return max(len(sample.token_ids) for sample in samples) <= self.max_tokens


class PreferenceSource(PromptSource):
    """Sends the prompt of every training row, once for each of its completions."""

    row_use: RowUse = "preferences"
    prompts_alone = False

    def __init__(self, data: Preferences, *, epochs: int | None = None, seed: int | None = None) -> None:
        super().__init__(
            data.task,
            data.policy,
            repeat=data.group_size,
            epochs=epochs,
            seed=seed,
            max_prompt_tokens=data.max_tokens,
            too_long="truncate" if data.too_long == "truncate" else "drop",
            answers_compared=False,
        )
        self.data = data

    def read_rows(self) -> Rows:
        return self.data.read_rows()


class PreferenceDataset(GivenRows[Trainable]):
    """Appends the row's completions to its prompt; their tokens and end token are trained, the prompt is not.

    The data's `too_long` says what happens to a row with a conversation of more than the data's `max_tokens`: the row
    is dropped with the reason `too_long`, its prompt loses its beginning, or the row is an error.
    """

    keyed_state = True

    groups: Out[Group]

    def __init__(self, data: Preferences) -> None:
        super().__init__(data.task, data.policy, max_tokens=data.max_tokens, too_long=data.too_long)
        self.data = data

    def facts(self) -> Facts:
        return Facts(group_size=self.data.group_size, drops=True, keeps_lineage=False)

    def check_rows(self) -> str | None:
        check_tools(self.policy, self.tried_rows())
        if self.data.kind == "labelled":
            mismatched_rows(self.given_rows())
        return None if self.data.scored else end_problem(self.policy)  # a reward model generates nothing

    def given_rows(self) -> Sequence[Row]:
        return self.data.read_rows().train

    def tried_rows(self) -> Sequence[Row]:
        rows = self.data.read_rows()
        return join_rows(rows.train, rows.held_out)

    def row_texts(self, row: Row) -> RowTexts:
        return self.data.row_texts(row)

    def row_lengths(self, chat: Chat) -> Iterator[int]:
        rendered = Renderer(self.data, chat, self.given_rows())
        return (max(len(sample.token_ids) for sample in samples) for samples in rendered)

    async def setup(self) -> None:
        await super().setup()
        self._render = Renderer(self.data, self._chat, self.given_rows())

    async def run(self) -> None:
        async for members in self.prompts.groups(self.data.group_size):
            if samples := self.answer_prompts(members.items):
                await self.groups.send(Group(members.group_id, samples, members.size), made_from=members.items)

    def make_samples(self, row: Row, prompts: Sequence[Prompt]) -> tuple[Trainable, ...]:
        """The completions of one row, with the ids that the ledger uses."""
        rendered = self._render.render_row(row.prompt_id)
        generator = f"{self.name}/{self.context.replica}"
        return tuple(
            replace(
                sample,
                sample_id=prompt.sample_id,
                group_id=prompt.group_id,
                epoch=prompt.epoch,
                pair=prompt.group_id if self.data.kind == "pairs" else "",
                generator=generator,
                generated_s=time.time(),
            )
            for prompt, sample in zip(prompts, rendered, strict=True)
        )


class Renderer:
    """Rows of one part, training or held-out, as samples."""

    def __init__(self, data: Preferences, chat: Chat, rows: Sequence[Row]) -> None:
        self._kind = data.kind
        self._max_tokens = data.max_tokens
        self._truncates = data.too_long == "truncate"
        self._chat = chat
        self._scored = data.scored
        self.rows = rows_by_id(rows)
        self._unrendered: set[str] = set()
        """Ids of rows whose completions cannot be rendered, as far as they were met as mismatches."""
        self._mismatches = mismatched_rows(rows) if rows and data.kind == "labelled" else {}

    def __iter__(self) -> Iterator[tuple[Trainable, ...]]:
        """The samples of each row that the template renders."""
        return rendered_alone(self.rows, self.render_row)

    def render_row(self, row_id: str) -> tuple[Trainable, ...]:
        """The pair as neighbours, chosen first, or the one labelled completion. Raises Unrendered."""
        row = self.rows[row_id]
        if self._kind == "pairs":
            both = ((row.columns["chosen"], 1), (row.columns["rejected"], -1))
            return self._shorten_prompts(tuple(self._make_sample(row, member, *one) for member, one in enumerate(both)))
        label = 1 if row.columns["label"] else -1
        sample = self._make_sample(row, 0, row.columns["completion"], label)
        # The prompt with the completion of the next row that has another prompt, and a completion that can be rendered.
        other, found = row, None
        for _ in range(len(self.rows)):
            other = self._mismatches[other.prompt_id]
            if other.asked_id == row.asked_id or other.prompt_id in self._unrendered:
                continue
            try:
                found = self._chat.with_tools(row.tools).encode_completion(row.turns, other.columns["completion"])
                break
            except Unrendered:
                self._unrendered.add(other.prompt_id)
        if found is None:
            raise Unrendered("no other row has a completion that can be put behind its prompt")
        ids, mask = found
        if self._truncates:  # as the sample itself: the completion stays
            ids, mask = shorten_prompt(ids, mask, self._max_tokens)
        mismatched = Mismatched(ids[: self._max_tokens], mask[: self._max_tokens])
        return self._shorten_prompts((replace(sample, mismatched=mismatched),))

    def _shorten_prompts(self, samples: tuple[Trainable, ...]) -> tuple[Trainable, ...]:
        """If one of the completions is too long, all lose the same number of tokens from the start of their prompt."""
        excess = max(len(sample.token_ids) for sample in samples) - self._max_tokens
        if not self._truncates or not 0 < excess < min(sample.prompt_tokens for sample in samples):
            return samples
        return tuple(sample.cut_tokens(excess) for sample in samples)

    def _make_sample(self, row: Row, member: int, reply: ReplyMessage, label: int) -> Trainable:
        chat = self._chat.with_tools(row.tools)
        token_ids, mask = (chat.encode_scored if self._scored else chat.encode_completion)(row.turns, reply)
        return given_sample(
            token_ids,
            mask,
            sample_id=f"{row.prompt_id}:{member}",
            group_id=row.prompt_id,
            prompt_id=row.prompt_id,
            member=member,
            group_size=2 if self._kind == "pairs" else 1,
            prompt_text=row.prompt,
            response_text=reply_text(reply),
            prompt_tokens=int(np.argmax(mask)),
            label=label,
            pair=row.prompt_id if self._kind == "pairs" else row.columns.get("pair", ""),
        )


def mismatched_rows(rows: Sequence[Row]) -> Mapping[str, Row]:
    """For each row, the next row with another prompt in the order of their ids, which is practically random.

    The result depends only on the data, not on seed, epoch or batch, so its reference logprobs are computed once.
    Raises ConfigError if all prompts are the same.
    """
    both = (prompt_ids(rows), asked_ids(rows))
    ids, asked = (np.fromiter((int(one, 16) for one in found), np.uint64) for found in both)
    order = np.argsort(ids)
    ends = np.flatnonzero(asked[order] != np.roll(asked[order], -1))
    if not ends.size:
        raise ConfigError(
            f"KTO measures its baseline on completions of other prompts, but all {len(order)} rows have one prompt; "
            "add rows with other prompts"
        )
    following = ends[np.searchsorted(ends, np.arange(len(order))) % len(ends)] + 1
    found = np.zeros_like(order)
    found[order] = order[following % len(order)]
    return match_rows(rows, found)
