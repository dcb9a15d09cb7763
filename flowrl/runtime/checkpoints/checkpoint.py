"""Checkpoints: one consistent snapshot through a running graph.

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

A directory becomes a checkpoint by its last rename, after its manifest is written (`manifest.json`); a crash
during the write leaves the previous checkpoint intact. `step_N` is complete at any time: the directory is written and
removed under the name `.step_N.tmp`, and a second `step_N` moves the first one to `.step_N.old` until it has replaced
it. The next run that claims the directory calls `recover`, which finishes or undoes what a crash interrupted. A run
that ends while one of its threads publishes stops the thread and waits for it: after that, nothing writes there.

The manifest has every file of the checkpoint with its size and checksums; it is written last and read first. A
directory without it is not a checkpoint. With it, any damage is detected before a run resumes from the checkpoint: a
missing, shortened or extended file, or a flipped bit, also in the manifest itself. Additional files are ignored. The
checksum is CRC-32: it detects accidental errors of disks and copies at disk speed, about 2 GB/s per core. Files are
summed in pieces, in several threads, because zlib and reads release the interpreter lock: a checkpoint of 100 GB takes
about ten seconds on eight cores if the disk is as fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Message, Prompt, Record, Sample, Scored
from flowrl.runtime.ledger.ledger_file import sync_file
from flowrl.runtime.ledger.ledger_segments import SEGMENTS
from flowrl.wire.encoding.codec import dump_value, load_message
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.items import ItemKey

FORMAT = 3
STEP_DIR = re.compile(r"step_(\d{6,})")
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
ASIDE = ".old"
RUBBISH = ".tmp"


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

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a process's answer to "snapshot"."""
        self.parts.update({(edge, key): parts for edge, key, parts in part["parts"]})
        self.ended.update((port, key) for port, key in part["ended"])
        self.lost.update({(port, key): load_message(marker) for port, key, marker in part["lost"]})
        self.sent.update(part["sent"])
        self.sent_before.update(part["sent_before"])
        self.left_out.update(part["left_out"])
        self.cursors.update(part["cursors"])
        self.states.update({replica_id: bytes(state) for replica_id, state in part["states"].items()})

    def take(self, saved: Iterable[SavedMessage]) -> None:
        """Add messages and records of a process. A record has its item's in port as edge, and its item's id."""
        for one in saved:
            _, edge, _, envelope = one
            if isinstance(envelope.body, Record):
                self.records[edge, envelope.id] = envelope.body
            else:
                self.messages.append(one)

    def settled(self) -> list[SavedMessage]:
        """The messages to send again at resume: the unfinished ones, with their prefixes filled in."""
        return [saved for message in self.messages for saved in self._settled(message)]

    def _settled(self, message: SavedMessage) -> Iterator[SavedMessage]:
        producer, edge, consumer, envelope = message
        port = edge.split(" -> ")[1]
        parts = {consumer: envelope.id} if consumer else self.parts.get((edge, envelope.id), {"": envelope.id})
        left = {rank: (port, key) for rank, key in parts.items() if key and (port, key) not in self.ended}
        lost = {rank: self.lost[place] for rank, place in left.items() if place in self.lost}
        if len(left) == len(parts) and not lost:
            left = {consumer: (port, envelope.id)}  # no rank has finished: a new number of ranks may split the message
        for rank, place in left.items():
            body = lost.get(rank) or self._with_prefix(self._with_record(place, envelope.body))
            yield producer, edge, rank, replace(envelope, body=body)

    def _with_record(self, place: ItemKey, body: Message) -> Message:
        record = self.records.get(place)
        if record is None:
            return body
        if record.asked in self.prefixes:
            record = replace(record, **self._prefix(record.asked))
        return replace(cast(Any, body), record=record)  # type: ignore[no-any-return]

    def _with_prefix(self, body: Message) -> Message:
        if not isinstance(body, Prompt) or body.sample_id not in self.prefixes:
            return body
        return replace(body, **self._prefix(body.sample_id))

    def _prefix(self, key: str) -> dict[str, Any]:
        token_ids, logprobs, versions = self.prefixes[key]
        return {"prefix_token_ids": token_ids, "prefix_logprobs": logprobs, "prefix_versions": versions}


def pages(saved: Iterable[SavedMessage]) -> Iterator[list[Any]]:
    """The packed messages and records, in pages of about PAGE_BYTES.

    Records are packed at once, because the work that they describe continues. Messages never change, so each is packed
    when its page is built.
    """
    return _pages([(place, pack(one) if isinstance(one.body, Record) else one) for *place, one in saved])


def _pages(kept: Iterable[tuple[list[Any], Envelope | Packed]]) -> Iterator[list[Any]]:
    page: list[Any] = []
    num_bytes = 0
    for place, one in kept:
        *head, body = pack(one) if isinstance(one, Envelope) else one
        page.append((*place, (*head, beside(body))))
        num_bytes += len(body)
        if num_bytes >= PAGE_BYTES or len(page) == PAGE_MESSAGES:
            yield page
            page, num_bytes = [], 0
    if page:
        yield page


def unpage(page: Iterable[Any]) -> list[SavedMessage]:
    """The messages of a page."""
    return [(producer, edge, consumer, unpack(packed)) for producer, edge, consumer, packed in page]


def beside(data: bytes) -> npt.NDArray[np.uint8]:
    """`data` as an array: arrays of any size travel in separate frames, outside the body of an answer or request."""
    return np.frombuffer(data, np.uint8)


def pack(envelope: Envelope) -> Packed:
    return envelope.id, envelope.ticket, envelope.group_id, envelope.member, dump_value(envelope.body)


def unpack(packed: Iterable[Any]) -> Envelope:
    key, ticket, group_id, member, body = packed
    return Envelope(key, ticket, group_id, member, load_message(body))


def write_state(directory: Path, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
    """`state.msgpack`: the messages, node states and `facts` (version, next ticket, ...), behind their digest.

    The manifest sums what the disk holds; the digest is of what was meant, so it also reveals what went wrong before.
    """
    content = {
        "format": FORMAT,
        "facts": dict(facts),
        "messages": [(*place, pack(envelope)) for *place, envelope in snapshot.settled()],
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
        content = dict(msgpack.unpackb(_unsealed(directory), strict_map_key=False))
        _require_all(int, content["format"])
        if content["format"] != FORMAT:
            raise ConfigError(f"{directory}: checkpoint format {content['format']}, but this flowrl reads {FORMAT}")
        content["messages"] = unpage(content["messages"])
        _require_types(content)
        return content
    except ConfigError:
        raise
    except UNREADABLE as problem:
        raise damaged_state(directory, problem) from None


def require_sealed(directory: Path) -> None:
    """Raise ConfigError if the state differs from its digest."""
    _unsealed(directory)


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


def _unsealed(directory: Path) -> memoryview:
    """The msgpack value in the state. A state of an earlier flowrl has no digest."""
    data = (directory / STATE).read_bytes()
    if not data.startswith(SEAL):
        return memoryview(data)
    digest, packed = data[len(SEAL) :][:DIGEST_BYTES], memoryview(data)[len(SEAL) + DIGEST_BYTES :]
    if digest != _digest(packed):
        raise ConfigError(f"{STATE} is not what was written (its own digest differs)")
    return packed


def _digest(packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


def _require_types(content: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless every part has the type with which `write_state` writes it."""
    for producer, edge, consumer, envelope in content["messages"]:
        name, replica = producer.split("/")
        out, into = edge.split(" -> ")
        _require_all(str, name, out, into, consumer, envelope.group_id)
        _require_all(int, int(replica), envelope.ticket, envelope.member)
        _require_all(bytes, envelope.id)
    _require_all(dict, content["facts"], content["cursors"], content["states"])
    _require_all(str, *content["cursors"], *content["states"])
    _require_all(int, *content["cursors"].values())
    _require_all(bytes, *content["states"].values(), *content["sent"])


def _require_all(kind: type, *values: Any) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r:.40} in place of {kind.__name__}")


def made(messages: Iterable[SavedMessage]) -> tuple[set[str], set[str]]:
    """Ids of the samples in these messages, and ids of those samples that have a reward."""
    bodies = [envelope.body for *_, envelope in messages]
    samples = [s for body in bodies for s in getattr(body, "samples", (body,)) if isinstance(s, Sample)]
    return {s.sample_id for s in samples}, {s.sample_id for s in samples if isinstance(s, Scored)}


def kept_requests(messages: Iterable[SavedMessage]) -> set[str]:
    """Ids of the requests whose replies are in records of these messages."""
    records = [getattr(envelope.body, "record", None) for *_, envelope in messages]
    return {request_id for record in records if isinstance(record, Record) for request_id in record.request_ids}


def link(source: Path, directory: Path, stop: threading.Event) -> bool:
    """Give `directory`, which has no manifest yet, the files that only the checkpoint `source` has, as hard links.

    Except the segments of the ledger, which `directory` has all of its own.
    Returns False, and changes nothing, if the file system has no hard links. Nobody may write to these files
    afterwards, because `source` has them too.
    """
    tried = directory / MANIFEST
    try:
        os.link(source / MANIFEST, tried)
    except OSError:
        return False
    tried.unlink()
    for path in sorted(source.rglob("*")):
        raise_if_stopped(path, stop)
        target = directory / path.relative_to(source)
        if target.parent.name == SEGMENTS and target.parent.parent == directory:
            continue
        if path.is_file() and target != tried and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return True


def publish(temporary: Path, final: Path, facts: Mapping[str, Any], stop: threading.Event) -> None:
    """Make a finished directory the checkpoint `final`, durably; replaces a checkpoint of that name.

    The manifest contains `facts`. Blocks until everything is on the disk. Setting `stop` raises
    `Abandoned` and leaves `final` as it was, unless the directory has been renamed already.
    """
    write_manifest(temporary, facts, stop)
    for path in (*temporary.rglob("*"), temporary):
        raise_if_stopped(temporary, stop)
        sync_file(path)
    _settle(final)
    if final.exists():
        final.replace(_hidden(final, ASIDE))
    try:
        temporary.replace(final)
        sync_file(final.parent)
    finally:
        _settle(final)


def recover(checkpoints: Path) -> None:
    """Restore or remove the remains of a run that was killed while it wrote, replaced or removed a checkpoint.

    No other run may write there: the caller holds the run directory's lock.
    """
    for aside in sorted(checkpoints.glob(f".step_*{ASIDE}")):
        _settle(aside.with_name(aside.name[1:].removesuffix(ASIDE)))
    for rubbish in sorted(checkpoints.glob(f".step_*{RUBBISH}")):
        shutil.rmtree(rubbish, ignore_errors=True)  # a process of the killed run may still be writing there


def _hidden(final: Path, suffix: str) -> Path:
    return final.with_name(f".{final.name}{suffix}")


def _settle(final: Path) -> None:
    """Remove the checkpoint moved aside for `final` if `final` exists; otherwise move it back."""
    aside = _hidden(final, ASIDE)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        aside.replace(final)


def steps_of(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint there, intact or damaged, oldest first."""
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


MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
PIECE_BYTES = 256 << 20
"""Size of the pieces of a file. Each piece has its own checksum; pieces are summed in parallel."""
CHUNK_BYTES = 4 << 20
"""Bytes per read; a thread keeps no more in memory."""
THREADS = min(8, os.cpu_count() or 1)


class Abandoned(FlowrlError):
    """The run ends, so the writing of a checkpoint is abandoned."""


@dataclass(frozen=True)
class _Piece:
    path: Path
    start: int
    num_bytes: int


def write_manifest(directory: Path, facts: Mapping[str, Any], stop: threading.Event) -> None:
    """Sum all files in `directory` and write its manifest, with `facts` (JSON). Raises Abandoned on `stop`."""
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items() if name != MANIFEST}
    known = _known(directory, files)
    summed = _summed(directory, {name: size for name, size in sizes.items() if name not in known}, stop)
    content = {"format": MANIFEST_FORMAT, **facts, "files": {name: known.get(name) or summed[name] for name in sizes}}
    sealed = {**content, "checksum": _seal(content)}
    (directory / MANIFEST).write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")


def _known(directory: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """The entries of the files that are hard links to those of another checkpoint, from its manifest.

    They are not read again: if one has changed since it was summed, that is found when it is verified.
    """
    left = {name: path.stat() for name, path in files.items() if path.stat().st_nlink > 1}
    known: dict[str, Any] = {}
    for other in sorted(directory.parent.glob("step_*"), reverse=True) if left else []:
        with suppress(ConfigError, OSError):
            entries = read_manifest(other)["files"]
            for name in [name for name in left if name in entries and (other / name).exists()]:
                if os.path.samestat((other / name).stat(), left[name]) and entries[name]["bytes"] == left[name].st_size:
                    known[name] = entries[name]
                    del left[name]
        if not left:
            break
    return known


def read_manifest(directory: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint. Raises ConfigError, with the file's name, if it is missing or damaged."""
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"it has no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("checksum", None) != _seal(content):
        raise ConfigError(f"{MANIFEST} has changed since it was written (its own checksum differs)")
    if content["format"] != MANIFEST_FORMAT:
        raise ConfigError(f"{MANIFEST} has format {content['format']}, but this flowrl reads {MANIFEST_FORMAT}")
    return content


def verify_files(directory: Path) -> Mapping[str, Any]:
    """The manifest, after checking every file against it. Raises ConfigError for the first file that differs."""
    content = read_manifest(directory)
    sizes = {name: entry["bytes"] for name, entry in content["files"].items()}
    for name, num_bytes in sizes.items():
        path = directory / name
        try:
            found_bytes = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
        if found_bytes is None:
            raise ConfigError(f"{name} is missing")
        if found_bytes != num_bytes:
            raise ConfigError(f"{name} has {found_bytes} bytes, but {num_bytes} were written")
    try:
        found = _summed(directory, sizes, threading.Event())
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be read: {error.strerror}") from None
    for name, entry in content["files"].items():
        for number, (was, now) in enumerate(zip(entry["crc32"], found[name]["crc32"], strict=True)):
            if was != now:
                start, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, sizes[name])
                raise ConfigError(f"{name} has changed since it was written (checksum of bytes {start} to {end})")
    return content


def _summed(directory: Path, sizes: Mapping[str, int], stop: threading.Event) -> dict[str, Any]:
    """Size and checksums of each file, by name."""
    pieces = [
        (name, _Piece(directory / name, start, min(PIECE_BYTES, size - start)))
        for name, size in sizes.items()
        for start in range(0, size, PIECE_BYTES)
    ]
    found: dict[str, Any] = {name: {"bytes": size, "crc32": []} for name, size in sizes.items()}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="flowrl-checksum") as threads:
        sums = threads.map(_sum, (piece for _, piece in pieces), (stop for _ in pieces))
        for (name, _), checksum in zip(pieces, sums, strict=True):
            found[name]["crc32"].append(checksum)
    return found


def _sum(piece: _Piece, stop: threading.Event) -> str:
    """The checksum of a piece, as eight hexadecimal digits."""
    checksum, left = 0, piece.num_bytes
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    with open(piece.path, "rb", buffering=0) as file:
        file.seek(piece.start)
        while left and (count := file.readinto(buffer[: min(CHUNK_BYTES, left)])):
            raise_if_stopped(piece.path, stop)
            checksum, left = zlib.crc32(buffer[:count], checksum), left - count
    return f"{checksum:08x}"


def raise_if_stopped(path: Path, stop: threading.Event) -> None:
    """Raise Abandoned if the run ends."""
    if stop.is_set():
        raise Abandoned(f"the run ends, so {path} is left unfinished")


def _seal(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
