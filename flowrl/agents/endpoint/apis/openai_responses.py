"""/v1/responses, as OpenAI defines it. A call can continue from an earlier response, by its id, while the session is
open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import ApiCall, CallAnswer, KnownResponses, data_event
from flowrl.agents.endpoint.apis.chat_completions import check_tool_choice
from flowrl.agents.endpoint.apis.response_input import read_input
from flowrl.agents.endpoint.apis.response_output import output_events, output_items
from flowrl.agents.endpoint.problems import ApiProblem, invalid
from flowrl.models.tokens.chat import Messages

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

    def read(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        tools = [_tool(f"tools[{n}]", tool) for n, tool in enumerate(fields.items("tools", body.get("tools") or []))]
        check_tool_choice(body, bool(tools))
        _check_stream_options(body)
        messages = [*_before(body, known), *read_input(body.get("input"))]
        stored = body.get("store") is None or fields.flag(body, "store")
        return ApiCall(
            model=fields.text("model", body.get("model")),
            messages=[*_instructions(body), *messages],
            tools=tools,
            max_tokens=fields.count(body, "max_output_tokens"),
            logprobs=_wants_logprobs(body),
            strict_tools=fields.strict_tools("tools[{}].", body.get("tools") or ()),
            stream=fields.flag(body, "stream"),
            kept=messages if stored else None,
            body=body,
        )

    def answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        (choice,) = answer.choices
        whole = choice.answer.finish_reason == "stop"
        return {
            **_head(call, answer),
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": output_items(call, answer),
            "usage": _usage(answer),
        }

    def events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        for number, event in enumerate(self._events(call, answer)):
            yield data_event({**event, "sequence_number": number}, event["type"])

    def error(self, problem: ApiProblem) -> Mapping[str, Any]:
        return problem.openai()

    def error_event(self, problem: ApiProblem) -> bytes:
        error = {"type": "error", "message": problem.message, "code": problem.code, "param": problem.param}
        return data_event({**error, "sequence_number": 0}, "error")

    def _events(self, call: ApiCall, answer: CallAnswer) -> Iterator[Mapping[str, Any]]:
        begun = {**_head(call, answer), "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        yield from output_events(output_items(call, answer))
        response = self.answer(call, answer)
        yield {"type": f"response.{response['status']}", "response": response}


def _head(call: ApiCall, answer: CallAnswer) -> dict[str, Any]:
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


def _usage(answer: CallAnswer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def _instructions(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = body.get("instructions")
    return [{"role": "system", "content": fields.text("instructions", given)}] if given not in (None, "") else []


def _before(body: Mapping[str, Any], known: KnownResponses) -> Messages:
    """The conversation that the call continues; its earlier instructions no longer apply."""
    ident = body.get("previous_response_id")
    if ident is None:
        return ()
    messages = known.messages_of(fields.text("previous_response_id", ident).removeprefix(IDENT))
    if messages is None:
        message = f"this session has no response {ident}, or it was not stored"
        raise ApiProblem(404, message, param="previous_response_id")
    return messages


def _tool(name: str, tool: Any) -> Mapping[str, Any]:
    if fields.mapping(name, tool).get("type") != "function":
        raise invalid(name, f"{name} is of type {tool.get('type')!r}; the policy can only call functions")
    known = {"type", "name", "description", "parameters", "strict"}
    fields.check_fields(tool, known, {"defer_loading": (False,)}, f"{name}.")
    return fields.function_tool(name, tool)


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    asked = fields.items("include", body.get("include") or [])
    for one in asked:
        if one != WITH_LOGPROBS and one not in INCLUDABLE:
            raise invalid("include", f"include has {fields.short(one)}, which is not known here; leave it out")
    return WITH_LOGPROBS in asked


def _check_stream_options(body: Mapping[str, Any]) -> None:
    options = fields.mapping("stream_options", body.get("stream_options") or {})
    fields.check_fields(options, (), {"include_obfuscation": (False,)}, "stream_options.")
