"""Shapes that conversations come in: lists of {role, content}, ShareGPT's {from, value}, and Alpaca's columns.

A list may also be written as text: as JSON, which tables with one type per column hold, or as Python writes it, which
is what pandas puts into CSV.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrl.tasks.row_reading.record_formats import Malformed
from flowrl.tasks.row_reading.tool_shapes import CALLS, UNTRAINED, message, of_function_call
from flowrl.tasks.rows import REASONING, WEIGHT, Turns

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Speaker -> role."""
ALPACA = ("instruction", "input", "output", "history")

OPENING = re.compile(r"\s*\[\s*\{\s*(?P<quote>[\"'])")
"""How the text of a list of messages begins; the quote says whether JSON or Python has written it."""


def with_messages(record: Mapping[str, Any], columns: Iterable[str]) -> Mapping[str, Any]:
    """The record with the lists of messages that its `columns` hold as text."""
    told = {name: found for name in columns if (found := _messages_in(record.get(name))) is not None}
    return {**record, **told} if told else record


def _messages_in(value: object) -> list[Mapping[str, Any]] | None:
    """The list of messages that `value` is the text of; None for other values. A role may be unknown: `is_turn` tells.

    A text that begins like such a list and cannot be parsed is no list, but text.
    """
    if not isinstance(value, str) or (opening := OPENING.match(value)) is None:
        return None
    try:
        found = json.loads(value) if opening["quote"] == '"' else ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(map(_is_like_message, found))
    return found if is_list else None


def _is_like_message(turn: object) -> bool:
    if not isinstance(turn, Mapping):
        return False
    of_role = isinstance(turn.get("role"), str) and ("content" in turn or CALLS in turn)
    return of_role or (isinstance(turn.get("from"), str) and "value" in turn)


def of_sharegpt(value: object) -> object:
    """A list of {from, value} as one of {role, content}; anything else unchanged."""
    if not (isinstance(value, Sequence) and value and all(_is_sharegpt(turn) for turn in value)):
        return value
    return [_of_speaker(turn) for turn in value]


def _of_speaker(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    speaker, value = turn["from"], turn["value"]
    others = {name: turn[name] for name in (WEIGHT, *UNTRAINED, *REASONING) if name in turn}
    if speaker == "function_call":
        return {"role": "assistant", "content": "", CALLS: of_function_call(value), **others}
    return {"role": SHAREGPT[speaker], "content": value, **others}


def _is_sharegpt(turn: object) -> bool:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        return False
    speaker = turn.get("from")
    return isinstance(speaker, str) and speaker in SHAREGPT


def is_alpaca(record: Mapping[str, Any]) -> bool:
    """Whether the record has Alpaca's columns."""
    return "instruction" in record and "output" in record


def alpaca(place: str, record: Mapping[str, Any]) -> object:
    """The conversation before the output: earlier rounds of `history`, then the instruction and its input.

    Raises Malformed for a history of another form.
    """
    if not isinstance(record["instruction"], str):
        return record["instruction"]
    extra = record.get("input")
    question = "\n\n".join(part for part in (record["instruction"], extra) if isinstance(part, str) and part.strip())
    earlier = [
        {"role": role, "content": text}
        for told in _rounds(place, record.get("history"))
        for role, text in zip(("user", "assistant"), told, strict=True)
    ]
    return [*earlier, {"role": "user", "content": question}] if earlier else question


def _rounds(place: str, history: object) -> Sequence[Sequence[str]]:
    """The earlier rounds, which a cell of a table may hold as JSON."""
    found = _as_json(history) if isinstance(history, str) else history
    if found is None:
        return ()
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(map(_is_round, found)):
        raise Malformed(
            f"{place}: the history is {str(history)[:60]!r}; it needs a list of rounds, each a list of two texts: what "
            "was asked, and the reply"
        )
    return found


def _as_json(text: str) -> object:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return text


def _is_round(told: object) -> bool:
    if not isinstance(told, Sequence) or isinstance(told, str):
        return False
    return len(told) == 2 and all(isinstance(text, str) for text in told)


def with_system(turns: Turns, record: Mapping[str, Any]) -> Turns:
    """The turns after the row's own system message, unless they begin with one."""
    text = record.get("system")
    if not isinstance(text, str) or not text.strip() or turns[0]["role"] == "system":
        return turns
    return ({"role": "system", "content": text}, *turns)


def is_turn(turn: object) -> bool:
    """Whether this is a message: a role with text, or with tool calls."""
    if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
        return False
    content = turn.get("content")
    return isinstance(content, str) or (content is None and bool(turn.get(CALLS)))


def messages(place: str, value: Sequence[Mapping[str, Any]], what: str) -> Turns:
    """The messages in one form. Raises Malformed."""
    return tuple(message(place, turn, what) for turn in value)
