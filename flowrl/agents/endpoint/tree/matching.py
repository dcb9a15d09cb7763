"""When two messages are the same: how a message of the policy is recognised when a client sends it back.

Clients send a reply back as their library stores it: with rewritten arguments, with blanks trimmed, without the text
next to a call, or without the ids of calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def said(message: Mapping[str, Any]) -> str:
    """What an assistant message says: its text without blanks at the ends, and its calls without their ids."""
    return canonical([_text(message), _calls(message)])


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """The ids of a message's tool calls that have one."""
    return [str(call["id"]) for call in message.get("tool_calls") or () if call.get("id")]


class KnownReplies(Generic[Found]):
    """Replies of the policy, found by what a client sends back.

    Among several that say the same, `find` takes the first one with the same reasoning as the message, else the first.
    """

    def __init__(self) -> None:
        self._by_call_id: dict[str, tuple[Mapping[str, Any], Found]] = {}
        self._by_said: dict[str, list[tuple[str, Found]]] = {}
        """What is said -> (reasoning, reply) of each reply that says it."""

    def add(self, message: Mapping[str, Any], reply: Found, *, stop_text: str = "") -> None:
        """`stop_text` ended the reply and is not in the message; clients may add it again."""
        for call_id in call_ids(message):
            self._by_call_id.setdefault(call_id, (message, reply))
        texts = {said(message)}
        if stop_text:
            texts.add(said({**message, "content": f"{message.get('content') or ''}{stop_text}"}))
        for text in texts:
            self._by_said.setdefault(text, []).append((_reasoning(message), reply))

    def find(self, message: Mapping[str, Any]) -> Found | None:
        """The reply that `message` repeats: by the id of a call, unless the calls or the text were edited; else by
        what it says. None if it repeats none."""
        for call_id in call_ids(message):
            known = self._by_call_id.get(call_id)
            if known is not None and _repeats(message, known[0]):
                return known[1]
        known_replies = self._by_said.get(said(message))
        if not known_replies:
            return None
        same = [reply for reasoning, reply in known_replies if reasoning == _reasoning(message)]
        return (same or [reply for _, reply in known_replies])[0]


def _repeats(message: Mapping[str, Any], reply: Mapping[str, Any]) -> bool:
    return _calls(message) == _calls(reply) and _text(message) in ("", _text(reply))


def _reasoning(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _text(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "").strip()


def _calls(message: Mapping[str, Any]) -> list[list[Any]]:
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [[function["name"], _arguments(function["arguments"])] for function in functions]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
