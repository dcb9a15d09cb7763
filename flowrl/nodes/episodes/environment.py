"""The environment node plays episodes of an environment. `episode_node` has the invariants of all nodes that do so.

Invariants:

- A reward comes only from the environment. An error of the environment voids the attempt, and every attempt has its own
  environment.
- The tokens of an episode are the ids that the generator sampled and the ids that the template wrote between them.
- A half-done attempt continues in a resumed run, with its replies and what the environment showed (`episode_log`).
- In an environment with several seats, the policy plays all seats, or one seat against opponents whose replies come
  from another generator. What opponents say is part of the environment, and never trained.

Waits: for replies, and for the environment (`context.outside`); each call of the environment has a limit in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

from flowrl.agents import History
from flowrl.environments import EnvironmentFailed, EnvironmentName, Episodes, environment_rows
from flowrl.errors import AttemptFailed, ConfigError
from flowrl.graph.node import Facts
from flowrl.graph.ports import Ask
from flowrl.messages import Prompt
from flowrl.messages.episode import Reply
from flowrl.models import Policy, check_model, ignore_progress, resolve
from flowrl.nodes.episodes.attempt import AskedTurn, AskTurn, Attempt, Limits, Played
from flowrl.nodes.episodes.episode_log import EpisodeLog, open_episode
from flowrl.nodes.episodes.episode_node import EpisodeNode, template_findings
from flowrl.nodes.scoring.shaping import Shaping
from flowrl.nodes.sources.row_source import row_of

NO_ROOM = "no_room"
"""The cause of an episode whose first observation fills the context."""


class Environment(EpisodeNode):
    """Plays the episodes of `environment` with the policy that `generate` asks.

    `environment` is a name as in docs/environments.md, `limits` bounds episodes and attempts. `processes` is the number
    of environment processes at a time, `memory_bytes` the memory that each may take; a process plays
    `episodes_per_process` episodes, one after the other. `keep_variables` names environment variables of the run that
    these processes get besides those that every program needs. `requests` plays held-out episodes, without tickets.
    `shaping` applies to the reward of a whole episode. `history` says how a context is made: "append" joins what was
    sampled and fed; "template" applies the template to all messages, so that an episode has a further sequence
    (`branches`) for each context that the template rewrote. Conversations begin with `system_prompt`, unless it is
    empty.

    If the environment has several seats, the policy plays all of them. With an edge from `opponent`, it plays only the
    seat (the row's seed + the epoch) modulo the number of seats; the generator at the end of that edge plays the
    others.
    """

    opponent: Ask

    _pool: Episodes

    def __init__(
        self,
        environment: str,
        policy: Policy,
        *,
        limits: Limits | None = None,
        processes: int = 256,
        memory_bytes: int = 1 << 30,
        episodes_per_process: int = 1,
        keep_variables: tuple[str, ...] = (),
        shaping: Shaping | None = None,
        history: History = "append",
        system_prompt: str = "",
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
        self.environment = environment
        self.history: History = history
        self.system_prompt = system_prompt

    @property
    def source(self) -> str:
        return self.environment

    def row_name(self, prompt: Prompt) -> str:
        return str(prompt.columns["environment"])

    # Declarations for the graph

    def facts(self) -> Facts:
        facts = super().facts()
        return replace(facts, optional=(*facts.optional, "opponent"))

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if self.history not in get_args(History):
            problems.append(f"history is {self.history!r}; it has to be one of {', '.join(get_args(History))}")
        try:
            if EnvironmentName(self.environment).adapter == "verifiers":
                problems.append(f"{self.environment!r} asks the policy itself; play it with AgentProgram(agent=...)")
        except ConfigError as problem:
            problems.append(str(problem))
        return problems

    def preflight(self) -> str | None:
        check_model(self.policy)
        return asyncio.run(self._try_episode())

    async def _try_episode(self) -> str | None:
        """Start one episode; return what is found about the chat template. With a model on disk, also render it."""
        async with self._new_pool(self.environment, step_s=self.limits.step_s, progress=ignore_progress) as pool:
            try:
                episode = await pool.reset(environment_rows(self.environment, number=1).all[0])
            except EnvironmentFailed as failure:
                raise ConfigError(f"the trial episode of {self.environment!r} failed: {failure}") from None
            observations = episode.observations
            await episode.close_quietly()
        found = template_findings(self.policy, self.environment, observations[0].tools, self.generate.server)
        if not self.policy.built_in:
            self._load_tokenizer(resolve(self.policy))
            size = self._new_attempt(ask_nobody).show_first(observations)
            if size >= self._tokens:
                raise ConfigError(
                    f"the first observation of {self.environment!r} has {size} tokens, but an episode may have "
                    f"{self._tokens}; raise limits.tokens, or choose a model with a longer context"
                )
        return found

    def _new_attempt(
        self, ask: AskTurn, elapsed: Callable[[], float] | None = None, trained: Collection[int] | None = None
    ) -> Attempt:
        outside = self.context.outside if hasattr(self, "context") else nullcontext
        return Attempt(
            self._templates,
            self.limits,
            self._tokens,
            ask=ask,
            history=self.history,
            system_prompt=self.system_prompt,
            trained=trained,
            elapsed=elapsed,
            outside=outside,
        )

    # Lifecycle

    async def setup(self) -> None:
        await self.prepare_attempts(await self.blocking(resolve, self.policy, progress=self.context.progress))
        progress = self.context.progress
        self._pool = self._new_pool(self.environment, step_s=self.limits.step_s, progress=progress)
        await self._pool.__aenter__()
        if self.opponent.connected and self._pool.seats == 1:
            raise ConfigError(
                f"environment {self.environment!r} has one seat, so there is no opponent to play; leave {self.name}."
                "opponent unconnected, or choose an environment with several seats"
            )

    async def close(self) -> None:
        if hasattr(self, "_pool"):
            await self._pool.__aexit__(None, None, None)

    # Episodes

    async def play_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int) -> Played:
        async def ask_turn(question: AskedTurn) -> Reply:
            if (known := log.known_reply(question)) is not None:
                return known
            turn = log.note_request(self.make_turn(prompt, question, log.attempt, ticket))
            reply = await (self.generate if turn.trained else self.opponent).ask_turn(turn)
            if not turn.trained and ticket >= 0:
                self.context.metric("tokens_of_opponents", reply.token_ids.size - turn.prefix_token_ids.size)
            log.note_reply(reply)
            return reply

        began_s = time.monotonic()
        with self.context.outside("an environment's reset"):
            episode = await open_episode(self._pool, row_of(prompt), log)
        self.context.gauge("environment_reset_s", time.monotonic() - began_s)
        try:
            with self.context.outside("an environment's state"):
                await episode.log_first()
            attempt = self._new_attempt(ask_turn, log.elapsed_s, self._trained_seats(prompt))
            try:
                played = await attempt.play_episode(episode)
            except EnvironmentFailed as failure:
                failure.played = attempt.note_end()  # the exception carries what was played so far
                raise
            if not played.sequences:
                text = f"the first observation leaves no room in {self._tokens} tokens"
                raise AttemptFailed(NO_ROOM, text, again=False, played=played)
            return played
        finally:
            for port in (self.generate, self.opponent) if self.opponent.connected else (self.generate,):
                port.forget(prompt.sample_id)
            with self.context.outside("an environment's end"):
                await episode.close_quietly()

    def _trained_seats(self, prompt: Prompt) -> Collection[int] | None:
        """The seats that the policy plays; None: all. The same for all members of a group."""
        if not self.opponent.connected:
            return None
        return ((row_of(prompt).seed + prompt.epoch) % self._pool.seats,)


async def ask_nobody(question: AskedTurn) -> Reply:
    """The generator of an attempt that only shows its first observation."""
    raise AssertionError("a trial asks for no reply")
