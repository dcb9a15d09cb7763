"""/v1/chat/completions, as OpenAI defines it."""

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
    token_logprobs,
    usage_fields,
)

READ = {
    *("model", "messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "logprobs"),
    *("stream", "stream_options", "temperature", "top_p", "tool_choice"),
}
NO_INFLUENCE = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}
"""Fields that say nothing about what is sampled."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none",),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role of the API -> that of chat templates."""
MESSAGE = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
EMPTY = {"audio": (), "function_call": (), "refusal": ("",), "annotations": ([],)}
"""Fields of a message that have to be empty."""


class ChatCompletions:
    keep_alive = b": waiting for the reply\n\n"

    def read_call(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools = [
            read_tool(f"tools[{n}]", tool) for n, tool in enumerate(fields.read_items("tools", body.get("tools") or []))
        ]
        check_tool_choice(body, bool(tools))
        messages = fields.read_items("messages", body.get("messages"))
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            messages=[read_message(f"messages[{n}]", message) for n, message in enumerate(messages)],
            tools=tools,
            n=fields.read_count(body, "n", fields.MOST_REPLIES) or 1,
            max_tokens=fields.read_count(body, "max_completion_tokens") or fields.read_count(body, "max_tokens"),
            stop=fields.stop_texts(body),
            logprobs=fields.read_flag(body, "logprobs"),
            stream=fields.read_flag(body, "stream"),
            include_usage=includes_usage(body),
            strict_tools=fields.strict_tools(
                "tools[{}].function.", (one["function"] for one in body.get("tools") or ())
            ),
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        choices = [
            {
                "index": n,
                "message": shown_message(choice),
                "logprobs": shown_logprobs(call, choice),
                "finish_reason": _finish_reason(choice),
            }
            for n, choice in enumerate(answer.choices)
        ]
        return {**self._answer_head(call, answer, "chat.completion"), "choices": choices, "usage": usage_fields(answer)}

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        head = self._answer_head(call, answer, "chat.completion.chunk")
        for n, choice in enumerate(answer.choices):
            shown = shown_message(choice)
            if choice.calls:
                shown["tool_calls"] = [{"index": m, **one} for m, one in enumerate(shown["tool_calls"])]
            logprobs = shown_logprobs(call, choice)
            said = {"index": n, "delta": shown, "logprobs": logprobs, "finish_reason": None}
            yield data_event({**head, "choices": [said]})
            ended = {"index": n, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(choice)}
            yield data_event({**head, "choices": [ended]})
        if call.include_usage:
            yield data_event({**head, "choices": [], "usage": usage_fields(answer)})
        yield b"data: [DONE]\n\n"

    def write_error(self, problem: ApiProblem) -> Mapping[str, Any]:
        return problem.openai()

    def error_event(self, problem: ApiProblem) -> bytes:
        return data_event(problem.openai())

    def _answer_head(self, call: ApiCall, answer: CallAnswer, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.ident}", "object": kind, "created": answer.created, "model": call.model}


def check_tool_choice(body: Mapping[str, Any], tools: bool) -> None:
    """The policy decides whether it calls a tool; "none" changes nothing where there are no tools."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto") and (choice != "none" or tools):
        raise fields.untrainable_field("tool_choice", choice)


def includes_usage(body: Mapping[str, Any]) -> bool:
    options = fields.read_mapping("stream_options", body.get("stream_options") or {})
    fields.check_fields(options, {"include_usage"}, {"include_obfuscation": (False,)}, "stream_options.")
    return fields.read_flag(options, "include_usage", "stream_options.")


def read_tool(name: str, tool: Any) -> Mapping[str, Any]:
    if fields.read_mapping(name, tool).get("type") != "function":
        raise invalid(name, f"{name} is of type {tool.get('type')!r}; the policy can only call functions")
    return fields.function_tool(f"{name}.function", tool.get("function"))


def read_message(name: str, message: Any) -> Mapping[str, Any]:
    role = ROLES[fields.one_of(f"{name}.role", fields.read_mapping(name, message).get("role"), ROLES)]
    fields.check_fields(message, MESSAGE[role], EMPTY, f"{name}.")
    read = {"role": role, "content": fields.content_text(f"{name}.content", message.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            read[key] = fields.read_text(f"{name}.{key}", message[key])
    calls = fields.read_items(f"{name}.tool_calls", message.get("tool_calls") or [])
    return (
        {**read, "tool_calls": [read_tool_call(f"{name}.tool_calls[{n}]", c) for n, c in enumerate(calls)]}
        if calls
        else read
    )


def read_tool_call(name: str, call: Any) -> Mapping[str, Any]:
    function = fields.read_mapping(f"{name}.function", fields.read_mapping(name, call).get("function"))
    read = {
        "name": fields.read_text(f"{name}.function.name", function.get("name")),
        "arguments": fields.parsed_arguments(f"{name}.function.arguments", function.get("arguments")),
    }
    return {"id": fields.read_text(f"{name}.id", call.get("id")), "type": "function", "function": read}


def shown_message(choice: Choice) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
    if choice.reasoning:
        shown["reasoning_content"] = choice.reasoning
    if choice.calls:
        shown["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
            }
            for call in choice.calls
        ]
    return shown


def shown_logprobs(call: ApiCall, choice: Choice) -> Mapping[str, Any] | None:
    return {"content": token_logprobs(choice), "refusal": None} if call.logprobs else None


def _finish_reason(choice: Choice) -> str:
    return "tool_calls" if choice.calls and choice.answer.finish_reason == "stop" else choice.answer.finish_reason
