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
    CallAnswer,
    ChatCompletions,
    OpenAIResponses,
    TextCompletions,
)
from flowrl.agents.endpoint.apis.api import ApiProblem, dump_json, invalid
from flowrl.agents.endpoint.apis.fields import check_fields, shorten_value
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
from flowrl.agents.endpoint.session_table import AgentSession, CallRun, SampledCall, SessionTable
from flowrl.errors import ConfigError
from flowrl.machine.proxies import reach_directly
from flowrl.messages.base import number_in

if TYPE_CHECKING:
    from aiohttp import web


AnswerRun = CallRun[SampledCall, CallAnswer]
APIS: Mapping[str, Api] = {
    "chat/completions": ChatCompletions(),
    "completions": TextCompletions(),
    "messages": AnthropicMessages(),
    "responses": OpenAIResponses(),
}
"""Path below v1 -> API."""


class CallsOverHttp:
    """Handles a POST to one of `APIS`. Its errors are ApiProblem."""

    def __init__(self, table: SessionTable, sampler: CallSampler, settings: EndpointSettings) -> None:
        self._table = table
        self._sampler = sampler
        self._settings = settings

    async def answer_call(self, request: web.Request, path: str) -> web.StreamResponse:
        api = APIS[path]
        session = self._table.find_session(key_of(request), request.match_info.get("session"))
        raw = await request.read()
        call = api.read_call(json_object(raw), session)
        self._sampler.check_call(call)
        key = hashlib.sha256(path.encode() + b"\n" + raw).digest()
        async with session.runs.join_run(
            key,
            lambda: self._sampler.sample_call(session, call),
            lambda sampled: self._sampler.deliver_answer(session, call, sampled),
            retried=_is_retry(request),
        ) as run:
            send = self._answer_streaming if call.stream else self._answer_whole
            return await send(request, api, call, run, self._stream_headers(session, call))

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """`messages/count_tokens`: a body of messages, whose limit may be left out."""
        from aiohttp import web

        session = self._table.find_session(key_of(request), request.match_info.get("session"))
        body = json_object(await request.read())
        call = APIS["messages"].read_call({**body, "max_tokens": body.get("max_tokens") or 1}, session)
        counted = dump_json({"input_tokens": await self._sampler.count_tokens(session, call)})
        return web.Response(text=counted, content_type="application/json")

    async def _answer_whole(
        self, request: web.Request, api: Api, call: ApiCall, run: AnswerRun, headers: dict[str, str]
    ) -> web.StreamResponse:
        from aiohttp import web

        answer = await run.deliver_once()
        body, said = dump_json(api.write_answer(call, answer)).encode(), _with_limit(headers, answer)
        response = web.Response(body=body, content_type="application/json", headers=said)
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _answer_streaming(
        self, request: web.Request, api: Api, call: ApiCall, run: AnswerRun, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Before the first keep-alive is sent, an error has its own HTTP status; after it, an error is an event of the
        stream."""
        response: web.StreamResponse | None = None
        while not await run.done_within(self._settings.keep_alive_s):
            response = response or await self._begin_stream(request, headers)
            await response.write(api.keep_alive)
        try:
            answer = await run.deliver_once()
        except ApiProblem as problem:
            if response is None:
                raise
            await response.write(api.error_event(problem))
        else:
            response = response or await self._begin_stream(request, _with_limit(headers, answer))
            await response.write(b"".join(api.write_events(call, answer)))
        await response.write_eof()
        return response

    async def _begin_stream(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        from aiohttp import web

        kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**kind, **headers})
        await response.prepare(request)
        return response

    def _stream_headers(self, session: AgentSession, call: ApiCall) -> dict[str, str]:
        """What the graph decides, even if the call asks for something else."""
        temperature, top_p = session.task.temperature, session.task.top_p
        temperature = self._settings.temperature if temperature is None else temperature
        top_p = self._settings.top_p if top_p is None else top_p
        headers = {"x-flowrl-sampling": f"temperature={temperature}, top_p={top_p}"}
        return {**headers, "x-flowrl-strict-tools": "not enforced"} if call.strict_tools else headers


def _with_limit(headers: dict[str, str], answer: CallAnswer) -> dict[str, str]:
    """`headers` with the limit of the reply, which is known only with the answer."""
    return {**headers, "x-flowrl-max-tokens": str(answer.max_tokens)}


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


def _is_retry(request: web.Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and count.strip("0") != ""


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


class SessionsOverHttp:
    """Handles the requests above. Their errors are ApiProblem."""

    def __init__(self, table: SessionTable, source: Sessions) -> None:
        self._table = table
        self._source = source
        self._waiting = 0

    async def begin_session(self, request: web.Request) -> web.StreamResponse:
        self._table.check_run_key(key_of(request))
        if self._table.is_full_with(self._waiting):
            raise ApiProblem(429, "as many sessions are open as there may be; end one first", retry_after_s=5)
        self._waiting += 1
        try:
            task = await self._source.next_task()
        except Unavailable as problem:
            raise ApiProblem(503, str(problem), retry_after_s=problem.retry_after_s) from None
        except Busy as problem:
            raise ApiProblem(429, str(problem), retry_after_s=problem.retry_after_s) from None
        except RunEnded as problem:
            raise ApiProblem(410, str(problem), code="run_ended") from None
        finally:
            self._waiting -= 1
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

    async def reward_session(self, request: web.Request) -> web.StreamResponse:
        session = self._find_session(request)
        body = json_object(await request.read())
        check_fields(body, {"reward"}, {})
        session.give_reward(checked_reward(body.get("reward")))
        return json_response({"id": session.session_id, "reward": session.reward})

    async def end_named_session(self, request: web.Request) -> web.StreamResponse:
        finished = self._table.end_session(self._find_session(request))
        return json_response({"id": finished.session_id, "reward": finished.reward, "cause": finished.cause})

    def _find_session(self, request: web.Request) -> AgentSession:
        return self._table.find_session(key_of(request), request.match_info["session"])


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

    Leaving cancels open calls. Sessions that are still open are not reported as finished.
    """

    def __init__(self, backend: Backend, sessions: Sessions, tokenizer: Any, settings: EndpointSettings) -> None:
        self._settings = settings
        self._table = SessionTable(sessions, tokenizer, settings)
        self._calls = CallsOverHttp(self._table, CallSampler(backend, tokenizer, settings), settings)
        self._sessions = SessionsOverHttp(self._table, sessions)
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
        return self._table.is_open(session_id)

    def end_session(self, session_id: str, reward: float | None = None, cause: str = "") -> FinishedSession:
        """End a session from this process. Raises ApiProblem if it is not open, or already has another reward."""
        session = self._table.find_session(self.key, session_id)
        if reward is not None:
            session.give_reward(checked_reward(reward))
        return self._table.end_session(session, cause)

    async def __aenter__(self) -> AgentEndpoint:
        from aiohttp import web

        runner = web.AppRunner(
            self._make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._settings.host, self._settings.port).start()
            self.url = f"http://{url_host(self._settings.host)}:{runner.addresses[0][1]}"
            self._write_key()
            reach_directly(self._settings.host)
        except OSError as problem:
            await runner.cleanup()
            raise ConfigError(
                f"the endpoint cannot be opened ({problem}); give it another host, port or key_file"
            ) from None
        self._runner = runner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        self._remove_key()
        await self._table.close_sessions()
        await self._runner.cleanup()

    def _make_app(self) -> web.Application:
        from aiohttp import web

        app = web.Application(client_max_size=self._settings.body_bytes, middlewares=[_in_the_apis_shape()])
        for base in ("/v1", "/s/{session}/v1"):
            app.add_routes([web.post(f"{base}/{path}", self._answer_call(path)) for path in APIS])
            app.add_routes([web.post(f"{base}/messages/count_tokens", self._calls.count_tokens)])
            app.add_routes(
                [web.get(f"{base}/models", self._list_models), web.get(f"{base}/models/{{model}}", self._show_model)]
            )
        app.add_routes(
            [
                web.post("/sessions", self._sessions.begin_session),
                web.post("/sessions/{session}/reward", self._sessions.reward_session),
                web.post("/sessions/{session}/end", self._sessions.end_named_session),
                web.delete("/sessions/{session}", self._sessions.end_named_session),
            ]
        )
        return app

    def _answer_call(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._calls.answer_call(request, path)

        return handle

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        models = [model_entry(name) for name in self._settings.models]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return json_response({"object": "list", "data": models, **ends})

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        name = request.match_info["model"]
        if name not in self._settings.models:
            raise ApiProblem(404, f"the model {name!r} is not served here", param="model", code="model_not_found")
        return json_response(model_entry(name))

    def _check_key(self, request: web.Request) -> None:
        """The run's key is enough where no session is named."""
        key, session_id = key_of(request), request.match_info.get("session")
        if session_id is not None or not self._table.is_run_key(key):
            self._table.find_session(key, session_id)

    def _write_key(self) -> None:
        """Write the key to a new file, which only its user can read from the beginning."""
        self._remove_key()
        if self._settings.key_file:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(self._settings.key_file, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(self.key)

    def _remove_key(self) -> None:
        if self._settings.key_file:
            Path(self._settings.key_file).unlink(missing_ok=True)


def model_entry(name: str) -> dict[str, object]:
    """A model, with the fields that OpenAI's and Anthropic's clients read."""
    openai = {"object": "model", "created": 0, "owned_by": "flowrl"}
    return {"id": name, **openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _in_the_apis_shape() -> Any:
    """A middleware that writes errors in the form of the API that was called."""
    from aiohttp import web

    @web.middleware
    async def answered(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiProblem as problem:
            return error_response(request, problem)
        except web.HTTPRequestEntityTooLarge as problem:
            return error_response(request, ApiProblem(413, f"the body is too large: {problem.text}"))
        except web.HTTPException as problem:
            message = f"{request.method} {request.path}: {problem.reason}; see docs/endpoint.md for what there is"
            return error_response(request, ApiProblem(problem.status, message))

    return answered


def error_response(request: web.Request, problem: ApiProblem) -> web.Response:
    path = request.path.partition("/v1/")[2]
    anthropic = path.startswith("messages") or (path.startswith("models") and "anthropic-version" in request.headers)
    api = APIS["messages" if anthropic else "chat/completions"]
    return json_response(dict(api.write_error(problem)), status=problem.status, headers=problem.headers)


def json_response(
    value: dict[str, object], *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    from aiohttp import web

    body = dump_json(value).encode()
    return web.Response(body=body, content_type="application/json", status=status, headers=headers)


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
