"""Checkpoints: one consistent snapshot through a running graph.

How the snapshot is made. Admission is closed, the trainers stand at a batch's end, generators hand over
their unfinished prefixes, every host stops taking items, ends the invocations it is in and sends no more, and
the hosts exchange what is under way until nothing moves. From then on nothing changes, and what the
producers still keep (custody) is the whole state between the nodes:

- a message that its consumer has not finished is saved with its edge, and sent again on it at resume; so is
  one that waits for credit, unless its node holds what it was made from, or reads, and makes it again. What
  two edges carry, or a broadcast, is one message for each consumer; what goes to a gang is kept as it was before
  it was split, so that it can be for any number of ranks, or once a rank has done its part, for each of the others;
- a message whose invocation has ended is left out, what was made from it is saved instead;
- in the place of a message whose loss is booked stands its tombstone;
- of an invocation that stands still between two sends the item is saved and the ids of what it has already
  sent, so that the repeated invocation sends only the rest.

Messages come from the hosts, and go back to them, in pages: all of a large run are more than a frame holds.

A directory becomes a checkpoint by its last rename, after its manifest is written
(`checkpoint_manifest`); a crash while writing leaves the one before. What is in `step_N` is whole at
any time: the directory is written and removed as `.step_N.tmp`, and a second `step_N` moves the first aside to
`.step_N.old` until it has taken its place. The next run that claims the directory calls `recover`, which finishes or
undoes what a crash interrupted. A run that ends while a thread of it publishes stops the thread and waits for it:
nobody else writes there any more.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from flowrl.channel.envelope import Envelope
from flowrl.channel.stored import dump, load
from flowrl.errors import ConfigError
from flowrl.messages import Message, Prompt, Sample, Scored
from flowrl.runtime.checkpoints import checkpoint_manifest
from flowrl.runtime.ports.items import ItemKey

FORMAT = 3
STEP_DIR = re.compile(r"step_(\d{6,})")
Saved = tuple[str, str, str, Envelope]
"""(producer node replica, edge name, for whom alone it is or "", message); a broadcast or a gang's part is for one"""
PAGE_BYTES = 64 << 20
PAGE_MESSAGES = 4096
"""In one answer or request."""
ASIDE = ".old"
RUBBISH = ".tmp"


@dataclass
class Snapshot:
    """What one host, or all of them, hand over."""

    messages: list[Saved] = field(default_factory=list)
    parts: dict[tuple[str, bytes], Mapping[str, bytes]] = field(default_factory=dict)
    """(edge, id) of a gang's message -> rank -> id of its part, "" of one that it has finished."""
    ended: set[ItemKey] = field(default_factory=set)
    lost: dict[ItemKey, Message] = field(default_factory=dict)
    """Tombstones of what is lost and has not been told to the next nodes."""
    sent: set[bytes] = field(default_factory=set)
    """Ids of what invocations that are to be repeated have sent."""
    sent_before: set[bytes] = field(default_factory=set)
    """The same from the checkpoint that the run began with; `left_out`: those that a repeated invocation reached."""
    left_out: set[bytes] = field(default_factory=set)
    cursors: dict[str, int] = field(default_factory=dict)
    """Out port of a node replica: how many messages it has sent outside of invocations."""
    states: dict[str, bytes] = field(default_factory=dict)
    """Node replica: its `state()`, dumped."""
    prefixes: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)
    """sample_id: (token_ids, logprobs, versions) of what was generated so far."""

    def add(self, part: Mapping[str, Any]) -> None:
        """Take in what a host answered to "snapshot"."""
        self.parts.update({(edge, key): parts for edge, key, parts in part["parts"]})
        self.ended.update((port, key) for port, key in part["ended"])
        self.lost.update({(port, key): load(marker) for port, key, marker in part["lost"]})
        self.sent.update(part["sent"])
        self.sent_before.update(part["sent_before"])
        self.left_out.update(part["left_out"])
        self.cursors.update(part["cursors"])
        self.states.update({replica_id: bytes(state) for replica_id, state in part["states"].items()})

    def settled(self) -> list[Saved]:
        """The messages to send again at resume: unfinished ones, prefixes filled in."""
        return [saved for message in self.messages for saved in self._settled(message)]

    def _settled(self, message: Saved) -> Iterator[Saved]:
        producer, edge, consumer, envelope = message
        port = edge.split(" -> ")[1]
        parts = {consumer: envelope.id} if consumer else self.parts.get((edge, envelope.id), {"": envelope.id})
        left = {rank: (port, key) for rank, key in parts.items() if key and (port, key) not in self.ended}
        lost = {rank: self.lost[place] for rank, place in left.items() if place in self.lost}
        if len(left) == len(parts) and not lost:
            left = {consumer: (port, envelope.id)}  # nothing of it is done: it may be split for another number of ranks
        for rank in left:
            body = lost.get(rank) or self._with_prefix(envelope.body)
            yield producer, edge, rank, replace(envelope, body=body)

    def _with_prefix(self, body: Message) -> Message:
        if not isinstance(body, Prompt) or body.sample_id not in self.prefixes:
            return body
        token_ids, logprobs, versions = self.prefixes[body.sample_id]
        return replace(body, prefix_token_ids=token_ids, prefix_logprobs=logprobs, prefix_versions=versions)


def pages(messages: Iterable[Saved]) -> Iterator[list[Any]]:
    """The messages packed, about PAGE_BYTES at a time."""
    page: list[Any] = []
    num_bytes = 0
    for *place, envelope in messages:
        *head, body = pack(envelope)
        page.append((*place, (*head, beside(body))))
        num_bytes += len(body)
        if num_bytes >= PAGE_BYTES or len(page) == PAGE_MESSAGES:
            yield page
            page, num_bytes = [], 0
    if page:
        yield page


def unpage(page: Iterable[Any]) -> list[Saved]:
    """The messages of a page."""
    return [(producer, edge, consumer, unpack(packed)) for producer, edge, consumer, packed in page]


def beside(data: bytes) -> npt.NDArray[np.uint8]:
    """`data` as an array: however long it is, it travels beside the body of an answer or request."""
    return np.frombuffer(data, np.uint8)


def pack(envelope: Envelope) -> tuple[bytes, int, str, int, bytes]:
    return envelope.id, envelope.ticket, envelope.group_id, envelope.member, dump(envelope.body)


def unpack(packed: Iterable[Any]) -> Envelope:
    key, ticket, group_id, member, body = packed
    return Envelope(key, ticket, group_id, member, load(body))


def write_state(directory: Path, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
    """`state.msgpack`: the messages, node states and `facts` (version, next ticket, ...)."""
    content = {
        "format": FORMAT,
        "facts": dict(facts),
        "messages": [(*place, pack(envelope)) for *place, envelope in snapshot.settled()],
        "sent": list(snapshot.sent | (snapshot.sent_before - snapshot.left_out)),
        "cursors": snapshot.cursors,
        "states": snapshot.states,
    }
    with open(directory / "state.msgpack", "wb") as file:
        file.write(msgpack.packb(content))
        file.flush()
        os.fsync(file.fileno())


def read_state(directory: Path) -> dict[str, Any]:
    """What `write_state` wrote, envelopes unpacked. Raises ConfigError for another format."""
    content = msgpack.unpackb((directory / "state.msgpack").read_bytes(), strict_map_key=False)
    if content["format"] != FORMAT:
        raise ConfigError(f"{directory}: checkpoint format {content['format']}, this flowrl reads {FORMAT}")
    content["messages"] = unpage(content["messages"])
    return dict(content)


def made(messages: Iterable[Saved]) -> tuple[set[str], set[str]]:
    """Ids of the samples among these messages, and of those that have their reward."""
    bodies = [envelope.body for *_, envelope in messages]
    samples = [s for body in bodies for s in getattr(body, "samples", (body,)) if isinstance(s, Sample)]
    return {s.sample_id for s in samples}, {s.sample_id for s in samples if isinstance(s, Scored)}


def publish(temporary: Path, final: Path, facts: Mapping[str, Any], stop: threading.Event) -> None:
    """Make a finished directory the checkpoint `final`, durably; one that has the name already is replaced.

    `facts` go into its manifest. Blocks until the disk has all of it; `stop` ends that with `manifest.Abandoned`,
    which leaves `final` as it was, as long as the name has not changed.
    """
    checkpoint_manifest.write(temporary, facts, stop)
    for path in (*temporary.rglob("*"), temporary):
        checkpoint_manifest.go_on(temporary, stop)
        _sync(path)
    _settle(final)
    if final.exists():
        final.replace(_hidden(final, ASIDE))
    try:
        temporary.replace(final)
        _sync(final.parent)
    finally:
        _settle(final)


def recover(checkpoints: Path) -> None:
    """Put back, or remove, what a run left that was killed while it wrote, replaced or removed a checkpoint.

    Nobody else may write there: the run directory's lock is held.
    """
    for aside in sorted(checkpoints.glob(f".step_*{ASIDE}")):
        _settle(aside.with_name(aside.name[1:].removesuffix(ASIDE)))
    for rubbish in sorted(checkpoints.glob(f".step_*{RUBBISH}")):
        shutil.rmtree(rubbish, ignore_errors=True)  # a process of the killed run may be writing there still


def _hidden(final: Path, suffix: str) -> Path:
    return final.with_name(f".{final.name}{suffix}")


def _settle(final: Path) -> None:
    """The checkpoint that stands aside for `final` goes if that is there, else back to its place."""
    aside = _hidden(final, ASIDE)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        aside.replace(final)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps_of(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint there, whole or not, oldest first."""
    found = ((STEP_DIR.fullmatch(path.name), path) for path in checkpoints.glob("step_*"))
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def prune(checkpoints: Path, keep: int, *, spared: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those of the steps `spared`; `keep` 0 keeps all."""
    for step, path in steps_of(checkpoints)[:-keep] if keep else []:
        if step not in spared:
            rubbish = _hidden(path, RUBBISH)
            shutil.rmtree(rubbish, ignore_errors=True)
            path.replace(rubbish)
            shutil.rmtree(rubbish)
