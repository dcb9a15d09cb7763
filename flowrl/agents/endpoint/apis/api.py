"""What the APIs have in common: a call as it is sampled, its answer, and the interface of an API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowrl.agents.endpoint.backend import SampledAnswer
from flowrl.agents.endpoint.problems import ApiProblem
from flowrl.agents.endpoint.tree.raw_prompts import RawPrompt
from flowrl.models.tokens.chat import Messages


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


class KnownResponses(Protocol):
    """The conversations of a session's earlier responses, by the responses' ids."""

    def messages_of(self, response_id: str) -> Messages | None: ...


class Api(Protocol):
    """One API. A stream has the content of the complete answer, as events."""

    keep_alive: bytes

    def read(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        """Raises ApiProblem for what is invalid, not known, or cannot be trained."""
        ...

    def answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]: ...

    def events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]: ...

    def error(self, problem: ApiProblem) -> Mapping[str, Any]: ...

    def error_event(self, problem: ApiProblem) -> bytes: ...


def data_event(data: Mapping[str, Any], event: str = "") -> bytes:
    """A server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {dumped(data)}\n\n".encode()


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def arguments_text(call: Mapping[str, Any]) -> str:
    """A call's arguments as JSON text."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def usage(answer: CallAnswer) -> Mapping[str, Any]:
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
