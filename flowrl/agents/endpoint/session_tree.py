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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
        fed = [span for span in asked.spans if span.token_ids.size]
        # If nothing was fed after the last reply, the new one is another sequence.
        continues = bool(sampled) and not (fed and fed[-1].logprobs is not None)
        branch = self._ends.pop(sampled[-1], None) if continues else None
        if branch is None:
            branch = [span if span.logprobs is None else Span(span.token_ids, span.text) for span in asked.spans]
            self._branches.append(branch)
        else:
            branch += asked.spans[len(branch) :]
        branch.append(reply)
        self._ends[reply] = branch

    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences, in the order in which they started."""
        return tuple(token_sequence(branch) for branch in self._branches)


def canonical_message(value: Any) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def stripped_text(message: Mapping[str, Any], key: str) -> str:
    return str(message.get(key) or "").strip()


def canonical_calls(message: Mapping[str, Any]) -> list[list[Any]]:
    """The name and the arguments of each call, the arguments as objects if they are valid JSON text."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        found.append([function["name"], arguments])
    return found


def said_parts(message: Mapping[str, Any]) -> str:
    """What an assistant message says: its text without blanks at the ends, and its calls without their ids."""
    return canonical_message([stripped_text(message, "content"), canonical_calls(message)])


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """The ids of a message's tool calls that have one."""
    return [str(call["id"]) for call in message.get("tool_calls") or () if call.get("id")]


class KnownReplies:
    """Replies of the policy, found by what a client sends back.

    Among several that say the same, `find_reply` takes the first one with the same reasoning as the message, else the
    first.
    """

    def __init__(self) -> None:
        self._by_call_id: dict[str, MessageNode] = {}
        self._by_said: dict[str, list[MessageNode]] = {}

    def add_reply(self, node: MessageNode) -> None:
        """The stop text that ended the reply is not in its message; clients may add it again."""
        message = node.message
        for call_id in call_ids(message):
            self._by_call_id.setdefault(call_id, node)
        texts = {said_parts(message)}
        if node.stop_text:
            texts.add(said_parts({**message, "content": f"{message.get('content') or ''}{node.stop_text}"}))
        for text in texts:
            self._by_said.setdefault(text, []).append(node)

    def find_reply(self, message: Mapping[str, Any]) -> MessageNode | None:
        """The reply that `message` repeats: by the id of a call, unless the calls or the text were edited; else by
        what it says. None if it repeats none."""
        text = stripped_text(message, "content")
        for call_id in call_ids(message):
            known = self._by_call_id.get(call_id)
            if known is None or text not in ("", stripped_text(known.message, "content")):
                continue
            if canonical_calls(message) == canonical_calls(known.message):
                return known
        equal = self._by_said.get(said_parts(message), [])
        reasoning = stripped_text(message, "reasoning_content")
        same = [node for node in equal if stripped_text(node.message, "reasoning_content") == reasoning]
        return next(iter(same or equal), None)


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
    text: str
    """The prompt and `shown`."""


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
            spans = self._text_spans(prompt)
        else:
            ids = np.asarray(prompt, np.int32)
            kept: tuple[Span, ...] = ()
            size = 0
            for one in self._completed:
                known = np.concatenate([one.asked.token_ids, one.reply.token_ids])
                if known.size > size and np.array_equal(ids[: known.size], known):
                    kept, size = (*one.asked.spans, one.reply), known.size
            spans = (*kept, Span(ids[size:], ""))
        return AskedPrompt(tuple(span for span in spans if span.token_ids.size), prompt)

    def add_reply(self, asked: AskedPrompt, reply: Span, shown: str) -> None:
        shown = shown if isinstance(asked.prompt, str) else ""
        self._completed.append(CompletedPrompt(asked, reply, shown, f"{asked.prompt}{shown}"))
        self._branches.add_reply(asked, reply)

    def _text_spans(self, prompt: str) -> tuple[Span, ...]:
        continued = [one for one in self._completed if one.shown and prompt.startswith(one.text)]
        if not continued:
            return (Span(np.asarray(self._tokenizer(prompt)["input_ids"], np.int32), prompt),)
        longest = max(continued, key=lambda one: len(one.text))
        rest = prompt[len(longest.text) - len(longest.shown) :]

        # The part of the reply that the prompt repeats keeps its ids; if that is all of it, the reply's own span.
        ids, kept = longest.reply.token_ids, ""
        size = ids.size
        while size:
            kept = self._tokenizer.decode(
                ids[:size].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if rest.startswith(kept):
                break
            size, kept = size - 1, ""
        reply = longest.reply if size == ids.size else Span(ids[:size], kept)
        fed = rest[len(kept) :]
        fed_ids = np.asarray(self._tokenizer(fed, add_special_tokens=False)["input_ids"], np.int32)
        return (*longest.asked.spans, reply, Span(fed_ids, fed))


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
    replies_below: KnownReplies = field(default_factory=KnownReplies)


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
        self._replies: KnownReplies = KnownReplies()
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
        message = {**message, "role": "assistant", "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", **call, "id": self._unused_id(call)} for call in calls]
        node = MessageNode(message, asked.node, reply, stop_text)
        asked.node.replies_below.add_reply(node)
        self._replies.add_reply(node)
        self._branches.add_reply(asked, reply)
        return message

    def _node_below(self, node: MessageNode, message: Mapping[str, Any]) -> MessageNode:
        replied = message["role"] == "assistant"
        known = node.replies_below.find_reply(message) if replied else None
        if known is not None:
            return known
        key = canonical_message(message)
        if key in node.fed_below:
            return node.fed_below[key]
        elsewhere = self._replies.find_reply(message) if replied else None
        if elsewhere is None:
            node.fed_below[key] = MessageNode(message, node)
            return node.fed_below[key]
        # A reply of another history is context here, with the ids that were sampled.
        assert elsewhere.reply is not None
        context = Span(elsewhere.reply.token_ids, elsewhere.reply.text)
        repeated = MessageNode(elsewhere.message, node, context, elsewhere.stop_text)
        node.replies_below.add_reply(repeated)
        return repeated

    def _unused_id(self, call: Mapping[str, Any]) -> str:
        """The policy's own id of a call, if there is one and no other call of the session has it; else a new one."""
        own, number = str(call.get("id") or ""), len(self._call_ids)
        while not own or own in self._call_ids:
            own, number = f"call{number:05}", number + 1  # nine letters and digits, which every template takes
        self._call_ids.add(own)
        return own


def context_spans(template: ChatTemplate, node: MessageNode) -> tuple[Span, ...]:
    """The spans of all that precedes a reply to `node`."""
    spans: list[Span] = []
    below: MessageNode | None = node
    while below is not None:
        replied: MessageNode | None = below
        while replied is not None and replied.reply is None:
            replied = replied.above
        reply = None if replied is None else replied.reply
        if below.fed is None:
            messages = path_messages(below)
            if replied is None or reply is None:
                text = template.render_text(messages)
                below.fed = Span(template.render_ids(text), text)
            else:
                size = len(path_messages(replied))
                ids = template.ids_following(messages[:size], reply.token_ids, messages[size:])
                below.fed = Span(ids, "")
        spans += [below.fed] if reply is None else [below.fed, reply]
        below = None if replied is None else replied.above
    return tuple(reversed(spans))


def path_messages(node: MessageNode) -> list[Mapping[str, Any]]:
    """The messages from the first one to this one."""
    found = []
    above: MessageNode | None = node
    while above is not None and above.message:
        found.append(above.message)
        above = above.above
    return found[::-1]
