"""Sends the records of samples whose fate a replica decides to the driver, which keeps them.

A trainer sends the records of the samples that it has finished, a node that loses a sample sends the record of that
sample, and an evaluation sends every answer. A sample that failed is sent whatever the share is, unless no samples of
the training are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Unpack

from flowrl.channel.encoding.chunks import chunked
from flowrl.messages import Prompt, Sample
from flowrl.runtime.samples.sample_record import HeldOutVerdict, SampleRecord, held_out_record, record_of
from flowrl.runtime.samples.sample_share import SampleChoice, SampleShare, hashed


class SampleNotes:
    """`send` gets the records of one call; they are plain values."""

    def __init__(self, send: Callable[[list[SampleRecord]], None], keep: SampleShare, *, token_ids: bool) -> None:
        self._send = send
        self._keep = keep
        self._token_ids = token_ids
        self._choice = SampleChoice(keep.share)
        self._choice_of_failed = SampleChoice(1.0 if keep.share else keep.share)

    def decided(self, samples: Iterable[Prompt | Sample], *, failed: bool = False) -> None:
        """Send the records of samples that a trainer has finished, or that are lost, if they are kept."""
        self._note(samples, self._choice_of_failed if failed else self._choice)

    def held_out(self, sample: Sample, **place_and_verdict: Unpack[HeldOutVerdict]) -> None:
        """Send the record of an answer of an evaluation, if these are kept."""
        if self._keep.held_out:
            self._send([held_out_record(sample, token_ids=self._token_ids, **place_and_verdict)])

    def _note(self, samples: Iterable[Prompt | Sample], choice: SampleChoice) -> None:
        """Send the groups that are kept, each of them whole, in an order that does not depend on that of the batch."""
        if not choice.may():
            return
        with choice.spending():
            groups: dict[str, list[Prompt | Sample]] = {}
            for sample in samples:
                groups.setdefault(sample.group_id, []).append(sample)
            order = sorted(groups, key=hashed)
        records: list[SampleRecord] = []
        for group_id in order:
            if choice.wants(group_id):
                with choice.spending():
                    records += [record_of(sample, token_ids=self._token_ids) for sample in groups[group_id]]
        if records:
            with choice.spending():
                for chunk in chunked(records):
                    self._send(chunk)
