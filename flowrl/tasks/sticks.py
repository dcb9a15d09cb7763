"""The built-in game of sticks: two players alternately take 1 to `take` sticks, and the player who takes the last one
wins.

As a task, the prompt is what a player has seen and done so far, and the answer is a winning move, if there is one. The
demonstrations are imperfect on purpose: most are random allowed moves. A model that imitates them knows the rules and
plays badly; self-play, which only sees who wins, can teach it to win within minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row

KNOWING = 1 / 5
"""The share of demonstrations that are chosen to win, where a winning move exists."""


@dataclass(frozen=True)
class SticksRules:
    """Options of `sticks`: games begin with `least` to `most` sticks. `seed` sets the games of a task's rows."""

    most: int = 16
    least: int = 6
    take: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"sticks: least is {self.least} and most is {self.most}; it needs 1 <= least <= most")
        if not 1 <= self.take <= 9:
            raise ConfigError(f"sticks: take is {self.take}; it has to be 1 to 9, because a move is one digit")

    def start(self, rng: random.Random) -> int:
        """The number of sticks at the beginning of a game."""
        return rng.randint(self.least, self.most)

    def move(self, text: str, left: int) -> int:
        """The number of sticks that a reply takes; 0 if the reply is no allowed move."""
        text = text.strip()
        moves = {str(number): number for number in self.moves(left)}
        return moves.get(text, 0)

    def moves(self, left: int) -> range:
        """The allowed moves."""
        return range(1, min(self.take, left) + 1)

    def winning(self, left: int) -> int:
        """The move after which the other player loses against the best play; 0 if there is none."""
        return left % (self.take + 1)

    def rows(self) -> Iterator[Row]:
        """What a player has seen and done in a random game, and a best move; games of all lengths."""
        rng = random.Random(self.seed)
        for turns in range(1 + self.most // 2):
            for _ in range(GAMES):
                if row := self._row(turns, rng):
                    yield row

    def _row(self, turns: int, rng: random.Random) -> Row | None:
        """A game in which the player has already made `turns` moves; None if the game is over by then."""
        left = self.start(rng)
        if rng.random() < 0.5:  # the other player begins
            left -= rng.choice(self.moves(left))
        messages = []
        for _ in range(turns):
            if left == 0:
                return None
            mine = rng.choice(self.moves(left))
            messages += [{"role": "user", "content": str(left)}, {"role": "assistant", "content": str(mine)}]
            left -= mine
            left -= rng.choice(self.moves(left)) if left else 0
        if left == 0:
            return None
        answer = str(self.winning(left) or rng.choice(self.moves(left)))
        return Row((*messages, {"role": "user", "content": str(left)}), {"answer": answer, "left": left})


GAMES = 400
"""Number of games that are played to get the rows of one length."""


def demonstrate_move(rules: SticksRules, row: Row, rng: random.Random) -> str:
    """The move of an imperfect player."""
    left = int(row.columns["left"])
    best = rules.winning(left)
    return str(best if best and rng.random() < KNOWING else rng.choice(rules.moves(left)))
