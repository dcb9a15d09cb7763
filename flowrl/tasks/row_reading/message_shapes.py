"""Converts conversations, tool definitions and tool calls from the shapes found in data into one.

A conversation is a list of {role, content}, or ShareGPT's {from, value}, or Alpaca's columns. A list may also be
written as text: as JSON, which tables with one type per column hold, or as Python writes it, which is what pandas puts
into CSV.

A definition is `{"type": "function", "function": {"name", "description", "parameters"}}`, or only the inner mapping. A
call is `{"type": "function", "function": {"name", "arguments"}}`, with an `id` where the data have one, or only
`{"name", "arguments"}`. Arguments are a mapping. Lists, and arguments, may be written as JSON text. Fields that are
null are left out: Parquet writes them in rows without a value if other rows have one.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrl.tasks.row_reading.record_formats import Malformed
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
CALLS = "tool_calls"
UNTRAINED = ("train", "training")
"""Fields with which other trainers leave a message out of the loss."""
TEXTS = ("name", "tool_call_id")
"""Further fields of a message that chat templates read, each a text."""
OPENING = re.compile(r"\s*\[\s*\{\s*(?P<quote>[\"'])")
"""How the text of a list of messages begins; the quote says whether JSON or Python has written it."""


# Conversations


def with_messages(record: Mapping[str, Any], columns: Iterable[str]) -> Mapping[str, Any]:
    """The record with the lists of messages that its `columns` hold as text. A role may be unknown: `is_turn` tells.

    A text that begins like such a list and cannot be parsed is no list, but text.
    """
    told = {}
    for name in columns:
        value = record.get(name)
        if not isinstance(value, str) or (opening := OPENING.match(value)) is None:
            continue
        try:
            found = json.loads(value) if opening["quote"] == '"' else ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(found, list) and all(map(_is_like_message, found)):
            told[name] = found
    return {**record, **told} if told else record


def _is_like_message(turn: object) -> bool:
    if not isinstance(turn, Mapping):
        return False
    of_role = isinstance(turn.get("role"), str) and ("content" in turn or CALLS in turn)
    return of_role or (isinstance(turn.get("from"), str) and "value" in turn)


def from_sharegpt(value: object) -> object:
    """A list of {from, value} as one of {role, content}; anything else unchanged."""
    if not isinstance(value, Sequence) or not value:
        return value
    for turn in value:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            return value
        if not isinstance(speaker := turn.get("from"), str) or speaker not in SHAREGPT:
            return value
    found = []
    for turn in value:
        speaker, said = turn["from"], turn["value"]
        others = {name: turn[name] for name in (WEIGHT, *UNTRAINED, *REASONING) if name in turn}
        if speaker == "function_call":  # one call, or a list of calls, as JSON text
            calls = parse_json_text(said)
            calls = [calls] if isinstance(calls, Mapping) else calls
            found.append({"role": "assistant", "content": "", CALLS: calls, **others})
        else:
            found.append({"role": SHAREGPT[speaker], "content": said, **others})
    return found


def alpaca_prompt(place: str, record: Mapping[str, Any]) -> object:
    """The conversation before the output: earlier rounds of `history`, then the instruction and its input.

    Raises Malformed for a history of another form.
    """
    instruction, extra, history = record["instruction"], record.get("input"), record.get("history")
    if not isinstance(instruction, str):
        return instruction
    question = "\n\n".join(part for part in (instruction, extra) if isinstance(part, str) and part.strip())
    rounds = history
    if isinstance(history, str):  # a cell of a table
        rounds = parse_json_text(history) if history.strip() else None
    rounds = () if rounds is None else rounds
    if not isinstance(rounds, Sequence) or isinstance(rounds, str) or not all(map(_is_round, rounds)):
        raise Malformed(
            f"{place}: the history is {str(history)[:60]!r}; it needs a list of rounds, each a list of two texts: what "
            "was asked, and the reply"
        )
    earlier = [
        {"role": role, "content": text}
        for told in rounds
        for role, text in zip(("user", "assistant"), told, strict=True)
    ]
    return [*earlier, {"role": "user", "content": question}] if earlier else question


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


# Messages


def is_turn(turn: object) -> bool:
    """Whether this is a message: a role with text, or with tool calls."""
    if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
        return False
    content = turn.get("content")
    return isinstance(content, str) or (content is None and bool(turn.get(CALLS)))


def make_turns(place: str, value: Sequence[Mapping[str, Any]], what: str) -> Turns:
    """The messages in one form: role, content, calls and the further fields that templates read. Raises Malformed."""
    turns = []
    for turn in value:
        found: dict[str, Any] = {"role": turn["role"], "content": turn.get("content") or ""}
        if calls := parse_json_text(turn.get(CALLS)):
            if turn["role"] != "assistant" or isinstance(calls, str) or not isinstance(calls, Sequence):
                raise Malformed(
                    f"{place}: in the {what}, {CALLS} of the {turn['role']} are {str(calls)[:60]!r}; they need to be a "
                    "list of calls of the assistant"
                )
            found[CALLS] = tuple(_make_call(place, one, what) for one in calls)
        found |= {name: turn[name] for name in TEXTS if isinstance(turn.get(name), str)}
        for name in REASONING:
            if (text := turn.get(name)) in (None, ""):
                continue
            if not isinstance(text, str) or turn["role"] != "assistant":
                raise Malformed(
                    f"{place}: in the {what}, {name} of the {turn['role']} is {str(text)[:60]!r}; it needs text, in a "
                    "message of the assistant"
                )
            found[name] = text
        if not _is_trained(place, turn, what):
            found[WEIGHT] = 0
        turns.append(found)
    return tuple(turns)


def _is_trained(place: str, turn: Mapping[str, Any], what: str) -> bool:
    """Whether the message has no weight of 0, which only the assistant's may have. Raises Malformed for others."""
    for name in UNTRAINED:
        if turn.get(name) is False:
            raise Malformed(
                f"{place}: in the {what}, {name} of a message of the {turn['role']} is false, which is not read here; "
                f"write {WEIGHT}: 0 for a turn of the assistant that is not trained"
            )
    weight = turn.get(WEIGHT)
    trained = turn["role"] == "assistant"
    if weight is None or (weight == 0 and not trained and not isinstance(weight, str)):
        return True
    if not isinstance(weight, bool | int | float) or weight not in (0, 1) or not trained:
        raise Malformed(
            f"{place}: in the {what}, the {WEIGHT} of a message of the {turn['role']} is {str(weight)[:60]!r}; it "
            "needs 0 for a turn of the assistant that is not trained, or 1, and 0 for all others"
        )
    return bool(weight)


# Tools


def make_definitions(place: str, value: object, column: str) -> tuple[Mapping[str, Any], ...]:
    """The definitions in a row's column; () for null and for an empty list. Raises Malformed."""
    found = parse_json_text(value)
    if found is None or found == [] or (isinstance(found, str) and not found.strip()):
        return ()
    inner = [
        one.get("function", one) if isinstance(one, Mapping) else None
        for one in (found if isinstance(found, Sequence) and not isinstance(found, str) else (None,))
    ]
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) and one["name"] for one in inner):
        raise Malformed(
            f"{place}: the column {column!r} is {str(value)[:60]!r}; it needs a list of tool definitions, each "
            "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}, or that as JSON text; if it means "
            "something else, write FILE:tools=none; to use another column, FILE:tools=COLUMN"
        )
    return tuple({"type": "function", "function": without_nulls(one)} for one in inner)


def _make_call(place: str, value: object, what: str) -> Mapping[str, Any]:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    given = inner.get("arguments", inner.get("parameters")) if isinstance(inner, Mapping) else None
    arguments = {} if given in (None, "") else parse_json_text(given)
    if not isinstance(value, Mapping) or not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise Malformed(
            f"{place}: in the {what}, a tool call is {str(value)[:80]!r}; it needs {{'function': {{'name': text, "
            "'arguments': a mapping, or one as JSON text}}"
        )
    plain = arguments if isinstance(given, str) else without_nulls(arguments)
    call = {"type": "function", "function": {"name": name, "arguments": plain}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) and value["id"] else call


def without_nulls(value: Any) -> Any:
    """`value` without fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(without_nulls(inner) for inner in value)
    return value


def reply_text(reply: str | Iterable[Mapping[str, Any]]) -> str:
    """The text of a reply, for people and for verifiers; a call is a line of JSON with its name and arguments."""
    if isinstance(reply, str):
        return reply
    lines = []
    for turn in reply:
        lines += [turn["content"]] if turn["content"].strip() else []
        lines += [json.dumps(call["function"], ensure_ascii=False, default=list) for call in turn.get(CALLS, ())]
    return "\n".join(lines)


def parse_json_text(value: object) -> Any:
    """The value that a text encodes as JSON, else the argument itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
