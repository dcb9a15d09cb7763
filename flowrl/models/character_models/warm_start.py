"""Warm start of the character models: SFT on lessons of the task, stopped by the held-out score.

Axes: B sequences, T tokens of the longest one, V vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl.machine.cache import Progress
from flowrl.models.character_models.lessons import IGNORED, Answers, Lesson, Lessons
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.tasks import Demonstrator, Row, Rows, demonstrator, load_rows, right_answer
from flowrl.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result of a warm start on a task."""

    batch: int = 64
    lr: float = 1e-3
    warmup_steps: int = 50
    max_steps: int = 1600
    check_every: int = 50
    num_checked: int = 256
    """Held-out prompts answered at every check."""
    sampled_target: float = 0.45
    """Stop when this share of sampled answers matches exactly ..."""
    greedy_target: float = 0.46
    """... or this share of greedy ones."""
    greedy_from: float = 0.1
    """Greedy answers are generated only once this share of sampled ones matches."""
    seed: int = 0

    def demonstrator(self, task: Task) -> Demonstrator:
        """The function that writes the answers to imitate."""
        return demonstrator(task)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; the first step is 1."""
        return self.lr * min(1.0, step / self.warmup_steps)

    def reached(self, step: int, sampled: float, greedy: float) -> bool:
        """Whether the model is good enough, so that training stops."""
        return sampled >= self.sampled_target or greedy >= self.greedy_target

    def tokenizer(self) -> Any:
        """A new tokenizer of the model."""
        return character_tokenizer()

    def lessons(self, tokenizer: Any, task: Task) -> Lessons:
        """What the model imitates. Raises ConfigError if there are no lessons for `task`."""
        return Answers(tokenizer, task, self.demonstrator(task))


@dataclass(frozen=True)
class Thorough(Recipe):
    """Trains only on right answers, until nearly all answers are right."""

    max_steps: int = 4000
    sampled_target: float = 0.95
    greedy_target: float = 0.97
    greedy_from: float = 0.9

    def demonstrator(self, task: Task) -> Demonstrator:
        return right_answer


def warm_start(model: Any, tokenizer: Any, task: Task, recipe: Recipe, progress: Progress) -> None:
    """Train `model` in place, in one thread. Reports every check to `progress`."""
    import torch

    lessons, rows = recipe.lessons(tokenizer, task), load_rows(task)
    if any(row.answer is None for row in rows.train):
        raise ConfigError(f"tiny cannot be warm-started on {task.name!r}: its rows have no answers; use another model")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            _Run(model, lessons, tokenizer.pad_token_id, rows, recipe, progress).train()
    finally:
        torch.set_num_threads(num_threads)


class _Run:
    """One warm start."""

    def __init__(self, model: Any, lessons: Lessons, pad: int, rows: Rows, recipe: Recipe, progress: Progress) -> None:
        self._model = model
        self._lessons = lessons
        self._pad = pad
        self._rows = rows.train
        self._recipe = recipe
        self._progress = progress
        self._random = random.Random(recipe.seed)
        self._checked = sorted(rows.held_out or rows.train, key=lambda row: row.prompt_id)[: recipe.num_checked]

    def train(self) -> None:
        """Train until a target is reached or the maximum number of steps is done."""
        import torch

        recipe, start_s = self._recipe, time.monotonic()
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(1, recipe.max_steps + 1):
            optimizer.param_groups[0]["lr"] = recipe.learning_rate(step)
            loss = self._loss(self._random.choices(self._rows, k=recipe.batch))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
            if step % recipe.check_every == 0:
                sampled = self._score(greedy=False)
                greedy = self._score(greedy=True) if sampled >= recipe.greedy_from else 0.0
                self._progress(
                    f"SFT step {step}, loss {loss.item():.2f}, {self._lessons.measure} {sampled:.2f} sampled"
                    + (f", {greedy:.2f} greedy" if greedy else "")
                    + f", {time.monotonic() - start_s:.0f} s"
                )
                if recipe.reached(step, sampled, greedy):
                    return
        self._progress(f"SFT stopped after {recipe.max_steps} steps short of its target")

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        """The mean loss over all labels of the batch."""
        groups = self._lessons.draw(rows, self._random)
        numbers = [sum(label != IGNORED for _, labels in group for label in labels) for group in groups]
        losses = [number / sum(numbers) * self._loss_of(group) for number, group in zip(numbers, groups, strict=True)]
        return sum(losses[1:], start=losses[0])

    def _loss_of(self, lessons: Sequence[Lesson]) -> Tensor:
        from torch.nn.functional import cross_entropy

        input_ids_BT, labels_BT = self._batch(lessons)
        logits_BTV = self._model(input_ids=input_ids_BT, use_cache=False).logits
        return cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)

    def _batch(self, lessons: Sequence[Lesson]) -> tuple[Tensor, Tensor]:
        """(ids, labels), right-padded; prompts and padding have no label."""
        import torch

        width = max(len(ids) for ids, _ in lessons)
        ids_BT = [[*ids, *([self._pad] * (width - len(ids)))] for ids, _ in lessons]
        labels_BT = [[*labels, *([IGNORED] * (width - len(labels)))] for _, labels in lessons]
        return torch.tensor(ids_BT), torch.tensor(labels_BT)

    def _score(self, *, greedy: bool) -> float:
        return self._lessons.score(self._model, self._checked, greedy=greedy)
