"""Which parts of tool use a chat template shows, and in which form it takes calls. Found once, with probe messages.

A template is a program of the model's author: it may silently leave out what it does not know. Rows whose tools, calls
or answers would be left out are refused. Most templates take a call's arguments as a mapping, some as JSON text. A few
need ids of calls, which must have nine letters and digits. Reasoning has one of several names, of which a template
knows at most some.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.rows import REASONING

Messages = Sequence[Mapping[str, Any]]
NAME, ARGUMENT, VALUE, ANSWER = "probe3tool", "probe3key", "probe3value", "probe3answer"
CALL_ID = "call{:05d}"
"""Nine letters and digits."""
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string", "description": "A probe."}}},
    },
}


@dataclass(frozen=True)
class ToolForm:
    """What a template shows, and how it takes calls."""

    definitions: bool
    calls: bool
    answers: bool
    json_arguments: bool = False
    needs_ids: bool = False

    def form_messages(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages in the form that this template takes."""
        ids: dict[str, str] = {}
        waiting: list[str] = []
        return [self._form_message(dict(message), ids, waiting) for message in messages]

    def _form_message(self, message: dict[str, Any], ids: dict[str, str], waiting: list[str]) -> dict[str, Any]:
        """`ids` has the ids of the calls so far, `waiting` the ids of those that have no answer yet."""
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._form_call(call, ids, waiting) for call in calls]
        elif message["role"] == "tool" and self.needs_ids and waiting:
            own = ids.get(message.get("tool_call_id", ""), waiting[0])
            message["tool_call_id"] = waiting.pop(waiting.index(own) if own in waiting else 0)
        return message

    def _form_call(self, call: Mapping[str, Any], ids: dict[str, str], waiting: list[str]) -> dict[str, Any]:
        function = {**call["function"], "arguments": plain_value(call["function"]["arguments"])}
        if self.json_arguments:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if not self.needs_ids:
            return {**call, "function": function}
        number = CALL_ID.format(len(ids))
        ids[call.get("id", number)] = number
        waiting.append(number)
        return {**call, "id": number, "function": function}

    def require_shown(self, messages: Messages, tools: Messages) -> None:
        """Raise ConfigError if the template would leave out definitions, calls or answers of tools that these have."""
        missing = [
            what
            for what, shown, used in (
                ("definitions of tools", self.definitions, bool(tools)),
                ("tool calls", self.calls, any(message.get("tool_calls") for message in messages)),
                ("answers of tools", self.answers, any(message["role"] == "tool" for message in messages)),
            )
            if used and not shown
        ]
        if missing:
            raise ConfigError(
                f"the data have {' and '.join(missing)}, which the model's chat template does not show; name a model "
                "or a --chat-template that knows tools, or leave the column out with FILE:tools=none"
            )


def reasoned(tokenizer: Any, messages: Messages) -> Messages | None:
    """The messages with their reasoning in a field that the chat template shows; None if it shows none."""
    if not any(name in message for message in messages for name in REASONING):
        return messages
    shown = _shown_reasoning(tokenizer, str(tokenizer.chat_template)) if tokenizer.chat_template else ()
    return [_with_reasoning(message, shown) for message in messages] if shown else None


def _with_reasoning(message: Mapping[str, Any], shown: tuple[str, ...]) -> Mapping[str, Any]:
    """The message with the reasoning that it has in a field that is `shown`."""
    given = [name for name in REASONING if name in message]
    if not given or any(name in shown for name in given):
        return message
    others = {name: value for name, value in message.items() if name not in REASONING}
    return {**others, shown[0]: message[given[0]]}


@functools.lru_cache(maxsize=8)
def _shown_reasoning(tokenizer: Any, template: str) -> tuple[str, ...]:
    """The fields in which `template`, the tokenizer's, shows the reasoning of a last message."""
    asked = {"role": "user", "content": "probe"}
    replied = {"role": "assistant", "content": "probe"}
    return tuple(name for name in REASONING if VALUE in render_text(tokenizer, [asked, {**replied, name: VALUE}], []))


def uses_tools(messages: Messages, tools: Messages) -> bool:
    """Whether a conversation has tools, tool calls or answers of tools."""
    return bool(tools) or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def tool_form(tokenizer: Any) -> ToolForm:
    """The form of the tokenizer's chat template."""
    return try_forms(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def try_forms(tokenizer: Any, template: str) -> ToolForm:
    """`template` is the tokenizer's: an argument, because a caller may change it and the result is cached."""
    forms = [
        ToolForm(True, True, True, json_arguments, needs_ids)
        for json_arguments in (False, True)
        for needs_ids in (False, True)
    ]
    rendered = [(form, render_probe(tokenizer, form)) for form in forms]
    best = next((form for form, text in rendered if _shows_call(text)), None)
    text = next((text for form, text in rendered if form == best), "")
    definitions = NAME in _rendered_asked(tokenizer)
    if best is None:
        text = render_text(tokenizer, [*probe_conversation(ToolForm(definitions, False, False))], [])
        return ToolForm(definitions, calls=False, answers=ANSWER in text)
    return ToolForm(definitions, True, ANSWER in text, best.json_arguments, best.needs_ids)


def _shows_call(text: str) -> bool:
    """Whether the text has name and argument, and the argument not as Python or as JSON within JSON would write it."""
    return NAME in text and VALUE in text and f"'{ARGUMENT}':" not in text and f'\\"{ARGUMENT}' not in text


def render_probe(tokenizer: Any, form: ToolForm) -> str:
    """A rendered conversation with a call and its answer, without definitions of tools; "" if the template refuses
    it."""
    return render_text(tokenizer, form.form_messages(probe_conversation(form)), [])


def probe_conversation(form: ToolForm) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": NAME, "arguments": {ARGUMENT: VALUE}}}
    reply = {"tool_calls": [call], "content": ""} if form.calls else {"content": "probe"}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", **reply},
        {"role": "tool", "content": ANSWER, "name": "probe"},
        {"role": "assistant", "content": "probe"},
    ]


def _rendered_asked(tokenizer: Any) -> str:
    return render_text(tokenizer, [{"role": "user", "content": "probe"}], [TOOL])


def render_text(tokenizer: Any, messages: Messages, tools: Messages) -> str:
    try:
        return str(tokenizer.apply_chat_template([dict(m) for m in messages], tools=tools or None, tokenize=False))
    except Exception:  # the boundary to the template, which is the model author's program
        return ""


def plain_value(value: Any) -> Any:
    """`value` with lists in place of tuples, which templates and JSON do not know."""
    if isinstance(value, Mapping):
        return {key: plain_value(inner) for key, inner in value.items()}
    return [plain_value(inner) for inner in value] if isinstance(value, tuple | list) else value


def plain_tools(tools: Messages) -> list[Any]:
    """Tool definitions in the form that templates take."""
    return [plain_value(tool) for tool in tools]
