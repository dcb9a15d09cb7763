"""/v1/messages, as Anthropic defines it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import OPENAI_TYPES, Api, ApiCall, ApiProblem, CallAnswer, data_event, invalid
from flowrl.models.tokens.chat import Messages

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
TOOL = {"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming", "strict"}
EMPTY: Mapping[str, tuple[Any, ...]] = {"citations": ([],), "caller": ({"type": "direct"},)}


TYPES = {**OPENAI_TYPES, 500: "api_error", 503: "overloaded_error"}
"""Status -> type of an error."""


class AnthropicMessages(Api):
    keep_alive = data_event({"type": "ping"}, "ping")

    def read_call(self, body: Mapping[str, Any], responses: Mapping[str, Messages]) -> ApiCall:
        if body.get("thread") is not None:
            # The SDK's tool runner asks for a conversation that the server keeps; these details let it do without.
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            message = "thread is not known here; send all messages with every call"
            raise ApiProblem(400, message, param="thread", details=details)
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools, strict = [], False
        for n, tool in enumerate(fields.read_items("tools", body.get("tools") or [])):
            name = f"tools[{n}]"
            if (kind := fields.read_mapping(name, tool).get("type")) not in (None, "custom"):
                raise invalid(name, f"{name} is of type {kind!r}, which Anthropic runs; describe it as a function")
            fields.check_fields(tool, TOOL, {"defer_loading": (False,)}, f"{name}.")
            tools.append(fields.read_function(name, tool, "input_schema"))
            strict |= fields.read_flag(tool, "strict", f"{name}.")
        choice = fields.read_mapping("tool_choice", body.get("tool_choice") or {"type": "auto"})
        if choice.get("type") != "auto" and (choice.get("type") != "none" or tools):
            raise fields.untrainable_field("tool_choice", dict(choice))
        fields.check_fields(choice, {"type"}, {"disable_parallel_tool_use": (False,)}, "tool_choice.")
        max_tokens = fields.read_count(body, "max_tokens")
        if max_tokens is None:
            raise invalid("max_tokens", "max_tokens is missing; it needs a whole number above 0")
        messages = read_system(body.get("system"))
        for n, message in enumerate(fields.read_items("messages", body.get("messages"))):
            messages += read_message(f"messages[{n}]", message)
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            messages=messages,
            tools=tools,
            max_tokens=max_tokens,
            stop=fields.read_stop(body, "stop_sequences"),
            stream=fields.read_flag(body, "stream"),
            strict_tools=strict,
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        (choice,) = answer.choices
        blocks: list[dict[str, Any]] = []
        if choice.reasoning:
            blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.text:
            blocks.append({"type": "text", "text": choice.text})
        for called in choice.calls:
            name, arguments = called["function"]["name"], dict(called["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": called["id"], "name": name, "input": arguments})

        reason = "tool_use" if choice.calls else "stop_sequence" if choice.answer.stop_text else "end_turn"
        return {
            "id": f"msg_{answer.ident}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": blocks,
            "stop_reason": "max_tokens" if choice.answer.finish_reason == "length" else reason,
            "stop_sequence": choice.answer.stop_text or None,
            "usage": {  # tokens from the cache are counted separately
                "input_tokens": answer.prompt_tokens - answer.cached_tokens,
                "cache_read_input_tokens": answer.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": answer.sampled_tokens,
            },
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        whole = self.write_answer(call, answer)
        begun = {**whole, "content": [], "usage": {**whole["usage"], "output_tokens": 0}}
        yield write_event("message_start", message={**begun, "stop_reason": None, "stop_sequence": None})
        for n, block in enumerate(whole["content"]):
            # A block starts empty, and one delta has its content.
            if block["type"] == "tool_use":
                empty = {**block, "input": {}}
                arguments = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": arguments}
            else:
                key = block["type"]
                empty = {**block, key: ""}
                delta = {"type": f"{key}_delta", key: block[key]}
            yield write_event("content_block_start", index=n, content_block=empty)
            yield write_event("content_block_delta", index=n, delta=delta)
            yield write_event("content_block_stop", index=n)
        ended = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        yield write_event("message_delta", delta=ended, usage=whole["usage"])
        yield write_event("message_stop")

    def write_error(self, problem: ApiProblem) -> Mapping[str, Any]:
        error = {"type": TYPES.get(problem.status, "invalid_request_error"), "message": problem.message}
        return {"type": "error", "error": error if problem.details is None else {**error, "details": problem.details}}

    def error_event(self, problem: ApiProblem) -> bytes:
        return data_event(self.write_error(problem), "error")


def write_event(kind: str, **data: Any) -> bytes:
    return data_event({"type": kind, **data}, kind)


def read_system(system: Any) -> list[Mapping[str, Any]]:
    """The message of the system, if there is one, without what only accounts for the call."""
    text = fields.read_content("system", system)
    if isinstance(system, list):
        text = "".join(block["text"] for block in system if not block["text"].startswith(ATTRIBUTION))
    elif text.startswith(ATTRIBUTION):
        text = text.partition("\n")[2].lstrip("\n")
    return [{"role": "system", "content": text}] if text else []


def read_message(name: str, message: Any) -> list[Mapping[str, Any]]:
    """The messages that a message of blocks stands for: a reply with its reasoning and calls; else the results of
    tools, each as a message, and then the texts as one."""
    role = fields.read_choice(f"{name}.role", fields.read_mapping(name, message).get("role"), BLOCKS)
    fields.check_fields(message, {"role", "content"}, {}, f"{name}.")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]

    texts = {"text": "", "thinking": ""}
    calls, results = [], []
    blocks = fields.read_items(f"{name}.content", content)
    for n, block in enumerate(blocks):
        at = f"{name}.content[{n}]"
        kind = fields.read_choice(f"{at}.type", fields.read_mapping(at, block).get("type"), BLOCKS[role])
        fields.check_fields(block, BLOCK[kind], EMPTY, f"{at}.")
        if kind in texts:
            texts[kind] += fields.read_text(f"{at}.{kind}", block.get(kind))
        elif kind == "tool_use":
            function = {
                "name": fields.read_text(f"{at}.name", block.get("name")),
                "arguments": fields.read_mapping(f"{at}.input", block.get("input")),
            }
            calls.append(
                {"id": fields.read_text(f"{at}.id", block.get("id")), "type": "function", "function": function}
            )
        else:
            called = fields.read_text(f"{at}.tool_use_id", block.get("tool_use_id"))
            text = fields.read_content(f"{at}.content", block.get("content"))
            results.append({"role": "tool", "content": text, "tool_call_id": called})

    if results and len(results) == len(blocks):
        return [*results]
    said: dict[str, Any] = {"role": role, "content": texts["text"]}
    if texts["thinking"]:
        said["reasoning_content"] = texts["thinking"]
    if calls:
        said["tool_calls"] = calls
    return [*results, said]
