"""One attempt at an episode: observations and replies alternate until the environment or a limit ends it.

The seats act in their order; the module `seat` says what a seat sees. The policy plays the trained seats, its opponents
play the others.

Waits: for replies of generators, and for the environment; each call of the environment has a limit in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from flowrl.agents import ChatTemplate, History
from flowrl.environments import Action, Observation, Step
from flowrl.environments.middle import without_middle
from flowrl.episode import Reply
from flowrl.messages import Int32
from flowrl.nodes.episodes.limits import Limits
from flowrl.nodes.episodes.played import Played, note_no_turn, note_seats
from flowrl.nodes.episodes.seat import Seat, after_system_prompt
from flowrl.nodes.episodes.turn_figures import TurnFigures

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


Ask = Callable[[AskedTurn], Awaitable[Reply]]


class PlayedEpisode(Protocol):
    """What an attempt needs of the environment's episode."""

    @property
    def observations(self) -> Sequence[Observation]: ...
    async def step(self, action: Action, seat: int) -> Step: ...


class Templates:
    """The chat templates of one tokenizer, one for each set of tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, ChatTemplate] = {}

    def decode(self, token_ids: Int32) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def of(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The chat template with these tools. Raises ConfigError if the template's boundaries cannot be found."""
        key = json.dumps([dict(tool) for tool in tools], sort_keys=True)
        if key not in self._known:
            self._known[key] = ChatTemplate(self.tokenizer, tuple(tools))
        return self._known[key]


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
        ask: Ask,
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
        self._elapsed = elapsed or _stopwatch()

    def begin(self, observations: Sequence[Observation]) -> int:
        """Show each seat its first observation; returns the number of tokens that the first seat then reads.

        Raises ConfigError if something cannot be rendered.
        """
        self._seats = [self._seat(number, first) for number, first in enumerate(observations)]
        for observation in observations:
            self._count(observation.metrics)
        self._context = self._seats[0].read()
        return int(self._context.size)

    def _seat(self, number: int, first: Observation) -> Seat:
        return Seat(
            number,
            after_system_prompt(first, self._system_prompt),
            self._templates.of(first.tools),
            history=self._history,
            observation_bytes=self._limits.observation_bytes,
            trained=self._trained is None or number in self._trained,
        )

    async def play(self, episode: PlayedEpisode) -> Played:
        """Play from the first observation to the end. Raises EnvironmentFailed, and what `ask` raises."""
        self.begin(episode.observations)
        seat, step = self._seats[0], Step(Observation())
        while not (cut := self._limit_reached()):
            action, unread = await self._turn(seat, step)
            complaint = self._complaint(seat, action, unread)
            step = complaint or await self._step(episode, action, seat)
            self._reward(seat, step, made=not complaint)
            if step.over:
                cut = "environment" if step.truncated and not step.terminated else ""
                break
            if seat.malformed_in_a_row == MALFORMED_IN_A_ROW:
                cut = "malformed_calls"
                break
            seat = self._next_seat(seat, step, made=not complaint)
            self._context = seat.read()
        self.finished(cut)
        if not self._played.turns and cut != "tokens" and any(seat.turns for seat in self._seats):
            note_no_turn(self._played, self._seats)
        return self._played

    def _limit_reached(self) -> str:
        if sum(seat.turns for seat in self._seats) == self._limits.turns:
            return "turns"
        if self._context.size >= self._tokens:
            return "tokens"
        return "seconds" if self._elapsed() >= self._limits.episode_s else ""

    async def _turn(self, seat: Seat, step: Step) -> tuple[Action, str]:
        """The seat's reply, and why its calls cannot be made ("" if they can); `step` is the step before the reply."""
        context = self._context
        limits = (self._tokens - context.size, self._limits.turn_tokens, step.max_tokens)
        most = min(limit for limit in limits if limit is not None)
        began_s = time.monotonic()
        turn = sum(other.turns for other in self._seats if other.trained == seat.trained)
        if seat.trained and not turn:
            self._played.text = self._templates.decode(context)
        reply = await self._ask(AskedTurn(turn, context, most, step.stop, seat.tools, opponent=not seat.trained))
        seconds = time.monotonic() - began_s
        action, unread = read_action(reply)
        message = {"role": "assistant", "content": action.text} if unread else reply.message
        if seat.trained:
            self._note_turn(reply, TurnFigures.of(reply, context_tokens=int(context.size), seconds=seconds), seat)
        seat.sampled(reply, message, action.tool_calls)
        return action, unread

    def _note_turn(self, reply: Reply, figures: TurnFigures, seat: Seat) -> None:
        played = self._played
        played.turns += 1
        played.figures.append(figures)
        played.later_figures += [figures] if seat.turns else []
        played.finish_reason, played.generator = reply.finish_reason, reply.generator

    def _complaint(self, seat: Seat, action: Action, unread: str) -> Step | None:
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

    async def _step(self, episode: PlayedEpisode, action: Action, seat: Seat) -> Step:
        began_s = time.monotonic()
        with self._outside("an environment's step"):
            step = await episode.step(action, seat.number)
        self._played.step_seconds.append(time.monotonic() - began_s)
        self._count(step.metrics)
        for observation in step.observations:
            self._count(observation.metrics)
        return step

    def _reward(self, seat: Seat, step: Step, *, made: bool) -> None:
        if not made:
            seat.rewarded(0.0)
            return
        for other, reward in zip(self._seats, step.rewards, strict=True):
            other.rewarded(reward)

    def _next_seat(self, seat: Seat, step: Step, *, made: bool) -> Seat:
        """Show the result of the step; return the seat that acts next. After a complaint, that is the same seat."""
        if not made:
            seat.show(step.observations[0])
            return seat
        for other, observation in zip(self._seats, step.observations, strict=True):
            other.show(observation)
        return self._seats[(seat.number + 1) % len(self._seats)]

    def _count(self, metrics: Mapping[str, float]) -> None:
        self._played.metrics.update(metrics)

    def finished(self, cut: str = "") -> Played:
        """The result of the attempt so far; `cut` says what cut it off."""
        self._played.cut = cut
        self._played.seconds = self._elapsed()
        note_seats(self._played, self._seats)
        return self._played


def _stopwatch() -> Callable[[], float]:
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s


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
