"""A session's requests and answers, as trees of messages and prompts, and their token sequences.

Invariants: a message that was fed keeps its place, so equal histories are equal contexts; a reply's token ids are
those that were sampled, wherever a client sends it back. A reply that comes back after its own history continues its
sequence; one that comes back after another history (a summary, an edited message) is context there.

Clients send a reply back as their library stores it: with rewritten arguments, with blanks trimmed, without the text
next to a call, or without the ids of calls. `KnownReplies` recognises it.

A prompt of text or token ids (/v1/completions) that continues an earlier prompt and its reply has the reply's sampled
ids. If the client cut the reply, at a stop text or its end token, the prompt has only those ids of the reply that it
repeats, as context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from flowrl.agents.chat_template import ChatTemplate, TextBound
from flowrl.agents.conversation import Span, TokenSequence, token_sequence
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages


@dataclass(frozen=True, eq=False)
class Asked:
    """A context that a reply is to be sampled for: fed spans, and earlier replies as the spans with which they were
    added."""

    spans: tuple[Span, ...]

    @cached_property
    def token_ids(self) -> Int32:
        return np.concatenate([span.token_ids for span in self.spans], dtype=np.int32)


class SampledBranches:
    """Add each reply with its context, as it comes; ask for the sequences at the end."""

    def __init__(self) -> None:
        self._branches: list[list[Span]] = []
        self._ends: dict[Span, list[Span]] = {}
        """The reply that ends a branch -> the branch."""

    def add_reply(self, asked: Asked, reply: Span) -> None:
        """`reply` has logprobs; of the spans asked, those that have them are replies that were added before."""
        sampled = [span for span in asked.spans if span.logprobs is not None]
        branch = self._ends.pop(sampled[-1], None) if sampled and not _ends_sampled(asked) else None
        if branch is None:
            branch = [_as_context(span) for span in asked.spans]
            self._branches.append(branch)
        else:
            branch += asked.spans[len(branch) :]
        branch.append(reply)
        self._ends[reply] = branch

    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences, in the order in which they started."""
        return tuple(token_sequence(branch) for branch in self._branches)


def _ends_sampled(asked: Asked) -> bool:
    """Whether nothing was fed after the last reply."""
    spans = [span for span in asked.spans if span.token_ids.size]
    return bool(spans) and spans[-1].logprobs is not None


def _as_context(span: Span) -> Span:
    return span if span.logprobs is None else Span(span.token_ids, span.text)


Found = TypeVar("Found")


def canonical_message(value: Any) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def said_parts(message: Mapping[str, Any]) -> str:
    """What an assistant message says: its text without blanks at the ends, and its calls without their ids."""
    return canonical_message([content_text(message), canonical_calls(message)])


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

    def add_reply(self, message: Mapping[str, Any], reply: Found, *, stop_text: str = "") -> None:
        """`stop_text` ended the reply and is not in the message; clients may add it again."""
        for call_id in call_ids(message):
            self._by_call_id.setdefault(call_id, (message, reply))
        texts = {said_parts(message)}
        if stop_text:
            texts.add(said_parts({**message, "content": f"{message.get('content') or ''}{stop_text}"}))
        for text in texts:
            self._by_said.setdefault(text, []).append((reasoning_text(message), reply))

    def find_reply(self, message: Mapping[str, Any]) -> Found | None:
        """The reply that `message` repeats: by the id of a call, unless the calls or the text were edited; else by
        what it says. None if it repeats none."""
        for call_id in call_ids(message):
            known = self._by_call_id.get(call_id)
            if known is not None and repeats_text(message, known[0]):
                return known[1]
        known_replies = self._by_said.get(said_parts(message))
        if not known_replies:
            return None
        same = [reply for reasoning, reply in known_replies if reasoning == reasoning_text(message)]
        return (same or [reply for _, reply in known_replies])[0]


def repeats_text(message: Mapping[str, Any], reply: Mapping[str, Any]) -> bool:
    return canonical_calls(message) == canonical_calls(reply) and content_text(message) in ("", content_text(reply))


def reasoning_text(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or "").strip()


def content_text(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "").strip()


def canonical_calls(message: Mapping[str, Any]) -> list[list[Any]]:
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [[function["name"], parse_arguments(function["arguments"])] for function in functions]


def parse_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


RawPrompt = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class AskedPrompt(Asked):
    """The context of a prompt."""

    prompt: RawPrompt


@dataclass(frozen=True, eq=False)
class CompletedPrompt:
    """A prompt with its reply."""

    asked: AskedPrompt
    reply: Span
    shown: str
    """The reply's text as the client has it; "" if the prompt was given as ids."""

    @property
    def text(self) -> str:
        return f"{self.asked.prompt}{self.shown}"


class RawPrompts:
    """Ask for a prompt's context, sample, and add the answer."""

    def __init__(self, tokenizer: Any, branches: SampledBranches, bound: TextBound) -> None:
        self._tokenizer = tokenizer
        self._bound = bound
        self._branches = branches
        self._completed: list[CompletedPrompt] = []

    def find_context(self, prompt: RawPrompt) -> AskedPrompt:
        """The context; the longest earlier one that the prompt continues keeps its ids. Raises TooMuchText."""
        if isinstance(prompt, str):
            self._bound.check_text(prompt)
        spans = self._text_spans(prompt) if isinstance(prompt, str) else self._id_spans(prompt)
        return AskedPrompt(tuple(span for span in spans if span.token_ids.size), prompt)

    def add_reply(self, asked: AskedPrompt, reply: Span, shown: str) -> None:
        text = shown if isinstance(asked.prompt, str) else ""
        self._completed.append(CompletedPrompt(asked, reply, text))
        self._branches.add_reply(asked, reply)

    def _text_spans(self, prompt: str) -> tuple[Span, ...]:
        continued = [one for one in self._completed if one.shown and prompt.startswith(one.text)]
        if not continued:
            return (Span(np.asarray(self._tokenizer(prompt)["input_ids"], np.int32), prompt),)
        longest = max(continued, key=lambda one: len(one.text))
        rest = prompt[len(longest.text) - len(longest.shown) :]
        kept, text = self._kept_part(longest.reply, rest)
        return (*longest.asked.spans, kept, self._fed_span(rest[len(text) :]))

    def _id_spans(self, prompt: Sequence[int]) -> tuple[Span, ...]:
        ids = np.asarray(prompt, np.int32)
        best: tuple[Span, ...] = ()
        for one in self._completed:
            spans = (*one.asked.spans, one.reply)
            if count_ids(spans) > count_ids(best) and np.array_equal(ids[: count_ids(spans)], join_ids(spans)):
                best = spans
        return (*best, Span(ids[count_ids(best) :], ""))

    def _kept_part(self, reply: Span, rest: str) -> tuple[Span, str]:
        """(the part of the reply that `rest` begins with, its text); if that is the whole reply, the part is `reply`
        itself."""
        for size in range(reply.token_ids.size, 0, -1):
            text = self._decode_ids(reply.token_ids[:size])
            if rest.startswith(text):
                return (reply if size == reply.token_ids.size else Span(reply.token_ids[:size], text)), text
        return Span(reply.token_ids[:0], ""), ""

    def _fed_span(self, text: str) -> Span:
        return Span(np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32), text)

    def _decode_ids(self, ids: Int32) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def count_ids(spans: tuple[Span, ...]) -> int:
    return sum(span.token_ids.size for span in spans)


def join_ids(spans: tuple[Span, ...]) -> Int32:
    return np.concatenate([span.token_ids for span in spans], dtype=np.int32)


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

    def find_context(self, messages: Messages, tools: Messages = ()) -> AskedMessages:
        """The context up to where the policy continues. Raises ConfigError if the template cannot render it."""
        template = self._template_of(tools)
        node = self._roots.setdefault(canonical_message(list(tools)), MessageNode({}))
        for message in messages:
            node = self._node_below(node, message)
        return AskedMessages(context_spans(template, node), node)

    def num_tokens(self, messages: Messages, tools: Messages = ()) -> int:
        """Tokens of these messages rendered anew, up to where the policy continues; the tree does not change."""
        template = self._template_of(tools)
        return int(template.render_ids(template.render_text(list(messages))).size)

    def add_reply(
        self, asked: AskedMessages, reply: Span, message: Mapping[str, Any], *, stop_text: str = ""
    ) -> Mapping[str, Any]:
        """Add a reply; returns the message as the client is to see it: each tool call has a unique id."""
        message = self._with_call_ids({**message, "role": "assistant", "content": message.get("content") or ""})
        node = MessageNode(message, asked.node, reply, stop_text)
        asked.node.replies_below.add_reply(message, node, stop_text=stop_text)
        self._replies.add_reply(message, node, stop_text=stop_text)
        self._branches.add_reply(asked, reply)
        return message

    def _node_below(self, node: MessageNode, message: Mapping[str, Any]) -> MessageNode:
        replied = message["role"] == "assistant"
        known = node.replies_below.find_reply(message) if replied else None
        if known is not None:
            return known
        key = canonical_message(message)
        if key not in node.fed_below:
            elsewhere = self._replies.find_reply(message) if replied else None
            if elsewhere is not None:
                return repeated_reply(node, elsewhere)
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


def repeated_reply(node: MessageNode, known: MessageNode) -> MessageNode:
    """The reply `known` as context below `node`."""
    assert known.reply is not None
    repeated = MessageNode(known.message, node, Span(known.reply.token_ids, known.reply.text), known.stop_text)
    node.replies_below.add_reply(known.message, repeated, stop_text=known.stop_text)
    return repeated


def context_spans(template: ChatTemplate, node: MessageNode) -> tuple[Span, ...]:
    """The spans of all that precedes a reply to `node`."""
    spans: list[Span] = []
    below: MessageNode | None = node
    while below is not None:
        reply = _last_reply(below)
        spans.append(fed_spans(template, below, reply))
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


def fed_spans(template: ChatTemplate, node: MessageNode, reply: MessageNode | None) -> Span:
    if node.fed is None:
        messages = path_messages(node)
        if reply is None or reply.reply is None:
            text = template.render_text(messages)
            node.fed = Span(template.render_ids(text), text)
        else:
            size = len(path_messages(reply))
            ids = template.ids_following(messages[:size], reply.reply.token_ids, messages[size:])
            node.fed = Span(ids, "")
    return node.fed


def path_messages(node: MessageNode) -> list[Mapping[str, Any]]:
    found = []
    above: MessageNode | None = node
    while above is not None and above.message:
        found.append(above.message)
        above = above.above
    return found[::-1]
