"""What the APIs have in common: a call as it is sampled, its answer, errors, and the interface of an API."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.agents.endpoint.backend import SampledAnswer
from flowrl.agents.endpoint.session_tree import RawPrompt
from flowrl.models.tokens.chat import Messages

OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


@dataclass(eq=False)
class ApiProblem(Exception):
    """What went wrong with a request; `status` is the HTTP status."""

    status: int
    message: str
    param: str | None = None
    """The field of the body."""
    code: str | None = None
    retry_after_s: int | None = None
    details: Mapping[str, Any] | None = None
    """What Anthropic's SDK reads from an error to continue on its own."""

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers. Clients retry a 409 on their own, which is pointless here."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"x-should-retry": "false"} if self.status == 409 else {}


def invalid(param: str, message: str) -> ApiProblem:
    """A 400 that names the field."""
    return ApiProblem(400, message, param=param)


@dataclass(frozen=True)
class ApiCall:
    """A body that was read: messages, or prompts, and how many replies of what length."""

    model: str
    messages: Messages = ()
    tools: Messages = ()
    prompts: Sequence[RawPrompt] = ()
    """Only for /v1/completions, in place of messages."""
    n: int = 1
    """Replies to the messages, or to each prompt."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    strict_tools: bool = False
    """Whether a tool asked for arguments that follow its schema strictly. Sampled arguments need not: a header says
    so."""
    kept: Messages | None = None
    """The messages before the reply, for a later call that continues from this call's answer; None if no call may."""
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One reply, and the message as the client sees it."""

    answer: SampledAnswer
    message: Mapping[str, Any]
    tokens: tuple[str, ...]
    """The text of each sampled token."""

    @property
    def text(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def calls(self) -> list[Mapping[str, Any]]:
        return list(self.message.get("tool_calls") or ())

    @property
    def reasoning(self) -> str:
        return str(self.message.get("reasoning_content") or "")


@dataclass(frozen=True)
class CallAnswer:
    """All replies to a call."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    max_tokens: int
    """The limit of a reply; if replies have different limits, the smallest."""
    ident: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def sampled_tokens(self) -> int:
        return sum(choice.answer.token_ids.size for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.answer.cached_tokens for choice in self.choices)


class Api(ABC):
    """One API. The errors and the keep-alive of a stream are those of OpenAI's APIs unless it has its own."""

    keep_alive = b": waiting for the reply\n\n"

    @abstractmethod
    def read_call(self, body: Mapping[str, Any], responses: Mapping[str, Messages]) -> ApiCall:
        """Raises ApiProblem for what is invalid, not known, or cannot be trained.

        `responses` are the conversations of the session's earlier responses, by the responses' ids.
        """

    @abstractmethod
    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        """The body of the response."""

    @abstractmethod
    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        """The content of the complete answer, as a stream."""

    def write_error(self, problem: ApiProblem) -> Mapping[str, Any]:
        kind = OPENAI_TYPES.get(problem.status, "invalid_request_error")
        return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}

    def error_event(self, problem: ApiProblem) -> bytes:
        """The error as an event of a stream that has begun."""
        return data_event(self.write_error(problem))


def data_event(data: Mapping[str, Any], event: str = "") -> bytes:
    """A server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {dump_json(data)}\n\n".encode()


def dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def arguments_text(call: Mapping[str, Any]) -> str:
    """A call's arguments as JSON text."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def usage_fields(answer: CallAnswer) -> Mapping[str, Any]:
    """The usage as in OpenAI's completions."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def token_logprobs(choice: Choice) -> list[Mapping[str, Any]]:
    """One entry for each sampled token, the end token included, in the form of OpenAI's APIs."""
    values = choice.answer.logprobs.tolist()
    return [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in zip(choice.tokens, values, strict=True)
    ]
