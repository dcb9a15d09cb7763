"""The players of a node with agents: processes that the node starts, or workers that ask it for tasks.

Waits: for a process to start, and for its program (`pool` bounds both); for a worker to take a task, without limit; for
the end of a worker's session, `episode_s` at most.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flowrl.agents.endpoint import AgentEndpoint, SessionAccess
from flowrl.agents.programs import AgentResult, ProgramName, as_agents_failure
from flowrl.environments import Action, EnvironmentFailed, EnvironmentRow, Episodes, Observation
from flowrl.messages import Prompt
from flowrl.nodes.episodes.agent_calls import AgentCalls, AgentCallTable, TaskOffers
from flowrl.nodes.episodes.episode_log import EpisodeLog, LoggedEpisode, open_episode
from flowrl.nodes.episodes.episode_node import turn_seed
from flowrl.nodes.generation.vllm_sampler import EVALUATION

Outside = Callable[[str], AbstractContextManager[Any]]
"""Makes a context for a wait on something outside of the run; the text names it."""


class AgentPlayer(Protocol):
    """The player of one attempt, in an open session."""

    session_id: str

    async def wait_for_result(self) -> tuple[AgentResult, str]:
        """The agent's result, and "seconds" if its time ended before it had one. Raises AttemptFailed."""
        ...

    async def close(self) -> None:
        """Clean up everything of this player. Call this once."""
        ...


class AgentPlayers(Protocol):
    """All players of one node."""

    async def begin_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int, calls: AgentCalls) -> AgentPlayer:
        """Wait until a player plays the attempt of `log`. Raises AttemptFailed."""
        ...

    async def close(self) -> None:
        """No further player will be needed."""
        ...


class StartedAgents:
    """Programs, each in a process of `pool`. The pool is already open; `close` closes it."""

    def __init__(
        self,
        program: ProgramName,
        pool: Episodes,
        open_session: Callable[[AgentCalls], SessionAccess],
        outside: Outside,
    ) -> None:
        self._program = program
        self._pool = pool
        self._open_session = open_session
        self._outside = outside

    async def begin_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int, calls: AgentCalls) -> AgentPlayer:
        options = {"task": dict(prompt.columns), "command": self._program.command}
        row = EnvironmentRow(self._program.text, options, turn_seed(prompt.seed, log.attempt, 0))
        with as_agents_failure(self._program), self._outside("an agent's start"):
            process = await open_episode(self._pool, row, log)
        return StartedAgent(self._program, process, self._open_session(calls), self._outside)

    async def close(self) -> None:
        await self._pool.__aexit__(None, None, None)


class StartedAgent:
    """One program in its process."""

    def __init__(self, program: ProgramName, process: LoggedEpisode, access: SessionAccess, outside: Outside) -> None:
        self._program = program
        self._process = process
        self._access = access
        self._outside = outside
        self.session_id = access.session_id

    async def wait_for_result(self) -> tuple[AgentResult, str]:
        try:
            await self._process.log_first()
            step = await self._process.step(Action(text=json.dumps(self._access.environment)))
        except EnvironmentFailed as failed:
            if failed.cause == "env_timed_out":
                return AgentResult(), "seconds"
            with as_agents_failure(self._program):
                raise
        return AgentResult.unpacked(step.observations[0].text), ""

    async def close(self) -> None:
        with self._outside("an agent's end"):
            await self._process.close_quietly()


class OutsideAgents:
    """Workers that are not started by the run. The task with the oldest ticket goes first, held-out tasks go last."""

    def __init__(
        self,
        offers: TaskOffers,
        table: AgentCallTable,
        endpoint: AgentEndpoint,
        *,
        episode_s: float,
        outside: Outside,
    ) -> None:
        self._offers = offers
        self._table = table
        self._endpoint = endpoint
        self._episode_s = episode_s
        self._outside = outside

    async def begin_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int, calls: AgentCalls) -> AgentPlayer:
        if log.first is not None:
            raise EnvironmentFailed("resumed", "the session of its outside worker ended with the run before")
        task = self._table.begin_session(calls, dict(prompt.columns))
        try:
            with self._outside("an outside worker"):
                await self._offers.wait_taken(task, ticket if ticket >= 0 else EVALUATION)
        except asyncio.CancelledError:
            # If a worker has taken the task at the same moment, its session ends.
            if self._endpoint.has_session(task.session_id):
                self._endpoint.end_session(task.session_id)
            else:
                self._table.withdraw(task.session_id)
            raise
        log.note_first([Observation()], None)
        return OutsideAgent(task.session_id, calls, self._episode_s)

    async def close(self) -> None:
        self._offers.end_offers()


class OutsideAgent:
    """The worker that has taken a task. Its session ends when the worker, the idle limit or this node ends it."""

    def __init__(self, session_id: str, calls: AgentCalls, episode_s: float) -> None:
        self.session_id = session_id
        self._calls = calls
        self._episode_s = episode_s

    async def wait_for_result(self) -> tuple[AgentResult, str]:
        await asyncio.wait({self._calls.ended}, timeout=self._episode_s)
        return AgentResult(), "" if self._calls.ended.done() else "seconds"

    async def close(self) -> None:
        """There is nothing to clean up: this node did not start the worker."""
