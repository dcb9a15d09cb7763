"""Which parts of tool use a chat template shows, and in which form it takes calls. Found once, with probe messages.

A template is a program of the model's author: it may silently leave out what it does not know. Rows whose tools, calls
or answers would be left out are refused. Most templates take a call's arguments as a mapping, some as JSON text. A few
need ids of calls, which must have nine letters and digits. Reasoning has one of several names, of which a template
knows at most some.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
        """A call's own id -> the id that it is given."""
        waiting: list[str] = []
        """Ids of the calls that have no answer yet."""
        formed = [dict(message) for message in messages]
        for message in formed:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = []
                for call in calls:
                    function = {**call["function"], "arguments": plain_value(call["function"]["arguments"])}
                    if self.json_arguments:
                        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                    told = {**call, "function": function}
                    if self.needs_ids:
                        told["id"] = CALL_ID.format(len(ids))
                        ids[call.get("id", told["id"])] = told["id"]
                        waiting.append(told["id"])
                    message["tool_calls"].append(told)
            elif message["role"] == "tool" and self.needs_ids and waiting:
                own = ids.get(message.get("tool_call_id", ""), waiting[0])
                message["tool_call_id"] = waiting.pop(waiting.index(own) if own in waiting else 0)
        return formed

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


def show_reasoning(tokenizer: Any, messages: Messages) -> Messages | None:
    """The messages with their reasoning in a field that the chat template shows; None if it shows none."""
    if not any(name in message for message in messages for name in REASONING):
        return messages
    shown = shown_reasoning(tokenizer) if tokenizer.chat_template else ()
    if not shown:
        return None
    told: list[Mapping[str, Any]] = []
    for message in messages:
        given = [name for name in REASONING if name in message]
        if given and not any(name in shown for name in given):
            others = {name: value for name, value in message.items() if name not in REASONING}
            message = {**others, shown[0]: message[given[0]]}
        told.append(message)
    return told


Found = TypeVar("Found")


def cached_by_template(examine: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """What `examine` finds out about a tokenizer's chat template, which a caller may change: kept for each of the last
    templates."""
    known = functools.lru_cache(maxsize=8)(lambda tokenizer, template: examine(tokenizer))
    return functools.wraps(examine)(lambda tokenizer: known(tokenizer, str(tokenizer.chat_template)))


@cached_by_template
def shown_reasoning(tokenizer: Any) -> tuple[str, ...]:
    """The fields in which the tokenizer's chat template shows the reasoning of a last message."""
    asked = {"role": "user", "content": "probe"}
    replied = {"role": "assistant", "content": "probe"}
    return tuple(name for name in REASONING if VALUE in render_text(tokenizer, [asked, {**replied, name: VALUE}], []))


def uses_tools(messages: Messages, tools: Messages) -> bool:
    """Whether a conversation has tools, tool calls or answers of tools."""
    return bool(tools) or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


@cached_by_template
def tool_form(tokenizer: Any) -> ToolForm:
    """The form of the tokenizer's chat template."""
    definitions = NAME in render_text(tokenizer, [{"role": "user", "content": "probe"}], [TOOL])
    for json_arguments, needs_ids in itertools.product((False, True), repeat=2):
        form = ToolForm(definitions, True, True, json_arguments, needs_ids)
        text = render_text(tokenizer, form.form_messages(probe_conversation(form)), [])
        # A template that takes the other form writes the arguments as Python does, or as JSON within JSON.
        if NAME in text and VALUE in text and f"'{ARGUMENT}':" not in text and f'\\"{ARGUMENT}' not in text:
            return replace(form, answers=ANSWER in text)
    without = ToolForm(definitions, calls=False, answers=False)
    return replace(without, answers=ANSWER in render_text(tokenizer, probe_conversation(without), []))


def probe_conversation(form: ToolForm) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": NAME, "arguments": {ARGUMENT: VALUE}}}
    reply = {"tool_calls": [call], "content": ""} if form.calls else {"content": "probe"}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", **reply},
        {"role": "tool", "content": ANSWER, "name": "probe"},
        {"role": "assistant", "content": "probe"},
    ]


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
