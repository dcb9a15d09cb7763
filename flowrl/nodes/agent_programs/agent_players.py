"""Who plays the attempts of a node with agents: processes that it starts, or workers that ask it for tasks.

Waits: for a process to start, and for its program (`pool` bounds both); for a worker to take a task, without limit; for
the end of a worker's session, `episode_s` at most.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flowrl.agents.endpoint import AgentEndpoint, SessionAccess, SessionTask
from flowrl.agents.programs import AgentResult, ProgramName, as_agents_failure
from flowrl.environments import Action, EnvironmentFailed, EnvironmentRow, Episodes, Observation
from flowrl.messages import Prompt
from flowrl.nodes.agent_programs.agent_calls import AgentCalls, AgentCallTable
from flowrl.nodes.agent_programs.task_offers import TaskOffers
from flowrl.nodes.episodes.episode_log import EpisodeLog, LoggedEpisode, open_episode
from flowrl.nodes.episodes.episode_node import turn_seed
from flowrl.nodes.vllm_engine.vllm_sampler import EVALUATION

Outside = Callable[[str], AbstractContextManager[Any]]
"""Says what is waited for outside of the run."""


class AgentPlayer(Protocol):
    """Who plays one attempt, in an open session."""

    session_id: str

    async def result(self) -> tuple[AgentResult, str]:
        """What it gives back, and "seconds" if its time was over before. Raises AttemptFailed."""
        ...

    async def close(self) -> None:
        """Leave nothing of it. Call it once."""
        ...


class AgentPlayers(Protocol):
    """All who play for one node."""

    async def begin(self, prompt: Prompt, log: EpisodeLog, ticket: int, calls: AgentCalls) -> AgentPlayer:
        """Wait until somebody plays the attempt of `log`. Raises AttemptFailed."""
        ...

    async def close(self) -> None:
        """Nobody will be asked any more."""
        ...


class StartedAgents:
    """Programs, each in a process of `pool`, which is open and is closed here."""

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

    async def begin(self, prompt: Prompt, log: EpisodeLog, ticket: int, calls: AgentCalls) -> AgentPlayer:
        options = {"task": dict(prompt.columns), "command": self._program.command}
        row = EnvironmentRow(self._program.text, options, turn_seed(prompt.seed, log.attempt, 0))
        with as_agents_failure(self._program), self._outside("an agent's start"):
            process = await open_episode(self._pool, row, log)
        return StartedAgent(self._program, process, self._open_session(calls), self._outside)

    async def close(self) -> None:
        await self._pool.__aexit__(None, None, None)


class StartedAgent:
    """One process."""

    def __init__(self, program: ProgramName, process: LoggedEpisode, access: SessionAccess, outside: Outside) -> None:
        self._program = program
        self._process = process
        self._access = access
        self._outside = outside
        self.session_id = access.session_id

    async def result(self) -> tuple[AgentResult, str]:
        try:
            await self._process.begin()
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
    """Workers that nobody here starts. Tasks of the oldest ticket go first, held-out ones last."""

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

    async def begin(self, prompt: Prompt, log: EpisodeLog, ticket: int, calls: AgentCalls) -> AgentPlayer:
        if log.first is not None:
            raise EnvironmentFailed("resumed", "the session of its outside worker ended with the run before")
        task = self._table.begin(calls, dict(prompt.columns))
        try:
            with self._outside("an outside worker"):
                await self._offers.taken(task, ticket if ticket >= 0 else EVALUATION)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        log.began([Observation()], None)
        return OutsideAgent(task.session_id, calls, self._episode_s)

    async def close(self) -> None:
        self._offers.end()

    def _give_up(self, task: SessionTask) -> None:
        """A worker may have taken it at the same moment."""
        if self._endpoint.has_session(task.session_id):
            self._endpoint.end_session(task.session_id)
        else:
            self._table.withdraw(task.session_id)


class OutsideAgent:
    """The worker that has taken a task. Its session ends when it, the idle limit or this node ends it."""

    def __init__(self, session_id: str, calls: AgentCalls, episode_s: float) -> None:
        self.session_id = session_id
        self._calls = calls
        self._episode_s = episode_s

    async def result(self) -> tuple[AgentResult, str]:
        await asyncio.wait({self._calls.ended}, timeout=self._episode_s)
        return AgentResult(), "" if self._calls.ended.done() else "seconds"

    async def close(self) -> None:
        """Nothing of a worker is here."""
