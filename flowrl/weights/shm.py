"""Shared-memory segments, each holding one complete version of a policy's weights.

Invariants:

- File locks serve as the reference count. A reader holds a shared lock from the check of the version to the
  end of its use, and the writer holds an exclusive lock while it writes. Locks end with their process, so a
  reader that dies blocks nothing.
- The version is in the header and is written last: a segment whose writer died holds no version.
- The newest complete version is overwritten only when all readers that the writer knows have used it. So a pool
  needs one segment if its readers are quick, and at most one segment per reader, the newest, and the one being
  written: readers + 2.

Nothing here waits: if a segment cannot be locked at once, the writer skips it, and a reader raises
`SegmentLost`, because a newer version exists.

A manifest has a table of the tensors in a segment. Offsets count from the segment's first data byte and are multiples
of 64. torch is imported only where it is used: drivers, and tests of the parts without tensors, do not need it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowrlError
from flowrl.machine.orphans import has_ended
from flowrl.messages import TensorRow, Weights

if TYPE_CHECKING:
    import torch

    from flowrl.wire.run_files import Presence


SHM = Path("/dev/shm")
DATA_OFFSET = 4096
"""Offset of the tensors in bytes: one page, so that every mapping is aligned."""
_HEADER = struct.Struct("<8sqQ")
_USED = struct.Struct("<Q")
"""1 + the newest version that a reader has used; a table of these, one for each reader, follows the header."""
MOST_READERS = (DATA_OFFSET - _HEADER.size) // _USED.size
_MAGIC = b"flowrlW1"
_POOL = re.compile(r"(?P<pool>flowrl-[^-]+-(?P<pid>\d+)-weights-[^-]*-)\d+")
"""The name of a segment: the name of its pool, which contains the process id, and a number."""
_serial = itertools.count()
"""Numbers the segments that this process creates."""


class SegmentLost(FlowrlError):
    """The segment now holds another version, or is being overwritten: use the newest manifest."""


class Segment:
    """An open segment file. `close` releases any lock that is held."""

    def __init__(self, name: str, *, create: bool = False) -> None:
        self.name = name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create else os.O_RDWR
        try:
            self.fd = os.open(SHM / name, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise SegmentLost(f"weights segment {name} is gone; its publisher has newer weights or ended") from None

    def try_lock(self, *, exclusive: bool) -> bool:
        """Take the lock if it is free now; a shared lock held by this object becomes an exclusive one."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release_lock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def write_header(self, version: int, num_bytes: int) -> None:
        """Say which version is held; -1: none, as long as one is being written."""
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, version, num_bytes), 0)

    def write_data(self, offset: int, data: memoryview) -> None:
        """Copy `data` to `offset` bytes after the header; the file grows as needed."""
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], DATA_OFFSET + offset + written)

    @property
    def version(self) -> int:
        """The version held, -1 if there is none or it is being written."""
        magic, version, _ = _HEADER.unpack(os.pread(self.fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        return int(version) if magic == _MAGIC else -1

    def note_used(self, reader: int, version: int) -> None:
        """Reader number `reader` needs this version no more, and none before it."""
        os.pwrite(self.fd, _USED.pack(version + 1), _HEADER.size + reader * _USED.size)

    def is_used_by(self, readers: int) -> bool:
        """Whether each of the readers 0 to `readers` - 1 has used the version that is held."""
        size = readers * _USED.size
        table = os.pread(self.fd, size, _HEADER.size).ljust(size, b"\0")
        return all(used > self.version for (used,) in _USED.iter_unpack(table))

    def map_file(self) -> mmap.mmap:
        """The whole file, header included. Shared: a mapping kept open sees what is written later."""
        return mmap.mmap(self.fd, 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SegmentPool:
    """The writer's segments of one policy, reused so that their pages stay warm.

    Their names identify the run. If a writer is killed, the run's driver removes its segments, or else the sweep at
    the next start does. `readers` is the number of processes that read every version and say when they have used it;
    0: readers are not known, so the newest version always stays.
    """

    def __init__(self, run_id: str, policy: str, *, readers: int = 0) -> None:
        from flowrl.wire.run_files import run_prefix

        self._readers = readers if readers <= MOST_READERS else 0
        self._run_id = run_id
        self._presence: Presence | None = None
        safe = "".join(c if c.isalnum() else "_" for c in policy)[-40:]
        self._stem = f"flowrl-{run_prefix(run_id, os.getpid())}-weights-{safe}-"
        self._segments: list[Segment] = []
        self._newest: Segment | None = None

    def __len__(self) -> int:
        return len(self._segments)

    def take_writable(self) -> Segment:
        """A segment locked for writing: the newest if all readers have used it, or one that no reader holds and that
        is not the newest, or else a new one."""
        newest = self._newest
        if (
            newest is not None
            and self._readers
            and newest.is_used_by(self._readers)
            and newest.try_lock(exclusive=True)
        ):
            newest.write_header(-1, 0)
            for other in self._segments:  # quick readers need no second one: free the memory of those that none holds
                if other is not newest and other.try_lock(exclusive=True):
                    other.write_header(-1, 0)
                    os.ftruncate(other.fd, DATA_OFFSET)  # it grows again when it is written
                    other.release_lock()
            return newest
        for segment in self._segments:
            if segment is not self._newest and segment.try_lock(exclusive=True):
                segment.write_header(-1, 0)
                return segment
        if self._presence is None:
            from flowrl.wire.run_files import Presence

            self._presence = Presence(self._run_id)
        segment = Segment(f"{self._stem}{next(_serial)}", create=True)
        locked = segment.try_lock(exclusive=True)
        assert locked
        segment.write_header(-1, 0)
        self._segments.append(segment)
        return segment

    def publish_segment(self, segment: Segment, version: int, num_bytes: int) -> None:
        """Commit and unlock `segment`, which is complete and now the newest."""
        segment.write_header(version, num_bytes)
        segment.release_lock()
        self._newest = segment

    def close(self) -> None:
        """Remove the segments' names; readers keep the segments that they have mapped."""
        for segment in self._segments:
            (SHM / segment.name).unlink(missing_ok=True)
            segment.close()
        self._segments.clear()
        self._newest = None
        if self._presence is not None:
            self._presence.close()
            self._presence = None


def open_version(name: str, version: int) -> Segment:
    """Segment `name`, locked for reading and holding `version`. Raises SegmentLost."""
    segment = Segment(name)
    if segment.try_lock(exclusive=False) and segment.version == version:
        return segment
    held = segment.version
    segment.close()
    raise SegmentLost(f"weights segment {name} holds version {held}, not {version}; take the newest manifest")


def remove_pool_of_dead(name: str) -> None:
    """Remove the segments of the pool that made segment `name`, if its process on this machine has ended."""
    made = _POOL.fullmatch(name)
    if made is None:
        return
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(int(made["pid"]))
        try:
            if not has_ended(process):
                return
        finally:
            os.close(process)
    for path in SHM.glob(f"{made['pool']}*"):
        path.unlink(missing_ok=True)


ALIGNMENT = 64


class ChecksumMismatch(FlowrlError):
    """The bytes in the transport are not those that the trainer published."""


class Checksum:
    """Depends on the order of tensors, and runs at memory speed: 64-bit word sums, hashed with name, type and shape."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        self._hash.update(f"{name};{dtype};{tuple(shape)};".encode())
        self._hash.update(struct.pack("<Q", word_sum(data)))

    @property
    def value(self) -> int:
        """The checksum, with 63 bits so that it fits any signed 64-bit integer."""
        return int.from_bytes(self._hash.digest(), "little") >> 1


def word_sum(data: npt.NDArray[np.uint8]) -> int:
    """Sum modulo 2**64 of the bytes as 64-bit little-endian words, the last one padded with zeros."""
    whole = len(data) // 8 * 8
    total = int(np.add.reduce(data[:whole].view("<u8"), dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def align_offset(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def map_segment(name: str, known: dict[str, mmap.mmap]) -> mmap.mmap:
    """The segment's mapping. It stays in `known`: a publisher reuses its few segments, and mapping costs page
    faults."""
    if name not in known:
        segment = Segment(name)
        known[name] = segment.map_file()
        segment.close()
    return known[name]


def view_tensors(mapping: mmap.mmap, rows: Iterable[TensorRow], *, start: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for each row, as views of a mapped segment. Valid while the segment is locked."""
    import torch

    for name, dtype, shape, offset, num_bytes in rows:
        torch_dtype = getattr(torch, dtype)
        count = num_bytes // torch_dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=torch_dtype, count=count, offset=start + offset)
        yield name, flat.reshape(tuple(shape))


def verify_checksum(manifest: Weights, mapping: mmap.mmap, *, start: int) -> None:
    """Raises ChecksumMismatch if the mapped bytes do not match the manifest."""
    found = Checksum()
    everything = np.frombuffer(mapping, np.uint8)
    for name, dtype, shape, offset, num_bytes in manifest.tensors:
        begin = start + offset
        found.add_tensor(name, dtype, shape, everything[begin : begin + num_bytes])
    if found.value != manifest.checksum:
        raise ChecksumMismatch(
            f"weights of {manifest.policy!r}, version {manifest.version}, have checksum {found.value:x} in "
            f"{manifest.transport}, but the manifest says {manifest.checksum:x}. Nothing was loaded; "
            "something other than the trainer wrote into the segment, or the copy is broken."
        )
