"""Sessions over HTTP, for workers that flowrl does not start: the next task, a reward, the end.

POST /sessions               201 {"id", "task", "api_key", "openai_base_url", "anthropic_base_url"}
POST /sessions/ID/reward     {"reward": number}
POST /sessions/ID/end, DELETE /sessions/ID
                             {"id", "reward", "cause"}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.agents.endpoint.agent_session import AgentSession
from flowrl.agents.endpoint.apis.api import dumped
from flowrl.agents.endpoint.apis.fields import check_fields, short
from flowrl.agents.endpoint.backend import Busy, RunEnded, Sessions, Unavailable
from flowrl.agents.endpoint.calls_over_http import json_object, key_of
from flowrl.agents.endpoint.problems import ApiProblem, invalid
from flowrl.agents.endpoint.session_table import SessionTable
from flowrl.message_base import number_in

if TYPE_CHECKING:
    from aiohttp import web


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

    async def begin(self, request: web.Request) -> web.StreamResponse:
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
        session = self._table.open(task)
        access = SessionAccess(session.session_id, session.key, f"{request.scheme}://{request.host}")
        return _json(
            {
                "id": access.session_id,
                "task": dict(task.task),
                "api_key": access.api_key,
                "openai_base_url": access.openai_base_url,
                "anthropic_base_url": access.anthropic_base_url,
            },
            status=201,
        )

    async def reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = json_object(await request.read())
        check_fields(body, {"reward"}, {})
        session.give_reward(checked_reward(body.get("reward")))
        return _json({"id": session.session_id, "reward": session.reward})

    async def end(self, request: web.Request) -> web.StreamResponse:
        finished = self._table.end(self._session(request))
        return _json({"id": finished.session_id, "reward": finished.reward, "cause": finished.cause})

    def _session(self, request: web.Request) -> AgentSession:
        return self._table.named(key_of(request), request.match_info["session"])


def checked_reward(reward: object) -> float:
    """Raises ApiProblem unless it is a finite number, or true or false."""
    number = number_in(reward)
    if number is None or not math.isfinite(number):
        raise invalid("reward", f"reward is {short(reward)}; it needs a finite number")
    return number


def _json(value: dict[str, object], *, status: int = 200) -> web.Response:
    from aiohttp import web

    return web.Response(body=dumped(value).encode(), content_type="application/json", status=status)
