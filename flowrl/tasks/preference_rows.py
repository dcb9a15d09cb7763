"""Preferences as rows: pairs of a chosen and a rejected completion, and single completions with a label.

A row is identified by its prompt and its completions together, so a prompt may have many rows. The split
depends only on the prompt: no prompt is both trained on and held out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flowrl.hub.name import HubName
from flowrl.tasks.arithmetic import careless_answer
from flowrl.tasks.files import Keys, conversation, plain, read_records
from flowrl.tasks.formats import Record
from flowrl.tasks.malformed import Malformed, Reading
from flowrl.tasks.rows import Row

Kind = Literal["pairs", "labelled"]
PAIR = ("chosen", "rejected")
LABELLED = ("completion", "label")


class Preference(Row):
    """A row whose columns are `chosen` and `rejected`, or `completion` and `label`."""

    @cached_property
    def prompt_id(self) -> str:
        """16 hex digits over the conversation and its completions."""
        content = [*map(dict, self.turns), *(self.columns[name] for name in (*PAIR, *LABELLED) if name in self.columns)]
        text = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def held_out(self) -> bool:
        """Whether the row is held out; depends only on the prompt."""
        return Row(self.turns).held_out


def rows(source: Path | HubName, keys: Keys, reading: Reading, kind: Kind) -> Iterator[Preference]:
    """The preferences of `source`. Raises ConfigError if it cannot be read, Malformed depending on `reading`."""
    for place, record in read_records(source, keys, reading):
        found = reading.at(place, lambda place=place, record=record: _preferences(place, record, keys, kind))  # type: ignore[misc]
        yield from found or ()


def careless(asked: Iterable[Row], kind: Kind) -> Iterator[Preference]:
    """Sums with the right answer chosen and the answer without carrying rejected; other sums are left out."""
    for row in asked:
        wrong = careless_answer(row.prompt)
        if wrong != row.answer:
            pair = Preference(row.turns, {**row.columns, "chosen": row.answer, "rejected": wrong})
            yield from (pair,) if kind == "pairs" else _both(pair)


def _preferences(place: str, record: Record, keys: Keys, kind: Kind) -> tuple[Preference, ...]:
    """The preferences of one record. A pair makes two labelled completions."""
    if kind == "labelled" and not (keys.chosen in record and keys.rejected in record):
        turns = _prompt(place, record, keys, keys.completion)
        judged = {
            "completion": _completion(place, record, keys, "completion", turns),
            "label": _label(place, record, keys),
        }
        return (Preference(turns, _others(record, keys) | judged),)
    turns = _prompt(place, record, keys, keys.chosen)
    chosen, rejected = (_completion(place, record, keys, name, turns) for name in PAIR)
    if chosen == rejected:
        raise Malformed(f"{place}: chosen and rejected are the same, {chosen[:60]!r}; leave the row out")
    pair = Preference(turns, _others(record, keys) | {"chosen": chosen, "rejected": rejected})
    return (pair,) if kind == "pairs" else _both(pair)


def _both(pair: Preference) -> tuple[Preference, ...]:
    """The two completions of a pair as separate rows; the column `pair` distinguishes them from others."""
    columns = {name: value for name, value in pair.columns.items() if name not in PAIR} | {"pair": pair.prompt_id}
    return tuple(
        Preference(pair.turns, {**columns, "completion": pair.columns[name], "label": name == "chosen"})
        for name in PAIR
    )


def _prompt(place: str, record: Record, keys: Keys, column: str) -> Any:
    """The messages before the completion: the prompt's own, or all but the last of a whole conversation."""
    if keys.prompt in record:
        return conversation(place, record[keys.prompt], "prompt")
    whole = record.get(column)
    if isinstance(whole, list) and len(whole) > 1:
        return conversation(place, whole[:-1], f"{column} without its last turn")
    raise Malformed(
        f"{place}: no column {keys.prompt!r}, and {column!r} is not a conversation that begins with the prompt; "
        "add such a column, or name the prompt's after the task's name: FILE:prompt=COLUMN"
    )


def _completion(place: str, record: Record, keys: Keys, name: str, turns: Any) -> str:
    """The text of a completion given as text, as one assistant turn, or as the prompt and one assistant turn."""
    column: str = getattr(keys, name)
    found = record.get(column)
    if isinstance(found, list) and found:
        told = conversation(place, found, column, may_end=True)
        found = told[-1]["content"] if told[-1]["role"] == "assistant" and told[:-1] in ((), turns) else None
    if isinstance(found, str) and found.strip():
        return found
    there = f"is {str(record[column])[:60]!r}" if column in record else f"is missing (there are {', '.join(record)})"
    raise Malformed(
        f"{place}: the column {column!r} {there}; it needs text, or the assistant's turn, alone or after the "
        f"prompt's turns. To use another column, name it after the task's name: FILE:{name}=COLUMN"
    )


def _label(place: str, record: Record, keys: Keys) -> bool:
    found = record.get(keys.label)
    if isinstance(found, str):  # a cell of a CSV file
        found = {"true": True, "1": True, "false": False, "0": False}.get(found.strip().lower(), found)
    if found not in (True, False):  # 1 and 0 also match, as they equal True and False
        raise Malformed(
            f"{place}: the column {keys.label!r} is {found!r}; it needs true for a desirable completion and false for "
            "an undesirable one. To use another column, name it after the task's name: FILE:label=COLUMN"
        )
    return bool(found)


def _others(record: Record, keys: Keys) -> dict[str, Any]:
    """The other columns, which rewards may need."""
    used = (keys.prompt, keys.chosen, keys.rejected, keys.completion, keys.label)
    columns = {key: plain(value) for key, value in record.items() if key not in used}
    if keys.answer in columns:
        columns["answer"] = str(columns.pop(keys.answer))
    return columns
