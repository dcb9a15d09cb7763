"""What a process tells the driver of its samples, for `rollouts/`: the records of those whose fate it decides.

A trainer sends the records of the samples that it has finished, a node that loses a sample sends the record of that
sample, and an evaluation sends every answer. A record has plain values, one key for each column of `rollouts/`. Which
samples are kept: all, a share of the groups, as many as cost little, or none (`SampleShare`). A sample that failed is
sent whatever the share is, unless no samples of the training are kept.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32, Prompt, Sample, Scored, Trainable
from flowrl.wire.encoding.cost import chunked

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

    mask, versions = sample.whole_mask, sample.whole_versions
    record |= {
        "prompt": sample.prompt_text[:MOST_TEXT],
        "response": sample.response_text[:MOST_TEXT],
        "prompt_tokens": int(sample.prompt_tokens),
        "response_tokens": int(mask.sum()),
        "truncated": bool(sample.truncated),
        "generator": sample.generator,
        "spans": version_spans(mask, versions),
    }
    if token_ids:
        record["token_ids"] = np.concatenate([one.token_ids for one in sample.sequences]).astype(np.int32).tobytes()
    if isinstance(sample, Scored):
        record |= {"reward": float(sample.reward), "raw_reward": float(sample.raw_reward)}
        record["parts"] = {name: float(value) for name, value in sample.reward_parts.items()}
    if isinstance(sample, Trainable):
        is_known = sample.advantages.size == mask.size and mask.any()
        record["advantage"] = float(sample.advantages[mask].mean()) if is_known else None
        record["label"] = int(sample.label)
    return record


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


def version_spans(policy_mask: Bool, versions: Int32) -> list[tuple[int, int]]:
    """(number of tokens, version) of each run of tokens of one origin; version -1 for tokens that were fed."""
    origin = np.where(policy_mask, versions, -1)
    starts = np.flatnonzero(np.diff(origin, prepend=-2))
    sizes = np.diff(starts, append=origin.size)
    return [(int(size), int(origin[start])) for start, size in zip(starts, sizes, strict=True)]


def text_bytes(record: Mapping[str, Any]) -> int:
    """Roughly the number of bytes that a record takes in memory."""
    return len(record["prompt"]) + len(record["response"]) + len(record.get("token_ids") or b"") + 500


PART_OF_TIME = 0.004
"""Share of a replica's time that keeping may take under `auto`. The driver's process spends about as much."""
FIRST_S, MOST_S = 0.002, 1.0
"""The time that may be spent at the start, and the largest time that can be saved up."""


@dataclass(frozen=True)
class SampleShare:
    """A parsed `--keep-samples`. `share` of the groups is kept; None: as many as PART_OF_TIME allows."""

    share: float | None = None
    held_out: bool = True
    """Whether held-out answers are kept; all of them are."""

    @staticmethod
    def parse(text: str) -> SampleShare:
        """Parse the value of the option. Raises ConfigError for any other text."""
        named = {
            "auto": SampleShare(),
            "all": SampleShare(1.0),
            "none": SampleShare(0.0),
            "off": SampleShare(0.0, held_out=False),
        }
        if text in named:
            return named[text]
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ConfigError(
                f"--keep-samples is {text!r}; it has to be auto, all, none, off, or a share of the groups such as 0.1"
            )
        return SampleShare(share)


class SampleChoice:
    """Decides for each group whether its samples are kept. With a share, a resumed run chooses the same groups."""

    def __init__(self, share: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._credit_s = FIRST_S
        self._seen_s: float | None = None

    def may_keep(self) -> bool:
        """Whether any group can be kept now."""
        if self._share is not None:
            return self._share > 0
        now = self._clock()
        passed_s = now - (now if self._seen_s is None else self._seen_s)
        self._credit_s = min(MOST_S, self._credit_s + PART_OF_TIME * passed_s)
        self._seen_s = now
        return self._credit_s > 0

    def keeps_group(self, group_id: str) -> bool:
        """Whether the samples of the group are kept."""
        return self.may_keep() if self._share is None else hash_group(group_id) < self._share

    @contextmanager
    def count_time(self) -> Iterator[None]:
        """Count the time inside as spent on keeping."""
        began_s = self._clock()
        yield
        self._credit_s -= self._clock() - began_s


def hash_group(group_id: str) -> float:
    """A number in [0, 1) that depends only on the group."""
    return zlib.crc32(group_id.encode()) / 2**32


class SampleNotes:
    """`send` gets the records of one call; they are plain values."""

    def __init__(self, send: Callable[[list[SampleRecord]], None], keep: SampleShare, *, token_ids: bool) -> None:
        self._send = send
        self._keep = keep
        self._token_ids = token_ids
        self._choice = SampleChoice(keep.share)
        self._choice_of_failed = SampleChoice(1.0 if keep.share else keep.share)

    def send_decided(self, samples: Iterable[Prompt | Sample], *, failed: bool = False) -> None:
        """Send the records of samples that a trainer has finished, or that are lost, if they are kept.

        Groups are kept whole, in an order that does not depend on that of the batch.
        """
        choice = self._choice_of_failed if failed else self._choice
        if not choice.may_keep():
            return
        with choice.count_time():
            groups: dict[str, list[Prompt | Sample]] = {}
            for sample in samples:
                groups.setdefault(sample.group_id, []).append(sample)
            order = sorted(groups, key=hash_group)
        records: list[SampleRecord] = []
        for group_id in order:
            if choice.keeps_group(group_id):
                with choice.count_time():
                    records += [record_of(sample, token_ids=self._token_ids) for sample in groups[group_id]]
        if records:
            with choice.count_time():
                for chunk in chunked(records):
                    self._send(chunk)

    def held_out(self, sample: Sample, **place_and_verdict: Unpack[HeldOutVerdict]) -> None:
        """Send the record of an answer of an evaluation, if these are kept."""
        if self._keep.held_out:
            self._send([held_out_record(sample, token_ids=self._token_ids, **place_and_verdict)])
