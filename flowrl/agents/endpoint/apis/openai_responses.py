"""/v1/responses, as OpenAI defines it. A call can continue from an earlier response, by its id, while the session is
open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import (
    ApiCall,
    ApiProblem,
    CallAnswer,
    KnownResponses,
    arguments_text,
    data_event,
    invalid,
    token_logprobs,
)
from flowrl.agents.endpoint.apis.chat_completions import ROLES, check_tool_choice
from flowrl.models.tokens.chat import Messages

OutputItem = Mapping[str, Any]


def output_items(call: ApiCall, answer: CallAnswer) -> list[OutputItem]:
    """The reasoning, text and calls of the reply, as far as it has them."""
    (choice,) = answer.choices
    status = "completed" if choice.answer.finish_reason == "stop" else "incomplete"
    items: list[OutputItem] = []
    if choice.reasoning:
        content = [{"type": "reasoning_text", "text": choice.reasoning}]
        items.append({"id": f"rs_{answer.ident}", "type": "reasoning", "summary": [], "content": content})
    if choice.text or not choice.calls:
        text: dict[str, Any] = {"type": "output_text", "text": choice.text, "annotations": []}
        text["logprobs"] = token_logprobs(choice) if call.logprobs else []
        said = {"id": f"msg_{answer.ident}", "type": "message", "role": "assistant", "status": status}
        items.append({**said, "content": [text]})
    for n, one in enumerate(choice.calls):
        called = {"id": f"fc_{answer.ident}_{n}", "type": "function_call", "call_id": one["id"], "status": status}
        items.append({**called, "name": one["function"]["name"], "arguments": arguments_text(one)})
    return items


def output_events(items: Sequence[OutputItem]) -> Iterator[dict[str, Any]]:
    for n, item in enumerate(items):
        yield {"type": "response.output_item.added", "output_index": n, "item": begin_item(item)}
        at = {"item_id": item["id"], "output_index": n}
        if item["type"] == "function_call":
            yield from _call_events(item, at)
        else:
            yield from _text_events(item, {**at, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": n, "item": item}


def begin_item(item: OutputItem) -> OutputItem:
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    return {**item, "content": [], "status": "in_progress"}


def _call_events(item: OutputItem, at: OutputItem) -> Iterator[dict[str, Any]]:
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
    yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}


def _text_events(item: OutputItem, at: OutputItem) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield {"type": "response.content_part.added", **at, "part": empty}
    yield {"type": f"response.{part['type']}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


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
    for n, item in enumerate(fields.read_items("input", given)):
        name, kind = f"input[{n}]", item_kind(f"input[{n}]", item)
        read = READERS[kind](name, item)
        if _belong_together(messages, read):
            messages[-1] = join_items(messages[-1], read)
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


def join_items(message: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**message, **read, "content": message["content"] + read["content"]}
    calls = [*message.get("tool_calls", ()), *read.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def item_kind(name: str, item: Any) -> str:
    kind = fields.one_of(f"{name}.type", fields.read_mapping(name, item).get("type", "message"), ITEM)
    fields.check_fields(item, ITEM[kind], EMPTY, f"{name}.")
    return kind


def message_item(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = fields.one_of(f"{name}.role", item.get("role"), ROLES.keys() - {"tool"})
    return {"role": ROLES[role], "content": fields.content_text(f"{name}.content", item.get("content"), TEXTS)}


def reasoning_item(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = fields.content_text(f"{name}.content", item.get("content"), ("reasoning_text",))
    return {"role": "assistant", "content": "", "reasoning_content": content}


def call_item(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": fields.read_text(f"{name}.name", item.get("name")),
        "arguments": fields.parsed_arguments(f"{name}.arguments", item.get("arguments")),
    }
    call = {"id": fields.read_text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def call_output_item(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = fields.content_text(f"{name}.output", item.get("output"), TEXTS)
    return {
        "role": "tool",
        "content": content,
        "tool_call_id": fields.read_text(f"{name}.call_id", item.get("call_id")),
    }


READERS = {
    "message": message_item,
    "reasoning": reasoning_item,
    "function_call": call_item,
    "function_call_output": call_output_item,
}


READ = {
    *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens"),
    *("stream", "store", "include", "temperature", "top_p", "stream_options"),
}
NO_INFLUENCE = {
    *("user", "metadata", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "text": ({"format": {"type": "text"}}, {}),
    "truncation": ("disabled",),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "reasoning": ({}, *({"summary": kind} for kind in ("auto", "concise", "detailed"))),
    "background": (False,),
    "max_tool_calls": (),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
WITH_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "code_interpreter_call.outputs"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
)
"""Further parts of a response that can be asked for; replies here have none, and reasoning is shown in full."""
IDENT = "resp_"


class OpenAIResponses:
    keep_alive = b": waiting for the reply\n\n"

    def read_call(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools = [
            read_tool(f"tools[{n}]", tool) for n, tool in enumerate(fields.read_items("tools", body.get("tools") or []))
        ]
        check_tool_choice(body, bool(tools))
        _check_stream_options(body)
        messages = [*messages_before(body, known), *read_input(body.get("input"))]
        stored = body.get("store") is None or fields.read_flag(body, "store")
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            messages=[*read_instructions(body), *messages],
            tools=tools,
            max_tokens=fields.read_count(body, "max_output_tokens"),
            logprobs=_wants_logprobs(body),
            strict_tools=fields.strict_tools("tools[{}].", body.get("tools") or ()),
            stream=fields.read_flag(body, "stream"),
            kept=messages if stored else None,
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        (choice,) = answer.choices
        whole = choice.answer.finish_reason == "stop"
        return {
            **response_head(call, answer),
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": output_items(call, answer),
            "usage": response_usage(answer),
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        for number, event in enumerate(self._stream_events(call, answer)):
            yield data_event({**event, "sequence_number": number}, event["type"])

    def write_error(self, problem: ApiProblem) -> Mapping[str, Any]:
        return problem.openai()

    def error_event(self, problem: ApiProblem) -> bytes:
        error = {"type": "error", "message": problem.message, "code": problem.code, "param": problem.param}
        return data_event({**error, "sequence_number": 0}, "error")

    def _stream_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[Mapping[str, Any]]:
        begun = {**response_head(call, answer), "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        yield from output_events(output_items(call, answer))
        response = self.write_answer(call, answer)
        yield {"type": f"response.{response['status']}", "response": response}


def response_head(call: ApiCall, answer: CallAnswer) -> dict[str, Any]:
    body = call.body
    return {
        "id": f"{IDENT}{answer.ident}",
        "object": "response",
        "created_at": answer.created,
        "model": call.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": call.kept is not None,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
    }


def response_usage(answer: CallAnswer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def read_instructions(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = body.get("instructions")
    return [{"role": "system", "content": fields.read_text("instructions", given)}] if given not in (None, "") else []


def messages_before(body: Mapping[str, Any], known: KnownResponses) -> Messages:
    """The conversation that the call continues; its earlier instructions no longer apply."""
    ident = body.get("previous_response_id")
    if ident is None:
        return ()
    messages = known.messages_of(fields.read_text("previous_response_id", ident).removeprefix(IDENT))
    if messages is None:
        message = f"this session has no response {ident}, or it was not stored"
        raise ApiProblem(404, message, param="previous_response_id")
    return messages


def read_tool(name: str, tool: Any) -> Mapping[str, Any]:
    if fields.read_mapping(name, tool).get("type") != "function":
        raise invalid(name, f"{name} is of type {tool.get('type')!r}; the policy can only call functions")
    known = {"type", "name", "description", "parameters", "strict"}
    fields.check_fields(tool, known, {"defer_loading": (False,)}, f"{name}.")
    return fields.function_tool(name, tool)


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    asked = fields.read_items("include", body.get("include") or [])
    for one in asked:
        if one != WITH_LOGPROBS and one not in INCLUDABLE:
            raise invalid("include", f"include has {fields.shorten_value(one)}, which is not known here; leave it out")
    return WITH_LOGPROBS in asked


def _check_stream_options(body: Mapping[str, Any]) -> None:
    options = fields.read_mapping("stream_options", body.get("stream_options") or {})
    fields.check_fields(options, (), {"include_obfuscation": (False,)}, "stream_options.")
