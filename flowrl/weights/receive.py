"""The generator's side: gets a published version onto this machine and checks it, before generation is paused.

A receiver converts a manifest to an update that vLLM's worker can load. `fetch` blocks, so it must not run on
the event loop. The caller closes its result after the update; this releases locks and notifies the trainer.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import FlowrlError
from flowrl.graph.routes import WeightTransport
from flowrl.messages import Weights
from flowrl.weights.fetched import SEGMENT_ENGINE, Fetched
from flowrl.weights.manifest import verify
from flowrl.weights.shm import DATA_OFFSET, SHM, Segment, SegmentLost, SegmentPool, open_version, remove_pool_of_dead

if TYPE_CHECKING:
    from flowrl.weights.tcp import Origin


class SegmentReceiver:
    """Reads shared memory; a version on another machine is first copied here, once per machine."""

    engine = SEGMENT_ENGINE

    def __init__(self, run_id: str, *, machine: str | None = None) -> None:
        self._run_id = run_id
        self._machine = machine
        """Replaces this machine's name, in tests of transfers between machines."""
        self._pool: SegmentPool | None = None
        self._notes: set[Path] = set()

    def join(self, manifest: Weights) -> None:
        return None

    def fetch(self, manifest: Weights) -> Fetched:
        segment = self._segment(manifest)
        try:
            verify(manifest, segment.map(), start=DATA_OFFSET)
        except FlowrlError:
            segment.close()
            raise
        return Fetched({"segment": segment.name, "tensors": [list(row) for row in manifest.tensors]}, segment.close)

    def _segment(self, manifest: Weights) -> Segment:
        transport, place = WeightTransport.parse(manifest.transport)
        if transport is WeightTransport.SHM:
            return open_version(place, manifest.base_version)
        if transport is WeightTransport.TCP:
            from flowrl.weights.tcp import Origin, machine_name

            origin = Origin.parse(place)
            if origin.machine == (self._machine or machine_name()):
                return open_version(origin.segment, manifest.base_version)
            return self._copied(origin, manifest)
        raise FlowrlError(
            f"weights of {manifest.policy!r} were published over {transport}, but this generator reads shared memory: "
            "the generator and its trainer were given different routes"
        )

    def _copied(self, origin: Origin, manifest: Weights) -> Segment:
        """The local copy of a remote segment. One process copies; the others wait for its lock and read the copy."""
        path = SHM / f"{origin.segment}-copy"
        self._notes.add(path)
        with _locked(path) as note:
            known = os.pread(note, 4096, 0).decode()
            if known:
                try:
                    return open_version(known, manifest.base_version)
                except SegmentLost:
                    pass  # the note names an older copy: download this version
                remove_pool_of_dead(known)  # nothing else removes the pool of a dead reader during the run
            name = self._download(origin, manifest)
            os.truncate(note, 0)
            os.pwrite(note, name.encode(), 0)
            return open_version(name, manifest.base_version)

    def _download(self, origin: Origin, manifest: Weights) -> str:
        from flowrl.weights.tcp import download

        if self._pool is None:
            self._pool = SegmentPool(self._run_id, manifest.policy)
        segment = self._pool.writable()
        try:
            download(origin, manifest.base_version, manifest.num_bytes, segment)
        except FlowrlError:
            segment.unlock()
            raise
        self._pool.publish(segment, manifest.base_version, manifest.num_bytes)
        return segment.name

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        for path in self._notes:
            path.unlink(missing_ok=True)


class _locked:
    """An exclusive lock on a small file next to the segments. Processes that take the lock share the file's content."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return self._fd

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
