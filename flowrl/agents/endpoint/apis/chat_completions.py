"""/v1/chat/completions, as OpenAI defines it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import (
    Api,
    ApiCall,
    CallAnswer,
    arguments_text,
    data_event,
    invalid,
    token_logprobs,
    usage_fields,
)
from flowrl.models.tokens.chat import Messages

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


class ChatCompletions(Api):
    def read_call(self, body: Mapping[str, Any], responses: Mapping[str, Messages]) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools, strict = [], False
        for n, tool in enumerate(fields.read_items("tools", body.get("tools") or [])):
            if fields.read_mapping(f"tools[{n}]", tool).get("type") != "function":
                kind = tool.get("type")
                raise invalid(f"tools[{n}]", f"tools[{n}] is of type {kind!r}; the policy can only call functions")
            tools.append(fields.read_function(f"tools[{n}].function", tool.get("function")))
            strict |= fields.read_flag(tool["function"], "strict", f"tools[{n}].function.")
        check_tool_choice(body, bool(tools))
        messages = fields.read_items("messages", body.get("messages"))
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            messages=[read_message(f"messages[{n}]", message) for n, message in enumerate(messages)],
            tools=tools,
            n=fields.read_count(body, "n", fields.MOST_REPLIES) or 1,
            max_tokens=fields.read_count(body, "max_completion_tokens") or fields.read_count(body, "max_tokens"),
            stop=fields.read_stop(body),
            logprobs=fields.read_flag(body, "logprobs"),
            stream=fields.read_flag(body, "stream"),
            include_usage=includes_usage(body),
            strict_tools=strict,
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        choices = []
        for n, choice in enumerate(answer.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.calls:
                message["tool_calls"] = [
                    {
                        "id": called["id"],
                        "type": "function",
                        "function": {"name": called["function"]["name"], "arguments": arguments_text(called)},
                    }
                    for called in choice.calls
                ]
            logprobs = {"content": token_logprobs(choice), "refusal": None} if call.logprobs else None
            reason = choice.answer.finish_reason
            reason = "tool_calls" if choice.calls and reason == "stop" else reason
            choices.append({"index": n, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return {
            "id": f"chatcmpl-{answer.ident}",
            "object": "chat.completion",
            "created": answer.created,
            "model": call.model,
            "choices": choices,
            "usage": usage_fields(answer),
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        whole = {**self.write_answer(call, answer), "object": "chat.completion.chunk"}
        choices, usage = whole.pop("choices"), whole.pop("usage")
        for choice in choices:
            delta = choice["message"]
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": n, **called} for n, called in enumerate(delta["tool_calls"])]
            said = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
            yield data_event({**whole, "choices": [said]})
            ended = {**said, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            yield data_event({**whole, "choices": [ended]})
        if call.include_usage:
            yield data_event({**whole, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def check_tool_choice(body: Mapping[str, Any], tools: bool) -> None:
    """The policy decides whether it calls a tool; "none" changes nothing where there are no tools."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto") and (choice != "none" or tools):
        raise fields.untrainable_field("tool_choice", choice)


def includes_usage(body: Mapping[str, Any]) -> bool:
    options = fields.read_mapping("stream_options", body.get("stream_options") or {})
    fields.check_fields(options, {"include_usage"}, {"include_obfuscation": (False,)}, "stream_options.")
    return fields.read_flag(options, "include_usage", "stream_options.")


def read_message(name: str, message: Any) -> Mapping[str, Any]:
    """A message of the body, as chat templates know it."""
    role = ROLES[fields.read_choice(f"{name}.role", fields.read_mapping(name, message).get("role"), ROLES)]
    fields.check_fields(message, MESSAGE[role], EMPTY, f"{name}.")
    read = {"role": role, "content": fields.read_content(f"{name}.content", message.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            read[key] = fields.read_text(f"{name}.{key}", message[key])
    calls = []
    for n, call in enumerate(fields.read_items(f"{name}.tool_calls", message.get("tool_calls") or [])):
        at = f"{name}.tool_calls[{n}]"
        given = fields.read_mapping(f"{at}.function", fields.read_mapping(at, call).get("function"))
        function = {
            "name": fields.read_text(f"{at}.function.name", given.get("name")),
            "arguments": fields.read_arguments(f"{at}.function.arguments", given.get("arguments")),
        }
        calls.append({"id": fields.read_text(f"{at}.id", call.get("id")), "type": "function", "function": function})
    return {**read, "tool_calls": calls} if calls else read
