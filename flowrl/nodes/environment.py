"""The environment node plays episodes: a prompt's item, and so its ticket, stays with its invocation to the end.

Invariants:

- A reward comes from the environment alone. What the environment does wrong voids the attempt; the next one has the
  same ticket and start, and an environment of its own. After the last attempt the sample fails, by its cause.
- The tokens of an episode are those that the generator sampled and those that the template wrote between them, by id.
- Every attempt that has begun is booked: in a finished episode, or as void.
- A checkpoint has the log of every attempt under way (`episode_log`), and never waits for an environment.

Waits: for replies, and for the environment (`context.outside`), whose every call has a limit in seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import numpy as np

from flowrl.agents import History
from flowrl.environments import RESUME_CAUSES, EnvironmentFailed, EnvironmentName, Episodes, environment_rows
from flowrl.episode import Episode, Reply, Turn
from flowrl.errors import ConfigError, SampleFailed
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Call, In, Out, Serve
from flowrl.messages import Branch, Prompt, Record
from flowrl.models import Policy, check_model, load_tokenizer, resolve
from flowrl.models.directory import context_length
from flowrl.nodes.attempt import Ask, AskedTurn, Attempt, Played, Templates
from flowrl.nodes.attempt_outcomes import AttemptOutcomes
from flowrl.nodes.environment_source import row_of
from flowrl.nodes.episode_checks import length_problems, template_findings
from flowrl.nodes.episode_log import EpisodeLog, LoggedEpisode, open_episode
from flowrl.nodes.episode_reports import EpisodeReports
from flowrl.nodes.limits import Limits
from flowrl.nodes.shaping import Shaping
from flowrl.nodes.vllm_sampler import EVALUATION

NO_ROOM = "no_room"
"""The cause of an episode whose first observation fills the context."""


class Environment(Node):
    """Plays the episodes of `environment` with the policy that `generate` asks.

    `environment` is a name as in docs/environments.md, `limits` bounds episodes and attempts. `processes` is the
    number of environments' processes at a time, `memory_bytes` what each may take. `requests` plays held-out
    episodes, without tickets. `shaping` applies to the reward of a whole episode. `history` is what a context is made
    of: with "append" of what was sampled and fed; with "template" of what the template makes of all messages, so that
    an episode has a further sequence (`branches`) for each context that the template rewrote.
    """

    prompts: In[Prompt]
    episodes: Out[Episode]
    generate: Call[Turn, Reply]
    requests: Serve[Prompt, Episode]

    _pool: Episodes
    _templates: Templates
    _tokens: int
    _reports: EpisodeReports
    _outcomes: AttemptOutcomes

    def __init__(
        self,
        environment: str,
        policy: Policy,
        *,
        limits: Limits | None = None,
        processes: int = 256,
        memory_bytes: int = 1 << 30,
        shaping: Shaping | None = None,
        history: History = "append",
    ) -> None:
        self.environment = environment
        self.policy = policy
        self.limits = limits or Limits()
        self.processes = processes
        self.memory_bytes = memory_bytes
        self.shaping = shaping or Shaping()
        self.history: History = history
        """Causes of which a line was printed."""

    # Declarations for the graph

    def facts(self) -> Facts:
        return Facts(
            longest_response=self.limits.tokens,
            concurrency=self.limits.episodes,
            episodes=self.limits.episodes,
            drops=True,
            optional=("requests",),
        )

    def check(self, facts: Any) -> list[str]:
        problems = [*self.limits.problems(), *self.shaping.problems()]
        for name in ("processes", "memory_bytes"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        if self.history not in get_args(History):
            problems.append(f"history is {self.history!r}; it has to be one of {', '.join(get_args(History))}")
        try:
            EnvironmentName(self.environment)
        except ConfigError as problem:
            problems.append(str(problem))
        return [*problems, *length_problems(self.limits, self.policy, None if facts is None else facts.token_budget)]

    def preflight(self) -> str | None:
        check_model(self.policy)
        return asyncio.run(self._try())

    async def _try(self) -> str | None:
        """Begin one episode; returns what is known of the chat template. With a model on disk, also render it."""
        async with self._episodes() as pool:
            _require_one_seat(self.environment, pool.seats)
            try:
                episode = await pool.reset(environment_rows(self.environment, number=1).all[0])
            except EnvironmentFailed as failure:
                raise ConfigError(f"the trial episode of {self.environment!r} failed: {failure}") from None
            observation = episode.observation
            await episode.close_quietly()
        found = template_findings(self.policy, self.environment, observation.tools)
        if not self.policy.built_in:
            self._load(resolve(self.policy))
            size = self._new_attempt(_ask_nobody).begin(observation)
            if size >= self._tokens:
                raise ConfigError(
                    f"the first observation of {self.environment!r} has {size} tokens, but an episode may have "
                    f"{self._tokens}; raise limits.tokens, or choose a model with a longer context"
                )
        return found

    def _load(self, model_dir: str) -> None:
        self._templates = Templates(load_tokenizer(model_dir))
        longest = context_length(model_dir)
        self._tokens = longest if self.limits.tokens is None else self.limits.tokens
        if self._tokens > longest:
            raise ConfigError(
                f"limits.tokens is {self._tokens}, but the context of {self.policy.model} takes {longest} tokens; "
                "lower it"
            )

    def _new_attempt(self, ask: Ask, elapsed: Callable[[], float] | None = None) -> Attempt:
        outside = self.context.outside if hasattr(self, "context") else nullcontext
        return Attempt(
            self._templates,
            self.limits,
            self._tokens,
            ask=ask,
            history=self.history,
            elapsed=elapsed,
            outside=outside,
        )

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
        self._reports = EpisodeReports(self.context, self._templates.tokenizer)
        self._outcomes = AttemptOutcomes(self.context, self.environment)
        self._pool = self._episodes()
        await self._pool.__aenter__()
        _require_one_seat(self.environment, self._pool.seats)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.requests.live is not None:
                tasks.create_task(self.requests.each(self._play_held_out, concurrency=self.limits.episodes))
            await self.prompts.each(self._play, concurrency=self.limits.episodes)
            self.episodes.close()  # `run` continues: held-out episodes may still be asked for

    async def close(self) -> None:
        if hasattr(self, "_pool"):
            await self._pool.__aexit__(None, None, None)

    # Episodes

    async def _play(self, prompt: Prompt) -> None:
        if self.episodes.was_sent():
            return
        log = self._new_log(prompt.record)
        began_s, ticket = time.monotonic() - log.seconds, self.prompts.ticket(prompt)
        cause: str
        while True:
            self.prompts.keep(prompt, log.record)
            try:
                played = await self._attempt(prompt, log, ticket)
            except EnvironmentFailed as failure:
                cause = failure.cause
                log = self._after_void(prompt, log, failure)
                if log.failed > self.limits.retries:
                    break
                continue
            if not played.sequences:
                cause = NO_ROOM
                text = f"the first observation leaves no room in {self._tokens} tokens"
                self._reports.failed(prompt, log.attempt, played, cause, text, last=True)
                self._outcomes.failed(cause, text)
                log = log.next_attempt(counts=True)
                break
            self._outcomes.succeeded()
            await self._settle(prompt, played, log.attempt, time.monotonic() - began_s)
            return
        place = (prompt.sample_id, self._row_name(prompt), log.attempt)
        self.context.ledger.episode_failed(*place, 0, cause, time.monotonic() - began_s)
        raise SampleFailed(cause)

    def _after_void(self, prompt: Prompt, log: EpisodeLog, failure: EnvironmentFailed) -> EpisodeLog:
        """Book the attempt as void; returns the log of the next one. What a resume cannot continue is no failure."""
        self.context.ledger.attempt_void(prompt.sample_id, log.attempt, failure.cause)
        counts = failure.cause not in RESUME_CAUSES
        if counts:
            last = log.failed == self.limits.retries
            self._reports.failed(prompt, log.attempt, failure.played, failure.cause, str(failure), last=last)
            self._outcomes.failed(failure.cause, str(failure))
        else:
            self._outcomes.not_resumed(failure.cause, str(failure))
        return log.next_attempt(counts=counts)

    def _new_log(self, record: Record | None = None) -> EpisodeLog:
        return EpisodeLog(record, observation_bytes=self.limits.observation_bytes)

    async def _settle(self, prompt: Prompt, played: Played, attempt: int, seconds: float) -> None:
        """Book the finished episode, and send or drop it."""
        episode = self.episode(prompt, played, attempt)
        self._reports.finished(prompt, attempt, played, episode.reward)
        self.context.ledger.episode(episode, truncated=played.cut or None, seconds=seconds)
        if played.cut and self.limits.on_truncated == "drop":
            self.prompts.drop(prompt, "truncated")
            return
        self.context.ledger.scored(episode)
        await self.episodes.send(episode)

    async def _play_held_out(self, prompt: Prompt) -> Episode:
        """A held-out episode; fails with its cause where training would."""
        log = self._new_log()
        while log.failed <= self.limits.retries:
            try:
                played = await self._attempt(prompt, log, -1)
            except EnvironmentFailed as failure:
                cause = failure.cause
                log = log.next_attempt(counts=True)
                continue
            if played.sequences:
                return self.episode(prompt, played, log.attempt)
            raise SampleFailed(NO_ROOM)
        raise SampleFailed(cause)

    async def _attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int) -> Played:
        async def ask(question: AskedTurn) -> Reply:
            if (known := log.known_reply(question)) is not None:
                return known
            turn = log.asking(self._turn(prompt, question, log.attempt, ticket))
            priority = ticket if ticket >= 0 else EVALUATION
            reply = await self.generate(turn, session=prompt.sample_id, group=prompt.group_id, priority=priority)
            log.replied(reply)
            return reply

        began_s = time.monotonic()
        with self.context.outside("an environment's reset"):
            episode = await open_episode(self._pool, row_of(prompt), log)
        self.context.gauge("environment_reset_s", time.monotonic() - began_s)
        try:
            with self.context.outside("an environment's state"):
                await episode.begin()
            return await _to_its_end(self._new_attempt(ask, log.elapsed), episode)
        finally:
            self.generate.forget(prompt.sample_id)
            with self.context.outside("an environment's end"):
                await episode.close_quietly()

    def _turn(self, prompt: Prompt, question: AskedTurn, attempt: int, ticket: int) -> Turn:
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
        sequence, *further = played.sequences
        first = int(np.argmax(sequence.policy_mask))
        num_tokens = sum(int(one.policy_mask.sum()) for one in played.sequences)
        reward = self.shaping.shaped(played.reward, {}, num_tokens=num_tokens, truncated=bool(played.cut))
        by_turn = self.shaping.by_turn([reward for _, reward in played.rewards], reward)
        now = time.time()
        return Episode(
            sample_id=prompt.sample_id,
            group_id=prompt.group_id,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            member=prompt.member,
            group_size=prompt.group_size,
            prompt_text=played.text,
            response_text=self._response_text(played),
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
            branches=tuple(Branch(o.token_ids, o.policy_mask, o.behavior_logprobs, o.versions) for o in further),
            reward=reward,
            raw_reward=played.reward,
            scored_s=now,
            turns=played.turns,
            attempts=attempt + 1,
            environment=self._row_name(prompt),
            cut=played.cut,
            masked=bool(played.cut) and self.limits.on_truncated == "mask",
            rewards_by_turn=tuple((place, r) for (place, _), r in zip(played.rewards, by_turn, strict=True)),
        )

    def _response_text(self, played: Played) -> str:
        """What follows the first context, and of each further sequence what follows the context of its first reply."""
        return "".join(self._templates.decode(s.token_ids[int(np.argmax(s.policy_mask)) :]) for s in played.sequences)

    @staticmethod
    def _row_name(prompt: Prompt) -> str:
        return str(prompt.columns["environment"])


async def _to_its_end(attempt: Attempt, episode: LoggedEpisode) -> Played:
    """Play the attempt. What it has come to goes with its failure."""
    try:
        return await attempt.play(episode)
    except EnvironmentFailed as failure:
        failure.played = attempt.finished()
        raise


async def _ask_nobody(question: AskedTurn) -> Reply:
    raise AssertionError("a trial asks for no reply")


def turn_seed(seed: int, attempt: int, turn: int) -> int:
    """The sampler's seed of one reply: 63 bits of a hash over the sample's seed, the attempt and the turn."""
    digest = hashlib.blake2b(f"{seed}/{attempt}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _require_one_seat(environment: str, seats: int) -> None:
    if seats != 1:
        raise ConfigError(
            f"environment {environment!r} has {seats} seats, and one policy plays one; choose an environment with one"
        )
