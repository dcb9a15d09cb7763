"""The built-in task: sums small enough that a character model of a few hundred thousand weights can learn them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row


@dataclass(frozen=True)
class Arithmetic:
    """Options of `arithmetic`: every problem `a+b=` with 0 <= a, b <= `max_value`, in an order set by `seed`."""

    max_value: int = 99
    operators: str = "+"
    """Any of `+` and `-`; differences are never negative."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_value < 1:
            raise ConfigError(f"arithmetic: max_value is {self.max_value} and needs at least 1")
        if not self.operators or set(self.operators) - set("+-"):
            raise ConfigError(f"arithmetic: operators is {self.operators!r}; it may hold + and -")

    def rows(self) -> Iterator[Row]:
        """All problems, shuffled."""
        problems = [
            (f"{a}{op}{b}=", str(a + b if op == "+" else a - b))
            for op in self.operators
            for a in range(self.max_value + 1)
            for b in range(self.max_value + 1)
            if op == "+" or a >= b
        ]
        random.Random(self.seed).shuffle(problems)
        for question, answer in problems:
            yield Row.ask(question, answer=answer)
