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
    usage,
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

    def read(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools = [_tool(f"tools[{n}]", tool) for n, tool in enumerate(fields.items("tools", body.get("tools") or []))]
        check_tool_choice(body, bool(tools))
        messages = fields.items("messages", body.get("messages"))
        return ApiCall(
            model=fields.text("model", body.get("model")),
            messages=[_message(f"messages[{n}]", message) for n, message in enumerate(messages)],
            tools=tools,
            n=fields.count(body, "n", fields.MOST_REPLIES) or 1,
            max_tokens=fields.count(body, "max_completion_tokens") or fields.count(body, "max_tokens"),
            stop=fields.stop_texts(body),
            logprobs=fields.flag(body, "logprobs"),
            stream=fields.flag(body, "stream"),
            include_usage=includes_usage(body),
            strict_tools=fields.strict_tools(
                "tools[{}].function.", (one["function"] for one in body.get("tools") or ())
            ),
            body=body,
        )

    def answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        choices = [
            {
                "index": n,
                "message": _shown(choice),
                "logprobs": _logprobs(call, choice),
                "finish_reason": _finish_reason(choice),
            }
            for n, choice in enumerate(answer.choices)
        ]
        return {**self._head(call, answer, "chat.completion"), "choices": choices, "usage": usage(answer)}

    def events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        head = self._head(call, answer, "chat.completion.chunk")
        for n, choice in enumerate(answer.choices):
            shown = _shown(choice)
            if choice.calls:
                shown["tool_calls"] = [{"index": m, **one} for m, one in enumerate(shown["tool_calls"])]
            logprobs = _logprobs(call, choice)
            said = {"index": n, "delta": shown, "logprobs": logprobs, "finish_reason": None}
            yield data_event({**head, "choices": [said]})
            ended = {"index": n, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(choice)}
            yield data_event({**head, "choices": [ended]})
        if call.include_usage:
            yield data_event({**head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, problem: ApiProblem) -> Mapping[str, Any]:
        return problem.openai()

    def error_event(self, problem: ApiProblem) -> bytes:
        return data_event(problem.openai())

    def _head(self, call: ApiCall, answer: CallAnswer, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.ident}", "object": kind, "created": answer.created, "model": call.model}


def check_tool_choice(body: Mapping[str, Any], tools: bool) -> None:
    """The policy decides whether it calls a tool; "none" changes nothing where there are no tools."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto") and (choice != "none" or tools):
        raise fields.untrainable("tool_choice", choice)


def includes_usage(body: Mapping[str, Any]) -> bool:
    options = fields.mapping("stream_options", body.get("stream_options") or {})
    fields.check_fields(options, {"include_usage"}, {"include_obfuscation": (False,)}, "stream_options.")
    return fields.flag(options, "include_usage", "stream_options.")


def _tool(name: str, tool: Any) -> Mapping[str, Any]:
    if fields.mapping(name, tool).get("type") != "function":
        raise invalid(name, f"{name} is of type {tool.get('type')!r}; the policy can only call functions")
    return fields.function_tool(f"{name}.function", tool.get("function"))


def _message(name: str, message: Any) -> Mapping[str, Any]:
    role = ROLES[fields.one_of(f"{name}.role", fields.mapping(name, message).get("role"), ROLES)]
    fields.check_fields(message, MESSAGE[role], EMPTY, f"{name}.")
    read = {"role": role, "content": fields.content_text(f"{name}.content", message.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            read[key] = fields.text(f"{name}.{key}", message[key])
    calls = fields.items(f"{name}.tool_calls", message.get("tool_calls") or [])
    return {**read, "tool_calls": [_call(f"{name}.tool_calls[{n}]", c) for n, c in enumerate(calls)]} if calls else read


def _call(name: str, call: Any) -> Mapping[str, Any]:
    function = fields.mapping(f"{name}.function", fields.mapping(name, call).get("function"))
    read = {
        "name": fields.text(f"{name}.function.name", function.get("name")),
        "arguments": fields.parsed_arguments(f"{name}.function.arguments", function.get("arguments")),
    }
    return {"id": fields.text(f"{name}.id", call.get("id")), "type": "function", "function": read}


def _shown(choice: Choice) -> dict[str, Any]:
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


def _logprobs(call: ApiCall, choice: Choice) -> Mapping[str, Any] | None:
    return {"content": token_logprobs(choice), "refusal": None} if call.logprobs else None


def _finish_reason(choice: Choice) -> str:
    return "tool_calls" if choice.calls and choice.answer.finish_reason == "stop" else choice.answer.finish_reason
