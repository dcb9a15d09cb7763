"""What is kept of one sample: plain values, one key for each column of `rollouts/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np

from flowrl.messages import Bool, Int32, Prompt, Sample, Scored, Trainable

SampleRecord = dict[str, Any]
MOST_TEXT = 1_000_000
"""Largest number of characters of a prompt or a response that are kept, from its start. At four bytes per character,
both fit into the text that one message body may have."""
TRAIN = "train"
"""The phase of samples that were admitted; held-out answers have before, during or after."""


def record_of(sample: Prompt | Sample, *, token_ids: bool) -> SampleRecord:
    """The record of a sample as it is now; for a prompt that was lost before it was answered, without a response."""
    record: SampleRecord = {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "prompt_id": sample.prompt_id,
        "epoch": int(sample.epoch),
        "member": int(sample.member),
        "phase": TRAIN,
    }
    if isinstance(sample, Prompt):
        return record | {"prompt": sample.text[:MOST_TEXT], "response": "", "prompt_tokens": len(sample.token_ids)}
    return record | _rollout(sample, token_ids) | _verdict(sample)


class HeldOutVerdict(TypedDict):
    """Where a held-out answer belongs, and how it was judged."""

    phase: str
    step: int
    task: str
    score: float
    correct: bool | None
    """None if nothing decides which answers are right."""
    parts: NotRequired[Mapping[str, float]]
    """The parts of the score, by name."""


def held_out_record(sample: Sample, *, token_ids: bool, **said: Unpack[HeldOutVerdict]) -> SampleRecord:
    """The record of a held-out answer."""
    place = {"phase": said["phase"], "step": said["step"], "task": said["task"], "correct": said["correct"]}
    found = record_of(sample, token_ids=token_ids) | place | {"reward": said["score"], "raw_reward": said["score"]}
    if parts := said.get("parts"):
        found["parts"] = {name: float(value) for name, value in parts.items()}
    return found


def _rollout(sample: Sample, token_ids: bool) -> SampleRecord:
    mask, versions = sample.whole_mask, sample.whole_versions
    found: SampleRecord = {
        "prompt": sample.prompt_text[:MOST_TEXT],
        "response": sample.response_text[:MOST_TEXT],
        "prompt_tokens": int(sample.prompt_tokens),
        "response_tokens": int(mask.sum()),
        "truncated": bool(sample.truncated),
        "generator": sample.generator,
        "spans": version_spans(mask, versions),
    }
    if token_ids:
        found["token_ids"] = np.concatenate([one.token_ids for one in sample.sequences]).astype(np.int32).tobytes()
    return found


def _verdict(sample: Sample) -> SampleRecord:
    found: SampleRecord = {}
    if isinstance(sample, Scored):
        found |= {"reward": float(sample.reward), "raw_reward": float(sample.raw_reward)}
        found["parts"] = {name: float(value) for name, value in sample.reward_parts.items()}
    if isinstance(sample, Trainable):
        found["advantage"] = _mean(sample.advantages, sample.whole_mask)
        found["label"] = int(sample.label)
    return found


def _mean(advantages: Any, mask: Bool) -> float | None:
    """The mean advantage of the policy tokens, None if there are none."""
    if advantages.size != mask.size or not mask.any():
        return None
    return float(advantages[mask].mean())


def version_spans(policy_mask: Bool, versions: Int32) -> list[tuple[int, int]]:
    """(number of tokens, version) of each run of tokens of one origin; version -1 for tokens that were fed."""
    origin = np.where(policy_mask, versions, -1)
    starts = np.flatnonzero(np.diff(origin, prepend=-2))
    sizes = np.diff(starts, append=origin.size)
    return [(int(size), int(origin[start])) for start, size in zip(starts, sizes, strict=True)]


def text_bytes(record: Mapping[str, Any]) -> int:
    """Roughly the number of bytes that a record takes in memory."""
    return len(record["prompt"]) + len(record["response"]) + len(record.get("token_ids") or b"") + 500
