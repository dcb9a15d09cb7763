"""Slab: large arrays are passed between processes of one machine through shared memory, with one copy.

The sender copies an array into a block of one of its segments and sends the block's address; the
receiver gets a view. When nothing in the receiving process refers to the block any more (the view and all
arrays made from it without a copy are gone), the receiver reports this to the owner, which reuses the block. So a
message may be forwarded, kept for a replay or finished late, and its data never change while anyone reads them.

Invariants
- A block is free, or lent to exactly one host; a lent block is never written.
- All blocks lent to a host are returned when that host's process dies.
- The memory of a segment is reserved when the segment is made, so a full /dev/shm is an error at that point, and
  never a signal later. If there is no room, arrays are sent as ordinary frames.
- A segment's name identifies the run, whose processes hold its `Presence`: this is how a sweep finds the segments
  of dead runs.

Waits: none.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from flowrl.errors import WireError
from flowrl.wire.run_files import SHM

FROM_BYTES = 512 << 10
"""Smaller arrays are cheaper to send as frames."""
SEGMENT_BYTES = 64 << 20
PAGE = 4096

SlabBlock = tuple[int, int]
"""(segment, offset)"""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_address = Struct("<IIQ")


def segment_path(prefix: str, host: str, incarnation: int, segment: int) -> Path:
    return SHM / f"{_name_stem(prefix, host)}{incarnation}-{segment}"


def _name_stem(prefix: str, host: str) -> str:
    return f"flowrl-{prefix}-{blake2b(host.encode(), digest_size=5).hexdigest()}-"


class Space:
    """The free blocks of one segment: first fit, adjacent free blocks are merged."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)]
        self._used: dict[int, int] = {}

    def take_block(self, num_bytes: int) -> int | None:
        """Reserve a block of at least `num_bytes` and return its offset, None if there is no room."""
        size = -(-num_bytes // PAGE) * PAGE
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self._used[offset] = size
                return offset
        return None

    def free_block(self, offset: int) -> None:
        """Free the block at `offset`."""
        insort(self._free, (offset, self._used.pop(offset)))
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())


class Slab:
    """The blocks that one process lends to other processes."""

    def __init__(self, prefix: str, host: str, incarnation: int) -> None:
        self._prefix = prefix
        self._host = host
        self._incarnation = incarnation
        self._spaces: list[Space] = []
        self._bytes: list[Bytes] = []
        self._lent: dict[SlabBlock, str] = {}

    @property
    def used_bytes(self) -> int:
        return sum(space.used_bytes for space in self._spaces)

    def lender(self, borrower: str) -> Lender:
        """An object that puts arrays into blocks for `borrower`."""
        return Lender(self, borrower)

    def open(self) -> None:
        """Remove the segments of this host's earlier incarnations. Views of them in other processes stay valid."""
        for path in SHM.glob(f"{_name_stem(self._prefix, self._host)}*"):
            path.unlink(missing_ok=True)

    def lend(self, array: np.ndarray[Any, Any], borrower: str) -> bytes | None:
        """Copy `array` into a block and return the block's address, None if there is no room."""
        block = self._find_block(array.nbytes)
        if block is None:
            return None
        segment, offset = block
        place = self._bytes[segment][offset : offset + array.nbytes]
        np.copyto(place.view(array.dtype).reshape(array.shape), array)
        self._lent[block] = borrower
        return _address.pack(self._incarnation, segment, offset) + self._host.encode()

    def _find_block(self, num_bytes: int) -> SlabBlock | None:
        for segment, space in enumerate(self._spaces):
            offset = space.take_block(num_bytes)
            if offset is not None:
                return segment, offset
        if not self._add_segment(max(SEGMENT_BYTES, -(-num_bytes // PAGE) * PAGE)):
            return None
        offset = self._spaces[-1].take_block(num_bytes)
        assert offset is not None
        return len(self._spaces) - 1, offset

    def _add_segment(self, num_bytes: int) -> bool:
        path = segment_path(self._prefix, self._host, self._incarnation, len(self._spaces))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # a sparse file would fail later, with SIGBUS at a write
            memory = mmap.mmap(file, num_bytes)
        except OSError:  # no room: /dev/shm is full, or a container's limit is reached
            path.unlink()
            return False
        finally:
            os.close(file)
        self._spaces.append(Space(num_bytes))
        self._bytes.append(np.frombuffer(memory, np.uint8))
        return True

    def free_blocks(self, borrower: str, blocks: Iterable[SlabBlock]) -> None:
        """`borrower` no longer uses these blocks. Blocks that were already taken back are ignored."""
        for segment, offset in blocks:
            if self._lent.get((segment, offset)) == borrower:
                del self._lent[segment, offset]
                self._spaces[segment].free_block(offset)

    def take_back(self, borrower: str) -> None:
        """Free all blocks of `borrower`: its process has ended, and its views with it."""
        self.free_blocks(borrower, [block for block, host in self._lent.items() if host == borrower])

    def close(self) -> None:
        """Remove the segments. Views in other processes stay valid."""
        for segment in range(len(self._spaces)):
            segment_path(self._prefix, self._host, self._incarnation, segment).unlink(missing_ok=True)
        self._spaces.clear()
        self._bytes.clear()
        self._lent.clear()


class Lender:
    """Puts arrays for one borrower into blocks of a slab (a `codec.ArrayPlace`). Refuses small arrays."""

    def __init__(self, slab: Slab, borrower: str) -> None:
        self._slab = slab
        self._borrower = borrower

    def __call__(self, array: np.ndarray[Any, Any]) -> bytes | None:
        return self._slab.lend(array, self._borrower) if array.nbytes >= FROM_BYTES else None

    def take_back(self, address: bytes) -> None:
        """Free the block at `address`, which was not sent to the borrower."""
        _, segment, offset = _address.unpack_from(address)
        self._slab.free_blocks(self._borrower, [(segment, offset)])


class Attached:
    """Other processes' segments, which are mapped here on first use.

    `release(host, incarnation, block)` is called, from any thread, when nothing here refers to a block any more.
    """

    def __init__(self, prefix: str, release: Callable[[str, int, SlabBlock], None]) -> None:
        self._prefix = prefix
        self._release = release
        self._segments: dict[tuple[str, int, int], Bytes] = {}

    def array(self, address: bytes, num_bytes: int) -> Bytes:
        """A view of the block at `address`. Raises WireError if there is none."""
        incarnation, segment, offset = _address.unpack_from(address)
        host = address[_address.size :].decode()
        memory = self._map_segment(host, incarnation, segment)
        if offset + num_bytes > memory.nbytes:
            raise WireError(
                f"an invalid block: {num_bytes} bytes at offset {offset} of a segment of {memory.nbytes} bytes"
            )
        # The base of `view` is a memoryview, not an array. So numpy makes every direct or indirect view of `view` keep
        # `view` itself alive, and not only the segment's array.
        view: Bytes = np.frombuffer(memory.data[offset : offset + num_bytes], np.uint8)
        weakref.finalize(view, self._release, host, incarnation, (segment, offset)).atexit = False
        return view

    def _map_segment(self, host: str, incarnation: int, segment: int) -> Bytes:
        key = host, incarnation, segment
        memory = self._segments.get(key)
        if memory is None:
            try:
                file = os.open(segment_path(self._prefix, host, incarnation, segment), os.O_RDONLY)
                try:
                    mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
                finally:
                    os.close(file)
            except FileNotFoundError as error:
                raise WireError(f"a shared segment of {host} that is gone") from error
            except OSError as error:
                raise WireError(f"a shared segment of {host} that cannot be mapped here: {error}") from error
            memory = self._segments[key] = np.frombuffer(mapped, np.uint8)
        return memory

    def forget(self, host: str) -> None:
        """Release a dead host's segments. Views that are still in use keep their memory."""
        for key in [key for key in self._segments if key[0] == host]:
            del self._segments[key]

    def close(self) -> None:
        self._segments.clear()
