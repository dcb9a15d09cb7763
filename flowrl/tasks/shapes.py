"""Shapes that conversations come in: lists of {role, content}, ShareGPT's {from, value}, and Alpaca's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Who speaks -> the role."""
ALPACA = ("instruction", "input", "output", "history")

Turns = tuple[Mapping[str, str], ...]


def of_sharegpt(value: object) -> object:
    """A list of {from, value} as one of {role, content}; anything else as it is."""
    if not (isinstance(value, Sequence) and value and all(_is_sharegpt(turn) for turn in value)):
        return value
    return [{"role": SHAREGPT[turn["from"]], "content": turn["value"]} for turn in value]


def _is_sharegpt(turn: object) -> bool:
    return isinstance(turn, Mapping) and turn.get("from") in SHAREGPT and isinstance(turn.get("value"), str)


def is_alpaca(record: Mapping[str, Any]) -> bool:
    """Whether the record has Alpaca's columns."""
    return isinstance(record.get("instruction"), str) and "output" in record


def alpaca(record: Mapping[str, Any]) -> object:
    """The conversation before the output: earlier rounds of `history`, then the instruction and its input."""
    extra = record.get("input")
    question = "\n\n".join(part for part in (record["instruction"], extra) if isinstance(part, str) and part.strip())
    rounds = record.get("history") or ()
    if not all(isinstance(told, Sequence) and len(told) == 2 and not isinstance(told, str) for told in rounds):
        return rounds
    earlier = [
        {"role": role, "content": text}
        for told in rounds
        for role, text in zip(("user", "assistant"), told, strict=True)
    ]
    return [*earlier, {"role": "user", "content": question}] if earlier else question


def with_system(turns: Turns, record: Mapping[str, Any]) -> Turns:
    """The turns after the row's own system message, unless they begin with one."""
    text = record.get("system")
    if not isinstance(text, str) or not text.strip() or turns[0]["role"] == "system":
        return turns
    return ({"role": "system", "content": text}, *turns)
