"""The input of /v1/responses: items, several of which may form one message of the assistant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.chat_completions import ROLES

TEXTS = ("input_text", "output_text", "text")
ITEM = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "reasoning": {"type", "id", "summary", "content", "status"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
    "function_call_output": {"type", "id", "call_id", "output", "status"},
}
EMPTY: Mapping[str, tuple[Any, ...]] = {"encrypted_content": ("",), "caller": ({"type": "direct"},)}


def read_input(given: Any) -> list[Mapping[str, Any]]:
    """Messages as chat templates know them. Raises ApiProblem."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for n, item in enumerate(fields.items("input", given)):
        name, kind = f"input[{n}]", _kind(f"input[{n}]", item)
        read = READERS[kind](name, item)
        if _belong_together(messages, read):
            messages[-1] = _joined(messages[-1], read)
        else:
            messages.append(read)
    return list(messages)


def _belong_together(messages: list[dict[str, Any]], read: Mapping[str, Any]) -> bool:
    """Whether the last message is a reply that `read` continues: reasoning, then text, then calls."""
    if not messages or messages[-1]["role"] != "assistant" or read["role"] != "assistant":
        return False
    last = messages[-1]
    if read.get("tool_calls"):
        return True
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def _joined(message: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**message, **read, "content": message["content"] + read["content"]}
    calls = [*message.get("tool_calls", ()), *read.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _kind(name: str, item: Any) -> str:
    kind = fields.one_of(f"{name}.type", fields.mapping(name, item).get("type", "message"), ITEM)
    fields.check_fields(item, ITEM[kind], EMPTY, f"{name}.")
    return kind


def _message(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = fields.one_of(f"{name}.role", item.get("role"), ROLES.keys() - {"tool"})
    return {"role": ROLES[role], "content": fields.content_text(f"{name}.content", item.get("content"), TEXTS)}


def _reasoning(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = fields.content_text(f"{name}.content", item.get("content"), ("reasoning_text",))
    return {"role": "assistant", "content": "", "reasoning_content": content}


def _call(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": fields.text(f"{name}.name", item.get("name")),
        "arguments": fields.parsed_arguments(f"{name}.arguments", item.get("arguments")),
    }
    call = {"id": fields.text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _output(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = fields.content_text(f"{name}.output", item.get("output"), TEXTS)
    return {"role": "tool", "content": content, "tool_call_id": fields.text(f"{name}.call_id", item.get("call_id"))}


READERS = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
}
