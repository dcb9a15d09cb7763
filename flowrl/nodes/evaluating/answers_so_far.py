"""The answers of one evaluation so far: those that an earlier run of the command has kept, and a count of all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flowrl.nodes.evaluating.held_out_scores import full_marks
from flowrl.nodes.writers.progress_count import ProgressCount
from flowrl.runtime.ledger.ledger_client import EvaluationRow
from flowrl.runtime.samples.kept_answers import AnswerKey, kept_answers, versions_in
from flowrl.runtime.samples.sample_record import SampleRecord
from flowrl.tasks import Row

Answered = tuple[EvaluationRow, Mapping[str, float]]
"""The ledger's row of an answer, and the parts of its score if a reward model is one of them."""


class AnswersSoFar:
    """For use on one event loop."""

    def __init__(self, kept: Mapping[AnswerKey, SampleRecord], *, total: int, say: Callable[[str], None]) -> None:
        """`kept` are the answers of an earlier run; `total` is the number of all answers that are asked for."""
        self._kept = kept
        self._progress = ProgressCount("answers", say, total=total, there=len(kept))

    @classmethod
    def read(cls, run_dir: str, phase: str, step: int, total: int, say: Callable[[str], None]) -> AnswersSoFar:
        """The answers of the evaluation with this phase and step. Raises ConfigError for a file that cannot be read."""
        return cls(kept_answers(Path(run_dir), phase=phase, step=step), total=total, say=say)

    def kept(self, task: str, prompt_id: str, member: int) -> Answered | None:
        """The answer, if an earlier run has kept it."""
        record = self._kept.get((task, prompt_id, member))
        return None if record is None else (_booked(record), record["parts"])

    def add(self) -> None:
        """Count one more answer."""
        self._progress.add()

    def end(self) -> None:
        """There are no further answers."""
        self._progress.end()


def _booked(record: SampleRecord) -> EvaluationRow:
    versions = versions_in(record)
    return EvaluationRow(
        phase=record["phase"],
        step=record["step"],
        prompt_id=record["prompt_id"],
        member=record["member"],
        score=record["reward"],
        correct=full_marks(record["reward"]) if record["correct"] is None else record["correct"],
        response_tokens=record["response_tokens"],
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        task=record["task"],
    )


def digest_of_rows(rows: Iterable[Row]) -> str:
    """A digest that is the same for the same prompts with the same columns and tools."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(json.dumps([row.prompt_id, dict(row.columns), row.tools], default=str).encode())
    return found.hexdigest()


def digest_of_ids(prompt_ids: Iterable[str]) -> str:
    """A digest that is the same for the same rows of an environment."""
    return hashlib.blake2b("\n".join(prompt_ids).encode(), digest_size=16).hexdigest()
