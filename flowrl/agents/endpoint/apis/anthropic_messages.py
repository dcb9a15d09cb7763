"""/v1/messages, as Anthropic defines it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import (
    ApiCall,
    ApiProblem,
    CallAnswer,
    Choice,
    KnownResponses,
    arguments_text,
    data_event,
    invalid,
)

READ = {
    *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream"),
    *("temperature", "top_p"),
}
NO_INFLUENCE = {"metadata", "service_tier", "cache_control", "inference_geo"}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({"edits": []},),
}
ATTRIBUTION = "x-anthropic-billing-header:"
"""Start of a system text that is not part of the prompt: Claude Code sends it, and it differs from call to call."""
BLOCK = {
    "text": {"type", "text", "cache_control"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input", "cache_control"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
}
BLOCKS = {
    "system": {"text"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "tool_use"},
}
EMPTY: Mapping[str, tuple[Any, ...]] = {"citations": ([],), "caller": ({"type": "direct"},)}


class AnthropicMessages:
    keep_alive = data_event({"type": "ping"}, "ping")

    def read_call(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        _check_thread(body)
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools = [
            read_tool(f"tools[{n}]", tool) for n, tool in enumerate(fields.read_items("tools", body.get("tools") or []))
        ]
        _check_tool_choice(body, bool(tools))
        max_tokens = fields.read_count(body, "max_tokens")
        if max_tokens is None:
            raise invalid("max_tokens", "max_tokens is missing; it needs a whole number above 0")
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            messages=[*read_system(body), *read_messages(body)],
            tools=tools,
            max_tokens=max_tokens,
            stop=fields.stop_texts(body, "stop_sequences"),
            stream=fields.read_flag(body, "stream"),
            strict_tools=fields.strict_tools("tools[{}].", body.get("tools") or ()),
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        (choice,) = answer.choices
        return {
            **message_head(call, answer),
            **ending_fields(choice),
            "content": content_blocks(choice),
            "usage": usage_fields(answer),
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        (choice,) = answer.choices
        begun = {**message_head(call, answer), "content": [], "stop_reason": None, "stop_sequence": None}
        usage = usage_fields(answer)
        yield write_event("message_start", message={**begun, "usage": {**usage, "output_tokens": 0}})
        for n, block in enumerate(content_blocks(choice)):
            empty, delta = _empty_with_delta(block, choice)
            yield write_event("content_block_start", index=n, content_block=empty)
            yield write_event("content_block_delta", index=n, delta=delta)
            yield write_event("content_block_stop", index=n)
        yield write_event("message_delta", delta=ending_fields(choice), usage=usage)
        yield write_event("message_stop")

    def write_error(self, problem: ApiProblem) -> Mapping[str, Any]:
        return problem.anthropic()

    def error_event(self, problem: ApiProblem) -> bytes:
        return data_event(problem.anthropic(), "error")


def write_event(kind: str, **data: Any) -> bytes:
    return data_event({"type": kind, **data}, kind)


def _check_tool_choice(body: Mapping[str, Any], tools: bool) -> None:
    choice = fields.read_mapping("tool_choice", body.get("tool_choice") or {"type": "auto"})
    if choice.get("type") != "auto" and (choice.get("type") != "none" or tools):
        raise fields.untrainable_field("tool_choice", dict(choice))
    fields.check_fields(choice, {"type"}, {"disable_parallel_tool_use": (False,)}, "tool_choice.")


def read_tool(name: str, tool: Any) -> Mapping[str, Any]:
    if fields.read_mapping(name, tool).get("type") not in (None, "custom"):
        raise invalid(name, f"{name} is of type {tool.get('type')!r}, which Anthropic runs; describe it as a function")
    known = {"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming", "strict"}
    fields.check_fields(tool, known, {"defer_loading": (False,)}, f"{name}.")
    return fields.function_tool(name, tool, "input_schema")


def read_system(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    system = body.get("system")
    text = fields.content_text("system", system)
    if isinstance(system, list):
        text = "".join(block["text"] for block in system if not block["text"].startswith(ATTRIBUTION))
    elif text.startswith(ATTRIBUTION):
        text = text.partition("\n")[2].lstrip("\n")
    return [{"role": "system", "content": text}] if text else []


def _check_thread(body: Mapping[str, Any]) -> None:
    """Refuse conversations that the server keeps. The SDK's tool runner asks for them, and continues without them if
    the error has these details."""
    if body.get("thread") is not None:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        message = "thread is not known here; send all messages with every call"
        raise ApiProblem(400, message, param="thread", details=details)


def read_messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for n, message in enumerate(fields.read_items("messages", body.get("messages"))):
        name = f"messages[{n}]"
        role = fields.one_of(f"{name}.role", fields.read_mapping(name, message).get("role"), BLOCKS)
        fields.check_fields(message, {"role", "content"}, {}, f"{name}.")
        blocks = _read_blocks(f"{name}.content", role, message.get("content"))
        yield from [read_assistant(blocks)] if role == "assistant" else read_said(role, blocks)


def _read_blocks(name: str, role: str, content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content, "where": name}]
    blocks = fields.read_items(name, content)
    for n, block in enumerate(blocks):
        where = f"{name}[{n}]"
        kind = fields.one_of(f"{where}.type", fields.read_mapping(where, block).get("type"), BLOCKS[role])
        fields.check_fields(block, BLOCK[kind], EMPTY, f"{name}[{n}].")
    return [{**block, "where": f"{name}[{n}]"} for n, block in enumerate(blocks)]


def read_assistant(blocks: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One message with its reasoning and calls."""
    message: dict[str, Any] = {"role": "assistant", "content": join_texts(blocks, "text")}
    if thinking := join_texts(blocks, "thinking"):
        message["reasoning_content"] = thinking
    calls = [read_call(block) for block in blocks if block["type"] == "tool_use"]
    return {**message, "tool_calls": calls} if calls else message


def join_texts(blocks: list[Mapping[str, Any]], kind: str) -> str:
    """The joined texts of all blocks of a kind."""
    return "".join(fields.read_text(f"{b['where']}.{kind}", b.get(kind)) for b in blocks if b["type"] == kind)


def read_call(block: Mapping[str, Any]) -> Mapping[str, Any]:
    where = block["where"]
    function = {
        "name": fields.read_text(f"{where}.name", block.get("name")),
        "arguments": fields.read_mapping(f"{where}.input", block.get("input")),
    }
    return {"id": fields.read_text(f"{where}.id", block.get("id")), "type": "function", "function": function}


def read_said(role: str, blocks: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The results of tools, each as a message, and then the texts as one."""
    for block in blocks:
        if block["type"] == "tool_result":
            called = fields.read_text(f"{block['where']}.tool_use_id", block.get("tool_use_id"))
            text = fields.content_text(f"{block['where']}.content", block.get("content"))
            yield {"role": "tool", "content": text, "tool_call_id": called}
    if not all(block["type"] == "tool_result" for block in blocks) or not blocks:
        yield {"role": role, "content": join_texts(blocks, "text")}


def message_head(call: ApiCall, answer: CallAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.ident}", "type": "message", "role": "assistant", "model": call.model}


def ending_fields(choice: Choice) -> dict[str, Any]:
    if choice.answer.finish_reason == "length":
        reason = "max_tokens"
    elif choice.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if choice.answer.stop_text else "end_turn"
    return {"stop_reason": reason, "stop_sequence": choice.answer.stop_text or None}


def content_blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": dict(function["arguments"])}
        )
    return blocks


def _empty_with_delta(block: dict[str, Any], choice: Choice) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block without its content, and the delta that adds the content."""
    if block["type"] == "tool_use":
        (call,) = [call for call in choice.calls if call["id"] == block["id"]]
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments_text(call)}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def usage_fields(answer: CallAnswer) -> dict[str, Any]:
    """Anthropic counts tokens from the cache separately."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.sampled_tokens,
    }
