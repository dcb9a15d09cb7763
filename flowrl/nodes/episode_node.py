"""A node that plays episodes: a prompt's item, and so its ticket, stays with its invocation to the end.

Invariants:

- What others than the policy do wrong voids the attempt; the next one has the same ticket and start. After the last
  attempt the sample fails, by its cause. There is no reward that nobody gave.
- Every attempt that has begun is booked: in a finished episode, or as void.

Waits: those of an attempt, which subclasses say.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from typing import Any

import numpy as np

from flowrl.episode import Episode, Reply, Turn
from flowrl.errors import AttemptFailed, ConfigError, FlowrlError, SampleFailed
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Call, In, Out, Serve
from flowrl.messages import Prompt
from flowrl.models import Policy, load_tokenizer
from flowrl.models.directory import context_length
from flowrl.nodes.attempt import AskedTurn, Played, Templates
from flowrl.nodes.limits import Limits
from flowrl.nodes.shaping import Shaping
from flowrl.nodes.vllm_sampler import EVALUATION

LOOKED_BACK = 256
"""Attempts among which failures are counted."""
FIRST_ATTEMPTS = 16
"""If so many attempts are over and all of them failed, the run ends too."""


class EpisodeNode(Node):
    """Attempts, retries, limits and bookings of episodes. Subclasses play an attempt."""

    prompts: In[Prompt]
    episodes: Out[Episode]
    generate: Call[Turn, Reply]
    requests: Serve[Prompt, Episode]

    _templates: Templates
    _tokens: int

    def __init__(
        self, policy: Policy, *, limits: Limits | None, processes: int, memory_bytes: int, shaping: Shaping | None
    ) -> None:
        self.policy = policy
        self.limits = limits or Limits()
        self.processes = processes
        self.memory_bytes = memory_bytes
        self.shaping = shaping or Shaping()
        self._outcomes: deque[str] = deque(maxlen=LOOKED_BACK)
        """The cause of each of the last attempts that failed; "" for one that did not."""
        self._succeeded = False

    # What subclasses say

    @property
    def source(self) -> str:
        """What plays against the policy, as users have named it."""
        raise NotImplementedError

    async def attempt(self, prompt: Prompt, number: int, ticket: int) -> Played:
        """Play the episode once; `played.sequence` is not None. Raises AttemptFailed."""
        raise NotImplementedError

    def row_name(self, prompt: Prompt) -> str:
        """The name of what plays, without options."""
        raise NotImplementedError

    # Declarations for the graph

    def facts(self) -> Facts:
        return Facts(
            longest_response=self.limits.tokens,
            concurrency=self.limits.episodes,
            drops=True,
            optional=("requests",),
        )

    def check(self, facts: Any) -> list[str]:
        problems = [*self.limits.problems(), *self.shaping.problems()]
        for name in ("processes", "memory_bytes"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        return problems

    def _load(self, model_dir: str) -> None:
        self._templates = Templates(load_tokenizer(model_dir))
        longest = context_length(model_dir)
        self._tokens = longest if self.limits.tokens is None else self.limits.tokens
        if self._tokens > longest:
            raise ConfigError(
                f"limits.tokens is {self._tokens}, but the context of {self.policy.model} takes {longest} tokens; "
                "lower it"
            )

    # Lifecycle

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.requests.live is not None:
                tasks.create_task(self.requests.each(self._play_held_out, concurrency=self.limits.episodes))
            await self.prompts.each(self._play, concurrency=self.limits.episodes)
            self.episodes.close()  # `run` continues: held-out episodes may still be asked for

    # Episodes

    async def _play(self, prompt: Prompt) -> None:
        if self.episodes.was_sent():
            return
        began_s, ledger = time.monotonic(), self.context.ledger
        ticket, cause = self.prompts.ticket(prompt), ""
        for number in range(self.limits.retries + 1):
            try:
                played = await self.attempt(prompt, number, ticket)
            except AttemptFailed as failure:
                ledger.attempt_void(prompt.sample_id, number, failure.cause)
                self._count_failure(failure.cause, str(failure))
                cause = failure.cause
                if not failure.again:
                    break
                continue
            self._count_success(played)
            await self._settle(prompt, played, number, time.monotonic() - began_s)
            return
        seconds = time.monotonic() - began_s
        ledger.episode_failed(prompt.sample_id, self.row_name(prompt), number + 1, 0, cause, seconds)
        raise SampleFailed(cause)

    async def _settle(self, prompt: Prompt, played: Played, attempt: int, seconds: float) -> None:
        """Book the finished episode, and send or drop it."""
        episode = self.episode(prompt, played, attempt)
        self.context.ledger.episode(episode, truncated=played.cut or None, seconds=seconds)
        if played.cut and self.limits.on_truncated == "drop":
            self.prompts.drop(prompt, "truncated")
            return
        self.context.ledger.scored(episode)
        await self.episodes.send(episode)

    async def _play_held_out(self, prompt: Prompt) -> Episode:
        """A held-out episode; fails with its cause where training would."""
        for number in range(self.limits.retries + 1):
            try:
                return self.episode(prompt, await self.attempt(prompt, number, -1), number)
            except AttemptFailed as failure:
                cause = failure.cause
                if not failure.again:
                    break
        raise SampleFailed(cause)

    async def ask(self, turn: Turn) -> Reply:
        """The generator's reply, at the place of the turn's ticket."""
        priority = turn.ticket if turn.ticket >= 0 else EVALUATION
        return await self.generate(turn, session=turn.sample_id, group=turn.group_id, priority=priority)

    def turn(self, prompt: Prompt, question: AskedTurn, attempt: int, ticket: int) -> Turn:
        """The request for one reply at this attempt, counted from 0; `ticket` is -1 for a held-out episode."""
        return Turn(
            request_id=f"{prompt.sample_id}/{attempt}.{question.turn}",
            sample_id=prompt.sample_id,
            group_id=prompt.group_id,
            turn=question.turn,
            attempt=attempt,
            ticket=ticket,
            seed=turn_seed(prompt.seed, attempt, question.turn),
            token_ids=question.token_ids,
            max_tokens=question.max_tokens,
            stop=question.stop,
            tools=question.tools,
        )

    def episode(self, prompt: Prompt, played: Played, attempt: int) -> Episode:
        """The message of an episode that was played at this attempt, counted from 0."""
        sequence = played.sequence
        assert sequence is not None
        first = int(np.argmax(sequence.policy_mask))
        reward = self.shaping.shaped(
            played.reward, {}, num_tokens=int(sequence.policy_mask.sum()), truncated=bool(played.cut)
        )
        now = time.time()
        return Episode(
            sample_id=prompt.sample_id,
            group_id=prompt.group_id,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            member=prompt.member,
            group_size=prompt.group_size,
            prompt_text=played.text,
            response_text=self._templates.decode(sequence.token_ids[first:]),
            token_ids=sequence.token_ids,
            policy_mask=sequence.policy_mask,
            behavior_logprobs=sequence.behavior_logprobs,
            versions=sequence.versions,
            prompt_tokens=first,
            truncated=bool(played.cut),
            generator=played.generator,
            columns=prompt.columns,
            metrics={**played.metrics, "turns": float(played.turns)},
            generated_s=now,
            reward=reward,
            raw_reward=played.reward,
            scored_s=now,
            turns=played.turns,
            attempts=attempt + 1,
            environment=self.row_name(prompt),
            cut=played.cut,
            masked=bool(played.cut) and self.limits.on_truncated == "mask",
            rewards_by_turn=tuple(played.rewards),
        )

    # Figures

    def _count_success(self, played: Played) -> None:
        self._succeeded = True
        self._outcomes.append("")
        context = self.context
        context.gauge("episode_turns", played.turns)
        context.gauge("environment_s", played.env_s)
        context.gauge("turns_generate_s", played.generate_s)
        context.metric("turns", played.turns)
        context.metric("turn_context_tokens", played.context_tokens)
        context.metric("turn_cached_tokens", played.cached_tokens)
        if played.malformed:
            context.metric("malformed_calls", played.malformed)
        if played.cut:
            context.metric(f"cut_by_{played.cut}", 1)

    def _count_failure(self, cause: str, text: str) -> None:
        """Report the failure of an attempt; raise if failures are what mostly happens."""
        if cause not in self._outcomes:
            self.context.progress(f"an attempt at an episode failed: {text}")
        self.context.metric(cause, 1)
        self._outcomes.append(cause)
        failed = Counter(cause for cause in self._outcomes if cause)
        most, over = failed.most_common(1)[0][0], len(self._outcomes)
        hopeless = not self._succeeded and over >= FIRST_ATTEMPTS
        if hopeless or (over == LOOKED_BACK and failed.total() > LOOKED_BACK // 2):
            raise FlowrlError(
                f"{failed.total()} of the last {over} attempts at episodes of {self.source!r} failed, mostly by "
                f"{most}; the last failure: {text}"
            )


def turn_seed(seed: int, attempt: int, turn: int) -> int:
    """The sampler's seed of one reply: 63 bits of a hash over the sample's seed, the attempt and the turn."""
    digest = hashlib.blake2b(f"{seed}/{attempt}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
