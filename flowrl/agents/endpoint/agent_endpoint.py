"""The endpoint: an HTTP server through which agent code reaches the policy.

Agents call the APIs of `apis`: a call is authorized, read, joined with an earlier attempt, and answered at once or as a
stream. Workers that flowrl does not start also take tasks and give rewards:

/v1/…                        a session's own key names the session
/s/SESSION/v1/…              the URL names it, and either key opens it
POST /sessions               201 {"id", "task", "api_key", "openai_base_url", "anthropic_base_url"}
POST /sessions/ID/reward     {"reward": number}
POST /sessions/ID/end, DELETE /sessions/ID
                             {"id", "reward", "cause"}

By default it listens only on this machine's loopback address. Programs that its process starts later reach it without
a proxy.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flowrl.agents.endpoint.apis import (
    AnthropicMessages,
    Api,
    ApiCall,
    ChatCompletions,
    OpenAIResponses,
    TextCompletions,
)
from flowrl.agents.endpoint.apis.api import ApiProblem, dump_json, invalid
from flowrl.agents.endpoint.apis.fields import check_fields
from flowrl.agents.endpoint.backend import (
    Backend,
    Busy,
    EndpointSettings,
    FinishedSession,
    RunEnded,
    Sessions,
    SessionTask,
    Unavailable,
)
from flowrl.agents.endpoint.call_sampler import CallSampler
from flowrl.agents.endpoint.session_table import AgentSession, CallRun, SessionTable, unknown_key
from flowrl.environments.protocol import shorten_value
from flowrl.errors import ConfigError
from flowrl.machine.proxies import reach_directly
from flowrl.messages.base import number_in

if TYPE_CHECKING:
    from aiohttp import web


APIS: Mapping[str, Api] = {
    "chat/completions": ChatCompletions(),
    "completions": TextCompletions(),
    "messages": AnthropicMessages(),
    "responses": OpenAIResponses(),
}
"""Path below v1 -> API."""


def key_of(request: web.Request) -> str:
    """The key that a request came with. Raises ApiProblem (401) if there is none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if not key:
        raise ApiProblem(401, "there is no key; send Authorization: Bearer KEY, or x-api-key: KEY")
    return key


def json_object(raw: bytes) -> Mapping[str, Any]:
    """The body. Raises ApiProblem (400) if it is not a JSON object, or contains text that cannot be encoded."""
    try:
        body = json.loads(raw.decode())
        if b"\\ud" in raw.lower():
            dump_json(body).encode()
    except (ValueError, RecursionError) as problem:
        raise ApiProblem(400, f"the body is not valid JSON ({problem})") from None
    if not isinstance(body, dict):
        raise ApiProblem(400, f"the body is a {type(body).__name__}; it needs an object")
    return body


@dataclass(frozen=True)
class SessionAccess:
    """How an agent reaches its session: by base URL, or only by key."""

    session_id: str
    api_key: str
    url: str
    """Base URL of the endpoint."""

    @property
    def openai_base_url(self) -> str:
        return f"{self.url}/s/{self.session_id}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Without v1, which Anthropic's SDK adds."""
        return f"{self.url}/s/{self.session_id}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for an agent's process, which SDKs read."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


def checked_reward(reward: object) -> float:
    """Raises ApiProblem unless it is a finite number, or true or false."""
    number = number_in(reward)
    if number is None or not math.isfinite(number):
        raise invalid("reward", f"reward is {shorten_value(reward)}; it needs a finite number")
    return number


SHUTDOWN_S = 1.0
"""Seconds for responses that are still being written when the endpoint closes."""


class AgentEndpoint:
    """Open within `async with`. `tokenizer` is the policy's; its chat template joins messages.

    Leaving cancels open calls. Sessions that are still open are not reported as finished. Errors of requests are
    ApiProblem, which `answer_errors` turns into responses.
    """

    def __init__(self, backend: Backend, sessions: Sessions, tokenizer: Any, settings: EndpointSettings) -> None:
        self._settings = settings
        self._source = sessions
        self._table = SessionTable(sessions, tokenizer, settings)
        self._sampler = CallSampler(backend, tokenizer, settings)
        self._num_beginning = 0
        """Clients that wait for a task."""
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Without a slash at its end; "" until the endpoint is open."""

    @property
    def key(self) -> str:
        """The run's key, which starts sessions and gives access to all of them."""
        return self._table.run_key

    def open_session(self, task: SessionTask) -> SessionAccess:
        """Begin a session for an agent that this process starts. Raises ConfigError for an id that is taken."""
        session = self._table.open_session(task)
        return SessionAccess(session.session_id, session.key, self.url)

    def has_session(self, session_id: str) -> bool:
        """Whether the session is open."""
        return session_id in self._table.open_sessions

    def end_session(self, session_id: str, reward: float | None = None, cause: str = "") -> FinishedSession:
        """End a session from this process. Raises ApiProblem if it is not open, or already has another reward."""
        session = self._table.find_session(self.key, session_id)
        if reward is not None:
            session.give_reward(checked_reward(reward))
        return self._table.end_session(session, cause)

    async def __aenter__(self) -> AgentEndpoint:
        from aiohttp import web

        settings = self._settings
        runner = web.AppRunner(
            self._make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
            self._remove_key()
            if settings.key_file:  # a new file, which only its user can read from the beginning
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(settings.key_file, flags, 0o600), "w", encoding="utf-8") as file:
                    file.write(self.key)
            reach_directly(settings.host)
        except OSError as problem:
            await runner.cleanup()
            raise ConfigError(
                f"the endpoint cannot be opened ({problem}); give it another host, port or key_file"
            ) from None
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{runner.addresses[0][1]}"
        self._runner = runner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        self._remove_key()
        await self._table.close_sessions()
        await self._runner.cleanup()

    def _remove_key(self) -> None:
        if self._settings.key_file:
            Path(self._settings.key_file).unlink(missing_ok=True)

    def _make_app(self) -> web.Application:
        from aiohttp import web

        routes = [
            web.post("/sessions", self._begin_session),
            web.post("/sessions/{session}/reward", self._reward_session),
            web.post("/sessions/{session}/end", self._end_named_session),
            web.delete("/sessions/{session}", self._end_named_session),
        ]
        for base in ("/v1", "/s/{session}/v1"):
            routes += [web.post(f"{base}/{path}", functools.partial(self._answer_call, path)) for path in APIS]
            routes += [
                web.post(f"{base}/messages/count_tokens", self._count_tokens),
                web.get(f"{base}/models", self._show_models),
                web.get(f"{base}/models/{{model}}", self._show_models),
            ]
        middlewares = [web.middleware(answer_errors)]
        app = web.Application(client_max_size=self._settings.body_bytes, middlewares=middlewares)
        app.add_routes(routes)
        return app

    def _find_session(self, request: web.Request) -> AgentSession:
        """The session that the URL or the key names."""
        return self._table.find_session(key_of(request), request.match_info.get("session"))

    async def _answer_call(self, path: str, request: web.Request) -> web.StreamResponse:
        """A POST to one of `APIS`: read, joined with an earlier attempt, and answered at once or as a stream."""
        api = APIS[path]
        session = self._find_session(request)
        raw = await request.read()
        call = api.read_call(json_object(raw), session.responses)
        self._sampler.check_call(call)

        # The graph decides how replies are sampled, even if the call asks for something else.
        temperature, top_p = session.task.temperature, session.task.top_p
        temperature = self._settings.temperature if temperature is None else temperature
        top_p = self._settings.top_p if top_p is None else top_p
        headers = {"x-flowrl-sampling": f"temperature={temperature}, top_p={top_p}"}
        if call.strict_tools:
            headers["x-flowrl-strict-tools"] = "not enforced"

        attempt = request.headers.get("x-stainless-retry-count", "0")
        async with session.runs.join_run(
            hashlib.sha256(path.encode() + b"\n" + raw).digest(),
            lambda: self._sampler.sample_call(session, call),
            lambda sampled: self._sampler.deliver_answer(session, call, sampled),
            retried=attempt.isdecimal() and attempt.strip("0") != "",
        ) as run:
            if call.stream:
                return await self._stream_answer(request, api, call, run, headers)
            answer = await run.deliver_once()
            headers["x-flowrl-max-tokens"] = str(answer.max_tokens)
            response = json_response(api.write_answer(call, answer), headers=headers)
            # The answer is written here, not by the server: leaving the block means that the client has it.
            await response.prepare(request)
            await response.write_eof()
            return response

    async def _stream_answer(
        self, request: web.Request, api: Api, call: ApiCall, run: CallRun, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Before the first keep-alive is sent, an error has its own HTTP status; after it, an error is an event of the
        stream."""
        from aiohttp import web

        kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**kind, **headers})
        while not run.task.done():
            await asyncio.wait({run.task}, timeout=self._settings.keep_alive_s)
            if not run.task.done():
                await response.prepare(request)
                await response.write(api.keep_alive)
        try:
            answer = await run.deliver_once()
        except ApiProblem as problem:
            if not response.prepared:
                raise
            await response.write(api.error_event(problem))
        else:
            if not response.prepared:
                response.headers["x-flowrl-max-tokens"] = str(answer.max_tokens)
                await response.prepare(request)
            await response.write(b"".join(api.write_events(call, answer)))
        await response.write_eof()
        return response

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """`messages/count_tokens`: a body of messages, whose limit may be left out."""
        session = self._find_session(request)
        body = json_object(await request.read())
        call = APIS["messages"].read_call({**body, "max_tokens": body.get("max_tokens") or 1}, session.responses)
        return json_response({"input_tokens": await self._sampler.count_tokens(session, call)})

    async def _show_models(self, request: web.Request) -> web.StreamResponse:
        """All models, or the one that the URL names. The run's key is enough where no session is named."""
        if "session" in request.match_info or not self._table.is_run_key(key_of(request)):
            self._find_session(request)
        wanted = request.match_info.get("model")
        if wanted is not None and wanted not in self._settings.models:
            raise ApiProblem(404, f"the model {wanted!r} is not served here", param="model", code="model_not_found")
        entries = [  # with the fields that OpenAI's and Anthropic's clients read
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "flowrl",
                "type": "model",
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
            }
            for name in ([wanted] if wanted else self._settings.models)
        ]
        if wanted:
            return json_response(entries[0])
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"], "has_more": False}
        return json_response({"object": "list", "data": entries, **ends})

    async def _begin_session(self, request: web.Request) -> web.StreamResponse:
        if not self._table.is_run_key(key_of(request)):
            raise unknown_key()
        if len(self._table.open_sessions) + self._num_beginning >= self._settings.sessions:
            raise ApiProblem(429, "as many sessions are open as there may be; end one first", retry_after_s=5)
        self._num_beginning += 1
        try:
            task = await self._source.next_task()
        except Unavailable as problem:
            raise ApiProblem(503, str(problem), retry_after_s=problem.retry_after_s) from None
        except Busy as problem:
            raise ApiProblem(429, str(problem), retry_after_s=problem.retry_after_s) from None
        except RunEnded as problem:
            raise ApiProblem(410, str(problem), code="run_ended") from None
        finally:
            self._num_beginning -= 1
        session = self._table.open_session(task)
        access = SessionAccess(session.session_id, session.key, f"{request.scheme}://{request.host}")
        return json_response(
            {
                "id": access.session_id,
                "task": dict(task.task),
                "api_key": access.api_key,
                "openai_base_url": access.openai_base_url,
                "anthropic_base_url": access.anthropic_base_url,
            },
            status=201,
        )

    async def _reward_session(self, request: web.Request) -> web.StreamResponse:
        session = self._find_session(request)
        body = json_object(await request.read())
        check_fields(body, {"reward"}, {})
        session.give_reward(checked_reward(body.get("reward")))
        return json_response({"id": session.session_id, "reward": session.reward})

    async def _end_named_session(self, request: web.Request) -> web.StreamResponse:
        finished = self._table.end_session(self._find_session(request))
        return json_response({"id": finished.session_id, "reward": finished.reward, "cause": finished.cause})


async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware that writes errors in the form of the API that was called."""
    from aiohttp import web

    try:
        return await handler(request)
    except ApiProblem as found:
        problem = found
    except web.HTTPRequestEntityTooLarge as found:
        problem = ApiProblem(413, f"the body is too large: {found.text}")
    except web.HTTPException as found:
        message = f"{request.method} {request.path}: {found.reason}; see docs/endpoint.md for what there is"
        problem = ApiProblem(found.status, message)
    path = request.path.partition("/v1/")[2]
    anthropic = path.startswith("messages") or (path.startswith("models") and "anthropic-version" in request.headers)
    api = APIS["messages" if anthropic else "chat/completions"]
    return json_response(api.write_error(problem), status=problem.status, headers=problem.headers)


def json_response(
    value: Mapping[str, object], *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    from aiohttp import web

    body = dump_json(value).encode()
    return web.Response(body=body, content_type="application/json", status=status, headers=headers)
