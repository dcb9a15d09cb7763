"""stub"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.environments.protocol import Action, ToolCall


@dataclass
class ParsedReply:
    message: Any
    malformed: str = ""


class ReplyParser:
    def __init__(self, t):
        self.t = t

    def parse(self, ids, context_ids, tools):
        return ParsedReply({"role": "assistant", "content": self.t.decode(list(ids), skip_special_tokens=True)})


def reply_parser(tokenizer, *, tool_parser=None, reasoning_parser=None):
    return ReplyParser(tokenizer)


def action_of(reply):
    m = reply.message
    calls = tuple(
        ToolCall(c["function"]["name"], c["function"]["arguments"], c.get("id", "")) for c in m.get("tool_calls") or ()
    )
    return Action(m.get("content") or "", calls, tuple(map(int, reply.token_ids)), reply.finish_reason)
