"""Sets of prompts that a policy is evaluated on: the held-out rows of a task, or all rows of a file or split.

As text: `test.jsonl:prompt=question,check=math`; with a name: `gsm8k=test.jsonl:check=math`; with options of the set
next to those of the task: `gsm8k=test.jsonl:check=math,num=200,samples=4,temperature=0.7,reward=rules.py:score`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.errors import ConfigError
from flowrl.tasks.row_reading.rows_on_disk import join_rows, lowest_rows
from flowrl.tasks.rows import HELD_OUT_ONE_IN, Row, Rows
from flowrl.tasks.task import Task
from flowrl.tasks.task_syntax import take_options

NAMED = re.compile(r"([A-Za-z_][\w.-]*)=([^:]*.*)", re.DOTALL)
OWN_OPTIONS = ("num", "samples", "temperature", "top_p", "top_k", "reward")


@dataclass(frozen=True)
class EvaluationSet:
    """One set. Its metrics are named after it."""

    name: str
    task: Task
    num: int | None = None
    """Number of prompts, chosen by their digests; None: all."""
    samples: int = 1
    """Answers to each prompt."""
    temperature: float | None = None
    """Sampling temperature. None: 0 if the set is `whole` and asks for one answer to each prompt, else as the generator
    answers evaluations."""
    top_p: float | None = None
    """Answers are sampled among the likeliest tokens whose probabilities sum up to this."""
    top_k: int | None = None
    """Answers are sampled among this many of the likeliest tokens; 0: among all."""
    at_most: bool = False
    """Whether all prompts are asked if there are fewer than `num`."""
    whole: bool = False
    """All rows, not only those that are held out."""

    @classmethod
    def parse(cls, text: str, *, like: Task, samples: int) -> EvaluationSet:
        """The set that `text` names, with the system prompt of `like`.

        Answers are scored by the set's `reward`; without one by its own verifier if it has one source and sets `check`,
        else by the reward of `like`. If `like` has no reward either, the set's own verifier scores them. Raises
        ConfigError.
        """
        named = NAMED.fullmatch(text)
        name, rest = named.groups() if named else ("", text)
        plain, own = take_options(f"evaluation set {text!r}", rest, OWN_OPTIONS)
        task = Task(plain, system_prompt=like.system_prompt, template=like.template)
        if len(task.made_sources) < len(task.sources):
            task = replace(task, reasoning=like.reasoning)
        reward = (
            str(own["reward"])
            if "reward" in own
            else ""
            if len(task.sources) == 1 and "check" in task.options
            else like.reward
        )
        found = cls(
            name or plain,
            replace(task, reward=reward),
            num=own.get("num"),
            samples=own.get("samples", samples),
            temperature=own.get("temperature"),
            top_p=own.get("top_p"),
            top_k=own.get("top_k"),
            whole=True,
        )
        for option, value in (("num", found.num), ("samples", found.samples)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"evaluation set {text!r}: {option} is {value!r}; it needs an integer of at least 1")
        found._check_sampling(text)
        return found

    def _check_sampling(self, text: str) -> None:
        value, top_p, top_k = self.temperature, self.top_p, self.top_k
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf
        ):
            raise ConfigError(f"evaluation set {text!r}: temperature is {value!r}; it needs a number from 0 up")
        if value == 0 and self.samples > 1:
            raise ConfigError(
                f"evaluation set {text!r}: at temperature 0 its {self.samples} answers to a prompt are all the same; "
                "raise temperature, or set samples=1"
            )
        if top_p is not None and (isinstance(top_p, bool) or not isinstance(top_p, int | float) or not 0 < top_p <= 1):
            raise ConfigError(f"evaluation set {text!r}: top_p is {top_p!r}; it needs a number above 0 and at most 1")
        if top_k is not None and (type(top_k) is not int or top_k < 0):
            raise ConfigError(f"evaluation set {text!r}: top_k is {top_k!r}; it needs an integer from 0 up")

    @property
    def asked_as(self) -> dict[str, float]:
        """The sampling options that its prompts carry, by the names of a Prompt's fields."""
        own = {"temperature": self.asked_at, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in own.items() if value is not None}

    @property
    def asked_at(self) -> float | None:
        """The temperature of its answers; None: as the generator answers evaluations."""
        if self.temperature is not None:
            return float(self.temperature)
        return 0.0 if self.whole and self.samples == 1 else None

    def chosen(self, rows: Rows) -> Sequence[Row]:
        """The prompts to ask; they do not depend on the order of the data."""
        return lowest_rows(self.choice(rows), self.num)

    def choice(self, rows: Rows) -> Sequence[Row]:
        """The prompts from which those to ask are chosen."""
        return join_rows(rows.train, rows.held_out) if self.whole else rows.held_out

    @property
    def takes_fewer(self) -> bool:
        """Whether all prompts are asked if there are fewer than `num`, as for the held-out rows of a file: a file has
        as many as it has."""
        return self.at_most or not (self.whole or self.task.generated)

    def require_enough(self, found: Sequence[object]) -> None:
        """Raise ConfigError if there are fewer prompts than `num`, or, for the held-out rows of a file, none at all."""
        if self.num is None or len(found) >= self.num or (found and self.takes_fewer):
            return
        if self.whole:
            raise ConfigError(f"{self.name!r} has {len(found)} rows, but num is {self.num}; leave num out to ask all")
        raise ConfigError(too_few(self.name, len(found), self.num))


def too_few(name: str, found: int, wanted: int) -> str:
    """The error text for too few held-out rows, with what to do about it."""
    fewer = f"ask for at most {found}" if found else "ask for none with --evaluate 0"
    return (
        f"{name!r} has {found or 'no'} held-out rows (one row in {HELD_OUT_ONE_IN} is held out), but {wanted} are to "
        f"be evaluated; {fewer}, add rows, or name a file whose rows are all asked with --evaluate-task"
    )
