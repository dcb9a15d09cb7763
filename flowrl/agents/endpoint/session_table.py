"""The open sessions of an endpoint: found by key or id, ended by their clients, or when they are idle.

Invariants: a session is ended once, and reported once. A session whose client waits for an answer is not idle.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from flowrl.agents.chat_template import ChatTemplate, TextBound
from flowrl.agents.endpoint.agent_session import AgentSession, SampledCall
from flowrl.agents.endpoint.apis import CallAnswer
from flowrl.agents.endpoint.backend import FinishedSession, Sessions, SessionTask
from flowrl.agents.endpoint.call_runs import CallRuns
from flowrl.agents.endpoint.endpoint_settings import EndpointSettings
from flowrl.agents.endpoint.problems import ApiProblem
from flowrl.agents.endpoint.tree.matching import canonical
from flowrl.errors import ConfigError
from flowrl.models.tokens.chat import Messages
from flowrl.models.tokens.token_extent import most_characters_per_token

MOST_TEMPLATES = 64
MOST_REMEMBERED = 4096
"""Maximum number of ended sessions whose clients are still told that the session has ended."""
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class SessionTable:
    """Sessions by id. `close` ends no session: those that are open when the run stops are not finished."""

    def __init__(self, sessions: Sessions, tokenizer: Any, settings: EndpointSettings) -> None:
        self.run_key = secrets.token_urlsafe(32)
        self._source = sessions
        self._tokenizer = tokenizer
        self._settings = settings
        self._open: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Id -> key."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._bound = TextBound(settings.context_tokens, most_characters_per_token(tokenizer))
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._templates_lock = threading.Lock()
        self._tasks: set[asyncio.Task[SampledCall]] = set()

    def is_full_with(self, more: int) -> bool:
        """Whether no further session can start, given the open sessions and `more` that are about to start."""
        return len(self._open) + more >= self._settings.sessions

    def open(self, task: SessionTask) -> AgentSession:
        """Begin a session. Raises ConfigError for an id that is malformed or taken."""
        name = task.session_id
        if not SESSION_ID.fullmatch(name) or name in self._open or name in self._ended:
            raise ConfigError(f"the session id {name!r} is taken, or has more than letters, digits, - and _")
        runs: CallRuns[SampledCall, CallAnswer] = CallRuns(
            self._begun,
            leave_s=self._settings.leave_s,
            most_open=self._settings.session_calls,
            changed=functools.partial(self._heard_of, name),
        )
        key = f"{name}.{secrets.token_urlsafe(24)}"
        self._open[name] = AgentSession(task, key, self._tokenizer, self._template_of, runs, self._bound)
        self._heard_of(name)
        return self._open[name]

    def named(self, key: str, session_id: str | None) -> AgentSession:
        """The open session that a key or an id names. Raises ApiProblem (401, 404, 409)."""
        session_id = self._authorized(key, session_id)
        if session_id in self._ended:
            raise ApiProblem(409, f"the session {session_id} has ended; ask for another one", code="session_ended")
        if session_id not in self._open:
            raise ApiProblem(404, f"there is no session {session_id}; POST /sessions begins one")
        self._heard_of(session_id)
        return self._open[session_id]

    def is_open(self, session_id: str) -> bool:
        return session_id in self._open

    def is_run_key(self, key: str) -> bool:
        return _equal(key, self.run_key)

    def check_run_key(self, key: str) -> None:
        """Raises ApiProblem (401) for any other key."""
        if not self.is_run_key(key):
            raise _unknown_key()

    def end(self, session: AgentSession, cause: str = "") -> FinishedSession:
        """Cancel the session's calls and report it."""
        name = session.session_id
        ended = self._open.pop(name)
        assert ended is session
        if name in self._timers:
            self._timers.pop(name).cancel()
        self._ended[name] = session.key
        if len(self._ended) > MOST_REMEMBERED:
            self._ended.popitem(last=False)
        session.runs.close()
        finished = session.finished(cause)
        self._source.finished(finished)
        return finished

    async def close(self) -> None:
        """Cancel all calls and wait until that is done."""
        for timer in self._timers.values():
            timer.cancel()
        for session in self._open.values():
            session.runs.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _authorized(self, key: str, session_id: str | None) -> str:
        if self.is_run_key(key):
            if session_id is None:
                message = "the run's key names no session; use the base URL of a session, or a session's own key"
                raise ApiProblem(401, message)
            return session_id
        named = key.partition(".")[0]
        known = self._open[named].key if named in self._open else self._ended.get(named, "")
        if not known or not _equal(key, known) or session_id not in (None, named):
            raise _unknown_key()
        return named

    def _begun(self, work: Coroutine[None, None, SampledCall]) -> asyncio.Task[SampledCall]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _heard_of(self, name: str) -> None:
        session = self._open.get(name)
        if session is not None:
            session.active_s = asyncio.get_running_loop().time()
            if name not in self._timers:
                self._look_after(name, self._settings.idle_s)

    def _look_after(self, name: str, seconds: float) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._look, name)

    def _look(self, name: str) -> None:
        """End the session if it is idle. While a client waits, there is no timer; the next one starts when the client
        leaves."""
        del self._timers[name]
        session = self._open[name]
        left_s = session.active_s + self._settings.idle_s - asyncio.get_running_loop().time()
        if session.runs.num_waiting:
            return
        if left_s > 0:
            self._look_after(name, left_s)
        else:
            self.end(session, "session_idle")

    def _template_of(self, tools: Messages) -> ChatTemplate:
        """Also called by threads, which make the contexts of long messages."""
        key = canonical(list(tools))
        with self._templates_lock:
            found = self._templates.get(key)
        found = found or ChatTemplate(self._tokenizer, tools, self._bound)
        with self._templates_lock:
            self._templates[key] = found
            self._templates.move_to_end(key)
            if len(self._templates) > MOST_TEMPLATES:
                self._templates.popitem(last=False)
        return found


def _equal(key: str, known: str) -> bool:
    sent = key.encode(errors="surrogatepass")  # bytes of a header that are no UTF-8 arrive as surrogates
    return hmac.compare_digest(sent, known.encode())


def _unknown_key() -> ApiProblem:
    return ApiProblem(401, "this key is not known; use the run's key, or that of the session", code="invalid_api_key")
