"""The calls of a session as a tree of messages; the tools are part of its root.

Invariants: a message that was fed keeps its place, so equal histories are equal contexts; a reply's token ids are
those that were sampled, wherever a client sends it back. A reply that comes back after its own history continues its
sequence; one that comes back after another history (a summary, an edited message) is context there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.agents.chat_template import ChatTemplate
from flowrl.agents.conversation import Span
from flowrl.agents.endpoint.tree.matching import KnownReplies, canonical
from flowrl.agents.endpoint.tree.sampled_branches import Asked, SampledBranches
from flowrl.models.tokens.chat import Messages


@dataclass(eq=False)
class MessageNode:
    """A message that follows the messages above it."""

    message: Mapping[str, Any]
    above: MessageNode | None = None
    reply: Span | None = None
    """What was sampled, without logprobs if a reply of another history comes back here; None for fed messages."""
    stop_text: str = ""
    """The stop text that ended the reply, if it is not part of the message."""
    fed: Span | None = None
    """What is fed from the last reply, or from the start, to where the policy continues after this message."""
    fed_below: dict[str, MessageNode] = field(default_factory=dict)
    replies_below: KnownReplies[MessageNode] = field(default_factory=KnownReplies)


@dataclass(frozen=True, eq=False)
class AskedMessages(Asked):
    """A context that ends with the message `node`."""

    node: MessageNode


class MessageTree:
    """Ask for the context of a call's messages, sample, and add the answer. Calls may overlap.

    `template_of` gives the chat template with a call's tools. Messages are those of `apply_chat_template`.
    """

    def __init__(self, template_of: Callable[[Messages], ChatTemplate], branches: SampledBranches) -> None:
        self._template_of = template_of
        self._branches = branches
        self._roots: dict[str, MessageNode] = {}
        self._replies: KnownReplies[MessageNode] = KnownReplies()
        self._call_ids: set[str] = set()

    def asked(self, messages: Messages, tools: Messages = ()) -> AskedMessages:
        """The context up to where the policy continues. Raises ConfigError if the template cannot render it."""
        template = self._template_of(tools)
        node = self._roots.setdefault(canonical(list(tools)), MessageNode({}))
        for message in messages:
            node = self._below(node, message)
        return AskedMessages(_spans(template, node), node)

    def num_tokens(self, messages: Messages, tools: Messages = ()) -> int:
        """Tokens of these messages rendered anew, up to where the policy continues; the tree does not change."""
        template = self._template_of(tools)
        return int(template.ids(template.text(list(messages))).size)

    def add(
        self, asked: AskedMessages, reply: Span, message: Mapping[str, Any], *, stop_text: str = ""
    ) -> Mapping[str, Any]:
        """Add a reply; returns the message as the client is to see it: each tool call has a unique id."""
        message = self._with_call_ids({**message, "role": "assistant", "content": message.get("content") or ""})
        node = MessageNode(message, asked.node, reply, stop_text)
        asked.node.replies_below.add(message, node, stop_text=stop_text)
        self._replies.add(message, node, stop_text=stop_text)
        self._branches.add(asked, reply)
        return message

    def _below(self, node: MessageNode, message: Mapping[str, Any]) -> MessageNode:
        replied = message["role"] == "assistant"
        known = node.replies_below.find(message) if replied else None
        if known is not None:
            return known
        key = canonical(message)
        if key not in node.fed_below:
            elsewhere = self._replies.find(message) if replied else None
            if elsewhere is not None:
                return _repeated(node, elsewhere)
            node.fed_below[key] = MessageNode(message, node)
        return node.fed_below[key]

    def _with_call_ids(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The policy's own id of a call is kept if there is one and no other call of the session has it."""
        if not message.get("tool_calls"):
            return message
        calls = [{"type": "function", **call, "id": self._unused_id(call)} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}

    def _unused_id(self, call: Mapping[str, Any]) -> str:
        own, number = str(call.get("id") or ""), len(self._call_ids)
        while not own or own in self._call_ids:
            own, number = f"call{number:05}", number + 1  # nine letters and digits, which every template takes
        self._call_ids.add(own)
        return own


def _repeated(node: MessageNode, known: MessageNode) -> MessageNode:
    """The reply `known` as context below `node`."""
    assert known.reply is not None
    repeated = MessageNode(known.message, node, Span(known.reply.token_ids, known.reply.text), known.stop_text)
    node.replies_below.add(known.message, repeated, stop_text=known.stop_text)
    return repeated


def _spans(template: ChatTemplate, node: MessageNode) -> tuple[Span, ...]:
    """The spans of all that precedes a reply to `node`."""
    spans: list[Span] = []
    below: MessageNode | None = node
    while below is not None:
        reply = _last_reply(below)
        spans.append(_fed(template, below, reply))
        if reply is None:
            break
        assert reply.reply is not None
        spans.append(reply.reply)
        below = reply.above
    return tuple(reversed(spans))


def _last_reply(node: MessageNode | None) -> MessageNode | None:
    while node is not None and node.reply is None:
        node = node.above
    return node


def _fed(template: ChatTemplate, node: MessageNode, reply: MessageNode | None) -> Span:
    if node.fed is None:
        messages = _messages(node)
        if reply is None or reply.reply is None:
            text = template.text(messages)
            node.fed = Span(template.ids(text), text)
        else:
            size = len(_messages(reply))
            ids = template.following(messages[:size], reply.reply.token_ids, messages[size:])
            node.fed = Span(ids, "")
    return node.fed


def _messages(node: MessageNode) -> list[Mapping[str, Any]]:
    found = []
    above: MessageNode | None = node
    while above is not None and above.message:
        found.append(above.message)
        above = above.above
    return found[::-1]
