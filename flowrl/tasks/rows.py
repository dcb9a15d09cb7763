"""Rows: one prompt each, with the columns that rewards receive. The split depends only on the prompt.

A hash of its prompt decides whether a row is held out. So the two parts are disjoint for every order, seed and number
of rows, and a problem that is generated twice is in the same part both times.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Self, TypeVar

from flowrl.errors import ConfigError
from flowrl.messages.base import scalar_problem

HELD_OUT_ONE_IN = 8
MOST_TEXT_BYTES = 7 << 20
"""The most text, in bytes, of a row's columns. A message holds 8 MiB (`flowrl.wire.encoding.cost`), of which 1 MiB
is reserved for the texts of a prompt and a response within the limits of a model."""
WEIGHT, REASONING = "weight", ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message: 0 for a turn that is not trained; and those that may hold its reasoning."""
OF_TASK = "of_task"
"""The column of a mixture's rows that names the row's own source."""


def digest(value: Any) -> str:
    """A hash of a value that JSON can hold, as 16 hex digits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_held_out(row_id: str) -> bool:
    """Whether a row with this digest belongs to the held-out part."""
    return int(row_id, 16) % HELD_OUT_ONE_IN == 0


Turns = tuple[Mapping[str, Any], ...]


def without_weight(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a model sees it, without the weight of its tokens in the loss."""
    return {name: value for name, value in turn.items() if name != WEIGHT}


@dataclass(frozen=True)
class Row:
    """One problem. `turns` are the messages before the response; the last one is the user's."""

    turns: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Everything else in the row. `answer`, if it exists, is text, or a list or mapping as in the data."""
    score: float = 0.0
    """Score of the answer. If a prompt has several answers, the one with the highest score is taken."""
    as_messages: bool = False
    """Whether its source has messages rather than text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions of the tools that the conversation may call."""
    reply: tuple[Mapping[str, Any], ...] = ()
    """The response to learn from, as turns; () if it is the text of `answer`."""
    place: str = field(default="", compare=False)
    """Where the row was read, such as `train.jsonl:17`; "" for a generated row."""
    opened: tuple[str, ...] = field(default=(), compare=False)
    """Columns whose text was read as the list of messages that it holds."""
    unread: str = field(default="", compare=False)
    """A column with a conversation that is not read because the row has a prompt; "" if there is none."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no message can carry: otherwise they would fail a lane in the middle of the
        run."""
        for turn in self.turns:
            for said in turn.values():
                _require_sendable("the prompt", said)
        _require_sendable("the column 'tools'", self.tools)
        _require_sendable("the answer", self.reply)
        for name, value in self.columns.items():
            _require_sendable(f"the column {name!r}", name)
            _require_sendable(f"the column {name!r}", value)

    def require_short(self) -> None:
        """Raise ConfigError if the columns do not fit into a message: every sample carries the columns of its row."""
        sizes = {name: _text_bytes(value) for name, value in self.columns.items()}
        if (total := sum(sizes.values())) > MOST_TEXT_BYTES:
            largest = max(sizes, key=lambda name: sizes[name])
            raise ConfigError(
                f"the columns hold {total / 2**20:.1f} MiB of text, most of it in {largest!r}, "
                f"and a message has room for {MOST_TEXT_BYTES >> 20}; leave out columns that no reward reads, shorten "
                "them, or drop such rows with malformed=skip"
            )

    @classmethod
    def ask(cls, question: str, /, **columns: Any) -> Row:
        """A row of one user message."""
        return cls(({"role": "user", "content": question},), columns)

    @property
    def prompt(self) -> str:
        """The last message, which contains the question."""
        return str(self.turns[-1]["content"])

    @property
    def answer(self) -> str | None:
        """The reference response; None if the data have none. A list or mapping is returned as JSON text."""
        answer = self.columns.get("answer")
        if isinstance(answer, tuple | Mapping):
            return json.dumps(answer, ensure_ascii=False, default=str)
        return None if answer is None else str(answer)

    @property
    def text_answer(self) -> bool:
        """Whether the answer, if there is one, is a text or a number rather than a list or mapping."""
        return not isinstance(self.columns.get("answer"), tuple | Mapping)

    @property
    def has_response(self) -> bool:
        """Whether there is something to learn from."""
        return bool(self.reply) or self.answer is not None

    @property
    def response(self) -> str | tuple[Mapping[str, Any], ...]:
        """What to learn from, as turns or as text. Only for rows that have it."""
        return self.reply or str(self.answer)

    @property
    def all_turns(self) -> tuple[Mapping[str, Any], ...]:
        """Every message of the row, including those of a response that is not text."""
        return (*self.turns, *self.reply)

    def reworded(self, word: Callable[[Turns], Turns]) -> Self:
        """The row with all of its messages as `word` makes them."""
        return replace(self, turns=word(self.turns), reply=word(self.reply))

    @cached_property
    def asked(self) -> tuple[Mapping[str, Any], ...]:
        """What identifies a prompt: the conversation, and its tools if it has any. What is trained of it is no part."""
        return (*map(without_weight, self.turns), *([{"tools": self.tools}] if self.tools else []))

    @cached_property
    def asked_id(self) -> str:
        """A hash of the conversation and its tools, as 16 hex digits; the same for all rows that ask the same."""
        return digest(self.asked)

    @property
    def prompt_id(self) -> str:
        """The same for the same row, in every run."""
        return self.asked_id

    @property
    def held_out(self) -> bool:
        """Whether the row belongs to the held-out part: one row in eight, by what it asks."""
        return is_held_out(self.asked_id)


@dataclass(frozen=True)
class Demonstration(Row):
    """A row whose prompt other rows may have as well. `occurrence` is its number among them, from 0."""

    occurrence: int = 0

    @cached_property
    def prompt_id(self) -> str:
        """A hash as 16 hex digits, different for each row of a prompt; the first row has that of a plain row."""
        return digest([*self.asked, self.occurrence]) if self.occurrence else self.asked_id


@dataclass(frozen=True)
class Rows:
    """The two disjoint parts of a task, each in the order of its source."""

    train: Sequence[Row]
    held_out: Sequence[Row]
    skipped: tuple[str, ...] = ()
    """What was wrong with the rows that were skipped as malformed, each with its place."""
    repeated: int = 0
    """Rows that were left out because another row with the same prompt was taken."""
    low_scores: int = 0
    """Rows that were left out because their score is below `min_score`."""
    opened: tuple[str, ...] = ()
    """Sentences about columns whose text was read as messages, one for each source and column."""

    @classmethod
    def split(cls, rows: Iterable[Row]) -> Rows:
        """Split by hash; of several rows with the same prompt, the first one with the highest score is kept."""
        unique: dict[str, Row] = {}
        read = 0
        for row in rows:
            read += 1
            known = unique.get(row.prompt_id)
            if known is None or row.score > known.score:
                unique[row.prompt_id] = row
        return cls._part_rows(list(unique.values()), read)

    @classmethod
    def every(cls, rows: Iterable[Row]) -> Rows:
        """Split by hash, with all rows of a prompt that have the highest score among them."""
        of_prompt: dict[str, list[Row]] = {}
        for row in (found := list(rows)):
            of_prompt.setdefault(row.asked_id, []).append(row)
        best = []
        for same in of_prompt.values():
            highest = max(row.score for row in same)
            best.append([row for row in same if row.score == highest])
        taken = [
            Demonstration(**{one.name: getattr(row, one.name) for one in fields(Row)}, occurrence=n)
            for same in best
            for n, row in enumerate(same)
        ]
        return cls._part_rows(taken, len(found))

    @classmethod
    def _part_rows(cls, ordered: Sequence[Row], read: int) -> Rows:
        """Both parts of the rows that were taken; `read` is the number of rows that were read."""
        train, held_out = (tuple(r for r in ordered if r.held_out is part) for part in (False, True))
        return cls(train, held_out, repeated=read - len(ordered))


def _text_bytes(value: Any) -> int:
    """The bytes of all texts in a value."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    if isinstance(value, Mapping):
        return sum(_text_bytes(key) + _text_bytes(inner) for key, inner in value.items())
    return sum(map(_text_bytes, value)) if isinstance(value, tuple | list) else 0


MAX_NESTED = 32
"""Maximum nesting depth of a column's values."""


def _require_sendable(where: str, value: Any, nested: int = 0) -> None:
    if isinstance(value, str | int):
        if problem := scalar_problem(value):
            raise ConfigError(f"{where} holds {problem}")
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(
            f"{where} holds NaN, which is no number; write null for what is missing, or leave the row out"
        )
    elif nested == MAX_NESTED:
        raise ConfigError(f"{where} holds values nested deeper than {MAX_NESTED}; flatten them, or write them as text")
    elif isinstance(value, Mapping):
        for inner in itertools.chain(value, value.values()):
            _require_sendable(where, inner, nested + 1)
    elif isinstance(value, tuple | list):
        for inner in value:
            _require_sendable(where, inner, nested + 1)


# How a row's messages are worded


AnyRow = TypeVar("AnyRow", bound=Row)
NAMED, EMPTY = "{prompt}", "{}"
FIELD = re.compile(r"\{(\w+)\}")
KEPT_BACK = ("answer", "chosen", "rejected", "completion")
"""Columns that a question must not reveal."""
THOUGHT = "<think>\n{}\n</think>\n\n{}"
"""A message with its reasoning as the templates of Qwen3, DeepSeek and others write it."""
WORDED = ("", "inline", "drop")
"""Values of the option `reasoning`."""


def check_template(template: str) -> None:
    """Raise ConfigError for a template that has no place for the prompt."""
    if template and NAMED not in template and EMPTY not in template:
        raise ConfigError(f"the task's template {template!r} has no place for the prompt; write {NAMED} where it goes")


def word_row(row: AnyRow, source: str, template: str, reasoning: str = "") -> AnyRow:
    """The row, with the name of its source in a mixture added unless that is "", with its reasoning as `reasoning`
    says, and with its question put into the template if there is one (`Solve: {prompt}`, which may name other columns).
    """
    if source:
        row = replace(row, columns={**row.columns, OF_TASK: source})
    if reasoning:
        row = row.reworded(partial(_word_reasoning, how=reasoning))
    if template:
        question = {**row.turns[-1], "content": _fill_template(template, row)}
        row = replace(row, turns=(*row.turns[:-1], question))
    return row


def _word_reasoning(turns: Sequence[Mapping[str, Any]], how: str) -> Turns:
    found = []
    for turn in turns:
        thoughts = [turn[name].strip("\n") for name in REASONING if name in turn]
        told = {name: value for name, value in turn.items() if name not in REASONING}
        if thoughts and how == "inline":
            told["content"] = THOUGHT.format("\n".join(thoughts), turn["content"].lstrip("\n"))
        found.append(told)
    return tuple(found)


def _fill_template(template: str, row: Row) -> str:
    """The template with the row's values. Other braces are unchanged, such as those of \\boxed{}."""
    if NAMED not in template:
        template = template.replace(EMPTY, NAMED, 1)

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name == "prompt":
            return row.prompt
        if name in row.columns and name not in KEPT_BACK:
            return str(row.columns[name])
        return found[0]

    return FIELD.sub(value, template)
