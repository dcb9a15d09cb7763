"""What a reward model is asked about one response, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.messages import Int32, Message, Sample
from flowrl.tasks import Row


@dataclass(frozen=True)
class ScoreQuestion(Message):
    """A response, as the tokens of its generator and as text after the turns of its row."""

    response: str
    token_ids: Int32
    """Prompt and response."""
    turns: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, sample: Sample, row: Row | None) -> ScoreQuestion:
        """The question about `sample`; without its row, a model with the generator's tokens alone can answer it."""
        asked = ((), ()) if row is None else (row.turns, row.tools)
        return cls(sample.response_text, sample.token_ids, *asked)


@dataclass(frozen=True)
class ModelScore(Message):
    """The score of a response."""

    score: float
    """As the model gives it."""
    reward: float
    """As it enters a reward: normalised where the node does that."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Scores of labels or steps by the names under which they are logged."""
