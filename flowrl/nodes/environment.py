"""The environment node plays episodes of an environment. `episode_node` says what holds for all nodes that do.

Invariants:

- A reward comes from the environment alone. What the environment does wrong voids the attempt, and every attempt has
  an environment of its own.
- The tokens of an episode are those that the generator sampled and those that the template wrote between them, by id.

Waits: for replies, and for the environment (`context.outside`), whose every call has a limit in seconds.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

from flowrl.environments import EnvironmentFailed, EnvironmentName, Episodes, environment_rows
from flowrl.episode import Reply
from flowrl.errors import AttemptFailed, ConfigError
from flowrl.messages import Prompt
from flowrl.models import Policy, check_model, resolve
from flowrl.nodes.attempt import Ask, AskedTurn, Attempt, Played
from flowrl.nodes.environment_source import row_of
from flowrl.nodes.episode_node import EpisodeNode
from flowrl.nodes.limits import Limits
from flowrl.nodes.shaping import Shaping

NO_ROOM = "no_room"
"""The cause of an episode whose first observation fills the context."""


class Environment(EpisodeNode):
    """Plays the episodes of `environment` with the policy that `generate` asks.

    `environment` is a name as in docs/environments.md, `limits` bounds episodes and attempts. `processes` is the
    number of environments' processes at a time, `memory_bytes` what each may take. `requests` plays held-out
    episodes, without tickets. `shaping` applies to the reward of a whole episode.
    """

    _pool: Episodes

    def __init__(
        self,
        environment: str,
        policy: Policy,
        *,
        limits: Limits | None = None,
        processes: int = 256,
        memory_bytes: int = 1 << 30,
        shaping: Shaping | None = None,
    ) -> None:
        super().__init__(policy, limits=limits, processes=processes, memory_bytes=memory_bytes, shaping=shaping)
        self.environment = environment

    @property
    def source(self) -> str:
        return self.environment

    # Declarations for the graph

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        try:
            EnvironmentName(self.environment)
        except ConfigError as problem:
            problems.append(str(problem))
        return problems

    def preflight(self) -> None:
        check_model(self.policy)
        asyncio.run(self._try())

    async def _try(self) -> None:
        """Begin one episode. With a model that exists already, also render what it shows."""
        async with self._episodes() as pool:
            _require_one_seat(self.environment, pool.seats)
            try:
                episode = await pool.reset(environment_rows(self.environment, number=1).all[0])
            except EnvironmentFailed as failure:
                raise ConfigError(f"the trial episode of {self.environment!r} failed: {failure}") from None
            observation = episode.observation
            await episode.close_quietly()
        if not self.policy.built_in:
            self._load(resolve(self.policy))
            size = self._new_attempt(_ask_nobody).begin(observation)
            if size >= self._tokens:
                raise ConfigError(
                    f"the first observation of {self.environment!r} has {size} tokens, but an episode may have "
                    f"{self._tokens}; raise limits.tokens, or choose a model with a longer context"
                )

    def _new_attempt(self, ask: Ask) -> Attempt:
        outside = self.context.outside if hasattr(self, "context") else nullcontext
        return Attempt(self._templates, self.limits, self._tokens, ask=ask, outside=outside)

    def _episodes(self) -> Episodes:
        return Episodes(
            self.environment,
            processes=self.processes,
            memory_bytes=self.memory_bytes,
            reset_s=self.limits.reset_s,
            step_s=self.limits.step_s,
        )

    # Lifecycle

    async def setup(self) -> None:
        model_dir = await self.blocking(resolve, self.policy, progress=self.context.progress)
        await self.blocking(self._load, model_dir)
        self._pool = self._episodes()
        await self._pool.__aenter__()
        _require_one_seat(self.environment, self._pool.seats)

    async def close(self) -> None:
        if hasattr(self, "_pool"):
            await self._pool.__aexit__(None, None, None)

    # Episodes

    async def attempt(self, prompt: Prompt, number: int, ticket: int) -> Played:
        async def ask(question: AskedTurn) -> Reply:
            return await self.ask(self.turn(prompt, question, number, ticket))

        with self.context.outside("an environment's reset"):
            episode = await self._pool.reset(row_of(prompt))
        try:
            played = await self._new_attempt(ask).play(episode)
        finally:
            self.generate.forget(prompt.sample_id)
            with self.context.outside("an environment's end"):
                await episode.close_quietly()
        if played.sequence is None:
            text = f"the first observation leaves no room in {self._tokens} tokens"
            raise AttemptFailed(NO_ROOM, text, again=False)
        return played

    def row_name(self, prompt: Prompt) -> str:
        return str(prompt.columns["environment"])


async def _ask_nobody(question: AskedTurn) -> Reply:
    raise AssertionError("a trial asks for no reply")


def _require_one_seat(environment: str, seats: int) -> None:
    if seats != 1:
        raise ConfigError(
            f"environment {environment!r} has {seats} seats, and one policy plays one; choose an environment with one"
        )
