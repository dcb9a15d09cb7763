"""Samples that no policy has sampled: their tokens are given by the data, and the same ledger records them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from flowrl.cache import Progress
from flowrl.errors import ConfigError
from flowrl.messages import Batch, Bool, Int32, Trainable
from flowrl.tasks import Row, Task


class HeldOutSource(Protocol):
    """A node whose rows are trained, except the rows that it holds out."""

    @property
    def part(self) -> str:
        """Which rows it trains."""
        ...

    @property
    def max_tokens(self) -> int: ...

    def require_held_out(self) -> None:
        """Raise ConfigError if it holds out no row."""
        ...

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        """Up to `most` samples of what it holds out; the choice does not depend on the order of the data."""
        ...


def given_sample(token_ids: Int32, mask: Bool, *, response_text: str, **fields: Any) -> Trainable:
    """A sample whose tokens in `mask` are trained; `fields` are further fields of `Trainable`."""
    alone: dict[str, Any] = {"epoch": 0, "member": 0, "generator": ""}
    return Trainable(
        **(alone | fields),
        group_size=1,
        response_text=response_text,
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), -1, np.int32),  # no version of the policy has sampled them
        prompt_tokens=int((~mask).sum()),
        truncated=False,
        generated_s=time.time(),
        advantages=mask.astype(np.float32),
    )


def require_responses(task: Task, rows: Sequence[Row]) -> None:
    """Raise ConfigError unless every row has a response to learn from: text, or the assistant's turns."""
    if without := [row for row in rows if not row.has_response]:
        unread = next((row.unread for row in without if row.unread), "")
        other = f", or messages={unread} to learn from the conversations in that column" if unread else ""
        raise ConfigError(
            f"{len(without)} of {len(rows)} training rows of {task.name!r} have no answer to learn from, the first at "
            f"{without[0].place or 'its beginning'}; set the option answer= of the task to the column that holds it"
            f"{other}, or take rows without one out of the data (malformed=skip does not)"
        )
    if other_row := next((row for row in rows if not row.reply and not row.text_answer), None):
        raise ConfigError(
            f"{other_row.place}: the answer is {str(other_row.answer)[:60]!r}; to learn from it needs text, or the "
            "assistant's turns; name the column that has them with answer="
        )


def batch_of(samples: Sequence[Trainable], token_budget: int) -> Batch:
    """All samples as one batch."""
    return Batch(
        samples=tuple(samples),
        micro_batches=(),
        num_sequences=len(samples),
        num_tokens=sum(sample.response_tokens for sample in samples),
        num_groups=len(samples),
        token_budget=token_budget,
    )
