"""One attempt at an episode: observations and replies by turns, until the environment or a limit ends it.

Waits: for replies of the generator, and for the environment, whose every call has a limit in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowrl.agents import ChatTemplate, Conversation, History, TokenSequence
from flowrl.environments import Action, Observation, Step
from flowrl.environments.middle import without_middle
from flowrl.episode import Reply
from flowrl.messages import Int32
from flowrl.nodes.limits import Limits
from flowrl.nodes.turn_figures import TurnFigures

MALFORMED_IN_A_ROW = 3
NAME_BYTES = 256
"""Of a tool's name as the policy wrote it."""


@dataclass(frozen=True)
class AskedTurn:
    """What an attempt asks the generator."""

    turn: int
    token_ids: Int32
    max_tokens: int
    stop: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...]


Ask = Callable[[AskedTurn], Awaitable[Reply]]


class PlayedEpisode(Protocol):
    """What an attempt needs of the environment's episode."""

    @property
    def observation(self) -> Observation: ...
    async def step(self, action: Action) -> Step: ...


@dataclass
class Played:
    """What an attempt has come to."""

    cut: str = ""
    """turns, tokens, seconds, malformed_calls or environment; "" if the episode ended by its own rules."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(index of the turn's last policy token, through all sequences, reward)"""
    turns: int = 0
    finish_reason: str = ""
    """Of the last reply."""
    step_seconds: list[float] = field(default_factory=list)
    """Of each of the environment's steps."""
    seconds: float = 0.0
    """From the first observation to the end."""
    figures: list[TurnFigures] = field(default_factory=list)
    """Of each reply."""
    malformed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment counted: of each name, its last value."""
    sequences: tuple[TokenSequence, ...] = ()
    """() if nothing was sampled."""
    text: str = ""
    """The first context, decoded."""
    generator: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Everything fed and answered."""

    @property
    def reward(self) -> float:
        """The sum over turns."""
        return sum(reward for _, reward in self.rewards)


class Templates:
    """The chat templates of one tokenizer, one for each set of tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, ChatTemplate] = {}

    def decode(self, token_ids: Int32) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def of(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Raises ConfigError if the template's boundaries cannot be found."""
        key = json.dumps([dict(tool) for tool in tools], sort_keys=True)
        if key not in self._known:
            self._known[key] = ChatTemplate(self.tokenizer, tuple(tools))
        return self._known[key]


class Attempt:
    """Plays one episode. `tokens` is the most that a sequence of it may have.

    `elapsed` gives the seconds that count against `limits.episode_s`; without it they count from here.
    """

    def __init__(
        self,
        templates: Templates,
        limits: Limits,
        tokens: int,
        *,
        ask: Ask,
        history: History = "append",
        elapsed: Callable[[], float] | None = None,
        outside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._templates = templates
        self._limits = limits
        self._tokens = tokens
        self._ask = ask
        self._history: History = history
        self._outside = outside
        self._played = Played()
        self._malformed_in_a_row = 0
        self._elapsed = elapsed or _stopwatch()

    def begin(self, observation: Observation) -> int:
        """Feed the first observation; returns the number of its tokens. Raises ConfigError if it cannot be rendered."""
        self._tools = observation.tools
        self._conversation = Conversation(self._templates.of(self._tools), history=self._history)
        self._conversation.feed(messages_of(observation, (), self._limits.observation_bytes))
        self._count(observation.metrics)
        return int(self._conversation.context().size)

    async def play(self, episode: PlayedEpisode) -> Played:
        """From the first observation to the end. Raises EnvironmentFailed, and what `ask` raises."""
        self.begin(episode.observation)
        step = Step(Observation())
        while not (cut := self._limit_reached()):
            action, unread = await self._turn(step)
            step = self._complaint(action, unread) or await self._step(episode, action)
            self._reward(step)
            if step.over:
                cut = "environment" if step.truncated and not step.terminated else ""
                break
            if self._malformed_in_a_row == MALFORMED_IN_A_ROW:
                cut = "malformed_calls"
                break
            self._conversation.feed(
                messages_of(step.observations[0], action.tool_calls, self._limits.observation_bytes)
            )
        return self.finished(cut)

    def _limit_reached(self) -> str:
        if self._played.turns == self._limits.turns:
            return "turns"
        if self._conversation.context().size >= self._tokens:
            return "tokens"
        return "seconds" if self._elapsed() >= self._limits.episode_s else ""

    async def _turn(self, step: Step) -> tuple[Action, str]:
        """The next reply, and why its calls cannot be made ("" if they can); `step` is the one before it."""
        context = self._conversation.context()
        limits = (self._tokens - context.size, self._limits.turn_tokens, step.max_tokens)
        most = min(limit for limit in limits if limit is not None)
        played, began_s = self._played, time.monotonic()
        if not played.turns:
            played.text = self._conversation.template.decode(context)
        reply = await self._ask(AskedTurn(played.turns, context, most, step.stop, self._tools))
        seconds = time.monotonic() - began_s
        action, unread = read_action(reply)
        message = {"role": "assistant", "content": action.text} if unread else reply.message
        self._conversation.sampled(reply.token_ids, reply.behavior_logprobs, reply.versions, message)
        played.turns += 1
        played.figures.append(TurnFigures.of(reply, context_tokens=int(context.size), seconds=seconds))
        played.finish_reason, played.generator = reply.finish_reason, reply.generator
        self._last_token = self._conversation.num_tokens - 1
        return action, unread

    def _complaint(self, action: Action, unread: str) -> Step | None:
        """What the policy is told in place of a step if it called what cannot be called; None if it did not."""
        known = [str(tool["function"]["name"]) for tool in self._tools]
        strange = [call.name for call in action.tool_calls if call.name not in known]
        if not unread and not strange:
            self._malformed_in_a_row = 0
            return None
        self._malformed_in_a_row += 1
        self._played.malformed += 1
        if unread:
            return Step(Observation(f"The call could not be read: {unread}. Nothing was called."))
        names = ", ".join(without_middle(name, NAME_BYTES) for name in strange)
        return Step(Observation(f"There is no tool {names}; the tools are {', '.join(known)}. Nothing was called."))

    async def _step(self, episode: PlayedEpisode, action: Action) -> Step:
        began_s = time.monotonic()
        with self._outside("an environment's step"):
            step = await episode.step(action)
        self._played.step_seconds.append(time.monotonic() - began_s)
        self._count(step.metrics)
        for observation in step.observations:
            self._count(observation.metrics)
        return step

    def _reward(self, step: Step) -> None:
        (reward,) = step.rewards
        self._played.rewards.append((self._last_token, reward))

    def _count(self, metrics: Mapping[str, float]) -> None:
        self._played.metrics.update(metrics)

    def finished(self, cut: str = "") -> Played:
        """What the attempt has come to until now."""
        self._played.cut = cut
        self._played.seconds = self._elapsed()
        self._played.messages = self._conversation.messages
        self._played.sequences = self._conversation.sequences()
        return self._played


def _stopwatch() -> Callable[[], float]:
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


def read_action(reply: Reply) -> tuple[Action, str]:
    """The reply as an action, and why its calls cannot be made; "" if they can, or if there is none.

    A reply that its limit of tokens cut off makes no call: what was to follow is not known.
    """
    ids, reason = tuple(reply.token_ids.tolist()), reply.finish_reason
    unread = reply.malformed
    if reply.message.get("tool_calls") and reason == "length":
        unread = "the reply was cut off at its limit of tokens"
    message = {"content": reply.message.get("content") or ""} if unread else reply.message
    return Action.of_message(message, token_ids=ids, finish_reason=reason), unread


def messages_of(observation: Observation, calls: Sequence[Any], most_bytes: int) -> list[Mapping[str, Any]]:
    """An observation as messages, each at most `most_bytes` long.

    A text is one message of the user. After `calls` it is the answer to the first of them, and the others have an
    empty one.
    """
    if observation.messages:
        return [
            {**message, "content": without_middle(message["content"], most_bytes)} for message in observation.messages
        ]
    text = without_middle(observation.text, most_bytes)
    if not calls:
        return [{"role": "user", "content": text}]
    return [
        {"role": "tool", "content": "" if index else text, "name": call.name, "tool_call_id": call.call_id}
        for index, call in enumerate(calls)
    ]
