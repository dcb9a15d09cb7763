"""The node that plays with agents of any code, which reach the policy over HTTP.

Agents are processes that the node starts (`Episodes`), or workers outside of the run that ask the node for tasks
(`TaskOffers`): the task with the oldest ticket goes first, held-out tasks go last.

`episode_node` has the invariants of all nodes that play episodes. In addition:

- A reward comes only from the agent: its program returns it, or posts it to its session.
- The tokens of an episode are those of its session: the ids that were sampled, and the ids that the template made of
  the messages that the agent sent between them.
- When an attempt is over, nothing of it is left: no process, no session, no call.
- A resumed run starts the program of a half-done attempt again from its beginning, and answers its calls as before
  (`CallLog`). An error before all of these calls are made again voids the attempt and does not count as a failure.
  Half-done attempts of outside workers are void.

Waits: for a process to start, which its pool bounds; for a worker to take a task, without limit; for an agent
(`context.outside`), until the agent ends, or `limits.episode_s` are over, or its session is idle, or one of its calls
cannot be answered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.agents import TokenSequence
from flowrl.agents.endpoint import AgentEndpoint, EndpointSettings, FinishedSession
from flowrl.agents.programs import AgentFailed, AgentResult, ProgramName, as_agents_failure, is_of_verifiers
from flowrl.environments import RESUME_CAUSES, Action, EnvironmentFailed, EnvironmentRow, Episodes, Observation
from flowrl.errors import AttemptFailed, ConfigError
from flowrl.graph.node import Facts
from flowrl.messages import Prompt, Record
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy, check_model, ignore_progress, resolve
from flowrl.nodes.episodes.agent_calls import AgentCalls, AgentCallTable, CallLog, TaskOffers
from flowrl.nodes.episodes.attempt import Limits, Played, read_action
from flowrl.nodes.episodes.episode_log import EpisodeLog, LoggedEpisode, open_episode
from flowrl.nodes.episodes.episode_node import EpisodeNode, template_findings, turn_seed
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.generation.vllm_sampler import EVALUATION
from flowrl.nodes.scoring.shaping import Shaping

OUTSIDE = "outside"
"""The name for agents that are workers which the run does not start."""
OF_ENVIRONMENTS = ("step_s", "observation_bytes")
"""Limits that only bound environments."""
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class BegunAgent:
    """The agent of one attempt, in an open session."""

    session_id: str
    process: LoggedEpisode | None = None
    """The process of a program that the node has started; None: the agent is an outside worker."""
    environment: str = ""
    """The environment variables that the program gets of its session, as JSON."""


class AgentProgram(EpisodeNode):
    """Plays every prompt with an agent; the policy behind `generate` answers the agent's calls.

    `agent` is `FILE.py:FUNCTION`, or `command` is a command line; docs/endpoint.md says what each of them is given. Or
    `agent` is "outside": workers that were started elsewhere ask the endpoint for tasks. The prompt's columns tell an
    agent its task. `sampling` has to equal the generator's, which is the default: agents get these options, and they
    bound the replies.

    `limits` bounds episodes and attempts. Its `reset_s` bounds the start of a process; limits that have no effect here
    have to keep their defaults. A session without a call for `idle_s` has failed. The endpoint listens on `host` and
    `port`; 0 is any free port. `models` are the names that calls may give to the policy. `processes` is the number of
    agents at a time, including outside workers that wait for a task. `memory_bytes` is the memory that a process may
    take. A process plays `episodes_per_process` episodes, one after the other; what the program keeps in its modules
    still exists in the next episode. `keep_variables` names environment variables of the run that processes get besides
    those that every program needs. `requests` plays held-out episodes, without tickets.
    """

    _endpoint: AgentEndpoint
    _table: AgentCallTable
    _offers: TaskOffers | None = None
    """The tasks for outside workers; None if agents are started."""
    _pool: Episodes | None = None
    """The processes of agents that are started."""

    def __init__(
        self,
        policy: Policy,
        *,
        agent: str = "",
        command: str = "",
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        idle_s: float = 600.0,
        host: str = "127.0.0.1",
        port: int = 0,
        models: tuple[str, ...] = ("policy",),
        processes: int = 256,
        memory_bytes: int = MEMORY_BYTES,
        episodes_per_process: int = 1,
        keep_variables: tuple[str, ...] = (),
        shaping: Shaping | None = None,
    ) -> None:
        super().__init__(
            policy,
            limits=limits,
            processes=processes,
            memory_bytes=memory_bytes,
            episodes_per_process=episodes_per_process,
            keep_variables=keep_variables,
            shaping=shaping,
        )
        self.agent = agent
        self.command = command
        self._sampling = sampling
        self.idle_s = idle_s
        self.host = host
        self.port = port
        self.models = tuple(models)

    @property
    def sampling(self) -> Sampling:
        """How replies are sampled in training."""
        server = self.generate.server
        of_server = server.sampling if isinstance(server, Generator) else Sampling()
        return of_server if self._sampling is None else self._sampling

    @property
    def outside(self) -> bool:
        """Whether agents are outside workers."""
        return self.agent == OUTSIDE and not self.command

    @property
    def environment(self) -> str:
        """The name of the environment of `verifiers` that plays as agent; "" if the agents are others."""
        return self.agent if not self.command and is_of_verifiers(self.agent) else ""

    @property
    def source(self) -> str:
        return self.agent or self.command

    @property
    def _program(self) -> ProgramName:
        return ProgramName(self.agent, self.command)

    def row_name(self, prompt: Prompt) -> str:
        return self.source

    # Declarations for the graph

    def facts(self) -> Facts:
        return replace(super().facts(), processes=self.processes)

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if not self.idle_s > 0:
            problems.append(f"idle_s is {self.idle_s}; it has to be above 0")
        try:
            socket.getaddrinfo(self.host, None)
        except (OSError, UnicodeError) as problem:
            told = getattr(problem, "strerror", None) or problem
            problems.append(
                f"host is {self.host!r}, which is no address and no name that is known here ({told}); take 127.0.0.1, "
                "or the address of this machine at which agents reach it"
            )
        if not 0 <= self.port < 1 << 16:
            problems.append(f"port is {self.port}; it has to be 0, which is any free one, or up to 65535")
        if not self.models or not all(self.models):
            problems.append("models has no name; it needs those that calls give to the policy")
        for name in OF_ENVIRONMENTS:
            if getattr(self.limits, name) != getattr(Limits, name):
                problems.append(f"limits.{name} bounds environments and has no effect on agents; leave it out")
        # Agents would get a `sampling` although their replies are sampled with another.
        server = self.generate.server
        asked = [(server.name, server.sampling)] if isinstance(server, Generator) else []
        for (name, of_server), field in itertools.product(asked, fields(Sampling)):
            own, other = getattr(self.sampling, field.name), getattr(of_server, field.name)
            if own != other:
                problems.append(
                    f"sampling has {field.name}={own!r}, but {name}, which answers, has {other!r}; leave "
                    "sampling out; agents then get the generator's"
                )
        if not self.outside:
            try:
                _ = self._program
            except ConfigError as problem:
                problems.append(str(problem))
            return problems
        useless = ["limits.reset_s"] if self.limits.reset_s != Limits.reset_s else []
        defaults = (("memory_bytes", MEMORY_BYTES), ("episodes_per_process", 1), ("keep_variables", ()))
        useless += [name for name, default in defaults if getattr(self, name) != default]
        text = "is for processes that are started, and has no effect on outside workers; leave it out"
        return [*problems, *(f"{name} {text}" for name in useless)]

    def preflight(self) -> str | None:
        check_model(self.policy)
        if not self.outside:
            asyncio.run(self._import_agent())
        return template_findings(self.policy, self.source, None, self.generate.server)

    async def _import_agent(self) -> None:
        """Import the agent's file."""
        async with self._new_pool(self._program.environment, step_s=self.limits.episode_s, progress=ignore_progress):
            pass

    # Lifecycle

    async def setup(self) -> None:
        await self.prepare_attempts(await self.blocking(resolve, self.policy, progress=self.context.progress))
        tokenizer, limit_s = self._templates.tokenizer, self.limits.episode_s
        self._offers = TaskOffers() if self.outside else None
        self._table = AgentCallTable(tokenizer, self._offers)
        key_file = Path(self.context.run_dir) / f"{self.name}-{self.context.replica}.key"
        limits = (self._tokens, self.sampling.max_tokens, self.limits.turn_tokens)
        settings = EndpointSettings(
            context_tokens=self._tokens,
            turn_tokens=min(limit for limit in limits if limit is not None),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            sessions=self.processes if self.outside else 2 * self.limits.episodes,
            idle_s=self.idle_s,
            host=self.host,
            port=self.port,
            models=self.models,
            key_file=str(key_file),
        )
        self._endpoint = await AgentEndpoint(self._table, self._table, tokenizer, settings).__aenter__()
        if self._offers is not None:
            where = f"{self._endpoint.url}/sessions, with the key in {key_file}"
            self.context.progress(f"outside workers get their tasks from {where}")
            return
        pool = self._new_pool(self._program.environment, step_s=limit_s, progress=self.context.progress)
        self._pool = await pool.__aenter__()

    async def close(self) -> None:
        if self._offers is not None:
            self._offers.end_offers()
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)
        if hasattr(self, "_endpoint"):
            await self._endpoint.__aexit__(None, None, None)

    # Episodes

    async def play_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int) -> Played:
        assert isinstance(log, CallLog)
        began_s, calls = time.monotonic(), self._new_calls(prompt, log, ticket)
        agent = await self._begin_agent(prompt, log, ticket, calls)
        self.context.gauge("environment_reset_s", time.monotonic() - began_s)
        try:
            played = await self._play_session(agent, calls, log)
        finally:
            self.generate.forget(prompt.sample_id)
            if agent.process is not None:
                with self.context.outside("an agent's end"):
                    await agent.process.close_quietly()
        calls.abandon_others()  # last: a checkpoint taken before this still has their replies
        return played

    def _new_log(self, record: Record | None = None) -> CallLog:
        return CallLog(record, observation_bytes=self.limits.observation_bytes)

    def _new_calls(self, prompt: Prompt, log: CallLog, ticket: int) -> AgentCalls:
        ledger, server, sampling = self.context.ledger, self.generate.server, self.sampling
        if ticket < 0 and isinstance(server, Generator):  # a held-out episode
            sampling = server.evaluation
        return AgentCalls(
            most_turns=self.limits.turns,
            turn=partial(self.make_turn, prompt, attempt=log.attempt, ticket=ticket),
            ask=self.generate.ask_turn,
            abandon=ledger.abandoned if ticket >= 0 else lambda *_: None,  # held-out requests have no rows
            log=log,
            sampling=sampling,
        )

    async def _begin_agent(self, prompt: Prompt, log: CallLog, ticket: int, calls: AgentCalls) -> BegunAgent:
        """Wait until an agent plays the attempt of `log`. Raises AttemptFailed."""
        outside = self.context.outside
        if self._pool is not None:
            options = {"task": dict(prompt.columns), "command": self._program.command}
            row = EnvironmentRow(self._program.text, options, turn_seed(prompt.seed, log.attempt, 0))
            with as_agents_failure(self._program), outside("an agent's start"):
                process = await open_episode(self._pool, row, log)
            access = self._endpoint.open_session(self._table.begin_session(calls))
            return BegunAgent(access.session_id, process, json.dumps(access.environment))
        assert self._offers is not None, "`setup` makes the pool or the offers"
        if log.first is not None:
            raise EnvironmentFailed("resumed", "the session of its outside worker ended with the run before")
        task = self._table.begin_session(calls, dict(prompt.columns))
        try:
            with outside("an outside worker"):
                await self._offers.wait_taken(task, ticket if ticket >= 0 else EVALUATION)
        except asyncio.CancelledError:
            # If a worker has taken the task at the same moment, its session ends.
            if self._endpoint.has_session(task.session_id):
                self._endpoint.end_session(task.session_id)
            else:
                self._table.withdraw_session(task.session_id)
            raise
        log.note_first([Observation()], None)
        return BegunAgent(task.session_id)

    async def _play_session(self, agent: BegunAgent, calls: AgentCalls, log: CallLog) -> Played:
        """Play from the start of the session to its end. If it fails, the exception carries the result so far."""
        began_s = time.monotonic()
        try:
            try:
                with self.context.outside("an agent"):
                    result, cut = await self._wait_for_result(agent, calls)
            finally:
                if calls.finished is None:
                    self._endpoint.end_session(agent.session_id)
                await calls.wait_closed()
            played = self._played_by(calls, time.monotonic() - began_s)
            assert calls.finished is not None
            reached = "turns" if calls.refused else "tokens" if calls.finished.full else ""  # the limit of a call
            played.cut = cut or reached
            self._reward_last_turn(played, calls.finished, result)
            if log.calls_left:
                raise EnvironmentFailed("replay_differs", f"the agent {self.source!r} ended {_too_early(log)}")
        except AttemptFailed as failure:
            failure.played = self._played_by(calls, time.monotonic() - began_s)
            if log.calls_left and failure.cause not in RESUME_CAUSES:
                text = f"the agent {self.source!r} failed {_too_early(log)}: {failure}"
                raise EnvironmentFailed("replay_differs", text) from None
            raise
        return played

    async def _run_agent(self, agent: BegunAgent, calls: AgentCalls) -> tuple[AgentResult, str]:
        """The agent's result, and "seconds" if its time ended before it had one. Raises AttemptFailed."""
        if agent.process is None:  # the worker, the idle limit or this node ends the session
            await asyncio.wait({calls.ended}, timeout=self.limits.episode_s)
            return AgentResult(), "" if calls.ended.done() else "seconds"
        try:
            await agent.process.log_first()
            step = await agent.process.step(Action(text=agent.environment))
        except EnvironmentFailed as failed:
            if failed.cause == "env_timed_out":
                return AgentResult(), "seconds"
            with as_agents_failure(self._program):
                raise
        return AgentResult.unpacked(step.observations[0].text), ""

    async def _wait_for_result(self, agent: BegunAgent, calls: AgentCalls) -> tuple[AgentResult, str]:
        """As `_run_agent`, which ends early if the attempt cannot go on. Raises what the generator raises."""
        running = asyncio.ensure_future(self._run_agent(agent, calls))
        ends: set[asyncio.Future[Any]] = {running, calls.broken}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        if calls.broken.done():
            calls.broken.result()
            raise AgentFailed("session_idle", f"the agent {self.source!r} asked nothing for {self.idle_s:g} s")
        return running.result()

    def _played_by(self, calls: AgentCalls, seconds: float) -> Played:
        """The result of the attempt, without reward and metrics. Only after the session has ended."""
        assert calls.finished is not None
        used = [calls.replies[request_id] for request_id in calls.finished.request_ids]  # that a client received
        own_s = max(0.0, seconds - calls.generate_s)
        figures = [calls.figures[turn.request_id] for turn, _ in used]
        played = Played(
            turns=len(used),
            step_seconds=[own_s / len(used) for _ in used],
            seconds=seconds,
            figures=figures,
            later_figures=figures[1:],
            malformed=sum(bool(read_action(reply)[1]) for _, reply in used),
            sequences=calls.finished.sequences,
        )
        if used:
            last = used[-1][1]
            played.finish_reason, played.generator = last.finish_reason, last.generator
            played.text = self._templates.decode_text(used[0][0].token_ids)
        return played

    def _reward_last_turn(self, played: Played, finished: FinishedSession, result: AgentResult) -> None:
        """Give the episode's reward, posted or returned, for its last turn. Raises AgentFailed unless there is one."""
        found = {reward for reward in (finished.reward, result.reward) if reward is not None}
        if len(found) > 1:
            text = f"posted the reward {finished.reward} and gave {result.reward} back; an episode has one"
            raise AgentFailed("agent_raised", f"the agent {self.source!r} {text}")
        if not found:
            cut = played.cut
            text = f", after a limit of its {cut}" if cut else "; return a number, or post one to the session"
            raise AgentFailed("no_reward", f"the agent {self.source!r} gave no reward{text}")
        if not played.sequences:
            raise AgentFailed("no_calls", f"the agent {self.source!r} ended without a reply of the policy")
        *earlier, last = turn_ends(played.sequences)
        played.rewards = [*((place, 0.0) for place in earlier), (last, found.pop())]
        played.metrics = dict(result.metrics)


def turn_ends(sequences: Sequence[TokenSequence]) -> list[int]:
    """The index of the last token of each reply, through all sequences; in a sequence, context separates replies."""
    ends, before = [], 0
    for sequence in sequences:
        edges = np.diff(sequence.policy_mask.astype(np.int8), append=0)
        ends += (before + np.flatnonzero(edges == -1)).tolist()
        before += sequence.token_ids.size
    return ends


def _too_early(log: CallLog) -> str:
    return f"before it had made all calls again that it had made before the checkpoint ({log.calls_left} were left)"
