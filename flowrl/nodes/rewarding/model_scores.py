"""The question to a reward model about one response, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.messages import Int32, Message, Sample
from flowrl.tasks import Row


@dataclass(frozen=True)
class ScoreQuestion(Message):
    """A response, both as the tokens of its generator and as text that follows the turns of its row."""

    response: str
    token_ids: Int32
    """Prompt and response."""
    turns: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, sample: Sample, row: Row | None) -> ScoreQuestion:
        """The question about `sample`; without the row, only a model that reads the generator's tokens can answer."""
        asked = ((), ()) if row is None else (row.turns, row.tools)
        return cls(sample.response_text, sample.token_ids, *asked)


@dataclass(frozen=True)
class ModelScore(Message):
    """The score of a response."""

    score: float
    """The score as the model gives it."""
    reward: float
    """The score as it enters a reward: normalised if the node normalises."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Scores of labels or steps by the names under which they are logged."""
