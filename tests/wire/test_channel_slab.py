"""Shared memory: blocks, their return, and what is left after a kill."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import WireError
from flowrl.graph.dispatch_rules import SHARE
from flowrl.messages import Message
from flowrl.wire import slab
from flowrl.wire.edges import OutEdge
from flowrl.wire.encoding.multiparts import DATA, NOTIFY, MessageDecoder, MessageEncoder
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.run_files import Presence, run_prefix, socket_root, sweep
from flowrl.wire.slab import FROM_BYTES, PAGE, Attached, Slab, SlabBlock, Space
from tests.wire.channel_rig import Thing, inbox_of, lane, opened, play, via

PREFIX = run_prefix("slab-test", os.getpid())
LARGE = FROM_BYTES // 4


@pytest.fixture(scope="module", autouse=True)
def present() -> Iterator[None]:
    """As in a run, so that no sweep takes the segments of these tests away."""
    presence = Presence("slab-test")
    yield
    presence.close()


def segments(prefix: str = PREFIX) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"flowrl-{prefix}-*"))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE)), max_size=60), st.randoms())
@settings(max_examples=200, deadline=None)
def test_blocks_never_overlap_and_all_space_comes_back(steps: list[tuple[bool, int]], random: object) -> None:
    space = Space(100 * PAGE)
    used: dict[int, int] = {}
    for give, size in steps:
        if give and used:
            offset = random.choice(sorted(used))  # type: ignore[attr-defined]
            del used[offset]
            space.free_block(offset)
            continue
        taken = space.take_block(size)
        if taken is not None:
            assert taken % PAGE == 0 and taken + size <= space.num_bytes
            assert all(taken + size <= other or other + length <= taken for other, length in used.items())
            used[taken] = size
    for offset in used:
        space.free_block(offset)
    assert space.used_bytes == 0
    assert space.take_block(100 * PAGE) == 0


def test_first_fit_reuses_the_warm_block() -> None:
    space = Space(100 * PAGE)
    first = space.take_block(10 * PAGE)
    assert first == 0
    space.free_block(first)
    assert space.take_block(10 * PAGE) == 0


@dataclass(frozen=True)
class Pair(Message):
    first: object
    second: object


class Ends:
    """A lender and a borrower; freed blocks go back at once."""

    def __init__(self) -> None:
        self.lender = Slab(PREFIX, "A", 0)
        self.attached = Attached(PREFIX, self.release)

    def release(self, host: str, incarnation: int, block: SlabBlock) -> None:
        assert (host, incarnation) == ("A", 0)
        self.lender.free_blocks("B", [block])

    def cross(self, array: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        address = self.lender.lender("B")(array)
        assert address is not None
        return self.attached.array(address, array.nbytes).view(np.int32)


@pytest.fixture
def ends() -> object:
    both = Ends()
    yield both
    both.attached.close()
    both.lender.close()
    assert segments() == []


def test_a_block_is_free_when_no_view_is_left(ends: Ends) -> None:
    values = np.arange(LARGE, dtype=np.int32)
    view = ends.cross(values)
    assert np.array_equal(view, values)
    part = view[100:200].reshape(10, 10)[::2]
    del view
    assert ends.lender.used_bytes >= values.nbytes
    assert part[0, 0] == 100
    other = ends.cross(values + 1)
    assert part[0, 0] == 100, "a block that is still seen is not written"
    del part, other
    assert ends.lender.used_bytes == 0


def test_small_arrays_do_not_use_it(ends: Ends) -> None:
    assert ends.lender.lender("B")(np.zeros(FROM_BYTES - 1, np.uint8)) is None


def test_arrays_larger_than_a_segment_and_strided_ones(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "SEGMENT_BYTES", 1 << 20)
    big = np.arange(1 << 20, dtype=np.int32)
    views = [ends.cross(big), ends.cross(big[::2]), ends.cross(big.reshape(1024, 1024).T)]
    assert len(segments()) == 2 or len(segments()) == 3
    assert np.array_equal(views[0], big)
    assert np.array_equal(views[1], big[::2])
    assert np.array_equal(views[2], big.reshape(1024, 1024).T.ravel())


def test_what_a_dead_host_had_comes_back(ends: Ends) -> None:
    view = ends.cross(np.arange(LARGE, dtype=np.int32))
    ends.lender.take_back("B")
    assert ends.lender.used_bytes == 0
    del view  # its late release changes nothing
    assert ends.lender.used_bytes == 0


def test_without_room_arrays_travel_as_frames(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert ends.lender.lender("B")(np.zeros(LARGE, np.int32)) is None
    assert segments() == []


def test_an_address_outside_the_segment_is_refused(ends: Ends) -> None:
    array = np.zeros(LARGE, np.int32)
    address = ends.lender.lender("B")(array)
    assert address is not None
    with pytest.raises(WireError, match="of a segment of"):
        ends.attached.array(address, 1 << 40)
    with pytest.raises(WireError, match="gone"):
        ends.attached.array(address.replace(b"A", b"C"), array.nbytes)


def test_what_a_refused_message_had_comes_back(ends: Ends) -> None:
    values = np.zeros(LARGE, np.int32)
    encoder = MessageEncoder("A", 0, ends.lender.lender("B"))
    encoder.add([(DATA, 1, 0, 0, [Envelope(bytes(16), body=Thing(0, values))])])
    used = ends.lender.used_bytes
    assert used >= values.nbytes
    with pytest.raises(WireError, match="object"):
        encoder.add([(DATA, 1, 0, 1, [Envelope(bytes(16), body=Pair(values, object()))])])
    with pytest.raises(WireError, match="object"):
        encoder.add([(NOTIFY, 0, 0, 0, ("kind", (values, object())))])
    with pytest.raises(WireError, match="no dataclass"):  # before anything of it is put there
        encoder.add([(DATA, 1, 0, 1, [Envelope(bytes(16), body=Message())])])
    assert ends.lender.used_bytes == used
    (frame,) = MessageDecoder(ends.attached.array).decode([bytes(part) for part in encoder.take()])
    assert np.array_equal(frame[4][0].body.values, values)  # type: ignore[index]


def test_messages_forwarded_and_kept_never_change_under_their_reader() -> None:
    """The consumer acks, keeps the array all the same, and many more messages go through the slab."""

    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        sender, inbox = OutEdge([a.sender(lane())], SHARE), inbox_of(b, lane())
        kept = []
        for index in range(20):
            values = np.full(LARGE, index, np.int32)
            await sender.send(Envelope(source_id("t", str(index)), body=Thing(index, values)))
            delivery = await inbox.take()
            if index % 5 == 0:
                kept.append(delivery.envelope.body.values)  # type: ignore[attr-defined]
            delivery.ack()
            del delivery
        b.on("sync", lambda host, body: None)
        await a.request("B", "sync")
        assert [values[0] for values in kept] == [0, 5, 10, 15]
        assert all((values == values[0]).all() for values in kept)
        kept.clear()
        del values
        gc.collect()
        a.on("sync", lambda host, body: None)
        await b.request("A", "sync")
        assert a._slab.used_bytes <= LARGE * 4

    play(main())


KILLED = """
import asyncio, os, sys
import numpy as np
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.slab import FROM_BYTES

async def main():
    endpoint = Endpoint("X", run_id="killed", driver_pid=os.getpid())
    await endpoint.open()
    endpoint._slab.lender("Y")(np.zeros(FROM_BYTES, np.uint8))
    print(os.getpid(), flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@pytest.mark.slow
def test_sweep_removes_what_a_killed_run_left_and_nothing_else() -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    prefix = run_prefix("killed", pid)
    left = [*segments(prefix), socket_root() / prefix]
    assert len(left) == 2 and all(path.exists() for path in left)
    assert not set(map(str, left)) & set(sweep()), "the run is alive"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert set(map(str, left)) <= set(sweep())
    assert not any(path.exists() for path in left)
