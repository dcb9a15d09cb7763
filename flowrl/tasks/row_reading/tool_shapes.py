"""Converts tool definitions and tool calls from the forms found in data into one form.

A definition is `{"type": "function", "function": {"name", "description", "parameters"}}`, or only the inner mapping. A
call is `{"type": "function", "function": {"name", "arguments"}}`, with an `id` where the data have one, or only
`{"name", "arguments"}`. Arguments are a mapping. Lists, and arguments, may be written as JSON text. Fields that are
null are left out: Parquet writes them in rows without a value if other rows have one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrl.tasks.row_reading.record_formats import Malformed
from flowrl.tasks.rows import REASONING, WEIGHT

CALLS = "tool_calls"
UNTRAINED = ("train", "training")
"""Fields with which other trainers leave a message out of the loss."""
TEXTS = ("name", "tool_call_id")
"""Further fields of a message that chat templates read, each a text."""


def definitions(place: str, value: object, column: str) -> tuple[Mapping[str, Any], ...]:
    """The definitions in a row's column; () for null and for an empty list. Raises Malformed."""
    found = _json(value)
    if found is None or found == [] or (isinstance(found, str) and not found.strip()):
        return ()
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(map(_is_definition, found)):
        raise Malformed(
            f"{place}: the column {column!r} is {str(value)[:60]!r}; it needs a list of tool definitions, each "
            "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}, or that as JSON text; if it means "
            "something else, write FILE:tools=none; to use another column, FILE:tools=COLUMN"
        )
    return tuple(_definition(one) for one in found)


def _is_definition(value: object) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str) and bool(inner["name"])


def _definition(value: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = without_nulls(value.get("function", value))
    return {"type": "function", "function": inner}


def message(place: str, turn: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A message with its role, content, calls and the further fields that templates read. Raises Malformed."""
    found: dict[str, Any] = {"role": turn["role"], "content": turn.get("content") or ""}
    if calls := _json(turn.get(CALLS)):
        if turn["role"] != "assistant" or isinstance(calls, str) or not isinstance(calls, Sequence):
            raise Malformed(
                f"{place}: in the {what}, {CALLS} of the {turn['role']} are {str(calls)[:60]!r}; they need to be a "
                "list of calls of the assistant"
            )
        found[CALLS] = tuple(_call(place, one, what) for one in calls)
    found |= {name: turn[name] for name in TEXTS if isinstance(turn.get(name), str)}
    return found | _reasoning(place, turn, what) | _weight(place, turn, what)


def _reasoning(place: str, turn: Mapping[str, Any], what: str) -> dict[str, str]:
    """The reasoning of a message. Raises Malformed for what is no text, or no assistant's."""
    given = {name: turn[name] for name in REASONING if turn.get(name) not in (None, "")}
    for name, text in given.items():
        if not isinstance(text, str) or turn["role"] != "assistant":
            raise Malformed(
                f"{place}: in the {what}, {name} of the {turn['role']} is {str(text)[:60]!r}; it needs text, in a "
                "message of the assistant"
            )
    return given


def _weight(place: str, turn: Mapping[str, Any], what: str) -> dict[str, int]:
    """The weight 0 of a message that is not trained; 1 is what others have. Raises Malformed for other weights."""
    for name in UNTRAINED:
        if turn.get(name) is False:
            raise Malformed(
                f"{place}: in the {what}, {name} of a message of the {turn['role']} is false, which is not read here; "
                f"write {WEIGHT}: 0 for a turn of the assistant that is not trained"
            )
    weight = turn.get(WEIGHT)
    trained = turn["role"] == "assistant"
    if weight is None or (weight == 0 and not trained and not isinstance(weight, str)):
        return {}
    if not isinstance(weight, bool | int | float) or weight not in (0, 1) or not trained:
        raise Malformed(
            f"{place}: in the {what}, the {WEIGHT} of a message of the {turn['role']} is {str(weight)[:60]!r}; it "
            "needs 0 for a turn of the assistant that is not trained, or 1, and 0 for all others"
        )
    return {} if weight else {WEIGHT: 0}


def _call(place: str, value: object, what: str) -> Mapping[str, Any]:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    given = inner.get("arguments", inner.get("parameters")) if isinstance(inner, Mapping) else None
    arguments = {} if given in (None, "") else _json(given)
    if not isinstance(value, Mapping) or not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise Malformed(
            f"{place}: in the {what}, a tool call is {str(value)[:80]!r}; it needs {{'function': {{'name': text, "
            "'arguments': a mapping, or one as JSON text}}"
        )
    plain = arguments if isinstance(given, str) else without_nulls(arguments)
    call = {"type": "function", "function": {"name": name, "arguments": plain}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) and value["id"] else call


def of_function_call(value: str) -> object:
    """The tool calls of ShareGPT's `function_call`, whose value is one call or a list of calls as JSON text."""
    found = _json(value)
    return [found] if isinstance(found, Mapping) else found


def without_nulls(value: Any) -> Any:
    """`value` without fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(without_nulls(inner) for inner in value)
    return value


def text_of(reply: str | Iterable[Mapping[str, Any]]) -> str:
    """The text of a reply, for people and for verifiers; a call is a line of JSON with its name and arguments."""
    if isinstance(reply, str):
        return reply
    lines = []
    for turn in reply:
        lines += [turn["content"]] if turn["content"].strip() else []
        lines += [json.dumps(call["function"], ensure_ascii=False, default=list) for call in turn.get(CALLS, ())]
    return "\n".join(lines)


def _json(value: object) -> Any:
    """The value that a text encodes as JSON, else the argument itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
