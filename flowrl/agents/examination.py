"""Preflight of a chat template: whether it rewrites history, what that costs, and whether tool calls can be parsed
back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.agents.call_parser import ReplyParser, reply_parser
from flowrl.agents.chat_template import ASKED, MARK, NEXT, ChatTemplate
from flowrl.agents.conversation import Conversation, History
from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages

PROBED_REPLIES = 3
ANY_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
"""A stand-in for tools that are not known yet: without tools nothing is parsed as a call."""


@dataclass(frozen=True)
class Examination:
    """What a chat template does to conversations, found with probe messages."""

    rewrites: tuple[str, ...]
    """Kinds of replies ("plain", "reasoning", "calls") whose context the template writes anew later."""
    sequences: int
    """Number of sequences of a probe with three replies, with `history="template"`."""
    repeated: float
    """Tokens of those sequences for each token of the one that `history="append"` makes."""
    no_tools: str
    """Why tool calls and tools' answers cannot be fed; "" if they can."""
    no_parsing: str
    """Why a rendered tool call was not parsed back; "" if it was, or if there are no tools."""
    parsed_by: str
    """The parser, as a user knows it."""
    no_calls: bool
    """Whether nothing of the rendered tool call was read as a call."""
    hides_tools: bool
    """Whether the template takes tool calls and answers, but does not tell the policy which tools exist."""

    def __str__(self) -> str:
        if self.no_tools:
            return f"{self.history()} Tool calls cannot be fed: {self.no_tools}."
        said = [self.history(), "Tool calls can be fed."]
        if self.hides_tools:
            said.append(
                "The template does not show which tools there are: describe them in the environment's first message."
            )
        if self.no_parsing:
            said.append(f"Tool calls are not parsed back: {self.no_parsing}.")
        else:
            said.append(f"A rendered tool call was parsed back by {self.parsed_by}.")
        return " ".join(said)

    def history(self) -> str:
        """What the template does to earlier replies, as a sentence."""
        if not self.rewrites:
            return "The template keeps earlier replies: both histories give the same contexts."
        return (
            f"The template rewrites earlier replies ({', '.join(self.rewrites)}). history='append' shows the model "
            "contexts that its template would not write; history='template' makes "
            f"{self.sequences} sequences of {PROBED_REPLIES} replies, {self.repeated:.1f} times the tokens."
        )


def examine(
    tokenizer: Any,
    tools: Messages = (),
    parser: ReplyParser | None = None,
    *,
    named: str = "the tokenizer's response_template",
) -> Examination:
    """Probe the chat template. Raises ConfigError if the boundary after a reply cannot be found.

    `parser` defaults to `reply_parser(tokenizer)`; `named` is the parser's name for the user. Reasoning is probed if
    the template names `</think>`.
    """
    template = ChatTemplate(tokenizer, tools)
    no_tools, no_parsing, no_calls, hides_tools = "", "", False, False
    try:
        template.boundary_before("tool", calls=True)
        template.boundary_before("user", calls=True)
    except ConfigError as problem:
        no_tools = str(problem)
    else:
        no_parsing, no_calls = parsed_back(template, parser)
        with_tools = template if tools else ChatTemplate(tokenizer, (ANY_TOOL,))
        hides_tools = with_tools.render_text([ASKED]) == ChatTemplate(tokenizer).render_text([ASKED])

    reasoning = ["reasoning"] if "</think>" in str(tokenizer.chat_template) else []
    kinds = ["plain", *reasoning, *([] if no_tools else ["calls"])]
    appended = {kind: sum(probe_sizes(template, kind, "append")) for kind in kinds}
    rewritten = {kind: probe_sizes(template, kind, "template") for kind in kinds}
    worst = max(kinds, key=lambda kind: sum(rewritten[kind]) / appended[kind])
    return Examination(
        tuple(kind for kind in kinds if len(rewritten[kind]) > 1),
        len(rewritten[worst]),
        sum(rewritten[worst]) / appended[worst],
        no_tools,
        no_parsing,
        named,
        no_calls=no_calls,
        hides_tools=hides_tools,
    )


def shown_reply(template: ChatTemplate, reply: Mapping[str, Any]) -> tuple[Int32, str]:
    """(ids of a reply that contains MARK, as the template shows it with its end; the text before the reply).

    The reply starts at the first id that differs from the rendering that ends with the question.
    """
    text = template.render_text([ASKED, reply, {"role": "user", "content": NEXT}]).partition(MARK)[0]
    before, whole = template.render_ids(template.render_text([ASKED])), template.render_ids(text + MARK)
    start = common_length(before, whole)
    end = end_of_turn(template, calls=bool(reply.get("tool_calls")))
    return np.concatenate([whole[start:], end]), template.decode(whole[:start])


def common_length(a: Int32, b: Int32) -> int:
    """Number of equal ids at the beginning of `a` and `b`."""
    size = min(a.size, b.size)
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if differing.size else size


def end_of_turn(template: ChatTemplate, *, calls: bool) -> Int32:
    """The ids after the mark in a reply, up to its end token; if the closing is unknown, up to the last end token
    before the point where the next message's role makes a difference."""
    boundary = template.boundary_before("tool" if calls else "user", calls=calls)
    if boundary.closing >= 0:
        return boundary.token_ids[: boundary.closing + 1]
    ids = boundary.token_ids[
        : common_length(boundary.token_ids, template.boundary_before("user", calls=calls).token_ids)
    ]
    while ids.size and not template.is_ended(ids):
        ids = ids[:-1]
    return ids


def probe_sizes(template: ChatTemplate, kind: str, history: History) -> list[int]:
    """Tokens of each sequence of a conversation with replies of this kind; with appended history it is one."""
    conversation = Conversation(template, history=history)
    new: Mapping[str, Any] = ASKED
    for n in range(PROBED_REPLIES):
        conversation.feed([new])
        context = conversation.context()
        message: Mapping[str, Any] = {"role": "assistant", "content": MARK}
        new = ASKED
        if kind == "reasoning":
            opened = template.decode(context).rstrip().endswith("<think>")
            text = ("" if opened else "<think>\n") + f"why\n</think>\n\n{MARK}"
            ids = np.concatenate([template.render_ids(text), end_of_turn(template, calls=False)])
            message = {"role": "assistant", "content": text}
        else:
            if kind == "calls" and n == 0:
                message, new = template.probe_call(MARK), template.probe_answer("sum")
            ids, _ = shown_reply(template, message)
        conversation.sampled(ids, np.zeros(ids.size), np.zeros(ids.size), message)
    return [sequence.token_ids.size for sequence in conversation.sequences()]


def parsed_back(template: ChatTemplate, parser: ReplyParser | None) -> tuple[str, bool]:
    """(why a tool call that the template renders does not come back from the parser, whether none comes back)."""
    if parser is None and getattr(template.tokenizer, "response_template", None) is None:
        return "the tokenizer has no response_template, and no parser was given", True
    call = template.probe_call(MARK)
    ids, before = shown_reply(template, call)
    parsed = (parser or reply_parser(template.tokenizer)).parse(ids, before, template.tools or (ANY_TOOL,))
    reply = template.decode(ids)
    if parsed.malformed:
        return f"{reply!r} could not be read ({parsed.malformed})", True
    expected = call["tool_calls"][0]["function"]
    calls = [one["function"] for one in parsed.message.get("tool_calls", ())]
    found = [{**one, "arguments": json.loads(one["arguments"])} for one in calls]
    return "" if found == [expected] else f"{reply!r} was parsed into {found} instead of {expected}", not found
