"""What a warm start imitates, and how it is scored: `Lessons`, and `Answers`, the lessons of single replies.

Axes: B sequences, T tokens of the longest one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.models.tokens.chat import Chat
from flowrl.tasks import Demonstrator, Row
from flowrl.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
Lesson = tuple[list[int], list[int]]
"""(ids, labels), equally long; tokens that are not imitated have the label IGNORED."""


class Lessons(Protocol):
    """The lessons of one task for one tokenizer."""

    measure: str
    """What `score` measures, for the progress report."""

    def draw(self, rows: Sequence[Row], rng: random.Random) -> Sequence[Sequence[Lesson]]:
        """A lesson for each row, in groups; the lessons of a group are padded to the same length."""
        ...

    def score(self, model: Any, rows: Sequence[Row], *, greedy: bool) -> float:
        """The share of `rows` that the model gets right."""
        ...


class Answers:
    """The answers of a demonstrator, scored by exact match."""

    measure = "held-out exact match"

    def __init__(self, tokenizer: Any, task: Task, demonstrate: Demonstrator) -> None:
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, task.system_prompt)
        self._demonstrate = demonstrate
        self._prompts: dict[str, list[int]] = {}

    def draw(self, rows: Sequence[Row], rng: random.Random) -> Sequence[Sequence[Lesson]]:
        """Prompts, each with an answer and the end token."""
        return [[self._lesson(row, rng) for row in rows]]

    def _lesson(self, row: Row, rng: random.Random) -> Lesson:
        prompt = self._prompt(row)
        text = self._demonstrate(row, rng)
        answer = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        return [*prompt, *answer], [*([IGNORED] * len(prompt)), *answer]

    def score(self, model: Any, rows: Sequence[Row], *, greedy: bool) -> float:
        """The share of rows whose answer is exactly right."""
        most = max(len(row.answer or "") for row in rows) + 1
        pad = self._tokenizer.pad_token_id
        replies_BT = continued(model, [self._prompt(row) for row in rows], most, pad=pad, greedy=greedy)
        answers: list[str] = self._tokenizer.batch_decode(replies_BT, skip_special_tokens=True)
        return sum(a == row.answer for a, row in zip(answers, rows, strict=True)) / len(rows)

    def _prompt(self, row: Row) -> list[int]:
        if row.prompt_id not in self._prompts:
            self._prompts[row.prompt_id] = self._chat.with_tools(row.tools).prompt(row.turns)[1].tolist()
        return self._prompts[row.prompt_id]


def continued(model: Any, contexts: Sequence[list[int]], most: int, *, pad: int, greedy: bool) -> Tensor:
    """What the model writes after each context: `most` tokens or fewer, padded on the right."""
    import torch

    width = max(map(len, contexts))
    ids_BT = torch.tensor([[pad] * (width - len(context)) + context for context in contexts])
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    with torch.no_grad():
        out_BT: Tensor = model.generate(ids_BT, attention_mask=ids_BT != pad, max_new_tokens=most, **how)
    return out_BT[:, width:]
