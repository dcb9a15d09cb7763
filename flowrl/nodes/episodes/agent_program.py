"""The node that plays with agents of any code, which reach the policy over HTTP.

`agent_players` has the kinds of agents: processes that the node starts, or outside workers.

`episode_node` has the invariants of all nodes that play episodes. In addition:

- A reward comes only from the agent: its program returns it, or posts it to its session.
- The tokens of an episode are those of its session: the ids that were sampled, and the ids that the template made of
  the messages that the agent sent between them.
- When an attempt is over, nothing of it is left: no process, no session, no call.
- A resumed run starts the program of a half-done attempt again from its beginning, and answers its calls as before
  (`CallLog`). An error before all of these calls are made again voids the attempt and does not count as a failure.
  Half-done attempts of outside workers are void.

Waits: for an agent (`context.outside`), until the agent ends, or `limits.episode_s` are over, or its session is idle,
or one of its calls cannot be answered.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.agents import TokenSequence
from flowrl.agents.endpoint import AgentEndpoint, EndpointSettings, FinishedSession, SessionAccess
from flowrl.agents.programs import AgentFailed, AgentResult, ProgramName, is_of_verifiers
from flowrl.environments import RESUME_CAUSES, EnvironmentFailed, Episodes
from flowrl.errors import AttemptFailed, ConfigError
from flowrl.graph.node import Facts
from flowrl.messages import Prompt, Record
from flowrl.models import Policy, check_model, ignore_progress, resolve
from flowrl.nodes.episodes.agent_calls import AgentCalls, AgentCallTable, CallLog, TaskOffers
from flowrl.nodes.episodes.agent_players import AgentPlayer, AgentPlayers, OutsideAgents, StartedAgents
from flowrl.nodes.episodes.attempt import Limits, Played, read_action
from flowrl.nodes.episodes.episode_log import EpisodeLog
from flowrl.nodes.episodes.episode_node import EpisodeNode, template_findings
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.sampling import Sampling
from flowrl.nodes.scoring.reward import Shaping

OUTSIDE = "outside"
"""The name for agents that are workers which the run does not start."""
OF_ENVIRONMENTS = ("step_s", "observation_bytes")
"""Limits that only bound environments."""
MEMORY_BYTES = 1 << 30


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

    _players: AgentPlayers
    _endpoint: AgentEndpoint
    _table: AgentCallTable

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
    def held_out_sampling(self) -> Sampling:
        """How replies are sampled in held-out episodes."""
        server = self.generate.server
        return server.evaluation if isinstance(server, Generator) else self.sampling

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
        problems += self._sampling_problems()
        if self.outside:
            return [*problems, *self._outside_problems()]
        try:
            _ = self._program
        except ConfigError as problem:
            problems.append(str(problem))
        return problems

    def _sampling_problems(self) -> Iterator[str]:
        """Problems of a `sampling` that agents would get although their replies are sampled with another."""
        server = self.generate.server
        if not isinstance(server, Generator) or self.sampling == server.sampling:
            return
        for field in fields(Sampling):
            own, other = getattr(self.sampling, field.name), getattr(server.sampling, field.name)
            if own != other:
                yield (
                    f"sampling has {field.name}={own!r}, but {server.name}, which answers, has {other!r}; leave "
                    "sampling out; agents then get the generator's"
                )

    def _outside_problems(self) -> Iterator[str]:
        text = "is for processes that are started, and has no effect on outside workers; leave it out"
        if self.limits.reset_s != Limits.reset_s:
            yield f"limits.reset_s {text}"
        for name, default in (("memory_bytes", MEMORY_BYTES), ("episodes_per_process", 1), ("keep_variables", ())):
            if getattr(self, name) != default:
                yield f"{name} {text}"

    def preflight(self) -> str | None:
        check_model(self.policy)
        if not self.outside:
            asyncio.run(self._import_agent())
        return template_findings(self.policy, self.source, None, self.generate.server)

    async def _import_agent(self) -> None:
        """Import the agent's file."""
        async with self._new_pool():
            pass

    def _new_pool(self, progress: Callable[[str], None] = ignore_progress) -> Episodes:
        return Episodes(
            self._program.environment,
            processes=self.processes,
            memory_bytes=self.memory_bytes,
            episodes_per_process=self.episodes_per_process,
            keep_variables=self.keep_variables,
            reset_s=self.limits.reset_s,
            step_s=self.limits.episode_s,
            progress=progress,
        )

    # Lifecycle

    async def setup(self) -> None:
        await self.prepare_attempts(await self.blocking(resolve, self.policy, progress=self.context.progress))
        tokenizer, offers = self._templates.tokenizer, TaskOffers() if self.outside else None
        self._table = AgentCallTable(tokenizer, offers)
        endpoint = AgentEndpoint(self._table, self._table, tokenizer, self._endpoint_settings())
        self._endpoint = await endpoint.__aenter__()
        outside = self.context.outside
        if offers is not None:
            where = f"{self._endpoint.url}/sessions, with the key in {self._key_file}"
            self.context.progress(f"outside workers get their tasks from {where}")
            limit_s = self.limits.episode_s
            self._players = OutsideAgents(offers, self._table, self._endpoint, episode_s=limit_s, outside=outside)
            return
        pool = await self._new_pool(self.context.progress).__aenter__()
        self._players = StartedAgents(self._program, pool, self._open_session, outside)

    def _open_session(self, calls: AgentCalls) -> SessionAccess:
        return self._endpoint.open_session(self._table.begin_session(calls))

    @property
    def _key_file(self) -> Path:
        return Path(self.context.run_dir) / f"{self.name}-{self.context.replica}.key"

    def _endpoint_settings(self) -> EndpointSettings:
        limits = (self._tokens, self.sampling.max_tokens, self.limits.turn_tokens)
        return EndpointSettings(
            context_tokens=self._tokens,
            turn_tokens=min(limit for limit in limits if limit is not None),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            sessions=self.processes if self.outside else 2 * self.limits.episodes,
            idle_s=self.idle_s,
            host=self.host,
            port=self.port,
            models=self.models,
            key_file=str(self._key_file),
        )

    async def close(self) -> None:
        if hasattr(self, "_players"):
            await self._players.close()
        if hasattr(self, "_endpoint"):
            await self._endpoint.__aexit__(None, None, None)

    # Episodes

    async def play_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int) -> Played:
        assert isinstance(log, CallLog)
        began_s, calls = time.monotonic(), self._new_calls(prompt, log, ticket)
        player = await self._players.begin_attempt(prompt, log, ticket, calls)
        self.context.gauge("environment_reset_s", time.monotonic() - began_s)
        try:
            played = await self._play_session(player, calls, log)
        finally:
            self.generate.forget(prompt.sample_id)
            await player.close()
        calls.abandon_others()  # last: a checkpoint taken before this still has their replies
        return played

    def _new_log(self, record: Record | None = None) -> CallLog:
        return CallLog(record, observation_bytes=self.limits.observation_bytes)

    def _new_calls(self, prompt: Prompt, log: CallLog, ticket: int) -> AgentCalls:
        ledger = self.context.ledger
        return AgentCalls(
            most_turns=self.limits.turns,
            turn=partial(self.make_turn, prompt, attempt=log.attempt, ticket=ticket),
            ask=self.ask_generator,
            book=ledger.request,
            abandon=ledger.abandoned if ticket >= 0 else lambda *_: None,  # held-out requests have no rows
            log=log,
            sampling=self.sampling if ticket >= 0 else self.held_out_sampling,
        )

    async def _play_session(self, player: AgentPlayer, calls: AgentCalls, log: CallLog) -> Played:
        """Play from the start of the session to its end. If it fails, the exception carries the result so far."""
        began_s = time.monotonic()
        try:
            try:
                with self.context.outside("an agent"):
                    result, cut = await self._wait_for_result(player, calls)
            finally:
                if calls.finished is None:
                    self._endpoint.end_session(player.session_id)
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

    async def _wait_for_result(self, player: AgentPlayer, calls: AgentCalls) -> tuple[AgentResult, str]:
        """The agent's result, and "seconds" if its time ended before it had one. Raises what the generator raises."""
        running = asyncio.ensure_future(player.wait_for_result())
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
        used = calls.used_replies()
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
        """Give the episode's reward for its last turn. Raises AgentFailed."""
        reward = self._given_reward(finished, result, played.cut)
        if not played.sequences:
            raise AgentFailed("no_calls", f"the agent {self.source!r} ended without a reply of the policy")
        *earlier, last = turn_ends(played.sequences)
        played.rewards = [*((place, 0.0) for place in earlier), (last, reward)]
        played.metrics = dict(result.metrics)

    def _given_reward(self, finished: FinishedSession, result: AgentResult, cut: str) -> float:
        """The reward that was posted or returned. Raises AgentFailed if there is none, or if there are two values."""
        found = {reward for reward in (finished.reward, result.reward) if reward is not None}
        if len(found) == 1:
            return found.pop()
        if found:
            text = f"posted the reward {finished.reward} and gave {result.reward} back; an episode has one"
            raise AgentFailed("agent_raised", f"the agent {self.source!r} {text}")
        text = f", after a limit of its {cut}" if cut else "; return a number, or post one to the session"
        raise AgentFailed("no_reward", f"the agent {self.source!r} gave no reward{text}")


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
