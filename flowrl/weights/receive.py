"""The generator's side: gets a published version onto this machine and checks it, before generation is paused.

A receiver converts a manifest to an update that vLLM's worker can load (`TransferEngine`), or that a torch module takes
(`ModuleWeights`, for nodes that are not vLLM engines). `fetch` blocks, so it must not run on the event loop. The caller
closes its result after the update; this releases locks and notifies the trainer.

On GPUs the generator joins the trainer's NCCL group, and the transfer happens inside the update itself, while
generation is paused: there is no memory to fetch into first. That part is written from the source of vLLM 0.32; it has
not yet run on a GPU.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.errors import FlowrlError
from flowrl.graph.routes import WeightRoute, WeightTransport, rank_offset, world_size
from flowrl.messages import Weights
from flowrl.weights.shm import (
    DATA_OFFSET,
    SHM,
    Segment,
    SegmentLost,
    SegmentPool,
    map_segment,
    open_version,
    remove_pool_of_dead,
    verify_checksum,
    view_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.weights.tcp import Origin


@dataclass(frozen=True)
class TransferEngine:
    """An engine of vLLM that loads weights into the model."""

    name: str
    """The name in vLLM's registry."""
    one_by_one: bool = True
    """Whether replicas may update one after another. False if a transfer needs all of them at once."""


SEGMENT_ENGINE = TransferEngine("flowrl_shm")
"""Ours: `flowrl.weights.vllm_process.vllm_worker` registers it."""
NCCL_ENGINE = TransferEngine("nccl", one_by_one=False)
PACKED_BYTES = 256 << 20
"""Size of each of the two buffers in which vLLM packs a broadcast, on the trainer's GPU and on every generator's."""


@dataclass(frozen=True)
class Fetched:
    """One version, ready to load."""

    update: Mapping[str, Any]
    """Update info of the vLLM transfer engine behind this receiver."""
    close: Callable[[], None]
    """Call once, when the update is finished or abandoned."""


class Receiver(Protocol):
    """Receives the versions of one policy for one replica."""

    engine: TransferEngine
    """The engine of vLLM that loads the updates."""

    def join_engine(self, manifest: Weights) -> Mapping[str, Any] | None:
        """Init info for vLLM's transfer engine at the first call; None afterwards, or if the engine needs none."""
        ...

    def fetch_version(self, manifest: Weights) -> Fetched:
        """Get the version of `manifest`. Raises SegmentLost if newer weights have replaced it: continue with the next
        manifest."""
        ...

    def close(self) -> None: ...


class NcclReceiver:
    """Takes part in the trainer's broadcast. All replicas have to do so at once, or the broadcast never ends."""

    engine = NCCL_ENGINE

    def __init__(self, routes: Sequence[WeightRoute], replica: str) -> None:
        self._routes = tuple(routes)
        self._replica = replica
        self._joined = False

    def join_engine(self, manifest: Weights) -> Mapping[str, Any] | None:
        if self._joined:
            return None
        self._joined = True
        _, place = WeightTransport.parse(manifest.transport)
        host, port = place.split("/")
        return {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": rank_offset(self._routes, self._replica),
            "world_size": world_size(self._routes),
            "packed": True,
            "packed_buffer_size_bytes": PACKED_BYTES,
        }

    def fetch_version(self, manifest: Weights) -> Fetched:
        rows = [*manifest.tensors]
        return Fetched(
            {
                "names": [name for name, *_ in rows],
                "dtype_names": [dtype for _, dtype, *_ in rows],
                "shapes": [list(shape) for _, _, shape, *_ in rows],
            },
            lambda: None,
        )

    def close(self) -> None:
        """vLLM leaves the group when it shuts down."""


class SegmentReceiver:
    """Reads shared memory; a version on another machine is first copied here, once per machine.

    `reader` is the number by which the publisher knows this reader; None: the publisher does not know it.
    """

    engine = SEGMENT_ENGINE

    def __init__(self, run_id: str, *, reader: int | None = None, machine: str | None = None) -> None:
        self._run_id = run_id
        self._reader = reader
        self._machine = machine
        """Replaces this machine's name, in tests of transfers between machines."""
        self._pool: SegmentPool | None = None
        self._notes: set[Path] = set()

    def join_engine(self, manifest: Weights) -> None:
        return None

    def fetch_version(self, manifest: Weights) -> Fetched:
        segment = self._open_segment(manifest)
        try:
            verify_checksum(manifest, segment.map_file(), start=DATA_OFFSET)
        except FlowrlError:
            segment.close()
            raise

        def close() -> None:
            if self._reader is not None:
                segment.note_used(self._reader, manifest.base_version)
            segment.close()

        return Fetched({"segment": segment.name, "tensors": [list(row) for row in manifest.tensors]}, close)

    def _open_segment(self, manifest: Weights) -> Segment:
        transport, place = WeightTransport.parse(manifest.transport)
        if transport is WeightTransport.SHM:
            return open_version(place, manifest.base_version)
        if transport is WeightTransport.TCP:
            from flowrl.weights.tcp import Origin, machine_name

            origin = Origin.parse_place(place)
            if origin.machine == (self._machine or machine_name()):
                return open_version(origin.segment, manifest.base_version)
            return self._copy_remote(origin, manifest)
        raise FlowrlError(
            f"weights of {manifest.policy!r} were published over {transport}, but this generator reads shared memory: "
            "the generator and its trainer were given different routes"
        )

    def _copy_remote(self, origin: Origin, manifest: Weights) -> Segment:
        """The local copy of a remote segment. One process copies; the others wait for its lock and read the copy."""
        from flowrl.weights.tcp import download_version

        path = SHM / f"{origin.segment}-copy"
        self._notes.add(path)
        with lock_file(path) as note:
            known = os.pread(note, 4096, 0).decode()
            if known:
                try:
                    return open_version(known, manifest.base_version)
                except SegmentLost:
                    pass  # the note names an older copy: download this version
                remove_pool_of_dead(known)  # nothing else removes the pool of a dead reader during the run
            if self._pool is None:
                self._pool = SegmentPool(self._run_id, manifest.policy)
            segment = self._pool.take_writable()
            try:
                download_version(origin, manifest.base_version, manifest.num_bytes, segment)
            except FlowrlError:
                segment.release_lock()
                raise
            self._pool.publish_segment(segment, manifest.base_version, manifest.num_bytes)
            os.truncate(note, 0)
            os.pwrite(note, segment.name.encode(), 0)
            return open_version(segment.name, manifest.base_version)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        for path in self._notes:
            path.unlink(missing_ok=True)


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Within this context, an exclusive lock on a small file next to the segments, whose content is shared by the
    processes that take the lock. Gives the file's descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def make_receiver(routes: Sequence[WeightRoute], replica: str, run_id: str) -> Receiver:
    """The generator's end for the route of `replica`; for shared memory if it has no route."""
    found = ((number, route.transport) for number, route in enumerate(routes) if route.consumer == replica)
    reader, kind = next(found, (None, WeightTransport.SHM))
    if kind is WeightTransport.NCCL:
        return NcclReceiver(routes, replica)
    return SegmentReceiver(run_id, reader=reader)


class ModuleWeights:
    """Loads versions into `parameters`, whose keys are the published names."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._mappings: dict[str, mmap.mmap] = {}
        """Segment name -> mapping."""

    def load_update(self, update: Mapping[str, Any]) -> None:
        """Copy the version that `fetch_version` returned; dtypes are converted. The caller holds the segment's lock.

        Raises FlowrlError, and loads nothing, if names or shapes differ from the module's.
        """
        import torch

        with torch.no_grad():
            for name, tensor in self.read_update(update).items():
                parameter: Any = self._parameters[name]
                if not hasattr(parameter, "ds_tensor"):
                    parameter.copy_(tensor)
                    continue
                shard = parameter.ds_tensor  # this rank's range of the flattened tensor
                start = torch.distributed.get_rank() * shard.numel()
                part = tensor.reshape(-1)[start : start + shard.numel()]
                shard[: part.numel()].copy_(part)

    def read_update(self, update: Mapping[str, Any]) -> dict[str, Tensor]:
        """The version's tensors by name, as views of its segment: they are valid while the caller holds its lock.

        Raises FlowrlError if names or shapes differ from the module's.
        """
        mapping = map_segment(update["segment"], self._mappings)
        found = dict(view_tensors(mapping, update["tensors"], start=DATA_OFFSET))
        mine = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in found.items()}
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if different:
            raise FlowrlError(
                f"the published weights do not fit this node's model: {len(different)} tensors differ in name or "
                f"shape, among them {', '.join(different[:3])}; give the node and its trainer the same model"
            )
        return found


def load_published(model: Any, update: Mapping[str, Any]) -> None:
    """Load the version of `update` into a flowrl model, or into this rank's part of one that ZeRO-3 has sharded."""
    if not hasattr(model, "loader"):
        model.loader = ModuleWeights(dict(model.network.named_parameters()))
    model.loader.load_update(update)
