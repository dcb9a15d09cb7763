"""The backend of a node's endpoint: the calls of agents become turns of their episodes.

Invariants:

- The turns of an attempt are numbered in the order of the calls. A turn that was given up before its reply is recorded
  in the ledger without tokens and as abandoned, so no number is missing.
- A reply that no client received is abandoned: it is not part of the episode.
- A call that the program of a resumed run makes as before the checkpoint gets the same reply as before.
- An exception of the generator ends the attempt, and is raised in the attempt's invocation.

Waits: a call waits for its reply, unless its client leaves; the end of a session waits for the calls that it cancels.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from flowrl.agents.endpoint import FinishedSession, LimitReached, SampledAnswer, SessionTask, Unavailable
from flowrl.environments import EnvironmentFailed
from flowrl.episode import Reply, Turn
from flowrl.errors import AttemptFailed, LaneFailed, OutOfService
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages
from flowrl.nodes.agent_programs.call_log import CallLog
from flowrl.nodes.agent_programs.task_offers import TaskOffers
from flowrl.nodes.episodes.attempt import AskedTurn, read_action
from flowrl.nodes.episodes.turn_figures import TurnFigures
from flowrl.nodes.vllm_engine.sampling import Sampling

CANCELLED = "cancelled"
"""Why a request is abandoned: its client left, or its session ended, before the reply."""
NOT_RECEIVED = "not_received"
"""Why a request is abandoned: no client received the reply."""
RETRY_S = 5
"""Seconds after which a client that no generator could answer may ask again; by then the run has ended or continues."""


class AgentCalls:
    """The calls of one attempt. Create this in the attempt's invocation, to which the waits for replies then belong.

    `ask` gets a reply, `book` and `abandon` write to the ledger, `turn` makes the request for a question, and `log` has
    the replies from before a resume. `sampling` says how replies are sampled; the agent gets these options.
    """

    def __init__(
        self,
        *,
        most_turns: int,
        turn: Callable[[AskedTurn], Turn],
        ask: Callable[[Turn], Awaitable[Reply]],
        book: Callable[[Turn, Reply], None],
        abandon: Callable[[str, str], None],
        log: CallLog,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling or Sampling()
        self._log = log
        self._most_turns = most_turns
        self._turn, self._ask, self._book, self._abandon = turn, ask, book, abandon
        self._context = contextvars.copy_context()
        self._open: set[asyncio.Task[Reply]] = set()
        self._num_asked = 0
        self.replies: dict[str, tuple[Turn, Reply]] = {}
        """Request id -> (turn, reply)."""
        self.figures: dict[str, TurnFigures] = {}
        self.refused = False
        """Whether a call was refused because the attempt already had `most_turns` turns."""
        self.generate_s = 0.0
        self.finished: FinishedSession | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the session has ended."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the attempt cannot continue: without an exception if the session was idle, else with the exception
        that ended the attempt."""
        self.broken.add_done_callback(lambda broken: broken.exception())  # possibly nothing waits for it any more

    async def reply(self, context_ids: Int32, max_tokens: int, stop: tuple[str, ...], tools: Messages) -> Reply:
        """The policy's reply. Raises LimitReached, and the exception that has ended the attempt."""
        if self.broken.done() and (end := self.broken.exception()) is not None:
            raise end
        if self._num_asked == self._most_turns:
            self.refused = True
            raise LimitReached(f"the episode has had its {self._most_turns} replies (limits.turns); end it")
        turn = self._turn(AskedTurn(self._num_asked, context_ids, max_tokens, stop, tuple(tools)))
        self._num_asked += 1
        if (known := self._known(turn)) is not None:
            return known
        began_s = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._asked(turn), context=self._context)
        self._open.add(task)
        task.add_done_callback(lambda ended: self._ended(turn, ended))
        try:
            return await task
        finally:
            self.generate_s += time.monotonic() - began_s

    def task(self, session_id: str, columns: Mapping[str, Any] | None = None) -> SessionTask:
        """The task with which the endpoint starts the session; for outside workers it has the row's columns."""
        return SessionTask(session_id, columns or {}, self._sampling.temperature, self._sampling.top_p)

    def end(self, session: FinishedSession) -> None:
        """The session has ended."""
        self.finished = session
        self.ended.set_result(None)
        if session.cause == "session_idle" and not self.broken.done():
            self.broken.set_result(None)

    async def closed(self) -> None:
        """Wait until the calls that the end of the session has cancelled have ended."""
        while self._open:
            await asyncio.wait(self._open)

    def used(self) -> list[tuple[Turn, Reply]]:
        """The replies that clients received, in the order they received them. Only after the session has ended."""
        assert self.finished is not None
        return [self.replies[request_id] for request_id in self.finished.request_ids]

    def abandon_others(self) -> None:
        """Record the replies that no client received as abandoned. Call this once, if the attempt counts."""
        assert self.finished is not None
        for request_id in self.replies.keys() - set(self.finished.request_ids):
            self._abandon(request_id, NOT_RECEIVED)

    def _known(self, turn: Turn) -> Reply | None:
        """The reply that the call had before a resume. Raises EnvironmentFailed, which ends the attempt."""
        try:
            reply = self._log.known_call(turn)
        except EnvironmentFailed as void:
            if not self.broken.done():
                self.broken.set_exception(void)
            raise
        if reply is not None:
            self.replies[turn.request_id] = (turn, reply)
            self.figures[turn.request_id] = TurnFigures.of(reply, context_tokens=int(turn.token_ids.size), seconds=0.0)
        return reply

    async def _asked(self, turn: Turn) -> Reply:
        began_s = time.monotonic()
        reply = await self._ask(self._log.asking(turn))
        self._log.called(turn, reply)
        seconds = time.monotonic() - began_s
        self.figures[turn.request_id] = TurnFigures.of(reply, context_tokens=int(turn.token_ids.size), seconds=seconds)
        return reply

    def _ended(self, turn: Turn, task: asyncio.Task[Reply]) -> None:
        self._open.discard(task)
        if task.cancelled():
            self._give_up(turn)
        elif (problem := task.exception()) is None:
            self.replies[turn.request_id] = (turn, task.result())
        elif not self.broken.done():
            self.broken.set_exception(problem)

    def _give_up(self, turn: Turn) -> None:
        """Record the turn as abandoned. The generator's own report of the request may also arrive, before or after
        this: the second `abandon` is for that report."""
        nothing = _nothing(turn)
        self._log.called(turn, nothing)
        self._book(turn, nothing)
        for _ in range(2):
            self._abandon(turn.request_id, CANCELLED)


class AgentCallTable:
    """The calls of all attempts that have a session, by session id: the `Backend` and `Sessions` of the endpoint.

    Without `offers` there are no tasks for outside workers.
    """

    def __init__(self, tokenizer: Any, offers: TaskOffers | None = None) -> None:
        self._tokenizer = tokenizer
        self._offers = offers
        self._calls: dict[str, AgentCalls] = {}
        self._number = 0

    def begin(self, calls: AgentCalls, columns: Mapping[str, Any] | None = None) -> SessionTask:
        """The task with which to start a session for these calls; `columns` are for outside workers."""
        self._number += 1
        name = f"session-{self._number}"
        self._calls[name] = calls
        return calls.task(name, columns)

    async def reply(
        self, session: str, context_ids: Int32, *, max_tokens: int, stop: tuple[str, ...], tools: Messages
    ) -> SampledAnswer:
        try:
            reply = await self._calls[session].reply(context_ids, max_tokens, stop, tools)
        except (OutOfService, LaneFailed) as gone:
            raise Unavailable(f"no generator can answer, and the run ends: {gone}", retry_after_s=RETRY_S) from None
        except AttemptFailed as void:
            raise Unavailable(f"this attempt cannot go on: {void}", retry_after_s=RETRY_S) from None
        return self._answer(reply, stop)

    def withdraw(self, session_id: str) -> None:
        """Forget a session that is not open."""
        self._calls.pop(session_id, None)

    async def next_task(self) -> SessionTask:
        if self._offers is None:
            text = "this run starts its agents itself, so it has no tasks for others; it needs the agent 'outside'"
            raise Unavailable(text)
        return await self._offers.next()

    def finished(self, session: FinishedSession) -> None:
        self._calls.pop(session.session_id).end(session)

    def _answer(self, reply: Reply, stop: tuple[str, ...]) -> SampledAnswer:
        """The agent's answer. It has a tool call that cannot be read, or was cut off, as text."""
        action, unread = read_action(reply)
        text = str(self._tokenizer.decode(reply.token_ids.tolist(), skip_special_tokens=True))
        stopped = [text.index(one) for one in stop if one in text] if reply.finish_reason == "stop" else []
        end = min(stopped, default=len(text))
        return SampledAnswer(
            token_ids=reply.token_ids,
            logprobs=reply.behavior_logprobs,
            versions=reply.versions,
            finish_reason=reply.finish_reason,
            text=text[:end],
            message={"content": action.text} if unread else reply.message,
            stop_text=next((one for one in stop if stopped and text.startswith(one, end)), ""),
            cached_tokens=reply.cached_tokens,
            request_id=reply.request_id,
        )


def _nothing(turn: Turn) -> Reply:
    """The reply to a turn that was given up."""
    return Reply(
        request_id=turn.request_id,
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        finish_reason="",
        message={},
        malformed="",
        cached_tokens=0,
        queued_s=0.0,
        generated_s=0.0,
        generator="",
    )
