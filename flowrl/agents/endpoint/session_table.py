"""The open sessions of an endpoint: found by key or id, ended by their clients, or when they are idle; and the calls
that run in each.

Invariants: a session is ended once, and reported once. A session whose client waits for an answer is not idle.

Runs of calls are independent of their clients: a retry joins the first run or repeats its answer, and samples nothing.
A run continues while a client waits for it, and for `leave_s` after that; then it is cancelled, or its answer is
forgotten. An answer is delivered once: the effects of a delivery happen for the first client that receives the answer.
A wait ends with the run, or when the client leaves, which cancels the wait but not the run.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from flowrl.agents.chat_template import ChatTemplate, TextBound
from flowrl.agents.endpoint.apis import CallAnswer
from flowrl.agents.endpoint.apis.api import ApiProblem
from flowrl.agents.endpoint.backend import EndpointSettings, FinishedSession, SampledAnswer, Sessions, SessionTask
from flowrl.agents.endpoint.session_tree import Asked, MessageTree, RawPrompts, SampledBranches, canonical_message
from flowrl.errors import ConfigError
from flowrl.models.tokens.chat import Messages
from flowrl.models.tokens.vocabulary import most_characters_per_token

SampledCall = list[tuple[Asked, SampledAnswer]]
"""The replies to a call, each with its context."""
StartSampling = Callable[[], Coroutine[None, None, SampledCall]]
DeliverAnswer = Callable[[SampledCall], CallAnswer]


class AgentSession:
    """An open session. `runs` has its calls, and `template_of` gives the chat template with tools."""

    def __init__(
        self,
        task: SessionTask,
        key: str,
        tokenizer: Any,
        template_of: Callable[[Messages], ChatTemplate],
        runs: CallRuns,
        bound: TextBound,
    ) -> None:
        self.task = task
        self.key = key
        self.runs = runs
        self.branches = SampledBranches()
        self.tree = MessageTree(template_of, self.branches)
        self.prompts = RawPrompts(tokenizer, self.branches, bound)
        self.asking = asyncio.Lock()
        """Held while a call's contexts are made, which may be in a thread."""
        self.active_s = 0.0
        """Time of the client's last activity, on the loop's clock."""
        self.request_ids: list[str] = []
        self.reward: float | None = None
        self.full = False
        """Whether a call was refused because its context left no place for a reply."""
        self.responses: dict[str, Messages] = {}
        """Id of a response -> the conversation that ended with it."""

    @property
    def session_id(self) -> str:
        return self.task.session_id

    def give_reward(self, reward: float) -> None:
        """Set the reward. Raises ApiProblem if the session already has another one."""
        if self.reward not in (None, reward):
            raise ApiProblem(409, f"the session has the reward {self.reward} already; a session has one reward")
        self.reward = reward


MOST_KEPT = 64
"""Maximum number of finished runs of a session whose answers can be repeated."""


class CallRun:
    """One call being answered. `deliver` makes what clients see from what was sampled."""

    def __init__(self, key: bytes, task: asyncio.Task[SampledCall], deliver: DeliverAnswer) -> None:
        self.key = key
        self.task = task
        self.waiting = 0
        self.received = False
        """Whether a client has the whole answer."""
        self.given_up = False
        """Whether the session has ended; what was sampled since then is not part of it."""
        self.leaving: asyncio.TimerHandle | None = None
        self._deliver = deliver
        self._delivered: CallAnswer | None = None

    async def deliver_once(self) -> CallAnswer:
        """Raises ApiProblem if the run failed, or if it was cancelled because its session ended."""
        await asyncio.wait({self.task})
        if self.task.cancelled() or self.given_up:
            raise ApiProblem(409, "the session ended while this call was open, so its answer was given up")
        sampled = self.task.result()
        if self._delivered is None:
            self._delivered = self._deliver(sampled)
        return self._delivered


class CallRuns:
    """The runs of one session.

    `begin` makes the task of a run; the owner of `begin` waits for the tasks at the end. `changed` is called when a
    client starts to wait, and when it stops.
    """

    def __init__(
        self,
        begin: Callable[[Coroutine[None, None, SampledCall]], asyncio.Task[SampledCall]],
        *,
        leave_s: float,
        most_open: int,
        changed: Callable[[], None],
    ) -> None:
        self.num_waiting = 0
        """Clients that wait for an answer."""
        self._begin = begin
        self._leave_s = leave_s
        self._most_open = most_open
        self._changed = changed
        self._runs: dict[CallRun, None] = {}
        """In the order in which they started."""
        self._closed = False

    @asynccontextmanager
    async def join_run(
        self,
        key: bytes,
        work: StartSampling,
        deliver: DeliverAnswer,
        *,
        retried: bool,
    ) -> AsyncIterator[CallRun]:
        """A run of the call `key`: if the call was `retried`, the run that the first attempt started, if that is still
        known.

        Leaving the block without an exception means that the client has the answer. Raises ApiProblem.
        """
        run = None
        if retried:
            # Among runs of equal calls, the one whose client has left; else the latest.
            equal = [known for known in self._runs if known.key == key]
            lost = [known for known in equal if not known.waiting and not known.received]
            run = next(reversed(lost or equal), None)
        if run is None:
            run = self._begin_run(key, work, deliver)
        run.waiting += 1
        self.num_waiting += 1
        if run.leaving is not None:
            run.leaving.cancel()
        self._changed()
        try:
            yield run
            run.received = True
        finally:
            run.waiting -= 1
            self.num_waiting -= 1
            if not run.waiting and not run.received and run in self._runs:
                run.leaving = asyncio.get_running_loop().call_later(self._leave_s, self._give_up, run)
            self._changed()

    def close_runs(self) -> None:
        """Cancel open runs; clients that wait for them get an ApiProblem."""
        self._closed = True
        runs = list(self._runs)
        self._runs.clear()
        for run in runs:
            if run.leaving is not None:
                run.leaving.cancel()
            run.given_up = True
            run.task.cancel()

    def _begin_run(
        self,
        key: bytes,
        work: StartSampling,
        deliver: DeliverAnswer,
    ) -> CallRun:
        if self._closed:
            raise ApiProblem(409, "the session has ended; ask for another one")
        if sum(not run.task.done() for run in self._runs) >= self._most_open:
            message = f"the session has {self._most_open} calls open already; wait until one is answered"
            raise ApiProblem(429, message, retry_after_s=1)
        run = CallRun(key, self._begin(work()), deliver)
        run.task.add_done_callback(lambda task: self._run_ended(run))
        self._runs[run] = None
        return run

    def _run_ended(self, run: CallRun) -> None:
        """Forget a failed run, so that a retry samples again, and the oldest finished runs beyond MOST_KEPT."""
        if run.task.cancelled() or run.task.exception() is not None:
            self._runs.pop(run, None)
        done = [other for other in self._runs if other.task.done() and not other.waiting]
        for other in done[: max(0, len(done) - MOST_KEPT)]:
            self._runs.pop(other)

    def _give_up(self, run: CallRun) -> None:
        self._runs.pop(run, None)
        run.task.cancel()


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
        self.open_sessions: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Id -> key."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._bound = TextBound(settings.context_tokens, most_characters_per_token(tokenizer))
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._templates_lock = threading.Lock()
        self._tasks: set[asyncio.Task[SampledCall]] = set()

    def open_session(self, task: SessionTask) -> AgentSession:
        """Begin a session. Raises ConfigError for an id that is malformed or taken."""
        name = task.session_id
        if not SESSION_ID.fullmatch(name) or name in self.open_sessions or name in self._ended:
            raise ConfigError(f"the session id {name!r} is taken, or has more than letters, digits, - and _")
        runs = CallRuns(
            self._start_task,
            leave_s=self._settings.leave_s,
            most_open=self._settings.session_calls,
            changed=functools.partial(self._heard_of, name),
        )
        key = f"{name}.{secrets.token_urlsafe(24)}"
        self.open_sessions[name] = AgentSession(task, key, self._tokenizer, self._template_of, runs, self._bound)
        self._heard_of(name)
        return self.open_sessions[name]

    def find_session(self, key: str, session_id: str | None) -> AgentSession:
        """The open session that a key or an id names. Raises ApiProblem (401, 404, 409)."""
        if self.is_run_key(key):
            if session_id is None:
                message = "the run's key names no session; use the base URL of a session, or a session's own key"
                raise ApiProblem(401, message)
        else:
            named = key.partition(".")[0]
            known = self.open_sessions[named].key if named in self.open_sessions else self._ended.get(named, "")
            if not known or not keys_equal(key, known) or session_id not in (None, named):
                raise unknown_key()
            session_id = named
        if session_id in self._ended:
            raise ApiProblem(409, f"the session {session_id} has ended; ask for another one", code="session_ended")
        if session_id not in self.open_sessions:
            raise ApiProblem(404, f"there is no session {session_id}; POST /sessions begins one")
        self._heard_of(session_id)
        return self.open_sessions[session_id]

    def is_run_key(self, key: str) -> bool:
        return keys_equal(key, self.run_key)

    def end_session(self, session: AgentSession, cause: str = "") -> FinishedSession:
        """Cancel the session's calls and report it."""
        name = session.session_id
        ended = self.open_sessions.pop(name)
        assert ended is session
        if name in self._timers:
            self._timers.pop(name).cancel()
        self._ended[name] = session.key
        if len(self._ended) > MOST_REMEMBERED:
            self._ended.popitem(last=False)
        session.runs.close_runs()
        finished = FinishedSession(
            session_id=name,
            sequences=session.branches.sequences(),
            request_ids=tuple(session.request_ids),
            reward=session.reward,
            full=session.full,
            cause=cause or ("no_reward" if session.reward is None else ""),
        )
        self._source.finished(finished)
        return finished

    async def close_sessions(self) -> None:
        """Cancel all calls and wait until that is done."""
        for timer in self._timers.values():
            timer.cancel()
        for session in self.open_sessions.values():
            session.runs.close_runs()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, work: Coroutine[None, None, SampledCall]) -> asyncio.Task[SampledCall]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _heard_of(self, name: str) -> None:
        session = self.open_sessions.get(name)
        if session is not None:
            loop = asyncio.get_running_loop()
            session.active_s = loop.time()
            if name not in self._timers:
                self._timers[name] = loop.call_later(self._settings.idle_s, self._end_idle, name)

    def _end_idle(self, name: str) -> None:
        """End the session if it is idle. While a client waits, there is no timer; the next one starts when the client
        leaves."""
        del self._timers[name]
        loop, session = asyncio.get_running_loop(), self.open_sessions[name]
        left_s = session.active_s + self._settings.idle_s - loop.time()
        if session.runs.num_waiting:
            return
        if left_s > 0:
            self._timers[name] = loop.call_later(left_s, self._end_idle, name)
        else:
            self.end_session(session, "session_idle")

    def _template_of(self, tools: Messages) -> ChatTemplate:
        """Also called by threads, which make the contexts of long messages."""
        key = canonical_message(list(tools))
        with self._templates_lock:
            found = self._templates.get(key)
        found = found or ChatTemplate(self._tokenizer, tools, self._bound)
        with self._templates_lock:
            self._templates[key] = found
            self._templates.move_to_end(key)
            if len(self._templates) > MOST_TEMPLATES:
                self._templates.popitem(last=False)
        return found


def keys_equal(key: str, known: str) -> bool:
    sent = key.encode(errors="surrogatepass")  # bytes of a header that are no UTF-8 arrive as surrogates
    return hmac.compare_digest(sent, known.encode())


def unknown_key() -> ApiProblem:
    return ApiProblem(401, "this key is not known; use the run's key, or that of the session", code="invalid_api_key")
