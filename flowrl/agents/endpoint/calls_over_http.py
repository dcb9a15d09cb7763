"""The calls of agents over HTTP: authorized, read, joined with an earlier attempt, answered at once or as a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrl.agents.endpoint.agent_session import AgentSession, SampledCall
from flowrl.agents.endpoint.apis import (
    AnthropicMessages,
    Api,
    ApiCall,
    CallAnswer,
    ChatCompletions,
    OpenAIResponses,
    TextCompletions,
)
from flowrl.agents.endpoint.apis.api import dumped
from flowrl.agents.endpoint.call_runs import CallRun
from flowrl.agents.endpoint.call_sampler import CallSampler
from flowrl.agents.endpoint.endpoint_settings import EndpointSettings
from flowrl.agents.endpoint.problems import ApiProblem
from flowrl.agents.endpoint.session_table import SessionTable

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

    async def answer(self, request: web.Request, path: str) -> web.StreamResponse:
        api = APIS[path]
        session = self._table.named(key_of(request), request.match_info.get("session"))
        raw = await request.read()
        call = api.read(json_object(raw), session)
        self._sampler.check(call)
        key = hashlib.sha256(path.encode() + b"\n" + raw).digest()
        async with session.runs.joined(
            key,
            lambda: self._sampler.sample(session, call),
            lambda sampled: self._sampler.deliver(session, call, sampled),
            retried=_is_retry(request),
        ) as run:
            send = self._stream if call.stream else self._whole
            return await send(request, api, call, run, self._headers(session, call))

    async def count(self, request: web.Request) -> web.StreamResponse:
        """`messages/count_tokens`: a body of messages, whose limit may be left out."""
        from aiohttp import web

        session = self._table.named(key_of(request), request.match_info.get("session"))
        body = json_object(await request.read())
        call = APIS["messages"].read({**body, "max_tokens": body.get("max_tokens") or 1}, session)
        counted = dumped({"input_tokens": await self._sampler.count(session, call)})
        return web.Response(text=counted, content_type="application/json")

    async def _whole(
        self, request: web.Request, api: Api, call: ApiCall, run: AnswerRun, headers: dict[str, str]
    ) -> web.StreamResponse:
        from aiohttp import web

        answer = await run.delivered()
        body, said = dumped(api.answer(call, answer)).encode(), _with_limit(headers, answer)
        response = web.Response(body=body, content_type="application/json", headers=said)
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(
        self, request: web.Request, api: Api, call: ApiCall, run: AnswerRun, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Before the first keep-alive is sent, an error has its own HTTP status; after it, an error is an event of the
        stream."""
        response: web.StreamResponse | None = None
        while not await run.done_within(self._settings.keep_alive_s):
            response = response or await self._begun(request, headers)
            await response.write(api.keep_alive)
        try:
            answer = await run.delivered()
        except ApiProblem as problem:
            if response is None:
                raise
            await response.write(api.error_event(problem))
        else:
            response = response or await self._begun(request, _with_limit(headers, answer))
            await response.write(b"".join(api.events(call, answer)))
        await response.write_eof()
        return response

    async def _begun(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        from aiohttp import web

        kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**kind, **headers})
        await response.prepare(request)
        return response

    def _headers(self, session: AgentSession, call: ApiCall) -> dict[str, str]:
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
            dumped(body).encode()
    except (ValueError, RecursionError) as problem:
        raise ApiProblem(400, f"the body is not valid JSON ({problem})") from None
    if not isinstance(body, dict):
        raise ApiProblem(400, f"the body is a {type(body).__name__}; it needs an object")
    return body


def _is_retry(request: web.Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and count.strip("0") != ""
