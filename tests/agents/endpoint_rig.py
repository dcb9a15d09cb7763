"""An endpoint in this process, in front of a backend that answers from a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.agents.endpoint import (
    AgentEndpoint,
    EndpointSettings,
    FinishedSession,
    SampledAnswer,
    SessionAccess,
    SessionTask,
    Unavailable,
)
from flowrl.messages import Int32
from flowrl.models.tokens.characters import SPECIAL, character_tokenizer
from flowrl.models.tokens.chat import Messages

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The tokenizer's own, with tools."""
END = "<|end|>"


def tool_tokenizer() -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert END in SPECIAL
    return tokenizer


@dataclass
class Asked:
    """What the backend was asked."""

    session: str
    context: str
    context_ids: Int32
    max_tokens: int
    stop: tuple[str, ...]
    tools: Messages


@dataclass
class RecordedBackend:
    """Answers each request by the next of `answers`, the last one again and again: a text, an answer, or an error.

    While `gate` is set to an event that is not, requests wait for it.
    """

    tokenizer: Any
    answers: list[Any] = field(default_factory=lambda: ["yes"])
    gate: asyncio.Event | None = None
    requests: list[Asked] = field(default_factory=list)
    arrived: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """To be acquired once for each request."""
    cancelled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """To be acquired once for each request that was cancelled."""

    async def reply(
        self, session: str, context_ids: Int32, *, max_tokens: int, stop: tuple[str, ...], tools: Messages
    ) -> SampledAnswer:
        context = self.tokenizer.decode(context_ids.tolist())
        self.requests.append(Asked(session, context, context_ids, max_tokens, stop, tools))
        self.arrived.release()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, SampledAnswer) else self.said(answer, number=len(self.requests))

    def said(
        self, text: str, *, number: int = 1, ended: bool = True, message: Mapping[str, Any] | None = None, **more: Any
    ) -> SampledAnswer:
        """An answer of `text` and an end token, sampled by version `number`."""
        ids = np.asarray(self.tokenizer(text + END * ended)["input_ids"], np.int32)
        return SampledAnswer(
            token_ids=ids,
            logprobs=(-np.arange(1, ids.size + 1) / 8).astype(np.float32),
            versions=np.full(ids.size, number, np.int32),
            finish_reason="stop" if ended or more.get("stop_text") else "length",
            text=text.removesuffix(more.get("stop_text", "")),
            message=message,
            request_id=f"request-{number}",
            **more,
        )

    def called(self, *arguments: Mapping[str, Any], text: str = "") -> SampledAnswer:
        """An answer that calls the tool `add`."""
        calls = [{"type": "function", "function": {"name": "add", "arguments": one}} for one in arguments]
        shown = "".join(f"CALL add {one}" for one in arguments)
        return self.said(f"{text}{shown}", message={"content": text, "tool_calls": calls})


@dataclass
class RecordedSessions:
    """Hands out numbered tasks, and keeps what finished."""

    left: int = 3
    done: list[FinishedSession] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    given: int = 0

    async def next_task(self) -> SessionTask:
        if self.given == self.left:
            raise Unavailable("the run has no further task", retry_after_s=7)
        self.given += 1
        return SessionTask(f"s{self.given}", {"question": "7+5="})

    def finished(self, session: FinishedSession) -> None:
        self.done.append(session)
        self.ended.set()


@dataclass
class EndpointRig:
    endpoint: AgentEndpoint
    backend: RecordedBackend
    sessions: RecordedSessions
    access: SessionAccess
    """Of an open session."""

    def text(self, ids: Any) -> str:
        return str(self.backend.tokenizer.decode(ids.tolist()))

    def end(self, reward: float = 1.0) -> FinishedSession:
        return self.endpoint.end_session(self.access.session_id, reward)


@asynccontextmanager
async def an_endpoint(*answers: Any, **settings: Any) -> AsyncIterator[EndpointRig]:
    """An open endpoint with one open session. An answer may be a function of the backend."""
    tokenizer = tool_tokenizer()
    backend = RecordedBackend(tokenizer)
    backend.answers = [a(backend) if isinstance(a, Callable) else a for a in answers] or ["yes"]
    sessions = RecordedSessions()
    chosen = {"context_tokens": 2000, "turn_tokens": 100, **settings}
    async with AgentEndpoint(backend, sessions, tokenizer, EndpointSettings(**chosen)) as endpoint:
        yield EndpointRig(endpoint, backend, sessions, endpoint.open_session(SessionTask("mine")))
