"""The two built-in tasks, small enough that a character model of a few hundred thousand weights can learn them.

`arithmetic` asks for sums. `sticks` is a game: two players alternately take 1 to `take` sticks, and the player who
takes the last one wins; the prompt is what a player has seen and done so far, and the answer is a winning move, if
there is one.

Their demonstrations are imperfect on purpose: two sums in three forget every carry, and most moves are random allowed
ones. A model that imitates them knows the rules and plays badly. RL, which only sees right or wrong, or who wins, can
teach it to carry, or to win, within minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row

CARELESS = 2 / 3
"""The share of demonstrations that forget to carry and to borrow."""
KNOWING = 1 / 5
"""The share of demonstrated moves that are chosen to win, where a winning move exists."""
GAMES = 400
"""Number of games that are played to get the rows of one length."""


@dataclass(frozen=True)
class Arithmetic:
    """Options of `arithmetic`: every problem `a+b=` with `min_value` <= a, b <= `max_value`.

    `seed` sets their order.
    """

    max_value: int = 99
    operators: str = "+"
    """Any of `+` and `-`; differences are never negative."""
    seed: int = 0
    min_value: int = 0

    def __post_init__(self) -> None:
        if self.max_value < 1:
            raise ConfigError(f"arithmetic: max_value is {self.max_value} and needs at least 1")
        if not 0 <= self.min_value < self.max_value:
            raise ConfigError(
                f"arithmetic: min_value is {self.min_value} and needs at least 0 and less than max_value, "
                f"which is {self.max_value}"
            )
        if not self.operators or set(self.operators) - set("+-"):
            raise ConfigError(f"arithmetic: operators is {self.operators!r}; it may hold + and -")

    def rows(self) -> Iterator[Row]:
        """All problems, shuffled."""
        numbers = range(self.min_value, self.max_value + 1)
        problems = [
            (f"{a}{op}{b}=", str(a + b if op == "+" else a - b))
            for op in self.operators
            for a in numbers
            for b in numbers
            if op == "+" or a >= b
        ]
        random.Random(self.seed).shuffle(problems)
        for question, answer in problems:
            yield Row.ask(question, answer=answer)


def careless_answer(question: str) -> str:
    """The answer to `a+b=` or `a-b=` digit by digit, without any carry or borrow."""
    operator = "+" if "+" in question else "-"
    left, right = question.rstrip("=").split(operator)
    width = max(len(left), len(right))
    sign = 1 if operator == "+" else -1
    pairs = zip(left.zfill(width), right.zfill(width), strict=True)
    return str(int("".join(str((int(a) + sign * int(b)) % 10) for a, b in pairs)))


def demonstrate_sum(row: Row, rng: random.Random) -> str:
    """The answer of an imperfect teacher."""
    return careless_answer(row.prompt) if rng.random() < CARELESS else str(row.answer)


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

    def draw_start(self, rng: random.Random) -> int:
        """The number of sticks at the beginning of a game."""
        return rng.randint(self.least, self.most)

    def parse_move(self, text: str, left: int) -> int:
        """The number of sticks that a reply takes; 0 if the reply is no allowed move."""
        text = text.strip()
        moves = {str(number): number for number in self.allowed_moves(left)}
        return moves.get(text, 0)

    def allowed_moves(self, left: int) -> range:
        """The allowed moves."""
        return range(1, min(self.take, left) + 1)

    def winning_move(self, left: int) -> int:
        """The move after which the other player loses against the best play; 0 if there is none."""
        return left % (self.take + 1)

    def rows(self) -> Iterator[Row]:
        """What a player has seen and done in a random game, and a best move; games of all lengths."""
        rng = random.Random(self.seed)
        for turns in range(1 + self.most // 2):
            for _ in range(GAMES):
                if row := self._play_row(turns, rng):
                    yield row

    def _play_row(self, turns: int, rng: random.Random) -> Row | None:
        """A game in which the player has already made `turns` moves; None if the game is over by then."""
        left = self.draw_start(rng)
        if rng.random() < 0.5:  # the other player begins
            left -= rng.choice(self.allowed_moves(left))
        messages = []
        for _ in range(turns):
            if left == 0:
                return None
            mine = rng.choice(self.allowed_moves(left))
            messages += [{"role": "user", "content": str(left)}, {"role": "assistant", "content": str(mine)}]
            left -= mine
            left -= rng.choice(self.allowed_moves(left)) if left else 0
        if left == 0:
            return None
        answer = str(self.winning_move(left) or rng.choice(self.allowed_moves(left)))
        return Row((*messages, {"role": "user", "content": str(left)}), {"answer": answer, "left": left})


def demonstrate_move(rules: SticksRules, row: Row, rng: random.Random) -> str:
    """The move of an imperfect player."""
    left = int(row.columns["left"])
    best = rules.winning_move(left)
    return str(best if best and rng.random() < KNOWING else rng.choice(rules.allowed_moves(left)))
