"""Preferences as rows: pairs of a chosen and a rejected completion, and single completions with a label.

A row is identified by its prompt and its completions together, so a prompt may have many rows. The split
depends only on the prompt: no prompt is both trained on and held out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

from flowrl.tasks.row_reading.columns import (
    CONVERSATIONS,
    Keys,
    answer_value,
    is_missing,
    make_conversation,
    plain_reply,
    plain_value,
    require_prompt,
    require_score,
    score_of,
    tools_of,
)
from flowrl.tasks.row_reading.message_shapes import reply_text, with_system
from flowrl.tasks.row_reading.record_formats import Malformed, RawRow, missing_column
from flowrl.tasks.rows import Row, Turns, digest
from flowrl.tasks.toy_tasks import careless_answer

Kind = Literal["pairs", "labelled"]
PAIR = ("chosen", "rejected")
LABELLED = ("completion", "label")


class Preference(Row):
    """A row whose columns are `chosen` and `rejected`, or `completion` and `label`."""

    @property
    def all_turns(self) -> Turns:
        """Every message of the row, including those of completions that are not text."""
        given = [told for name in (*PAIR, "completion") if isinstance(told := self.columns.get(name), tuple)]
        return (*self.turns, *itertools.chain.from_iterable(given))

    def reworded(self, word: Callable[[Turns], Turns]) -> Self:
        """The row with its messages, and those of its completions, as `word` makes them."""
        given = {name: self.columns.get(name) for name in (*PAIR, "completion")}
        told = {name: word(turns) for name, turns in given.items() if isinstance(turns, tuple)}
        return replace(self, turns=word(self.turns), columns={**self.columns, **told})

    @cached_property
    def prompt_id(self) -> str:
        """A hash of the conversation and its completions, as 16 hex digits."""
        return digest([*self.asked, *(self.columns[name] for name in (*PAIR, *LABELLED) if name in self.columns)])


def careless_preferences(asked: Iterable[Row], kind: Kind) -> Iterator[Preference]:
    """Sums with the right answer chosen and the answer without carrying rejected; other sums are left out."""
    for row in asked:
        wrong = careless_answer(row.prompt)
        if wrong != row.answer:
            pair = Preference(row.turns, {**row.columns, "chosen": row.answer, "rejected": wrong})
            yield from (pair,) if kind == "pairs" else _both_completions(pair)


def make_preferences(kind: Kind, keys: Keys, place: str, record: RawRow) -> tuple[Preference, ...]:
    """The preferences of one record. A pair makes two labelled completions.

    Raises Malformed, and LowScore if the record's score is below `min_score`.
    """
    told = keys.open_messages(record)
    is_single = kind == "labelled" and not (keys.chosen in record and keys.rejected in record)
    completions = (keys.completion,) if is_single else (keys.chosen, keys.rejected)
    before = _read_prompt(place, told, keys, completions)
    turns = with_system(before, record)
    names = ("completion",) if is_single else PAIR
    judged: dict[str, Any] = {name: _read_completion(place, told, keys, name, (turns, before)) for name in names}
    if is_single:
        judged["label"] = _read_label(place, record, keys)
    elif judged["chosen"] == judged["rejected"]:
        same = reply_text(judged["chosen"])
        raise Malformed(f"{place}: chosen and rejected are the same, {same[:60]!r}; leave the row out")
    tools = tools_of(place, record, keys)
    asked = (keys.prompt_column,) if keys.prompt_column in record else (keys.messages_column, CONVERSATIONS)
    opened = tuple(name for name in (*asked, *completions) if told.get(name) is not record.get(name))

    # The other columns, which rewards may need
    if keys.answer and keys.answer not in record:
        raise missing_column(place, record, keys.answer, "answer")
    used = {keys.prompt_column, keys.messages_column, keys.answer_column, "answer", "system"}
    used |= {keys.chosen, keys.rejected, keys.completion, keys.label}
    used |= set() if keys.prompt_column in record else {CONVERSATIONS}
    columns = {key: plain_value(value) for key, value in record.items() if key not in used}
    if not is_missing(answer := record.get(keys.answer_column)):
        columns["answer"] = answer_value(answer)
    columns |= {"tools": tools} if tools else {}

    found = Preference(turns, columns | judged, tools=tools, place=place, opened=opened)
    found.require_short()
    require_score(place, score_of(place, record, keys), keys)
    return (found,) if is_single or kind == "pairs" else _both_completions(found)


def _both_completions(pair: Preference) -> tuple[Preference, ...]:
    """The two completions of a pair as separate rows; the column `pair` distinguishes them from others."""
    columns = {name: value for name, value in pair.columns.items() if name not in PAIR} | {"pair": pair.prompt_id}
    judged = ({**columns, "completion": pair.columns[name], "label": name == "chosen"} for name in PAIR)
    return tuple(Preference(pair.turns, one, tools=pair.tools, place=pair.place, opened=pair.opened) for one in judged)


def _read_prompt(place: str, record: RawRow, keys: Keys, columns: tuple[str, ...]) -> Turns:
    """The messages before the completion: those of the column that an option names, or of the prompt, else those with
    which all whole conversations begin, else those of a conversation."""
    named = {option: column for option in ("prompt", "messages") if (column := getattr(keys, option))}
    for option, column in named.items():
        if column in record:
            told = record[column]
            return (
                make_conversation(place, told, "prompt")
                if option == "prompt"
                else _read_asked_turns(place, told, column)
            )
    for option, column in named.items():
        raise missing_column(place, record, column, option)
    if keys.prompt_column in record:
        return make_conversation(place, record[keys.prompt_column], "prompt")
    for column in columns:
        if column not in record:
            raise _completion_problem(place, record, column, column)
    found = [record.get(column) for column in columns]
    wholes = [whole for whole in found if isinstance(whole, list) and len(whole) > 1]
    if wholes and len(wholes) == len(columns):
        told = [
            make_conversation(place, one, column, may_end=True) for one, column in zip(wholes, columns, strict=True)
        ]
        return make_conversation(place, list(told[0][: _num_shared(told)]), f"{columns[0]} without its completion")
    for column in (keys.messages_column, CONVERSATIONS):
        if column in record:
            return _read_asked_turns(place, record[column], column)
    raise Malformed(
        f"{place}: no column 'prompt', and {columns[0]!r} is not a conversation that begins with the prompt; "
        "add such a column, or name the prompt's after the task's name: FILE:prompt=COLUMN"
    )


def _read_asked_turns(place: str, told: object, column: str) -> Turns:
    """The messages of a conversation; a last turn of the assistant's is an answer, which the completions replace."""
    turns = make_conversation(place, told, f"column {column!r}", may_end=True)
    return turns if turns[-1]["role"] != "assistant" else require_prompt(place, turns, column)


def _num_shared(told: Sequence[Turns]) -> int:
    """Number of messages in the prompt: the longest common beginning after which all continue with an assistant's
    message."""
    most = min(map(len, told)) - 1
    number = next((n for n in range(most) if any(one[n] != told[0][n] for one in told)), most)
    return next((n for n in range(number, 0, -1) if all(one[n]["role"] == "assistant" for one in told)), most)


def _read_completion(place: str, record: RawRow, keys: Keys, name: str, prompts: Sequence[Turns]) -> str | Turns:
    """A completion, given as text or as turns that start with the assistant's, with or without the prompt's turns
    before: `prompts` are these turns, with and without the row's own system message.

    The result is text if the completion is one turn without tool calls.
    """
    column: str = getattr(keys, name)
    found = record.get(column)
    if isinstance(found, list) and found:
        told = make_conversation(place, found, column, may_end=True)
        told = next((told[len(turns) :] for turns in prompts if told[: len(turns)] == turns), told)
        ends = (told[0]["role"], told[-1]["role"]) if told else ()
        found = plain_reply(place, told, column) if ends == ("assistant", "assistant") else None
        if isinstance(found, tuple):
            return found
    if isinstance(found, str) and found.strip():
        return found
    raise _completion_problem(place, record, column, name)


def _completion_problem(place: str, record: RawRow, column: str, option: str) -> Malformed:
    there = f"is {str(record[column])[:60]!r}" if column in record else f"is missing (there are {', '.join(record)})"
    return Malformed(
        f"{place}: the column {column!r} {there}; it needs text, or the assistant's turn, alone or after the "
        f"prompt's turns; to use another column, name it after the task's name: FILE:{option}=COLUMN"
    )


def _read_label(place: str, record: RawRow, keys: Keys) -> bool:
    found = record.get(keys.label)
    if isinstance(found, str):  # a cell of a CSV file
        found = {"true": True, "1": True, "false": False, "0": False}.get(found.strip().lower(), found)
    if found not in (True, False):  # 1 and 0 also match, as they equal True and False
        there = f"is {str(found)[:60]!r}" if keys.label in record else f"is missing (there are {', '.join(record)})"
        raise Malformed(
            f"{place}: the column {keys.label!r} {there}; it needs true for a desirable completion and false for an "
            "undesirable one; to use another column, name it after the task's name: FILE:label=COLUMN"
        )
    return bool(found)
