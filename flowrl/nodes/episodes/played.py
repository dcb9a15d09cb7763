"""The result of an attempt at an episode, as plain data. It is read from the seats of the module `seat`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.agents import TokenSequence
from flowrl.messages import Int32
from flowrl.nodes.episodes.seat import Seat
from flowrl.nodes.episodes.turn_figures import TurnFigures

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

    def of_seats(self) -> Iterator[tuple[float, list[tuple[int, float]], int]]:
        """Yield (reward, [(place, reward) of each turn], number of policy tokens) for each seat."""
        if not self.seat_rewards:
            yield self.reward, self.rewards, sum(int(one.policy_mask.sum()) for one in self.sequences)
        ends = np.cumsum([one.token_ids.size for one in self.sequences])
        for seat, reward in self.seat_rewards:
            mine = [sequence for sequence, of in zip(self.sequences, self.seats, strict=True) if of == seat]
            turns = [(p, r) for p, r in self.rewards if self.seats[int(np.searchsorted(ends, p, "right"))] == seat]
            yield reward, turns, sum(int(sequence.policy_mask.sum()) for sequence in mine)


def note_seats(played: Played, seats: Sequence[Seat]) -> None:
    """Note the results of the seats in `played`; a later call replaces the notes of an earlier call."""
    trained = [seat for seat in seats if seat.trained]
    found: list[tuple[int, TokenSequence, Messages]] = []
    played.rewards = []
    before = 0
    for seat in trained:
        found += [(seat.number, sequence, seat.conversation.messages) for sequence in seat.conversation.sequences()]
        played.rewards += [(before + place, reward) for place, reward in seat.rewards]
        before += seat.conversation.num_tokens
    played.sequences = tuple(sequence for _, sequence, _ in found)
    played.messages = tuple(messages for _, _, messages in found)
    if len(seats) > 1:
        played.seats = tuple(number for number, _, _ in found)
        played.seat_rewards = tuple((seat.number, seat.reward) for seat in trained)
        played.metrics |= {f"seat_{seat.number}_reward": seat.reward for seat in seats}


def note_no_turn(played: Played, seats: Sequence[Seat]) -> None:
    """The opponents ended the game before the policy's first turn: its sequence is the context it would have read."""
    seat = next(seat for seat in seats if seat.trained)
    played.sequences = (fed_alone(seat.unanswered()),)
    played.messages = (seat.conversation.messages,)
    played.seats = (seat.number,) if len(seats) > 1 else ()


def fed_alone(token_ids: Int32) -> TokenSequence:
    """A sequence in which nothing was sampled."""
    size = token_ids.size
    return TokenSequence(token_ids, np.zeros(size, np.bool_), np.zeros(size, np.float32), np.full(size, -1, np.int32))
