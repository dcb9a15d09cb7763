"""How a chat template joins messages: what it writes after a reply, by id.

A template is a program of the model's author: it may drop, move or rewrite what it is given, and the rendering of a
longer conversation need not begin with that of a shorter one. So nothing is assumed: a mark takes the place of a
reply's content, and what the template writes after the mark is what follows the reply. The text between a reply, with
or without calls, and the next message is found once for each role of that message, with probe messages. A template for
which it cannot be found is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages, render_chat, token_ids

MARK = "mark7q"
"""Takes the place of a reply; letters and a digit, which no template escapes or trims."""
NEXT = "next4z"
"""The content of the probe message after the reply."""
ASKED: Mapping[str, Any] = {"role": "user", "content": "probe"}


@dataclass(frozen=True)
class Boundary:
    """The ids that a template writes between the mark in a reply and the content of the next message."""

    token_ids: Int32
    closing: int
    """Index in `token_ids` at which the reply is complete and its end begins; -1 if no probe shows it."""


class TooMuchText(ConfigError):
    """A text has more tokens than a context, at least `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"a text has at least {num_tokens} tokens, which is more than a context has")


@dataclass(frozen=True)
class TextBound:
    """Refuses texts that cannot fit into a context before they are tokenized, which takes a second for each MB."""

    context_tokens: int
    characters_per_token: int | None
    """As `most_characters_per_token` says; None: nothing is refused."""

    def check_text(self, text: str) -> None:
        """Raises TooMuchText."""
        if self.characters_per_token is not None:
            least = -(-len(text) // self.characters_per_token)
            if least > self.context_tokens:
                raise TooMuchText(least)


class ChatTemplate:
    """The chat template of a tokenizer with an episode's tools. Raises ConfigError if its boundary cannot be found.

    One instance serves any number of conversations; it keeps what the probes have found. Messages are those of
    `apply_chat_template`; the arguments of a tool call may be a mapping or JSON text. Several threads may use it.
    """

    def __init__(self, tokenizer: Any, tools: Messages = (), bound: TextBound | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template, so messages cannot be joined; name a chat model")
        self.tokenizer = tokenizer
        self.tools = tools
        self._bound = bound
        self._added = frozenset(tokenizer.added_tokens_decoder) | frozenset(tokenizer.all_special_ids)
        self._boundaries: dict[tuple[str, bool], Boundary] = {}
        self._in_parts = False
        self._json_arguments = False
        self._mark_ids = self.render_ids(MARK)
        try:
            self.boundary_before("user")
        except ConfigError as problem:
            # Perhaps the template takes content in parts, as those for images do, and reads the parts, or prints them.
            self._in_parts = True
            with suppress(ConfigError):
                self.boundary_before("user")
            if not self._boundaries or "'type'" in self.render_text([ASKED]):
                raise problem from None
        with suppress(ConfigError):  # a template without tool calls serves conversations without them
            self.boundary_before("user", calls=True)

    def render_text(self, messages: Messages) -> str:
        """The rendering of `messages` up to where the policy continues."""
        try:
            given = [self._form_message(message) for message in messages]
            return render_chat(self.tokenizer, given, add_generation_prompt=True, tools=self.tools)
        except Exception as problem:  # the boundary to the template, which is the model author's program
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            raise ConfigError(
                f"the chat template does not render a conversation that ends with {roles} ({problem}); "
                "feed roles in an order that it knows, or use another template"
            ) from None

    def render_ids(self, text: str) -> Int32:
        """The ids of text that starts a context. Raises TooMuchText beyond the bound that was given."""
        if self._bound is not None:
            self._bound.check_text(text)
        return token_ids(self.tokenizer, text)

    def ids_after_reply(self, text: str) -> Int32:
        """The ids of text that follows a reply. Raises ConfigError if a token would span the boundary."""
        mark, whole = self._mark_ids, self.render_ids(MARK + text)
        if not np.array_equal(whole[: mark.size], mark):
            raise ConfigError(
                f"the tokenizer joins the end of a reply with {text[:20]!r}, which the chat template writes after it, "
                "so the boundary cannot be found by id; use a template that ends replies with a special token"
            )
        return whole[mark.size :]

    def decode(self, ids: Int32) -> str:
        """The text of `ids`, special tokens included."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ids_following(self, history: Messages, sampled: Int32, new: Messages) -> Int32:
        """The ids that the template writes between the reply that ends `history` and the next reply, without those
        already sampled.

        Without new messages the next reply follows at once.
        """
        reply = history[-1]
        role = str(new[0]["role"]) if new else "assistant"
        boundary = self.boundary_before(role, calls=bool(reply.get("tool_calls")))
        mark = self._unused_mark([*history, *new])
        marked: dict[str, Any] = {"role": "assistant", "content": mark}
        if reply.get("tool_calls"):
            *others, last = reply["tool_calls"]
            function = {**last.get("function", last), "arguments": {"probe": mark}}
            marked = {"role": "assistant", "content": "", "tool_calls": [*others, {**last, "function": function}]}
        ids = self.ids_after_reply(self._after_mark([*history[:-1], marked, *new], mark))

        start = boundary.closing
        if start < 0:  # the reply is complete where its own end token is
            found = np.flatnonzero(boundary.token_ids == sampled[-1]) if self.is_ended(sampled) else np.array([])
            if not found.size:
                raise ConfigError(
                    "the chat template ends a reply with tool calls in its own way, and this reply does not end that "
                    "way; feed it as a reply without calls, or use another template"
                )
            start = int(found[0])
        if not np.array_equal(ids[: start + 1], boundary.token_ids[: start + 1]):
            raise ConfigError(
                f"the chat template ends this reply with {self.decode(ids[: start + 1])!r} and the probe's with "
                f"{self.decode(boundary.token_ids[: start + 1])!r}; use a template that ends all replies alike"
            )
        return ids[start + self.overlap_with(sampled, ids[start : boundary.token_ids.size]) :]

    def overlap_with(self, sampled: Int32, closing: Int32) -> int:
        """How many ids of `closing` the policy has sampled itself: `sampled` ends with them, and they contain an end
        token.

        Ids without an end token are text of the reply, which may by chance end in the same way as the template
        continues.
        """
        for n in range(min(sampled.size, closing.size), 0, -1):
            if np.array_equal(sampled[-n:], closing[:n]) and not self._added.isdisjoint(closing[:n].tolist()):
                return n
        return 0

    def is_ended(self, sampled: Int32) -> bool:
        """Whether the policy ended its reply itself, with an end token."""
        return sampled.size > 0 and int(sampled[-1]) in self._added

    def content_ids(self, sampled: Int32) -> Int32:
        """`sampled` without the end that the policy sampled."""
        end = self.overlap_with(sampled, self.boundary_before("user").token_ids)
        if end == 0 and sampled.size and sampled[-1] == self.tokenizer.eos_token_id:
            end = 1
        return sampled[: sampled.size - end]

    def boundary_before(self, role: str, *, calls: bool = False) -> Boundary:
        """The boundary between a reply, with or without tool calls, and a message of `role`.

        Raises ConfigError if the template drops either, or shows one of them more than once.
        """
        key = (role, calls)
        if key in self._boundaries:
            return self._boundaries[key]
        after = self._shown_after(role, calls)
        if after.count(NEXT) != 1:
            raise ConfigError(
                f"the chat template shows a {role} message after a reply {after.count(NEXT)} times instead of once, "
                "so its boundary cannot be found; use a template that knows this role"
            )
        between = after.partition(NEXT)[0]
        if not between:
            raise ConfigError(
                f"the chat template writes nothing between a reply and a {role} message, so there is no boundary; "
                "use a template that ends replies"
            )
        ids, closing = self.ids_after_reply(between), 0
        if calls:
            # A reply with calls is complete where the boundary after one without begins.
            closing = -1
            with suppress(ConfigError):  # the template shows such a message only after a call
                found = np.flatnonzero(ids == self.boundary_before(role).token_ids[0])
                closing = int(found[0]) if found.size else -1
        self._boundaries[key] = Boundary(ids, closing)
        return self._boundaries[key]

    def marked_starts(self, messages: Messages, indices: Sequence[int], text: str) -> list[int]:
        """`marked_start` of each of the replies, from one rendering with a mark in all of them.

        If the marks change other parts of the rendering, each reply is rendered with its own mark only.
        """
        mark = self._unused_mark(messages)
        marks = {index: f"{mark}{index:06}" for index in indices}
        marked = [
            {**message, "content": marks[n] + str(message.get("content") or "")} if n in marks else message
            for n, message in enumerate(messages)
        ]
        shown = self.render_text(marked)
        starts, plain, last = [], "", 0
        for index in indices:
            if (at := shown.find(marks[index], last)) < 0:
                starts.append(-1)
                continue
            plain += shown[last:at]
            starts.append(len(plain))
            last = at + len(marks[index])
        if plain + shown[last:] != text:
            return [self.marked_start(messages, index, text) for index in indices]
        return starts

    def marked_start(self, messages: Messages, index: int, text: str) -> int:
        """Where in `text`, the rendering of `messages`, the reply `index` begins; -1 if the template rewrites it."""
        mark = self._unused_mark(messages)
        reply = {**messages[index], "content": mark + str(messages[index].get("content") or "")}
        shown = self.render_text([*messages[:index], reply, *messages[index + 1 :]])
        return shown.find(mark) if shown.replace(mark, "", 1) == text else -1

    def probe_call(self, argument: str) -> Mapping[str, Any]:
        """A reply that calls the first tool (any, if there are none) with one argument."""
        function = dict(self.tools[0]).get("function", self.tools[0]) if self.tools else {}
        name = function.get("name", "probe")
        names = list(function.get("parameters", {}).get("properties", {})) or ["probe"]
        call = {"name": name, "arguments": {names[0]: argument}}
        calls = [{"id": "call00000", "type": "function", "function": call}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def probe_answer(self, content: str) -> Mapping[str, Any]:
        """The answer of the tool that `probe_call` calls."""
        (call,) = self.probe_call("")["tool_calls"]
        return {"role": "tool", "content": content, "name": call["function"]["name"], "tool_call_id": call["id"]}

    def _shown_after(self, role: str, calls: bool) -> str:
        new = self.probe_answer(NEXT) if role == "tool" else {"role": role, "content": NEXT}
        if not calls:
            return self._after_mark([ASKED, {"role": "assistant", "content": MARK}, new], MARK)
        try:
            return self._after_mark([ASKED, self.probe_call(MARK), new], MARK)
        except ConfigError as problem:
            self._json_arguments = not self._json_arguments
            try:
                return self._after_mark([ASKED, self.probe_call(MARK), new], MARK)
            except ConfigError:
                self._json_arguments = not self._json_arguments
                raise problem from None

    def _after_mark(self, messages: Messages, mark: str) -> str:
        text = self.render_text(messages)
        if text.count(mark) != 1:
            raise ConfigError(
                f"the chat template shows an earlier reply {text.count(mark)} times instead of once, so the boundary "
                "after it cannot be found; use a template that keeps replies (and tool calls, where there are tools)"
            )
        return text.partition(mark)[2]

    def _form_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as this template takes it."""
        content = message.get("content") or ""
        in_parts = self._in_parts and isinstance(content, str)
        formed = {**message, "content": [{"type": "text", "text": content}] if in_parts else content}
        calls = []
        for call in message.get("tool_calls") or ():
            function = dict(call.get("function", call))
            arguments = function["arguments"]
            if self._json_arguments and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not self._json_arguments and isinstance(arguments, str):
                arguments = json.loads(arguments)
            calls.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
        return {**formed, "tool_calls": calls} if calls else formed

    def _unused_mark(self, messages: Messages) -> str:
        text = json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str)
        mark = MARK
        while mark in text:
            mark += "q"
        return mark


class Templates:
    """The chat templates of one tokenizer, one for each set of tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, ChatTemplate] = {}

    def decode_text(self, token_ids: Int32) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The chat template with these tools. Raises ConfigError if the template's boundaries cannot be found."""
        key = json.dumps([dict(tool) for tool in tools], sort_keys=True)
        if key not in self._known:
            self._known[key] = ChatTemplate(self.tokenizer, tuple(tools))
        return self._known[key]
