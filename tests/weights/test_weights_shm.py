"""Segments: what readers can rely on while versions come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.weights.shm import SHM, Segment, SegmentLost, SegmentPool, open_version
from flowrl.wire.run_files import Presence, remove_run, sweep


def publish(pool: SegmentPool, version: int) -> str:
    segment = pool.take_writable()
    segment.write_data(0, memoryview(bytes([version % 256]) * 64))
    pool.publish_segment(segment, version, 64)
    return segment.name


def content(segment: Segment) -> int:
    return os.pread(segment.fd, 1, 4096)[0]


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(uuid.uuid4().hex[:8], "policy")
    yield pool
    pool.close()


def test_two_segments_are_enough_without_readers(pool: SegmentPool) -> None:
    names = [publish(pool, version) for version in range(6)]
    assert len(pool) == 2
    assert names[0] == names[2] == names[4] and names[1] == names[3] == names[5]


def test_a_reader_keeps_its_version_while_newer_ones_are_published(pool: SegmentPool) -> None:
    held = open_version(publish(pool, 0), 0)
    for version in range(1, 5):
        publish(pool, version)
    assert held.version == 0 and content(held) == 0
    assert len(pool) == 3
    held.close()


def use(name: str, reader: int, version: int) -> None:
    held = open_version(name, version)
    held.note_used(reader, version)
    held.close()


def test_one_segment_is_enough_for_readers_that_have_used_each_version() -> None:
    pool = SegmentPool(uuid.uuid4().hex[:8], "policy", readers=2)
    try:
        for version in range(4):
            name = publish(pool, version)
            use(name, 0, version)
            use(name, 1, version)
        assert len(pool) == 1
    finally:
        pool.close()


def test_a_version_stays_until_the_last_reader_has_used_it() -> None:
    """And the second segment that this takes gives its memory back when readers are quick again."""
    pool = SegmentPool(uuid.uuid4().hex[:8], "policy", readers=2)
    try:
        first = publish(pool, 0)
        use(first, 0, 0)
        second = publish(pool, 1)
        assert second != first
        use(first, 1, 0)
        for reader in range(2):
            use(second, reader, 1)
        assert publish(pool, 2) == second
        assert (SHM / first).stat().st_size == 4096
        with pytest.raises(SegmentLost, match="holds version -1, not 0"):
            open_version(first, 0)
        assert publish(pool, 3) == first, "version 2 was not used"
        held = open_version(first, 3)
        assert content(held) == 3
        held.close()
    finally:
        pool.close()


def test_a_late_reader_is_told_that_its_version_was_written_over(pool: SegmentPool) -> None:
    name = publish(pool, 0)
    publish(pool, 1)
    publish(pool, 2)
    with pytest.raises(SegmentLost, match="holds version 2, not 0"):
        open_version(name, 0)


def test_a_segment_being_written_is_no_version(pool: SegmentPool) -> None:
    name = publish(pool, 0)
    publish(pool, 1)
    assert pool.take_writable().name == name
    with pytest.raises(SegmentLost, match="holds version -1"):
        open_version(name, 0)


def test_a_closed_pool_leaves_no_names_and_readers_keep_theirs(pool: SegmentPool) -> None:
    name = publish(pool, 3)
    held = open_version(name, 3)
    pool.close()
    assert not (SHM / name).exists()
    assert content(held) == 3
    held.close()
    with pytest.raises(SegmentLost, match="is gone"):
        open_version(name, 3)


@given(st.lists(st.tuples(st.sampled_from(["publish", "take", "drop"]), st.integers(0, 2)), max_size=40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_readers_plus_two_segments_whatever_the_order(moves: list[tuple[str, int]], known: bool) -> None:
    """Three readers, each with at most one version: whatever they do, what they hold stays what it was, and each can
    take the newest version until it has used it."""
    pool = SegmentPool(uuid.uuid4().hex[:8], "policy", readers=3 if known else 0)
    used = dict.fromkeys(range(3), -1)
    held: dict[int, tuple[int, Segment]] = {}
    newest, name = 0, publish(pool, 0)
    try:
        for move, reader in moves:
            if move == "publish":
                newest += 1
                name = publish(pool, newest)
            elif move == "take" and reader not in held and used[reader] < newest:
                held[reader] = (newest, open_version(name, newest))
            elif move == "drop" and reader in held:
                used[reader], segment = held.pop(reader)
                segment.note_used(reader, used[reader])
                segment.close()
            assert all(segment.version == version == content(segment) for version, segment in held.values())
        assert len(pool) <= 3 + 2
    finally:
        for _, segment in held.values():
            segment.close()
        pool.close()


WRITER = """
import sys
from flowrl.weights.shm import SegmentPool

pool = SegmentPool(sys.argv[1], "policy")
segment = pool.take_writable()
pool.publish_segment(segment, 0, 0)
print(segment.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def killed() -> Iterator[tuple[str, Path]]:
    """(run id, segment) of a run whose writer of weights gets SIGKILL, as rank 0 of a trainer may."""
    run_id = uuid.uuid4().hex[:8]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WRITER, run_id], **streams) as writer:  # type: ignore[call-overload]
        left = SHM / writer.stdout.readline().strip()
        assert left.exists() and str(left) not in sweep(), "the writer lives"
        writer.kill()
        writer.wait()
        yield run_id, left


def test_the_segments_of_a_killed_writer_go_at_the_end_of_its_run(killed: tuple[str, Path]) -> None:
    run_id, left = killed
    driver = Presence(run_id)
    assert str(left) not in sweep(), "the run goes on"
    assert str(left) in remove_run(run_id)
    assert not left.exists()
    driver.close()


def test_the_segments_of_a_killed_writer_are_swept_and_no_others(pool: SegmentPool, killed: tuple[str, Path]) -> None:
    name = publish(pool, 0)
    _, left = killed
    assert str(left) in sweep()
    assert not left.exists() and (SHM / name).exists()


def test_the_lock_of_a_killed_reader_is_free(pool: SegmentPool) -> None:
    name = publish(pool, 0)
    code = (
        "from flowrl.weights.shm import open_version\n"
        f"held = open_version({name!r}, 0)\n"
        "print('held', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"held\n"
        publish(pool, 1)
        assert publish(pool, 2) != name
        reader.kill()
    assert publish(pool, 3) == name
