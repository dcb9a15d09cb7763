"""The built-in task: sums small enough that a character model of a few hundred thousand weights can learn them.

Its demonstrations are imperfect on purpose: two in three forget every carry. A model that imitates them
knows both methods of addition and prefers the wrong one. RL, which only sees right or wrong, can teach it
to carry within minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row


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


CARELESS = 2 / 3
"""The share of demonstrations that forget to carry and to borrow."""


def careless_answer(question: str) -> str:
    """The answer to `a+b=` or `a-b=` digit by digit, without any carry or borrow."""
    operator = "+" if "+" in question else "-"
    left, right = question.rstrip("=").split(operator)
    width = max(len(left), len(right))
    sign = 1 if operator == "+" else -1
    pairs = zip(left.zfill(width), right.zfill(width), strict=True)
    return str(int("".join(str((int(a) + sign * int(b)) % 10) for a, b in pairs)))


def demonstrate(row: Row, rng: random.Random) -> str:
    """The answer of an imperfect teacher."""
    return careless_answer(row.prompt) if rng.random() < CARELESS else str(row.answer)
