"""The backend of a node's endpoint: the calls of agents become turns of their episodes.

Invariants:

- The turns of an attempt are numbered in the order of the calls. A turn that was given up before its reply is recorded
  in the ledger without tokens and as abandoned, so no number is missing.
- A reply that no client received is abandoned: it is not part of the episode.
- A call that the program of a resumed run makes as before the checkpoint gets the same reply as before (`CallLog`).
- An exception of the generator ends the attempt, and is raised in the attempt's invocation.

A resumed run starts the program again from its beginning. Calls are numbered in their order, as before the checkpoint,
and a call with a known reply gets that reply; nothing is sampled for it. If the program does not do what it did before
(a call with another context, limit or stop text, an end before all known calls are made again, a call that its client
gave up), the attempt is void: how it would have continued is not known.

Tasks wait for outside workers, and workers for tasks (`TaskOffers`):

- A task is handed out once, to a worker that still waits. A task that was withdrawn is not handed out.
- Of several tasks, the task with the lowest place is handed out first; of several workers, the first is served first.

Waits: a call waits for its reply, unless its client leaves; the end of a session waits for the calls that it cancels; a
task waits for a worker, without limit; a worker for a task, `WAIT_S` at most, or until the run has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.agents.endpoint import FinishedSession, LimitReached, RunEnded, SampledAnswer, SessionTask, Unavailable
from flowrl.environments import EnvironmentFailed, Step
from flowrl.errors import AttemptFailed, LaneFailed, OutOfService
from flowrl.messages import Int32, Record
from flowrl.messages.episode import EpisodeRecord, Reply, Turn, empty_reply
from flowrl.messages.sampling import Sampling
from flowrl.models.tokens.chat import Messages
from flowrl.nodes.episodes.attempt import AskedTurn, TurnFigures, figures_of, read_action
from flowrl.nodes.episodes.episode_log import EpisodeLog

NOT_RECEIVED = "not_received"
"""Why a request is abandoned: no client received the reply."""
RETRY_S = 5
"""Seconds after which a client that no generator could answer may ask again; by then the run has ended or continues."""


class AgentCalls:
    """The calls of one attempt. Create this in the attempt's invocation, to which the waits for replies then belong.

    `ask` gets a reply, `abandon` writes to the ledger, `turn` makes the request for a question, and `log` has the
    replies from before a resume. `sampling` says how replies are sampled; the agent gets these options.
    """

    def __init__(
        self,
        *,
        most_turns: int,
        turn: Callable[[AskedTurn], Turn],
        ask: Callable[[Turn], Awaitable[Reply]],
        abandon: Callable[[str, str], None],
        log: CallLog,
        sampling: Sampling | None = None,
    ) -> None:
        self.sampling = sampling or Sampling()
        self._log = log
        self._most_turns = most_turns
        self._turn, self._ask, self._abandon = turn, ask, abandon
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

    async def reply_to_call(self, context_ids: Int32, max_tokens: int, stop: tuple[str, ...], tools: Messages) -> Reply:
        """The policy's reply. Raises LimitReached, and the exception that has ended the attempt."""
        if self.broken.done() and (end := self.broken.exception()) is not None:
            raise end
        if self._num_asked == self._most_turns:
            self.refused = True
            raise LimitReached(f"the episode has had its {self._most_turns} replies (limits.turns); end it")
        turn = self._turn(AskedTurn(self._num_asked, context_ids, max_tokens, stop, tuple(tools)))
        self._num_asked += 1
        try:
            known = self._log.known_call(turn)  # the reply that the call had before a resume
        except EnvironmentFailed as void:
            if not self.broken.done():
                self.broken.set_exception(void)
            raise
        if known is not None:
            self.replies[turn.request_id] = (turn, known)
            self.figures[turn.request_id] = figures_of(known, context_tokens=int(turn.token_ids.size), seconds=0.0)
            return known
        began_s = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._ask_turn(turn), context=self._context)
        self._open.add(task)
        task.add_done_callback(lambda ended: self._note_ended(turn, ended))
        try:
            return await task
        finally:
            self.generate_s += time.monotonic() - began_s

    def end_session(self, session: FinishedSession) -> None:
        """The session has ended."""
        self.finished = session
        self.ended.set_result(None)
        if session.cause == "session_idle" and not self.broken.done():
            self.broken.set_result(None)

    async def wait_closed(self) -> None:
        """Wait until the calls that the end of the session has cancelled have ended."""
        while self._open:
            await asyncio.wait(self._open)

    def abandon_others(self) -> None:
        """Record the replies that no client received as abandoned. Call this once, if the attempt counts."""
        assert self.finished is not None
        for request_id in self.replies.keys() - set(self.finished.request_ids):
            self._abandon(request_id, NOT_RECEIVED)

    async def _ask_turn(self, turn: Turn) -> Reply:
        began_s = time.monotonic()
        reply = await self._ask(self._log.note_request(turn))
        self._log.note_call(turn, reply)
        seconds = time.monotonic() - began_s
        self.figures[turn.request_id] = figures_of(reply, context_tokens=int(turn.token_ids.size), seconds=seconds)
        return reply

    def _note_ended(self, turn: Turn, task: asyncio.Task[Reply]) -> None:
        self._open.discard(task)
        if task.cancelled():
            self._log.note_call(turn, empty_reply(turn))
        elif (problem := task.exception()) is None:
            self.replies[turn.request_id] = (turn, task.result())
        elif not self.broken.done():
            self.broken.set_exception(problem)


class AgentCallTable:
    """The calls of all attempts that have a session, by session id: the `Backend` and `Sessions` of the endpoint.

    Without `offers` there are no tasks for outside workers.
    """

    def __init__(self, tokenizer: Any, offers: TaskOffers | None = None) -> None:
        self._tokenizer = tokenizer
        self._offers = offers
        self._calls: dict[str, AgentCalls] = {}
        self._number = 0

    def begin_session(self, calls: AgentCalls, columns: Mapping[str, Any] | None = None) -> SessionTask:
        """The task with which to start a session for these calls; `columns` are for outside workers."""
        self._number += 1
        name = f"session-{self._number}"
        self._calls[name] = calls
        return SessionTask(name, columns or {}, calls.sampling.temperature, calls.sampling.top_p)

    async def reply(
        self, session: str, context_ids: Int32, *, max_tokens: int, stop: tuple[str, ...], tools: Messages
    ) -> SampledAnswer:
        try:
            reply = await self._calls[session].reply_to_call(context_ids, max_tokens, stop, tools)
        except (OutOfService, LaneFailed) as gone:
            raise Unavailable(f"no generator can answer, and the run ends: {gone}", retry_after_s=RETRY_S) from None
        except AttemptFailed as void:
            raise Unavailable(f"this attempt cannot go on: {void}", retry_after_s=RETRY_S) from None
        # The agent gets a tool call that cannot be read, or was cut off, as text.
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

    def withdraw_session(self, session_id: str) -> None:
        """Forget a session that is not open."""
        self._calls.pop(session_id, None)

    async def next_task(self) -> SessionTask:
        if self._offers is None:
            text = "this run starts its agents itself, so it has no tasks for others; it needs the agent 'outside'"
            raise Unavailable(text)
        return await self._offers.next_task()

    def finished(self, session: FinishedSession) -> None:
        self._calls.pop(session.session_id).end_session(session)


class CallLog(EpisodeLog):
    """Several calls may be open; a checkpoint keeps the sampled tokens of the call that was started last."""

    def __init__(self, record: Record | None = None, *, observation_bytes: int) -> None:
        super().__init__(record, observation_bytes=observation_bytes)
        replies, calls = self._before.replies, self._before.calls
        self._calls = list(calls[: len(replies)])
        self._asked_call = b"".join(calls[len(replies) :])
        self._asked_before = self._asked_call
        self._left = {reply.request_id: (reply, call) for reply, call in zip(replies, self._calls, strict=True)}

    def make_record(self) -> EpisodeRecord:
        open_call = [self._asked_call] if self._asked else []
        return replace(super().make_record(), calls=(*self._calls, *open_call))

    @property
    def calls_left(self) -> int:
        """Number of calls with a known reply that the program has not made again."""
        return len(self._left)

    def known_call(self, turn: Turn) -> Reply | None:
        """The known reply to a call; None if it has to be asked for.

        Raises EnvironmentFailed if the program does not make the call that it made before.
        """
        differs = EnvironmentFailed(
            "replay_differs", f"call {turn.turn} of the program is not the one that it was before"
        )
        if turn.request_id == self._before.asked and digest_call(turn) != self._asked_before:
            raise differs
        if turn.request_id not in self._left:
            return None
        reply, call = self._left[turn.request_id]
        if digest_call(turn) != call:
            raise differs
        if not reply.finish_reason:
            raise EnvironmentFailed("resumed", f"call {turn.turn} of the program was given up, and has no reply")
        del self._left[turn.request_id]
        self._note_known_reply()
        return reply

    def note_request(self, turn: Turn) -> Turn:
        self._asked_call = digest_call(turn)
        return super().note_request(turn)

    def note_call(self, turn: Turn, reply: Reply) -> None:
        """Note the reply to a call that had no known reply; it has no finish reason if the call was given up."""
        asked = self._asked
        self._calls.append(digest_call(turn))
        self.note_reply(reply)
        if asked != turn.request_id:
            self._asked = asked

    def note_step(self, step: Step, state: bytes | None) -> None:
        """Note the program's result. If the program has played again, its new result counts, not the known one."""
        if self.known_step() is None:
            super().note_step(step, state)
        else:
            self.pass_step()

    @property
    def _replaying(self) -> bool:
        return bool(self._left)


def digest_call(turn: Turn) -> bytes:
    """What makes two calls the same."""
    asked = repr((turn.max_tokens, turn.stop)).encode()
    return hashlib.sha256(turn.token_ids.tobytes() + asked).digest()


WAIT_S = 3.0
"""How long a worker's request waits: less than the 5 s after which some HTTP clients leave."""


@dataclass(order=True)
class Offer:
    """A task that waits."""

    place: int
    number: int
    task: SessionTask = field(compare=False)
    taken: asyncio.Future[None] = field(compare=False)


class TaskOffers:
    """The tasks of one node that no worker has taken."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._offers: list[Offer] = []
        """A heap."""
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        """The worker that holds it is the next to be served; a lock is acquired in the order of asking."""
        self._ended = False

    async def wait_taken(self, task: SessionTask, place: int) -> None:
        """Offer a task and wait until a worker has it. Cancelling withdraws it, unless it was handed out by then."""
        offer = Offer(place, next(self._numbers), task, asyncio.get_running_loop().create_future())
        heapq.heappush(self._offers, offer)
        self._changed.set()
        await offer.taken

    async def next_task(self) -> SessionTask:
        """Hand a task out. A cancelled call takes none. Raises Unavailable if there is none in time, and RunEnded."""
        try:
            async with asyncio.timeout(self._wait_s), self._turn:
                while (offer := self._first_offer()) is None:
                    if self._ended:
                        raise RunEnded("the run has ended, so there is no further task")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable("no task is waiting now; ask again", retry_after_s=0) from None
        offer.taken.set_result(None)
        return offer.task

    def end_offers(self) -> None:
        """There will be no further task; RunEnded is raised for waiting workers."""
        self._ended = True
        self._changed.set()

    def _first_offer(self) -> Offer | None:
        while self._offers:
            offer = heapq.heappop(self._offers)
            if not offer.taken.done():  # else its wait was cancelled
                return offer
        return None
