"""An environment of benchmarks/agents/agent_faults.py: sums until one is far off, in a process that fails by chance."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from typing import Any, cast

from flowrl.environments import Action, Env, Observation, Step

NEAR = 5
"""So far from the sum an answer may be, and another one is asked."""
CHANCE = "FLOWRL_BENCHMARK_FAULTS"
KINDS = ("hang", "crash", "kill", "garbage")
NO_OBSERVATION, NO_STEP = cast(Observation, "garbage"), cast(Step, "garbage")
AT_RESET, AT_FIRST, AT_LAST = "reset", "first", "last"


class Faulty(Env):
    """Each attempt fails with the chance `chance` in each of KINDS, whatever its row, its length and its actions.

    It fails at its reset, first or last step; a hanging one only at steps, whose limit is the shorter one. The variable
    CHANCE says the chance, and no option: an option would be part of the rows' names, and of what is drawn from those.
    """

    def __init__(self, most: int = 4, step_s: float = 0.2) -> None:
        self.most, self.step_s = most, step_s
        chance = float(os.environ.get(CHANCE, "0.05"))
        dice = random.SystemRandom()  # not the seed of the episode: another attempt draws anew
        drawn = int(dice.random() // chance) if chance else len(KINDS)
        self.kind = KINDS[drawn] if drawn < len(KINDS) else ""
        self.moment = dice.choice((AT_FIRST, AT_LAST) if self.kind == "hang" else (AT_RESET, AT_FIRST, AT_LAST))

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        if self.kind and self.moment == AT_RESET:
            self.fail()
            return NO_OBSERVATION
        self.random, self.left = random.Random(seed), self.most
        return Observation(self.question())

    def question(self) -> str:
        first, second = self.random.randrange(10, 30), self.random.randrange(1, 10)
        self.answer = str(first + second)
        return f"{first}+{second}="

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.step_s)  # what a tool would take
        said = action.text.strip()
        off = abs(int(said) - int(self.answer)) if said.isdecimal() else None
        self.left -= 1
        over = off is None or off > NEAR or not self.left
        if self.kind and (over if self.moment == AT_LAST else self.moment == AT_FIRST):
            self.fail()
            return NO_STEP
        return Step(
            Observation(self.question()), reward=0.0 if off is None else 1 / (1 + off) / self.most, terminated=over
        )

    def fail(self) -> None:
        """Does not return, but for garbage."""
        if self.kind == "hang":
            time.sleep(3600.0)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "crash":
            raise LookupError("a bug of the environment")
