"""A node that plays episodes: a prompt's item, and so its ticket, stays with its invocation until the episode's end.

Invariants:

- An error that is not the policy's voids the attempt; the next attempt has the same ticket and start. After the last
  attempt the sample fails with that attempt's cause. A reward that was not given is never filled in.
- Every attempt that has started is in the ledger: in a finished episode, or as void.
- A checkpoint has the log of every running attempt (`episode_log`), and waits for nothing.

Waits: those of an attempt, which subclasses describe.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flowrl.agents import TokenSequence, examine
from flowrl.agents.chat_template import Templates
from flowrl.agents.parser_trial import examine_with_parsers, parsers_that_read
from flowrl.environments import RESUME_CAUSES, Episodes
from flowrl.errors import AttemptFailed, ConfigError, SampleFailed
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import Ask, In, Out, Serve
from flowrl.messages import Branch, Prompt, Record
from flowrl.messages.episode import Episode, Turn
from flowrl.models import Policy, known_context, known_tokenizer, load_tokenizer, with_template
from flowrl.models.model_files import context_length
from flowrl.models.tokens.chat import Messages
from flowrl.nodes.episodes.attempt import AskedTurn, Limits, Played
from flowrl.nodes.episodes.attempt_outcomes import AttemptOutcomes, BegunAttempt
from flowrl.nodes.episodes.episode_log import EpisodeLog
from flowrl.nodes.episodes.episode_reports import EpisodeReports
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.scoring.shaping import Shaping
from flowrl.tasks.user_code import keep_problems

NO_TURN = "no_turn"
"""The reason for dropping an episode that opponents of the policy ended before the policy's first turn."""


class EpisodeNode(Node):
    """Attempts, retries, limits and ledger entries of episodes. Subclasses play an attempt; their `setup` calls
    `prepare`."""

    prompts: In[Prompt]
    episodes: Out[Episode]
    generate: Ask
    requests: Serve[Prompt, Episode]

    _templates: Templates
    _tokens: int
    _reports: EpisodeReports
    _outcomes: AttemptOutcomes

    def __init__(
        self,
        policy: Policy,
        *,
        limits: Limits | None,
        processes: int,
        memory_bytes: int,
        episodes_per_process: int,
        keep_variables: tuple[str, ...],
        shaping: Shaping | None,
    ) -> None:
        self.policy = policy
        self.limits = limits or Limits()
        self.processes = processes
        self.memory_bytes = memory_bytes
        self.episodes_per_process = episodes_per_process
        self.keep_variables = tuple(keep_variables)
        self.shaping = shaping or Shaping()

    # What subclasses say

    @property
    def source(self) -> str:
        """The environment or agent that plays with the policy, as users have named it."""
        raise NotImplementedError

    async def play_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int) -> Played:
        """Play the attempt of `log`; what was played has at least one sequence. Raises AttemptFailed."""
        raise NotImplementedError

    def row_name(self, prompt: Prompt) -> str:
        """The name of what plays the prompt, without options."""
        raise NotImplementedError

    # Declarations for the graph

    def facts(self) -> Facts:
        return Facts(
            longest_context=self.limits.tokens,
            context_by="limits.tokens",
            context_with_reply=True,
            longest_response=self.limits.tokens,
            concurrency=self.limits.episodes,
            episodes=self.limits.episodes,
            expected_s=self.limits.expected_s,
            drops=True,
            optional=("requests",),
        )

    def check(self, facts: Any) -> list[str]:
        problems = [*self.limits.find_problems(), *self.shaping.find_problems()]
        for name in ("processes", "memory_bytes", "episodes_per_process"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        problems += keep_problems(self.keep_variables)
        budget, longest = None if facts is None else facts.token_budget, known_context(self.policy)
        model, most = self.policy.model, self.limits.tokens
        if longest is not None and most is not None and most > longest:
            problems.append(f"limits.tokens is {most}, but the context of {model} takes {longest} tokens; lower it")
        if longest is not None and most is None and budget is not None and budget < longest:
            problems.append(
                f"an episode may have as many tokens as the context of {model}, {longest}, but a micro-batch takes "
                f"token_budget={budget}; set limits.tokens, or raise token_budget to {longest}"
            )
        return problems

    def _new_pool(self, played: str, *, step_s: float, progress: Callable[[str], None]) -> Episodes:
        """The processes of the environment or agent that `played` names."""
        return Episodes(
            played,
            processes=self.processes,
            memory_bytes=self.memory_bytes,
            episodes_per_process=self.episodes_per_process,
            keep_variables=self.keep_variables,
            reset_s=self.limits.reset_s,
            step_s=step_s,
            progress=progress,
        )

    def _load_tokenizer(self, model_dir: str) -> None:
        """Load the tokenizer. Raises ConfigError if an episode may be longer than the model's context."""
        self._templates = Templates(
            with_template(load_tokenizer(model_dir, trust_remote_code=self.policy.trust_remote_code), self.policy)
        )
        longest = context_length(model_dir)
        self._tokens = longest if self.limits.tokens is None else self.limits.tokens
        if self._tokens > longest:
            raise ConfigError(
                f"limits.tokens is {self._tokens}, but the context of {self.policy.model} takes {longest} tokens; "
                "lower it"
            )

    async def prepare_attempts(self, model_dir: str) -> None:
        """Make what every attempt needs."""
        await self.blocking(self._load_tokenizer, model_dir)
        self._reports = EpisodeReports(self.context, self._templates.tokenizer, name_of=self.row_name)
        self._outcomes = AttemptOutcomes(self.context, self.source)

    # Lifecycle

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.requests.live is not None:
                tasks.create_task(self.requests.each(self._play_held_out, concurrency=self.limits.episodes))
            await self.prompts.each(self._play_prompt, concurrency=self.limits.episodes)
            self.episodes.close()  # `run` continues: held-out episodes may still be asked for

    # Episodes

    async def _play_prompt(self, prompt: Prompt) -> None:
        if self.episodes.was_sent():
            return
        log = self._new_log(prompt.record)
        began_s, ticket = time.monotonic() - log.seconds_played, self.prompts.ticket(prompt)
        cause, last = "", False
        while not last:
            self.prompts.keep(prompt, log.make_record)
            await self._outcomes.wait_ready()
            with self._outcomes.begin_attempt() as attempt:
                try:
                    played = await self.play_attempt(prompt, log, ticket)
                except AttemptFailed as failure:
                    cause, (counts, last) = failure.cause, self._judge_failure(attempt, log, failure)
                    self.context.ledger.attempt_void(prompt.sample_id, log.attempt, cause)
                    if cause not in RESUME_CAUSES:
                        told = (prompt, log.attempt, failure.played, cause, str(failure))
                        self._reports.report_failed(*told, last=last)
                    log = log.next_attempt(counts=counts)
                    continue
                self._outcomes.note_success(attempt)
            episode = self.make_episode(prompt, played, log.attempt)
            self._reports.report_finished(prompt, log.attempt, played, episode.reward)
            self.context.ledger.episode(episode, truncated=played.cut or None, seconds=time.monotonic() - began_s)
            if played.cut and self.limits.on_truncated == "drop":
                self.prompts.drop(prompt, "truncated")
            elif not played.turns:
                self.prompts.drop(prompt, NO_TURN)
            else:
                self.context.ledger.scored(episode)
                await self.episodes.send(episode)
            return
        place = (prompt.sample_id, self.row_name(prompt), log.attempt)
        self.context.ledger.episode_failed(*place, 0, cause, time.monotonic() - began_s)
        raise SampleFailed(cause)

    def _judge_failure(self, attempt: BegunAttempt, log: EpisodeLog, failure: AttemptFailed) -> tuple[bool, bool]:
        """Whether the failure uses up one of the retries, and whether the attempt was the last one."""
        if failure.cause in RESUME_CAUSES:  # that a resume cannot continue an attempt is no failure
            self._outcomes.note_not_resumed(failure.cause, str(failure))
            return False, False
        counts = self._outcomes.note_failure(attempt, failure.cause, str(failure), event=failure.event)
        return counts, not failure.again or (counts and log.failed >= self.limits.retries)

    def _new_log(self, record: Record | None = None) -> EpisodeLog:
        return EpisodeLog(record, observation_bytes=self.limits.observation_bytes)

    async def _play_held_out(self, prompt: Prompt) -> Episode:
        """Play a held-out episode. Raises SampleFailed with the cause where a training episode would fail."""
        log = self._new_log()
        while True:
            await self._outcomes.wait_ready()
            with self._outcomes.begin_attempt() as attempt:
                try:
                    played = await self.play_attempt(prompt, log, -1)
                except AttemptFailed as failure:
                    counts, last = self._judge_failure(attempt, log, failure)
                    if last:
                        raise SampleFailed(failure.cause) from None
                    log = log.next_attempt(counts=counts)
                    continue
                self._outcomes.note_success(attempt)
            return self.make_episode(prompt, played, log.attempt)

    def make_turn(self, prompt: Prompt, question: AskedTurn, attempt: int, ticket: int) -> Turn:
        """The request for one reply at this attempt, counted from 0; `ticket` is -1 for a held-out episode."""
        return Turn(
            request_id=f"{prompt.sample_id}/{attempt}.{'o' * question.opponent}{question.turn}",
            sample_id=prompt.sample_id,
            group_id=prompt.group_id,
            turn=question.turn,
            attempt=attempt,
            ticket=ticket,
            seed=turn_seed(prompt.seed, attempt, question.turn, opponent=question.opponent),
            token_ids=question.token_ids,
            max_tokens=question.max_tokens,
            stop=question.stop,
            tools=question.tools,
            trained=not question.opponent,
        )

    def make_episode(self, prompt: Prompt, played: Played, attempt: int) -> Episode:
        """The message of an episode that was played at this attempt, counted from 0."""
        sequence, *further = played.sequences
        by_seat: list[float] = []
        by_turn: list[tuple[int, float]] = []
        for reward, turns, num_tokens in played.seat_results():
            shaped = self.shaping.shape_reward(reward, {}, num_tokens=num_tokens, truncated=bool(played.cut))
            rewards = self.shaping.rewards_by_turn([one for _, one in turns], shaped)
            by_seat.append(shaped)
            by_turn += [(place, one) for (place, _), one in zip(turns, rewards, strict=True)]
        replies = (self._templates.decode_text(one.token_ids[before_reply(one) :]) for one in played.sequences)
        now = time.time()
        return Episode.of_prompt(
            prompt,
            prompt_text=played.text,
            response_text="".join(replies),
            token_ids=sequence.token_ids,
            policy_mask=sequence.policy_mask,
            behavior_logprobs=sequence.behavior_logprobs,
            versions=sequence.versions,
            prompt_tokens=before_reply(sequence),
            truncated=bool(played.cut),
            generator=played.generator,
            metrics={**played.metrics, "turns": float(played.turns)},
            generated_s=now,
            branches=tuple(Branch(o.token_ids, o.policy_mask, o.behavior_logprobs, o.versions) for o in further),
            reward=sum(by_seat) / len(by_seat),
            raw_reward=played.reward,
            scored_s=now,
            turns=played.turns,
            attempts=attempt + 1,
            environment=self.row_name(prompt),
            cut=played.cut,
            masked=bool(played.cut) and self.limits.on_truncated == "mask",
            rewards_by_turn=tuple(by_turn),
            seats=played.seats,
            seat_rewards=tuple((seat, r) for (seat, _), r in zip(played.seat_rewards, by_seat, strict=False)),
        )


def before_reply(sequence: TokenSequence) -> int:
    """The number of tokens before the first sampled token; all tokens if none was sampled."""
    return int(np.argmax(sequence.policy_mask)) if sequence.policy_mask.any() else sequence.token_ids.size


def turn_seed(seed: int, attempt: int, turn: int, *, opponent: bool = False) -> int:
    """The sampler's seed of one reply: 63 bits of a hash over the sample's seed, the attempt and the turn."""
    who = "/opponent" * opponent
    digest = hashlib.blake2b(f"{seed}/{attempt}/{turn}{who}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def template_findings(policy: Policy, environment: str, tools: Messages | None, generator: object = None) -> str | None:
    """What an examination of the chat template finds; None for a model whose tokenizer is not known yet.

    `tools` is None if the tools are known only from the episodes. `generator` is the node that answers; if it names
    vLLM's parsers, replies are parsed with these. Raises ConfigError for tools that the template cannot take, and for
    tools whose calls no parser reads.
    """
    tokenizer, template = known_tokenizer(policy), f"the chat template of {policy.model}"
    if tokenizer is None:
        return None
    if isinstance(generator, Generator) and (generator.tool_parser or generator.reasoning_parser):
        examination = examine_with_parsers(
            policy, tools or (), tool_parser=generator.tool_parser, reasoning_parser=generator.reasoning_parser
        )
    else:
        examination = examine(tokenizer, tools or ())
    if tools and examination.no_tools:
        raise ConfigError(
            f"environment {environment!r} has tools, but the chat template of {policy.model} cannot take them "
            f"({examination.no_tools}); choose a model for tool calls, or an environment without tools"
        )
    if examination.no_calls and isinstance(generator, Generator):
        if tools:
            raise ConfigError(
                f"environment {environment!r} has tools, but nothing reads the policy's calls "
                f"({examination.no_parsing}), so each would be taken for its final answer; "
                f"{_parser_to_name(policy, tools)}"
            )
        if tools is None:
            return f"{template}: {examination} {CALLS_AS_TEXT}"
    return f"{template}: {examination.history() if tools is not None and not tools else examination}"


CALLS_AS_TEXT = (
    "Warning: if requests have tools, agents get the calls of replies as text, not as calls; name vLLM's parser for "
    "the model with --tool-parser, or Generator(tool_parser=...)."
)


def _parser_to_name(policy: Policy, tools: Messages) -> str:
    """The advice on which parser to name. It tries all of vLLM's parsers, which takes some seconds."""
    change = "name vLLM's parser for the model, as in --tool-parser hermes, or Generator(tool_parser=...)"
    try:
        reading = parsers_that_read(policy, tools)
    except ConfigError:  # vLLM is not installed, or cannot be tried
        return change
    if not reading:
        return f"none of vLLM's parsers reads a call that its chat template renders; {change}, or another model"
    return f"name one of vLLM's parsers that do: --tool-parser {reading[0]}" + (
        f" (or {', '.join(reading[1:])})" if reading[1:] else ""
    )
