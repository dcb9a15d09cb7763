"""Whole episodes of a model with a calculator, in plain transformers: `Conversation` keeps the tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.agents import ChatTemplate, Conversation
from flowrl.models.built_in_models import CALCULATOR, continue_prompt
from flowrl.tasks import Row

SUM = re.compile(r"(\d{1,9})([+-])(\d{1,9})")


@dataclass(frozen=True)
class PlayedEpisode:
    """How one episode went."""

    num_calls: int
    right: bool
    answered: str
    expected: str
    calculated: str


def calculator(expression: str) -> str:
    """The value of a sum or difference, as the tool says it."""
    found = SUM.fullmatch(expression)
    if found is None:
        return "error: no sum"
    left, operator, right = found.groups()
    return str(int(left) + int(right) if operator == "+" else int(left) - int(right))


def play(model: Any, tokenizer: Any, rows: Sequence[Row], *, greedy: bool, turns: int = 3) -> list[PlayedEpisode]:
    """Episodes of at most `turns` replies; torch's seed decides what is sampled."""
    template = ChatTemplate(tokenizer, [CALCULATOR])
    conversations = [Conversation(template) for _ in rows]
    for conversation, row in zip(conversations, rows, strict=True):
        conversation.feed(list(row.turns))
    open_ones = conversations
    for _ in range(turns):
        contexts = [one.context().tolist() for one in open_ones]
        replies = continue_prompt(model, contexts, 64, pad=tokenizer.pad_token_id, greedy=greedy).tolist()
        for conversation, reply in zip(open_ones, replies, strict=True):
            _answer(conversation, _until_end(reply, tokenizer.eos_token_id))
        open_ones = [one for one in open_ones if one.messages[-1]["role"] == "tool"]
        if not open_ones:
            break
    return [_played(one, row) for one, row in zip(conversations, rows, strict=True)]


def _until_end(reply: list[int], eos: int) -> list[int]:
    return reply[: reply.index(eos) + 1] if eos in reply else reply


def _answer(conversation: Conversation, reply: list[int]) -> None:
    """Take a reply, and feed the calculator's answers if it calls it."""
    tokenizer, zeros = conversation.template.tokenizer, np.zeros(len(reply))
    message: Mapping[str, Any] | None = None
    with suppress(ValueError):  # a malformed call: the reply is its text
        message = tokenizer.parse_response(reply, prefix="", tools=[CALCULATOR])
    conversation.sampled(reply, zeros, zeros, message)
    for call in (message or {}).get("tool_calls", ()):
        said = calculator(str(call["function"]["arguments"].get("expression")))
        conversation.feed([{"role": "tool", "name": "calculator", "content": said}])


def _played(conversation: Conversation, row: Row) -> PlayedEpisode:
    messages = conversation.messages
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    last = messages[-1]
    said = str(last["content"]) if last["role"] == "assistant" else ""
    return PlayedEpisode(len(answers), said == row.answer, said, str(row.answer), answers[-1] if answers else "")
