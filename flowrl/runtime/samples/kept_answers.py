"""The answers of an evaluation that an earlier run of the same command has kept in `rollouts/`."""

from __future__ import annotations

from pathlib import Path

from flowrl.runtime.samples.rollout_files import columns_of, rollout_files
from flowrl.runtime.samples.sample_record import SampleRecord

UNFINISHED = "unfinished.json"
"""The file that marks a run directory whose answers are taken over: that of a pure evaluation that has not ended."""
COLUMNS = ("task", "prompt_id", "member", "phase", "step", "reward", "correct", "response_tokens", "spans", "parts")
AnswerKey = tuple[str, str, int]
"""task, prompt_id, member"""


def kept_answers(run_dir: Path, *, phase: str, step: int) -> dict[AnswerKey, SampleRecord]:
    """The answers of that evaluation; {} unless the run continues an evaluation.

    Raises ConfigError for a file that cannot be read.
    """
    if not (run_dir / UNFINISHED).is_file():
        return {}
    found: dict[AnswerKey, SampleRecord] = {}
    for file in rollout_files(run_dir):
        if not (file.held_out and file.first <= step <= file.last):
            continue
        for row in columns_of(file.path, COLUMNS).to_pylist():
            if row["phase"] == phase and row["step"] == step:
                found[(row["task"], row["prompt_id"], row["member"])] = row | {"parts": dict(row["parts"] or ())}
    return found


def versions_in(record: SampleRecord) -> list[int]:
    """The versions that sampled an answer, in the order of its tokens; [] for an answer without tokens."""
    return [span["version"] for span in record["spans"] or () if span["version"] >= 0]
