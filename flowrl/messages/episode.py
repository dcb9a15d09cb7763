"""The messages of episodes: the requests of environments to generators, the replies, and the finished episodes.

Array axes: T tokens of an episode, N sampled tokens of a reply.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.messages import Float32, Int32, Message, Prompt, Record, Sample, Scored, no_ids, no_logprobs


@dataclass(frozen=True)
class Episode(Scored):
    """A finished episode: a scored sample whose reply tokens alternate with what the environment said.

    The reward is the sum of what the environment gave in each turn; `turn_rewards` is empty. If the environment has
    several seats, the sequences are those of the seats that the policy has played, seat by seat, and the reward is
    the mean of `seat_rewards`.
    """

    turns: int = 0
    """Number of replies."""
    attempts: int = 1
    """Number of times that the episode was started; all attempts but the last were void."""
    environment: str = ""
    """The environment's name, without options."""
    cut: str = ""
    """What cut the episode off (a word); "" if it ended by its own rules."""
    masked: bool = False
    """Whether the episode stays out of the loss and only takes part in the comparison within its group."""
    rewards_by_turn: tuple[tuple[int, float], ...] = ()
    """(index of the turn's last policy token, reward) of each turn, in order. The index counts through all sequences.
    The rewards are those after shaping: their sum is `reward` or, over the turns of one seat, the reward of that
    seat."""


@dataclass(frozen=True)
class Turn(Message):
    """A request of an episode to a generator: continue `token_ids` with one reply."""

    request_id: str
    """Unique within the run."""
    sample_id: str
    group_id: str
    turn: int
    """From 0 within the attempt."""
    attempt: int
    """From 0."""
    ticket: int
    """The group's ticket: smaller tickets are served first. -1 for held-out episodes, which come last."""
    seed: int
    """Seed of the sampler: a hash of the sample's seed, the attempt, the turn, and whether an opponent is asked."""
    token_ids: Int32
    """The whole context."""
    max_tokens: int
    """Maximum number of tokens in the reply."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply, besides those of the generator's sampling."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the policy may call, in OpenAI's form: what a parser of calls has to know."""
    prefix_token_ids: Int32 = field(default_factory=no_ids)
    """The beginning of the reply, which was sampled before a checkpoint; these arrays are equally long."""
    prefix_logprobs: Float32 = field(default_factory=no_logprobs)
    prefix_versions: Int32 = field(default_factory=no_ids)
    opponent: bool = False
    """Whether an opponent of the policy is asked: its tokens count as the environment's, and are not booked."""


@dataclass(frozen=True)
class Reply(Message):
    """The answer to a `Turn`; N sampled tokens."""

    request_id: str
    token_ids: Int32
    """[N], the end token included if it was sampled."""
    behavior_logprobs: Float32
    """[N]"""
    versions: Int32
    """[N]"""
    finish_reason: str
    """stop | length"""
    message: Mapping[str, Any]
    """The reply as a message of a conversation: role, content, and tool calls if there are any."""
    malformed: str
    """Why a tool call in the reply could not be parsed; "" if there was no call or all were parsed."""
    cached_tokens: int
    """Tokens of the context whose keys and values were in the prefix cache."""
    queued_s: float
    """Seconds from the request's arrival to its start in vLLM."""
    generated_s: float
    """Seconds from its start in vLLM to its end."""
    generator: str
    """Node replica that answered, as "generator/0"."""

    def as_sample(self, prompt: Prompt, text: str) -> Sample:
        """The rollout of `prompt`, whose `token_ids` were the turn's, with this reply as its response `text`.

        Only the reply is the policy's: a prompt that begins with a part of another rollout has that part as context.
        """
        before, tokens = len(prompt.token_ids), len(self.token_ids)
        return Sample.of(
            prompt,
            response_text=text,
            token_ids=np.concatenate([prompt.token_ids, self.token_ids]).astype(np.int32),
            policy_mask=np.arange(before + tokens) >= before,
            behavior_logprobs=np.concatenate([np.zeros(before, np.float32), self.behavior_logprobs]),
            versions=np.concatenate([np.full(before, -1, np.int32), self.versions]),
            prompt_tokens=before,
            truncated=self.finish_reason != "stop",
            generator=self.generator,
            generated_s=time.time(),
        )


@dataclass(frozen=True)
class EpisodeRecord(Record):
    """What a checkpoint keeps of an unfinished episode; T tokens of its context."""

    attempt: int = 0
    """From 0."""
    failed: int = 0
    """Attempts that the environment has made void."""
    seconds: float = 0.0
    """Seconds since the attempt started."""
    replies: tuple[Reply, ...] = ()
    """Replies of the attempt's turns, in order; for an agent's program, in the order in which they ended."""
    calls: tuple[bytes, ...] = ()
    """Only for agents' programs: digests of the requests that `replies` answer and, if there is one, of the open
    request."""
    context_ids: Int32 = field(default_factory=no_ids)
    """[T], all tokens fed and sampled up to the episode's newest request."""
    first: tuple[Mapping[str, Any], ...] | None = None
    """What the environment showed each seat at first, as plain data; None before it has done so."""
    steps: tuple[Mapping[str, Any], ...] = ()
    """The environment's steps, as plain data."""
    state: bytes | None = None
    """What the environment saved after the last of these steps; None if it saves nothing."""
