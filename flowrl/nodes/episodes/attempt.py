"""One attempt at an episode: observations and replies alternate until the environment or a limit ends it.

The seats act in their order. An environment for one player has one seat. Seats never share tokens: what one seat does,
another sees only in what the environment shows to it. The policy plays the trained seats, its opponents play the
others. `Played` is the result.

Waits: for replies of generators, and for the environment; each call of the environment has a limit in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np

from flowrl.agents import ChatTemplate, Conversation, History, TokenSequence
from flowrl.agents.chat_template import Templates
from flowrl.environments import Action, Observation, Step
from flowrl.environments.protocol import LEAST_BYTES, without_middle
from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.messages.episode import Reply

OnTruncated = Literal["train", "mask", "drop"]
LEAST = {"turns": 1, "tokens": 2, "turn_tokens": 1, "episodes": 1, "retries": 0, "observation_bytes": LEAST_BYTES}


@dataclass(frozen=True)
class Limits:
    """Bounds of one episode, of the attempts at it, and of the number of episodes at a time."""

    turns: int = 32
    """Most replies in an episode."""
    tokens: int | None = None
    """Most tokens of the whole episode, or of each of its sequences; None: as many as the model's context takes."""
    turn_tokens: int | None = None
    """Most tokens of one reply; None: as many as the generator's sampling allows."""
    reset_s: float = 120.0
    """Most seconds for the environment's reset."""
    step_s: float = 60.0
    """Most seconds for one step of the environment."""
    episode_s: float = 1800.0
    """Most seconds for an attempt; checked between turns."""
    expected_s: float | None = None
    """Your estimate of the seconds that an episode takes on average. It bounds nothing; `flowrl check` uses it to
    estimate the time of a step."""
    observation_bytes: int = 65536
    """Longest text of one message of the environment, in bytes of UTF-8; the middle of a longer text is cut out and
    marked."""
    episodes: int = 1024
    """Most episodes at a time."""
    retries: int = 2
    """Attempts after the first, if the environment failed."""
    on_truncated: OnTruncated = "train"
    """An episode that was cut off by turns, tokens, seconds or malformed calls is trained with the reward it has
    (train), kept out of the loss but compared with its group (mask), or dropped (drop)."""

    def find_problems(self) -> Iterator[str]:
        """Sentences that say what is wrong with a value."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"limits.{name} is {value}; it has to be {least} or more"
        for name in ("reset_s", "step_s", "episode_s", "expected_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"limits.{name} is {value}; it has to be above 0"
        if self.expected_s is not None and self.expected_s >= self.episode_s:
            yield (
                f"limits.expected_s is {self.expected_s:g}, but limits.episode_s ends an attempt after "
                f"{self.episode_s:g} s; raise episode_s"
            )
        if self.on_truncated not in get_args(OnTruncated):
            yield f"limits.on_truncated is {self.on_truncated!r}; choose one of {', '.join(get_args(OnTruncated))}"


MALFORMED_IN_A_ROW = 3
NAME_BYTES = 256
"""Most bytes that are shown of a tool's name as the policy wrote it."""


@dataclass(frozen=True)
class AskedTurn:
    """An attempt's request to a generator for one reply."""

    turn: int
    """Number of the turn, from 0, among the policy's turns in the attempt, or among those of its opponents."""
    token_ids: Int32
    max_tokens: int
    stop: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...]
    opponent: bool = False
    """Whether an opponent of the policy is asked."""


AskTurn = Callable[[AskedTurn], Awaitable[Reply]]


class PlayedEpisode(Protocol):
    """What an attempt needs of the environment's episode."""

    @property
    def observations(self) -> Sequence[Observation]: ...
    async def step(self, action: Action, seat: int) -> Step: ...


class Attempt:
    """Plays one episode. `tokens` is the largest number of tokens that a sequence of the episode may have.

    With a `system_prompt`, each seat's conversation begins with it.
    `trained` are the seats that the policy plays (None: all). `elapsed` gives the seconds that count against
    `limits.episode_s`; without it, seconds count from the creation of this object.
    """

    def __init__(
        self,
        templates: Templates,
        limits: Limits,
        tokens: int,
        *,
        ask: AskTurn,
        history: History = "append",
        system_prompt: str = "",
        trained: Collection[int] | None = None,
        elapsed: Callable[[], float] | None = None,
        outside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._templates = templates
        self._limits = limits
        self._tokens = tokens
        self._ask = ask
        self._history: History = history
        self._system_prompt = system_prompt
        self._trained = trained
        self._outside = outside
        self._played = Played()
        self._seats: list[Seat] = []
        began_s = time.monotonic()
        self._elapsed = elapsed or (lambda: time.monotonic() - began_s)

    def show_first(self, observations: Sequence[Observation]) -> int:
        """Show each seat its first observation; returns the number of tokens that the first seat then reads.

        Raises ConfigError if something cannot be rendered.
        """
        self._seats = [
            Seat(
                number,
                after_system_prompt(first, self._system_prompt),
                self._templates.with_tools(first.tools),
                history=self._history,
                observation_bytes=self._limits.observation_bytes,
                trained=self._trained is None or number in self._trained,
            )
            for number, first in enumerate(observations)
        ]
        for observation in observations:
            self._played.metrics.update(observation.metrics)
        self._context = self._seats[0].read_shown()
        return int(self._context.size)

    async def play_episode(self, episode: PlayedEpisode) -> Played:
        """Play from the first observation to the end. Raises EnvironmentFailed, and what `ask` raises."""
        self.show_first(episode.observations)
        seat, step = self._seats[0], Step(Observation())
        while not (cut := self._limit_reached()):
            action, unread = await self._play_turn(seat, step)
            complaint = self._complain_of_calls(seat, action, unread)
            if complaint is not None:  # nothing was made of the reply, and the same seat acts again
                step = complaint
                seat.add_reward(0.0)
            else:
                began_s = time.monotonic()
                with self._outside("an environment's step"):
                    step = await episode.step(action, seat.number)
                self._played.step_seconds.append(time.monotonic() - began_s)
                self._played.metrics.update(step.metrics)
                for observation in step.observations:
                    self._played.metrics.update(observation.metrics)
                for other, reward in zip(self._seats, step.rewards, strict=True):
                    other.add_reward(reward)
            if step.over:
                cut = "environment" if step.truncated and not step.terminated else ""
                break
            if seat.malformed_in_a_row == MALFORMED_IN_A_ROW:
                cut = "malformed_calls"
                break
            if complaint is not None:
                seat.show_observation(step.observations[0])
            else:
                for other, observation in zip(self._seats, step.observations, strict=True):
                    other.show_observation(observation)
                seat = self._seats[(seat.number + 1) % len(self._seats)]
            self._context = seat.read_shown()
        self.note_end(cut)
        if not self._played.turns and cut != "tokens" and any(seat.turns for seat in self._seats):
            # The opponents ended the game before the policy's first turn: its sequence is what it would have read.
            waiting = next(seat for seat in self._seats if seat.trained)
            ids = waiting.conversation.context() if waiting.reading else waiting.read_shown()
            nothing = (np.zeros(ids.size, np.bool_), np.zeros(ids.size, np.float32), np.full(ids.size, -1, np.int32))
            self._played.sequences = (TokenSequence(ids, *nothing),)
            self._played.messages = (waiting.conversation.messages,)
            self._played.seats = (waiting.number,) if len(self._seats) > 1 else ()
        return self._played

    def _limit_reached(self) -> str:
        if sum(seat.turns for seat in self._seats) == self._limits.turns:
            return "turns"
        if self._context.size >= self._tokens:
            return "tokens"
        return "seconds" if self._elapsed() >= self._limits.episode_s else ""

    async def _play_turn(self, seat: Seat, step: Step) -> tuple[Action, str]:
        """The seat's reply, and why its calls cannot be made ("" if they can); `step` is the step before the reply."""
        context = self._context
        limits = (self._tokens - context.size, self._limits.turn_tokens, step.max_tokens)
        most = min(limit for limit in limits if limit is not None)
        began_s = time.monotonic()
        turn = sum(other.turns for other in self._seats if other.trained == seat.trained)
        if seat.trained and not turn:
            self._played.text = self._templates.decode_text(context)
        reply = await self._ask(AskedTurn(turn, context, most, step.stop, seat.tools, opponent=not seat.trained))
        seconds = time.monotonic() - began_s
        action, unread = read_action(reply)
        message = {"role": "assistant", "content": action.text} if unread else reply.message
        if seat.trained:
            played, figures = self._played, figures_of(reply, context_tokens=int(context.size), seconds=seconds)
            played.turns += 1
            played.figures.append(figures)
            played.later_figures += [figures] if seat.turns else []
            played.finish_reason, played.generator = reply.finish_reason, reply.generator
        seat.add_reply(reply, message, action.tool_calls)
        return action, unread

    def _complain_of_calls(self, seat: Seat, action: Action, unread: str) -> Step | None:
        """The answer to a seat whose calls cannot be made, in place of the environment's step; None if they can."""
        known = [str(tool["function"]["name"]) for tool in seat.tools]
        strange = [call.name for call in action.tool_calls if call.name not in known]
        if not unread and not strange:
            seat.malformed_in_a_row = 0
            return None
        seat.malformed_in_a_row += 1
        self._played.malformed += seat.trained
        if unread:
            return Step(Observation(f"The call could not be read: {unread.rstrip('.')}. Nothing was called."))
        names = ", ".join(without_middle(name, NAME_BYTES) for name in strange)
        return Step(Observation(f"There is no tool {names}; the tools are {', '.join(known)}. Nothing was called."))

    def note_end(self, cut: str = "") -> Played:
        """The result of the attempt so far; `cut` says what cut it off."""
        self._played.cut = cut
        self._played.seconds = self._elapsed()
        trained = [seat for seat in self._seats if seat.trained]
        found: list[tuple[int, TokenSequence, Messages]] = []
        self._played.rewards = []  # a later call replaces what an earlier one has noted
        before = 0
        for seat in trained:
            found += [(seat.number, sequence, seat.conversation.messages) for sequence in seat.conversation.sequences()]
            self._played.rewards += [(before + place, reward) for place, reward in seat.rewards]
            before += seat.conversation.num_tokens
        self._played.sequences = tuple(sequence for _, sequence, _ in found)
        self._played.messages = tuple(messages for _, _, messages in found)
        if len(self._seats) > 1:
            self._played.seats = tuple(number for number, _, _ in found)
            self._played.seat_rewards = tuple((seat.number, seat.reward) for seat in trained)
            self._played.metrics |= {f"seat_{seat.number}_reward": seat.reward for seat in self._seats}
        return self._played


def read_action(reply: Reply) -> tuple[Action, str]:
    """The reply as an action, and why its calls cannot be made; "" if they can, or if it has no calls.

    A reply that was cut off at its limit of tokens makes no calls: the rest of it is not known.
    """
    ids, reason = tuple(reply.token_ids.tolist()), reply.finish_reason
    unread = reply.malformed
    if reply.message.get("tool_calls") and reason == "length":
        unread = "the reply was cut off at its limit of tokens"
    message = {"content": reply.message.get("content") or ""} if unread else reply.message
    return Action.of_message(message, token_ids=ids, finish_reason=reason), unread


class Seat:
    """Starts with its first observation. `trained`: the policy plays the seat, and the seat's replies are trained."""

    def __init__(
        self,
        number: int,
        first: Observation,
        template: ChatTemplate,
        *,
        history: History,
        observation_bytes: int,
        trained: bool,
    ) -> None:
        self.number = number
        self.trained = trained
        self.tools = first.tools
        self.conversation = Conversation(template, history=history)
        self.turns = 0
        self.malformed_in_a_row = 0
        self.rewards: list[tuple[int, float]] = []
        """(index of the turn's last token, through all sequences of this seat, reward)"""
        self.reward = 0.0
        """The sum of all rewards of the seat, including the rewards before its first turn."""
        self._observation_bytes = observation_bytes
        self._shown: list[Observation] = []
        self._calls: Sequence[Any] = ()
        self._early = 0.0
        self.reading = False
        """Whether the seat has been given the context of a reply that it has not given yet."""
        self.show_observation(first)

    def show_observation(self, observation: Observation) -> None:
        """Show an observation, which the seat reads when its next turn begins. An empty observation shows nothing."""
        if observation.text or observation.messages:
            self._shown.append(observation)

    def read_shown(self) -> Int32:
        """Begin the seat's turn: the context of its reply, with everything shown to it since its last reply."""
        self.conversation.feed(join_observations(self._shown, self._calls, self._observation_bytes))
        self._shown, self._calls, self.reading = [], (), True
        return self.conversation.context()

    def add_reply(self, reply: Reply, message: Mapping[str, Any], calls: Sequence[Any]) -> None:
        """Add the seat's reply; `calls` are the calls in it, which the next observation answers."""
        self.conversation.sampled(reply.token_ids, reply.behavior_logprobs, reply.versions, message)
        self.turns += 1
        self._calls, self.reading = calls, False

    def add_reward(self, reward: float) -> None:
        """Add a reward to the seat's last turn. Before its first turn, the reward is kept and added to that turn."""
        self.reward += reward
        if not self.turns:
            self._early += reward
            return
        last = self.conversation.num_tokens - 1
        if self.rewards and self.rewards[-1][0] == last:
            self.rewards[-1] = (last, self.rewards[-1][1] + reward)
        else:
            self.rewards.append((last, reward + self._early))
            self._early = 0.0


def after_system_prompt(first: Observation, prompt: str) -> Observation:
    """`first` after a system message with `prompt`. Raises ConfigError if `first` has its own system message."""
    if not prompt:
        return first
    shown = first.messages or ({"role": "user", "content": first.text},) * bool(first.text)
    if shown and shown[0]["role"] == "system":
        raise ConfigError(
            "the environment begins an episode with a system message of its own, and there is a system prompt besides; "
            "leave --task.system-prompt out"
        )
    return replace(first, text="", messages=({"role": "system", "content": prompt}, *shown))


def join_observations(shown: Sequence[Observation], calls: Sequence[Any], most_bytes: int) -> list[Mapping[str, Any]]:
    """Observations as messages, each at most `most_bytes` long. Several texts become one message, a line for each."""
    if not any(observation.messages for observation in shown):
        return messages_of(Observation("\n".join(observation.text for observation in shown)), calls, most_bytes)
    first, *others = shown
    return [
        *messages_of(first, calls, most_bytes),
        *(message for other in others for message in messages_of(other, (), most_bytes)),
    ]


def messages_of(observation: Observation, calls: Sequence[Any], most_bytes: int) -> list[Mapping[str, Any]]:
    """An observation as messages, each at most `most_bytes` long.

    A text becomes one message of the user. After `calls`, it is the answer to the first call, and the other calls get
    an empty answer.
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


Messages = tuple[Mapping[str, Any], ...]


@dataclass
class Played:
    """Every field is about the seats that the policy plays, unless its text says otherwise."""

    cut: str = ""
    """turns, tokens, seconds, malformed_calls or environment; "" if the episode ended by its own rules."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(index of the turn's last policy token, through all sequences, reward)"""
    turns: int = 0
    finish_reason: str = ""
    """How the last reply ended."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of each step of the environment, including the steps after an opponent's reply."""
    seconds: float = 0.0
    """Seconds from the first observation to the end."""
    figures: list[TurnFigures] = field(default_factory=list)
    """Figures of each reply."""
    later_figures: list[TurnFigures] = field(default_factory=list)
    """The `figures` of all turns after the first turn of their seat."""
    malformed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's metrics: name -> last value."""
    sequences: tuple[TokenSequence, ...] = ()
    """() if nothing was sampled."""
    seats: tuple[int, ...] = ()
    """The seat of each sequence; () if the environment has one seat."""
    seat_rewards: tuple[tuple[int, float], ...] = ()
    """(seat, its reward), also for a seat that had no turn; () if the environment has one seat."""
    text: str = ""
    """The first context, decoded."""
    generator: str = ""
    messages: tuple[Messages, ...] = ()
    """For each sequence, everything that was fed to its seat and answered."""

    @property
    def reward(self) -> float:
        """The sum over turns; with several seats, the mean of their rewards."""
        if self.seat_rewards:
            return sum(reward for _, reward in self.seat_rewards) / len(self.seat_rewards)
        return sum(reward for _, reward in self.rewards)

    def seat_results(self) -> Iterator[tuple[float, list[tuple[int, float]], int]]:
        """Yield (reward, [(place, reward) of each turn], number of policy tokens) for each seat."""
        if not self.seat_rewards:
            yield self.reward, self.rewards, sum(int(one.policy_mask.sum()) for one in self.sequences)
        ends = np.cumsum([one.token_ids.size for one in self.sequences])
        for seat, reward in self.seat_rewards:
            mine = [sequence for sequence, of in zip(self.sequences, self.seats, strict=True) if of == seat]
            turns = [(p, r) for p, r in self.rewards if self.seats[int(np.searchsorted(ends, p, "right"))] == seat]
            yield reward, turns, sum(int(sequence.policy_mask.sum()) for sequence in mine)


@dataclass(frozen=True)
class TurnFigures:
    """The figures of one request for a reply, without the environment's step after it."""

    generate_s: float
    """Seconds in vLLM."""
    slot_s: float
    """The other seconds until the reply: for a place on the edge, at the generator and in vLLM, and in transit."""
    context_tokens: int
    cached_tokens: int


def figures_of(reply: Reply, *, context_tokens: int, seconds: float) -> TurnFigures:
    """The figures of `reply`; `seconds` is the time from the request to the reply."""
    slot_s = max(seconds - reply.generated_s, 0.0)
    return TurnFigures(reply.generated_s, slot_s, context_tokens, reply.cached_tokens)
