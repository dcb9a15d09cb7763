"""Warm start of `tiny_agent`: traces of sums, two in three of which do not use the calculator.

The traces without a call answer directly and forget every carry, so they are mostly wrong; the others call the
calculator and answer with its result. RL, which only sees right or wrong, can teach the model within minutes to always
call it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool
from flowrl.models.character_models.lessons import IGNORED, Lesson, Lessons, continued
from flowrl.models.character_models.warm_start import Recipe
from flowrl.models.tokens.chat import Chat
from flowrl.models.tokens.tool_characters import tool_tokenizer
from flowrl.tasks import Row
from flowrl.tasks.task import Task
from flowrl.tasks.toy_tasks import careless_answer

CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
"""The tool of the traces. Their tokens contain only its name and the names of its arguments."""


@dataclass(frozen=True)
class ToolUse(Recipe):
    """Always trains for `max_steps`: calls become right before direct answers become as wrong as those of the
    traces."""

    lr: float = 2e-3
    max_steps: int = 600
    check_every: int = 200
    sampled_target: float = 0.95
    greedy_target: float = 0.97
    greedy_from: float = 0.9
    called: float = 1 / 3
    """The share of traces with a call."""

    def learning_rate(self, step: int) -> float:
        """Falls to 0, because calls have to be right character by character."""
        return super().learning_rate(step) * (1 - step / (self.max_steps + 1))

    def reached(self, step: int, sampled: float, greedy: float) -> bool:
        """True only after `max_steps`, if a target is reached."""
        return step == self.max_steps and super().reached(step, sampled, greedy)

    def tokenizer(self) -> Any:
        """A new tokenizer with tool tokens."""
        return tool_tokenizer()

    def lessons(self, tokenizer: Any, task: Task) -> Lessons:
        """The traces of `task`. Raises ConfigError unless it is arithmetic."""
        check_tool_task(task)
        return ToolTraces(tokenizer, task, self.called)


def check_tool_task(task: Task) -> None:
    """Raise ConfigError unless traces with a calculator exist for `task`."""
    if len(task.sources) > 1 or task.source != "arithmetic":
        raise ConfigError(
            f"tiny_agent cannot be warm-started on {task.name!r}: it learns to call a calculator, which arithmetic "
            "alone needs; name arithmetic with its options, or use another model"
        )


def call_message(row: Row) -> dict[str, Any]:
    """The reply that asks the calculator for the row's sum."""
    function = {"name": "calculator", "arguments": {"expression": row.prompt.rstrip("=")}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


class ToolTraces:
    """Traces with and without a call; only those that begin with a call are scored."""

    measure = "held-out right after a call"

    def __init__(self, tokenizer: Any, task: Task, called: float) -> None:
        self._chat = Chat(tokenizer, task.system_prompt, (CALCULATOR,))
        self._pad = tokenizer.pad_token_id
        self._called = called
        self._known: dict[tuple[str, bool], Lesson] = {}

    def draw(self, rows: Sequence[Row], rng: random.Random) -> Sequence[Sequence[Lesson]]:
        """A trace for each row, in two groups: the direct ones, and those with a call, which are three times as
        long."""
        calls = [rng.random() < self._called for _ in rows]
        groups = [
            [self.trace(r, calls=kind) for r, c in zip(rows, calls, strict=True) if c == kind] for kind in (False, True)
        ]
        return [group for group in groups if group]

    def trace(self, row: Row, *, calls: bool) -> Lesson:
        """A whole episode: its replies and their end tokens have labels; the calculator's answers have none."""
        key = (row.prompt_id, calls)
        if key not in self._known:
            ids, mask = self._chat.demonstration(*_episode(row, calls))
            self._known[key] = ids.tolist(), np.where(mask, ids, IGNORED).tolist()
        return self._known[key]

    def score(self, model: Any, rows: Sequence[Row], *, greedy: bool) -> float:
        """The share of rows whose call and answer are right after a first token that begins a call."""
        traces = [self.trace(row, calls=True) for row in rows]
        calls = self._imitated(model, traces, 0, given=1, greedy=greedy)
        return float((calls & self._imitated(model, traces, 1, given=0, greedy=greedy)).mean())

    def _imitated(self, model: Any, traces: Sequence[Lesson], reply: int, *, given: int, greedy: bool) -> Bool:
        """Whether the model reproduces the reply of each trace, given the context and the first `given` ids of the
        reply."""
        contexts, rests = [], []
        for ids, labels in traces:
            start, end = _replies(labels)[reply]
            contexts.append(ids[: start + given])
            rests.append(ids[start + given : end])
        found = continued(model, contexts, max(map(len, rests)), pad=self._pad, greedy=greedy).tolist()
        return np.array([one[: len(rest)] == rest for one, rest in zip(found, rests, strict=True)])


def _episode(row: Row, calls: bool) -> tuple[list[Mapping[str, Any]], str]:
    """The messages before the last answer, and that answer."""
    if not calls:
        return list(row.turns), careless_answer(row.prompt)
    answer = str(row.answer)
    return [*row.turns, call_message(row), {"role": "tool", "name": "calculator", "content": answer}], answer


def _replies(labels: Sequence[int]) -> list[tuple[int, int]]:
    """[start, end) of every stretch of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(labels) != IGNORED, [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
