"""Warm start of `tiny`: SFT on the task's demonstrations, stopped by the held-out score.

Axes: B sequences, T tokens of the longest one, V vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl.models.cache import Progress
from flowrl.models.chat import Chat
from flowrl.tasks import Demonstrator, Row, demonstrator, load_rows, right_answer
from flowrl.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100


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
    """Stop when so many sampled answers match exactly ..."""
    greedy_target: float = 0.46
    """... or so many greedy ones."""
    greedy_from: float = 0.1
    """Greedy answers are only asked for once so many sampled ones match."""
    seed: int = 0

    def demonstrator(self, task: Task) -> Demonstrator:
        """The function that writes the answers to imitate."""
        return demonstrator(task)


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
    """Train `model` in place, in one thread; reports every check to `progress`."""
    import torch

    rows = load_rows(task)
    if any(row.answer is None for row in rows.train):
        raise ConfigError(f"tiny cannot be warm-started on {task.name!r}: its rows have no answers; use another model")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            _Run(model, tokenizer, task, rows.train, rows.held_out, recipe, progress).train()
    finally:
        torch.set_num_threads(num_threads)


class _Run:
    """One warm start."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        task: Task,
        train: Sequence[Row],
        held_out: Sequence[Row],
        recipe: Recipe,
        progress: Progress,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, task.system_prompt)
        self._rows = train
        self._recipe = recipe
        self._progress = progress
        self._random = random.Random(recipe.seed)
        self._demonstrate = recipe.demonstrator(task)
        self._prompts: dict[str, list[int]] = {}
        self._checked = sorted(held_out or train, key=lambda row: row.prompt_id)[: recipe.num_checked]

    def train(self) -> None:
        """Train until a target is reached or the maximum number of steps is done."""
        import torch

        recipe, start_s = self._recipe, time.monotonic()
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(1, recipe.max_steps + 1):
            optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, step / recipe.warmup_steps)
            loss = self._loss(self._random.choices(self._rows, k=recipe.batch))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
            if step % recipe.check_every == 0:
                sampled = self._score(greedy=False)
                greedy = self._score(greedy=True) if sampled >= recipe.greedy_from else 0.0
                self._progress(
                    f"SFT step {step}, loss {loss.item():.2f}, held-out exact match {sampled:.2f} sampled"
                    + (f", {greedy:.2f} greedy" if greedy else "")
                    + f", {time.monotonic() - start_s:.0f} s"
                )
                if sampled >= recipe.sampled_target or greedy >= recipe.greedy_target:
                    return
        self._progress(f"SFT stopped after {recipe.max_steps} steps short of its target")

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        from torch.nn.functional import cross_entropy

        input_ids_BT, labels_BT = self._batch(rows)
        logits_BTV = self._model(input_ids=input_ids_BT, use_cache=False).logits
        return cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)

    def _batch(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """(ids, labels), right-padded; prompts and padding have no label."""
        import torch

        prompts = [self._prompt(row) for row in rows]
        answers = [[*self._ids(self._demonstrate(row, self._random)), self._tokenizer.eos_token_id] for row in rows]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        pairs = [(p, a, width - len(p) - len(a)) for p, a in zip(prompts, answers, strict=True)]
        ids = [[*p, *a, *([self._tokenizer.pad_token_id] * rest)] for p, a, rest in pairs]
        labels = [[*([IGNORED] * len(p)), *a, *([IGNORED] * rest)] for p, a, rest in pairs]
        return torch.tensor(ids), torch.tensor(labels)

    def _score(self, *, greedy: bool) -> float:
        """The share of the checked prompts whose answer is exactly right."""
        answers = self._answers([self._prompt(row) for row in self._checked], greedy=greedy)
        return sum(a == row.answer for a, row in zip(answers, self._checked, strict=True)) / len(self._checked)

    def _answers(self, prompts: Sequence[list[int]], *, greedy: bool) -> list[str]:
        import torch

        width = max(map(len, prompts))
        pad, most = self._tokenizer.pad_token_id, max(len(row.answer or "") for row in self._checked) + 1
        ids_BT = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        with torch.no_grad():
            out_BT = self._model.generate(ids_BT, attention_mask=ids_BT != pad, max_new_tokens=most, **how)
        return list(self._tokenizer.batch_decode(out_BT[:, width:], skip_special_tokens=True))

    def _prompt(self, row: Row) -> list[int]:
        if row.prompt_id not in self._prompts:
            self._prompts[row.prompt_id] = self._chat.prompt(row.turns)[1].tolist()
        return self._prompts[row.prompt_id]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
