"""The endpoint: an HTTP server through which agent code reaches the policy.

/v1/…          a session's own key names the session
/s/SESSION/v1/…  the URL names it, and either key opens it
/sessions      see `sessions_over_http`

By default it listens only on this machine's loopback address. Programs that its process starts later reach it without
a proxy.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flowrl.agents.endpoint.apis.api import dumped
from flowrl.agents.endpoint.backend import Backend, FinishedSession, Sessions, SessionTask
from flowrl.agents.endpoint.call_sampler import CallSampler
from flowrl.agents.endpoint.calls_over_http import APIS, CallsOverHttp, key_of
from flowrl.agents.endpoint.endpoint_settings import EndpointSettings
from flowrl.agents.endpoint.problems import ApiProblem
from flowrl.agents.endpoint.session_table import SessionTable
from flowrl.agents.endpoint.sessions_over_http import SessionAccess, SessionsOverHttp, checked_reward
from flowrl.errors import ConfigError
from flowrl.machine.proxies import reach_directly

if TYPE_CHECKING:
    from aiohttp import web

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
        session = self._table.open(task)
        return SessionAccess(session.session_id, session.key, self.url)

    def has_session(self, session_id: str) -> bool:
        """Whether the session is open."""
        return self._table.is_open(session_id)

    def end_session(self, session_id: str, reward: float | None = None, cause: str = "") -> FinishedSession:
        """End a session from this process. Raises ApiProblem if it is not open, or already has another reward."""
        session = self._table.named(self.key, session_id)
        if reward is not None:
            session.give_reward(checked_reward(reward))
        return self._table.end(session, cause)

    async def __aenter__(self) -> AgentEndpoint:
        from aiohttp import web

        runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._settings.host, self._settings.port).start()
            self.url = f"http://{_host(self._settings.host)}:{runner.addresses[0][1]}"
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
        await self._table.close()
        await self._runner.cleanup()

    def _app(self) -> web.Application:
        from aiohttp import web

        app = web.Application(client_max_size=self._settings.body_bytes, middlewares=[_in_the_apis_shape()])
        for base in ("/v1", "/s/{session}/v1"):
            app.add_routes([web.post(f"{base}/{path}", self._call(path)) for path in APIS])
            app.add_routes([web.post(f"{base}/messages/count_tokens", self._calls.count)])
            app.add_routes([web.get(f"{base}/models", self._models), web.get(f"{base}/models/{{model}}", self._model)])
        app.add_routes(
            [
                web.post("/sessions", self._sessions.begin),
                web.post("/sessions/{session}/reward", self._sessions.reward),
                web.post("/sessions/{session}/end", self._sessions.end),
                web.delete("/sessions/{session}", self._sessions.end),
            ]
        )
        return app

    def _call(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._calls.answer(request, path)

        return handle

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        models = [_model(name) for name in self._settings.models]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return _json({"object": "list", "data": models, **ends})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        name = request.match_info["model"]
        if name not in self._settings.models:
            raise ApiProblem(404, f"the model {name!r} is not served here", param="model", code="model_not_found")
        return _json(_model(name))

    def _check_key(self, request: web.Request) -> None:
        """The run's key is enough where no session is named."""
        key, session_id = key_of(request), request.match_info.get("session")
        if session_id is not None or not self._table.is_run_key(key):
            self._table.named(key, session_id)

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


def _model(name: str) -> dict[str, object]:
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
            return _error(request, problem)
        except web.HTTPRequestEntityTooLarge as problem:
            return _error(request, ApiProblem(413, f"the body is too large: {problem.text}"))
        except web.HTTPException as problem:
            message = f"{request.method} {request.path}: {problem.reason}; see docs/endpoint.md for what there is"
            return _error(request, ApiProblem(problem.status, message))

    return answered


def _error(request: web.Request, problem: ApiProblem) -> web.Response:
    path = request.path.partition("/v1/")[2]
    anthropic = path.startswith("messages") or (path.startswith("models") and "anthropic-version" in request.headers)
    api = APIS["messages" if anthropic else "chat/completions"]
    return _json(dict(api.error(problem)), status=problem.status, headers=problem.headers)


def _json(value: dict[str, object], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    from aiohttp import web

    body = dumped(value).encode()
    return web.Response(body=body, content_type="application/json", status=status, headers=headers)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
