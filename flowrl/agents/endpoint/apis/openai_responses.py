"""/v1/responses, as OpenAI defines it. A call can continue from an earlier response, by its id, while the session is
open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import (
    Api,
    ApiCall,
    ApiProblem,
    CallAnswer,
    arguments_text,
    data_event,
    invalid,
    token_logprobs,
)
from flowrl.agents.endpoint.apis.chat_completions import ROLES, check_tool_choice
from flowrl.environments.protocol import shorten_value
from flowrl.models.tokens.chat import Messages

TEXTS = ("input_text", "output_text", "text")
ITEM = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "reasoning": {"type", "id", "summary", "content", "status"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
    "function_call_output": {"type", "id", "call_id", "output", "status"},
}
EMPTY: Mapping[str, tuple[Any, ...]] = {"encrypted_content": ("",), "caller": ({"type": "direct"},)}
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
TOOL = {"type", "name", "description", "parameters", "strict"}


class OpenAIResponses(Api):
    def read_call(self, body: Mapping[str, Any], responses: Mapping[str, Messages]) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools, strict = [], False
        for n, tool in enumerate(fields.read_items("tools", body.get("tools") or [])):
            name = f"tools[{n}]"
            if (kind := fields.read_mapping(name, tool).get("type")) != "function":
                raise invalid(name, f"{name} is of type {kind!r}; the policy can only call functions")
            fields.check_fields(tool, TOOL, {"defer_loading": (False,)}, f"{name}.")
            tools.append(fields.read_function(name, tool))
            strict |= fields.read_flag(tool, "strict", f"{name}.")
        check_tool_choice(body, bool(tools))
        options = fields.read_mapping("stream_options", body.get("stream_options") or {})
        fields.check_fields(options, (), {"include_obfuscation": (False,)}, "stream_options.")
        included = fields.read_items("include", body.get("include") or [])
        for one in included:
            if one != WITH_LOGPROBS and one not in INCLUDABLE:
                shown = shorten_value(one)
                raise invalid("include", f"include has {shown}, which is not known here; leave it out")

        messages = read_input(body.get("input"))
        ident = body.get("previous_response_id")
        if ident is not None:
            before = responses.get(fields.read_text("previous_response_id", ident).removeprefix(IDENT))
            if before is None:
                message = f"this session has no response {ident}, or it was not stored"
                raise ApiProblem(404, message, param="previous_response_id")
            messages = [*before, *messages]
        # The instructions of earlier calls no longer apply, so they are in no conversation that is kept.
        given = body.get("instructions")
        instructions = "" if given is None else fields.read_text("instructions", given)
        stored = body.get("store") is None or fields.read_flag(body, "store")
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            messages=[{"role": "system", "content": instructions}, *messages] if instructions else messages,
            tools=tools,
            max_tokens=fields.read_count(body, "max_output_tokens"),
            logprobs=WITH_LOGPROBS in included,
            strict_tools=strict,
            stream=fields.read_flag(body, "stream"),
            kept=messages if stored else None,
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        (choice,) = answer.choices
        whole, body = choice.answer.finish_reason == "stop", call.body
        return {
            "id": f"{IDENT}{answer.ident}",
            "object": "response",
            "created_at": answer.created,
            "model": call.model,
            "error": None,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "store": call.kept is not None,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            "status": "completed" if whole else "incomplete",
            "output": output_items(call, answer),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": answer.sampled_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
            },
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        response = self.write_answer(call, answer)
        begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[dict[str, Any]] = [
            {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
        ]
        for n, item in enumerate(response["output"]):
            events += item_events(item, n)
        events.append({"type": f"response.{response['status']}", "response": response})
        for number, event in enumerate(events):
            yield data_event({**event, "sequence_number": number}, event["type"])

    def error_event(self, problem: ApiProblem) -> bytes:
        error = {"type": "error", "message": problem.message, "code": problem.code, "param": problem.param}
        return data_event({**error, "sequence_number": 0}, "error")


def output_items(call: ApiCall, answer: CallAnswer) -> list[Mapping[str, Any]]:
    """The reasoning, text and calls of the reply, as far as it has them."""
    (choice,) = answer.choices
    status = "completed" if choice.answer.finish_reason == "stop" else "incomplete"
    items: list[Mapping[str, Any]] = []
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


def item_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """The events of one item of the output: it starts empty, one delta has its content, and then it is done."""
    at = {"item_id": item["id"], "output_index": index}
    added = {"type": "response.output_item.added", "output_index": index}
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield {**added, "item": {**item, "arguments": "", "status": "in_progress"}}
        yield {"type": f"{kind}.delta", **at, "delta": arguments}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": arguments}
    else:
        (part,) = item["content"]
        kind, at = f"response.{part['type']}", {**at, "content_index": 0}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
        yield {**added, "item": {**item, "content": [], "status": "in_progress"}}
        yield {"type": "response.content_part.added", **at, "part": empty}
        yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
        yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def read_input(given: Any) -> list[Mapping[str, Any]]:
    """Messages as chat templates know them: reasoning, text and calls that follow each other are one reply."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Mapping[str, Any]] = []
    for n, item in enumerate(fields.read_items("input", given)):
        read = read_item(f"input[{n}]", item)
        last = messages[-1] if messages else {"role": ""}
        begun = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
        if last["role"] == read["role"] == "assistant" and (read.get("tool_calls") or begun):
            calls = [*last.get("tool_calls", ()), *read.get("tool_calls", ())]
            joined = {**last, **read, "content": last["content"] + read["content"]}
            messages[-1] = {**joined, "tool_calls": calls} if calls else joined
        else:
            messages.append(read)
    return messages


def read_item(name: str, item: Any) -> dict[str, Any]:
    """One item of the input as a message of its own."""
    kind = fields.read_choice(f"{name}.type", fields.read_mapping(name, item).get("type", "message"), ITEM)
    fields.check_fields(item, ITEM[kind], EMPTY, f"{name}.")
    if kind == "message":
        role = fields.read_choice(f"{name}.role", item.get("role"), ROLES.keys() - {"tool"})
        return {"role": ROLES[role], "content": fields.read_content(f"{name}.content", item.get("content"), TEXTS)}
    if kind == "reasoning":
        reasoning = fields.read_content(f"{name}.content", item.get("content"), ("reasoning_text",))
        return {"role": "assistant", "content": "", "reasoning_content": reasoning}
    call_id = fields.read_text(f"{name}.call_id", item.get("call_id"))
    if kind == "function_call_output":
        output = fields.read_content(f"{name}.output", item.get("output"), TEXTS)
        return {"role": "tool", "content": output, "tool_call_id": call_id}
    function = {
        "name": fields.read_text(f"{name}.name", item.get("name")),
        "arguments": fields.read_arguments(f"{name}.arguments", item.get("arguments")),
    }
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}
