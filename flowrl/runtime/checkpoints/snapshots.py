"""One consistent snapshot through a running graph: its messages, the states of its nodes, and the file that holds them.

How the snapshot is made: admission is closed, the trainers wait at a batch's end, and generators hand over their
unfinished prefixes. Every process stops taking items, ends its open invocations and stops sending, and all exchange
what is in transit until nothing moves. From then on nothing changes, and the messages that the producers still keep
(custody) are the whole state between the nodes:

- A message that its consumer has not finished is saved with its edge, and sent again on that edge at resume. A message
  that waits for credit is also saved, unless its node makes it again, because the node holds the items from which the
  message was made or reads its data itself. A message on two edges, or a broadcast, is saved as one message for each
  consumer. A message to a gang is saved as it was before the split, so that it fits any number of ranks; once a rank
  has finished its part, the message is saved separately for each of the other ranks.
- A message whose invocation has ended is not saved; the messages made from it are saved instead.
- A tombstone replaces a message whose loss is booked.
- A record that a node keeps with an item in progress (`In.keep`) is saved with the item's message, and with the tokens
  generated so far for the record's open request.
- For an invocation that is paused between two sends, the item is saved together with the ids of the messages already
  sent, so that the repeated invocation sends only the rest.

Messages travel from the processes and back in pages, because all messages of a large run do not fit in one frame.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Message, Prompt, Record, Sample, Scored
from flowrl.messages.episode import AskRecord
from flowrl.runtime.checkpoints.checkpoint import STEP_DIR, steps_of
from flowrl.wire.encoding.codec import dump_value, load_message
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.items import ItemKey

FORMAT = 3
SavedMessage = tuple[str, str, str, Envelope]
"""(producer node replica, edge name, the only consumer or "", message); broadcasts and gang parts name a consumer"""
Packed = tuple[bytes, int, str, int, bytes]
"""An envelope as plain values: id, ticket, group_id, member, dumped body."""
PAGE_BYTES = 64 << 20
PAGE_MESSAGES = 4096
"""Largest number of messages in one answer or request."""
STATE = "state.msgpack"
SEAL = b"flowrl state\n"
"""The first bytes of a state. DIGEST_BYTES of a BLAKE2b digest of the msgpack value behind them follow."""
DIGEST_BYTES = 16
UNREADABLE = (
    *(FlowrlError, msgpack.UnpackException, struct.error, ArithmeticError, AssertionError, AttributeError),
    *(LookupError, MemoryError, RecursionError, TypeError, ValueError),
)
"""What reading a value raises that is not what was written."""


@dataclass
class Snapshot:
    """The parts of a snapshot from one process, or from all processes."""

    messages: list[SavedMessage] = field(default_factory=list)
    parts: dict[tuple[str, bytes], Mapping[str, bytes]] = field(default_factory=dict)
    """(edge, id) of a message to a gang -> rank -> id of its part, "" if the rank has finished it."""
    ended: set[ItemKey] = field(default_factory=set)
    lost: dict[ItemKey, Message] = field(default_factory=dict)
    """Lost item -> its tombstone, which is not sent to the next nodes yet."""
    sent: set[bytes] = field(default_factory=set)
    """Ids of messages already sent by invocations that will be repeated."""
    sent_before: set[bytes] = field(default_factory=set)
    """As `sent`, from the checkpoint that the run resumed; `left_out`: those that a repeated invocation has skipped."""
    left_out: set[bytes] = field(default_factory=set)
    cursors: dict[str, int] = field(default_factory=dict)
    """Out port of a node replica -> number of messages sent outside of invocations."""
    states: dict[str, bytes] = field(default_factory=dict)
    """Node replica -> its `state()`, dumped."""
    prefixes: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)
    """sample_id, or id of a request -> (token_ids, logprobs, versions) of the tokens generated so far."""
    records: dict[ItemKey, Record] = field(default_factory=dict)
    """Item in progress -> the record that its node keeps with it."""
    asks: dict[ItemKey, AskRecord] = field(default_factory=dict)
    """Item in progress -> the replies to what its node has asked for it."""

    def add_part(self, part: Mapping[str, Any]) -> None:
        """Add a process's answer to "snapshot"."""
        self.parts.update({(edge, key): parts for edge, key, parts in part["parts"]})
        self.ended.update((port, key) for port, key in part["ended"])
        self.lost.update({(port, key): load_message(marker) for port, key, marker in part["lost"]})
        self.sent.update(part["sent"])
        self.sent_before.update(part["sent_before"])
        self.left_out.update(part["left_out"])
        self.cursors.update(part["cursors"])
        self.states.update({replica_id: bytes(state) for replica_id, state in part["states"].items()})

    def add_saved(self, saved: Iterable[SavedMessage]) -> None:
        """Add messages and records of a process. A record has its item's in port as edge, and its item's id."""
        for one in saved:
            _, edge, _, envelope = one
            if isinstance(envelope.body, AskRecord):
                # A replica that has not taken the item has a copy too, from an earlier checkpoint, with fewer replies.
                known = self.asks.setdefault((edge, envelope.id), envelope.body)
                if len(envelope.body.replies) > len(known.replies):
                    self.asks[edge, envelope.id] = envelope.body
            elif isinstance(envelope.body, Record):
                self.records[edge, envelope.id] = envelope.body
            else:
                self.messages.append(one)

    def unfinished(self) -> list[SavedMessage]:
        """The messages to send again at resume, with their prefixes filled in."""
        found: list[SavedMessage] = []
        for producer, edge, consumer, envelope in self.messages:
            port = edge.split(" -> ")[1]
            parts = {consumer: envelope.id} if consumer else self.parts.get((edge, envelope.id), {"": envelope.id})
            left = {rank: (port, key) for rank, key in parts.items() if key and (port, key) not in self.ended}
            lost = {rank: self.lost[place] for rank, place in left.items() if place in self.lost}
            if len(left) == len(parts) and not lost:
                left = {consumer: (port, envelope.id)}  # no rank has finished: a new number of ranks may split it
            for rank, place in left.items():
                body = lost.get(rank) or self._fill_in(place, envelope.body)
                found.append((producer, edge, rank, replace(envelope, body=body)))
        return found

    def unfinished_asks(self) -> list[SavedMessage]:
        """The replies for items among the messages to send again; each has its item's in port as edge."""
        if not self.asks:
            return []
        places = {(edge.split(" -> ")[1], envelope.id) for _, edge, _, envelope in self.unfinished()}
        asked = [(place, record) for place, record in self.asks.items() if place in places]
        return [("", port, "", Envelope(key, body=record)) for (port, key), record in asked]

    def _fill_in(self, place: ItemKey, body: Message) -> Message:
        """The message with the record that is kept with it, and both with the tokens generated so far for them."""

        def prefix_of(key: str) -> dict[str, Any]:
            names = ("prefix_token_ids", "prefix_logprobs", "prefix_versions")
            return dict(zip(names, self.prefixes.get(key, ()), strict=False))

        if (record := self.records.get(place)) is not None:
            body = replace(cast(Any, body), record=replace(record, **prefix_of(record.asked)))
        if isinstance(body, Prompt) and body.sample_id in self.prefixes:
            body = replace(body, **prefix_of(body.sample_id))
        return body


def pack_pages(saved: Iterable[SavedMessage]) -> Iterator[list[Any]]:
    """The packed messages and records, in pages of about PAGE_BYTES.

    Records are packed at once, because the work that they describe continues. Messages never change, so each is packed
    when its page is built.
    """
    kept = [(place, pack_envelope(one) if isinstance(one.body, Record) else one) for *place, one in saved]

    def build_pages() -> Iterator[list[Any]]:
        page: list[Any] = []
        num_bytes = 0
        for place, one in kept:
            *head, body = pack_envelope(one) if isinstance(one, Envelope) else one
            page.append((*place, (*head, as_frame(body))))
            num_bytes += len(body)
            if num_bytes >= PAGE_BYTES or len(page) == PAGE_MESSAGES:
                yield page
                page, num_bytes = [], 0
        if page:
            yield page

    return build_pages()


def unpack_page(page: Iterable[Any]) -> list[SavedMessage]:
    """The messages of a page."""
    return [
        (producer, edge, consumer, Envelope(key, ticket, group_id, member, load_message(body)))
        for producer, edge, consumer, (key, ticket, group_id, member, body) in page
    ]


def as_frame(data: bytes) -> npt.NDArray[np.uint8]:
    """`data` as an array: arrays of any size travel in separate frames, outside the body of an answer or request."""
    return np.frombuffer(data, np.uint8)


def pack_envelope(envelope: Envelope) -> Packed:
    return envelope.id, envelope.ticket, envelope.group_id, envelope.member, dump_value(envelope.body)


def samples_in(messages: Iterable[SavedMessage]) -> tuple[set[str], set[str]]:
    """Ids of the samples in these messages, and ids of those samples that have a reward."""
    bodies = [envelope.body for *_, envelope in messages]
    samples = [s for body in bodies for s in getattr(body, "samples", (body,)) if isinstance(s, Sample)]
    return {s.sample_id for s in samples}, {s.sample_id for s in samples if isinstance(s, Scored)}


def kept_requests(messages: Iterable[SavedMessage]) -> set[str]:
    """Ids of the requests whose replies are in records of these messages, or in those that are records."""
    bodies = [envelope.body for *_, envelope in messages]
    records = [body if isinstance(body, Record) else getattr(body, "record", None) for body in bodies]
    return {request_id for record in records if isinstance(record, Record) for request_id in record.request_ids}


def write_state(directory: Path, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
    """`state.msgpack`: the messages, node states and `facts` (version, next ticket, ...), behind their digest.

    The manifest sums what the disk holds; the digest is of what was meant, so it also reveals what went wrong before.
    """
    content = {
        "format": FORMAT,
        "facts": dict(facts),
        "messages": [(*place, pack_envelope(envelope)) for *place, envelope in snapshot.unfinished()],
        "asked": [(*place, pack_envelope(envelope)) for *place, envelope in snapshot.unfinished_asks()],
        "sent": list(snapshot.sent | (snapshot.sent_before - snapshot.left_out)),
        "cursors": snapshot.cursors,
        "states": snapshot.states,
    }
    packed = msgpack.packb(content)
    with open(directory / STATE, "wb") as file:
        file.write(SEAL + _digest(packed))
        file.write(packed)
        file.flush()
        os.fsync(file.fileno())


def read_state(directory: Path) -> dict[str, Any]:
    """The content that `write_state` wrote, with unpacked envelopes.

    Raises ConfigError for another format, and for damage.
    """
    try:
        content = dict(msgpack.unpackb(read_sealed(directory), strict_map_key=False))
        _require_all(int, content["format"])
        if content["format"] != FORMAT:
            raise ConfigError(f"{directory}: checkpoint format {content['format']}, but this flowrl reads {FORMAT}")
        content["messages"] = unpack_page(content["messages"])
        content["asked"] = unpack_page(content.get("asked", ()))
        for producer, edge, consumer, envelope in content["messages"]:
            name, replica = producer.split("/")
            out, into = edge.split(" -> ")
            _require_all(str, name, out, into, consumer, envelope.group_id)
            _require_all(int, int(replica), envelope.ticket, envelope.member)
            _require_all(bytes, envelope.id)
        for _, port, _, envelope in content["asked"]:
            _require_all(str, *port.split("."))
            _require_all(bytes, envelope.id)
            _require_all(AskRecord, envelope.body)
        _require_all(int, *(int(replica_id.split("/")[1]) for replica_id in content["states"]))
        _require_all(dict, content["facts"], content["cursors"], content["states"])
        _require_all(str, *content["cursors"], *content["states"])
        _require_all(int, *content["cursors"].values())
        _require_all(bytes, *content["states"].values(), *content["sent"])
        return content
    except ConfigError:
        raise
    except UNREADABLE as problem:
        raise damaged_state(directory, problem) from None


def _require_all(kind: type[Any], *values: Any) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r:.40} in place of {kind.__name__}")


def read_sealed(directory: Path) -> memoryview:
    """The msgpack value in the state. Raises ConfigError if it differs from its digest, which one of an earlier flowrl
    lacks."""
    data = (directory / STATE).read_bytes()
    if not data.startswith(SEAL):
        return memoryview(data)
    digest, packed = data[len(SEAL) :][:DIGEST_BYTES], memoryview(data)[len(SEAL) + DIGEST_BYTES :]
    if digest != _digest(packed):
        raise ConfigError(f"{STATE} is not what was written (its own digest differs)")
    return packed


def _digest(packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


def damaged_state(directory: Path, problem: BaseException) -> ConfigError:
    """The message about a state that is not what `write_state` wrote."""
    step = int(found[1]) if (found := STEP_DIR.fullmatch(directory.name)) else 0
    older = [path.name for number, path in steps_of(directory.parent) if number < step]
    remedy = (
        f"move {directory.name} away, and --resume continues from {older[-1]}"
        if older
        else "restore it from a copy, or start again with a new --run-dir"
    )
    why = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
    return ConfigError(f"{directory.name}: its {STATE} is damaged, or another program wrote it ({why}); {remedy}")
