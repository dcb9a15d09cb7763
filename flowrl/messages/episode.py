"""The messages between those who ask a policy and its generators, and the episodes that are made of replies.

Array axes: T tokens of an episode, N sampled tokens of a reply.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowrlError
from flowrl.messages import Branch, Column, Float32, Int32, Message, Prompt, Record, Sample, Scored, no_ids, no_logprobs
from flowrl.messages.sampling import ReplySchema, Sampling

LAST_PLACE = 1 << 30
"""The priority of requests without a ticket; those under a ticket come first, the oldest ticket before all."""


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
    """A request to a generator: continue `token_ids`, or answer `messages`, with one reply."""

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
    """Seed of the sampler: a hash that no other request of the run has."""
    token_ids: Int32
    """The whole context, or its beginning if there are `messages`."""
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
    trained: bool = True
    """Whether the reply is for training. Tokens of other replies (an opponent's, a judge's) are not booked."""
    sampling: Sampling | None = None
    """How the reply is sampled; None: as the generator samples for training, or for evaluation without a ticket."""
    schema: ReplySchema | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """A conversation to answer, which the generator renders. After `token_ids`, the first message is the reply that
    these end with."""
    reply_tokens: int = 0
    """Number of tokens at the end of `token_ids` that were sampled as the reply `messages[0]`."""

    @property
    def priority(self) -> int:
        """The smaller number is served first."""
        return self.ticket if self.ticket >= 0 else LAST_PLACE


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
    context_ids: Int32 = field(default_factory=no_ids)
    """What the reply continues: made by the generator for a turn with `messages`, and by an Ask port for all."""
    sample_id: str = ""
    """Only from an Ask port: the sample that the tokens are booked for, "" for a reply that is not trained."""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """By name, what the sampling asks for: entropy [N], top_logprobs [N, K] and top_token_ids [N, K]."""

    @property
    def text(self) -> str:
        """The content of `message`."""
        return str(self.message.get("content") or "")


def empty_reply(turn: Turn) -> Reply:
    """The reply to a turn that was given up."""
    return Reply(
        request_id=turn.request_id,
        token_ids=no_ids(),
        behavior_logprobs=no_logprobs(),
        versions=no_ids(),
        finish_reason="",
        message={},
        malformed="",
        cached_tokens=0,
        queued_s=0.0,
        generated_s=0.0,
        generator="",
    )


def make_sample(prompt: Prompt, replies: Sequence[Reply], **content: Any) -> Sample:
    """The sample that consists of `replies`, with their ids, logprobs and versions; `content` sets further fields.

    A reply whose context begins with everything up to an earlier reply, and something more, continues that reply's
    sequence; any other begins a sequence of its own. Raises FlowrlError for replies that were not asked for the prompt
    with trained=True.
    """
    if not replies:
        raise FlowrlError(f"sample {prompt.sample_id!r} was made of no replies; drop the prompt instead")
    for reply in replies:
        if reply.sample_id != prompt.sample_id:
            asked = f"for sample {reply.sample_id!r}" if reply.sample_id else "with trained=False"
            raise FlowrlError(
                f"sample {prompt.sample_id!r} was made of the reply {reply.request_id!r}, which was asked {asked}; "
                "make a sample of replies that were asked for it with trained=True"
            )
    if len({reply.request_id for reply in replies}) < len(replies):
        raise FlowrlError(f"sample {prompt.sample_id!r} was made of one reply twice; name each reply once")
    first, *further = join_replies(replies)
    ids = replies[0].context_ids
    fields: dict[str, Any] = {
        "response_text": "".join(reply.text for reply in replies),
        "prompt_tokens": ids.size,
        "truncated": replies[-1].finish_reason != "stop",
        "generator": replies[-1].generator,
        "generated_s": time.time(),
        "branches": tuple(further),
    }
    arrays = {name: getattr(first, name) for name in ("token_ids", "policy_mask", "behavior_logprobs", "versions")}
    sample = Sample.of_prompt(prompt, **{**fields, **arrays, **content})
    for column in COLUMNS_OF_REPLIES if all(reply.columns for reply in replies) else ():
        if column in replies[0].columns:
            ordered = (reply for parts in _order_replies(replies) for reply in parts)
            values = np.concatenate([reply.columns[column] for reply in ordered])
            whole = np.zeros((sample.num_tokens, *values.shape[1:]), values.dtype)
            whole[sample.whole_mask] = values
            sample = sample.with_column(Column(column, str(values.dtype), values.shape[1:]), whole)
    return sample


COLUMNS_OF_REPLIES = ("entropy", "top_logprobs", "top_token_ids")


def join_replies(replies: Sequence[Reply]) -> list[Branch]:
    """The sequences of replies, in the order of their beginnings."""
    return [_join_sequence(parts) for parts in _order_replies(replies)]


def _order_replies(replies: Sequence[Reply]) -> list[list[Reply]]:
    """The replies of each sequence."""
    joined: list[list[Reply]] = []
    for reply in replies:
        for earlier in joined:
            last = earlier[-1]
            whole = np.concatenate([last.context_ids, last.token_ids])
            # At once after a reply, the two would be one span of sampled tokens, which no request has sampled.
            if reply.context_ids.size > whole.size and np.array_equal(reply.context_ids[: whole.size], whole):
                earlier.append(reply)
                break
        else:
            joined.append([reply])
    return joined


def _join_sequence(replies: Sequence[Reply]) -> Branch:
    last = replies[-1]
    ids = np.concatenate([last.context_ids, last.token_ids]).astype(np.int32)
    mask, logprobs = np.zeros(ids.size, np.bool_), np.zeros(ids.size, np.float32)
    versions = np.full(ids.size, -1, np.int32)
    for reply in replies:
        place = slice(reply.context_ids.size, reply.context_ids.size + reply.token_ids.size)
        mask[place], logprobs[place], versions[place] = True, reply.behavior_logprobs, reply.versions
    return Branch(ids, mask, logprobs, versions)


@dataclass(frozen=True)
class AskRecord(Record):
    """What a checkpoint keeps of the asks of one item: the replies, and a digest of the call that each answers."""

    replies: tuple[Reply, ...] = ()
    calls: tuple[bytes, ...] = ()
    sampled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Sample that is made and booked -> ids of the requests whose replies are in it."""


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
