"""Weights for other machines: rank 0 serves its segments in chunks, and one reader per machine fetches them.

The server's public key is sent in the manifest, over links that are encrypted themselves: any process that knows
the key belongs to the run. A server reads the segment under a read lock, so a version that is overwritten
during the transfer is "lost", never mixed. Waits: a reader waits for its chunks, until the server answers
or `SILENCE_S` has passed without an answer.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from dataclasses import dataclass
from typing import Self

import zmq
from zmq.utils import z85

from flowrl.errors import FlowrlError
from flowrl.weights.shm import DATA_OFFSET, Segment, SegmentLost, open_version
from flowrl.wire.connection import local_ip, this_machine

CHUNK_BYTES = 4 << 20
IN_FLIGHT = 8
SILENCE_S = 60.0
_REQUEST = struct.Struct("<qQI")
"""Version, offset, number of bytes; the segment's name follows."""


@dataclass(frozen=True)
class Origin:
    """Where a segment is served: the part after "tcp:" in a manifest's transport."""

    host: str
    port: int
    public_key: str
    """Hexadecimal."""
    machine: str
    """Readers with the same `machine_name()` open the segment directly."""
    segment: str

    def __str__(self) -> str:
        return f"{self.host}/{self.port}/{self.public_key}/{self.machine}/{self.segment}"

    @classmethod
    def parse_place(cls, text: str) -> Self:
        host, port, key, machine, segment = text.split("/")
        return cls(host, int(port), key, machine, segment)


def machine_name() -> str:
    """The machine's name; equal in processes that share /dev/shm."""
    return hashlib.blake2b(this_machine().encode(), digest_size=6).hexdigest()


class ChunkServer:
    """Serves this process's segments in a separate thread."""

    def __init__(self, address: str | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._public = public
        self._host = address or local_ip()
        self._port = self._socket.bind_to_random_port(f"tcp://{self._host}")
        self._thread = threading.Thread(target=self._serve_chunks, name="flowrl-weights-tcp", daemon=True)
        self._thread.start()

    def name_origin(self, segment: str) -> Origin:
        return Origin(self._host, self._port, z85.decode(self._public).hex(), machine_name(), segment)

    def close(self) -> None:
        self._context.term()
        self._thread.join()

    def _serve_chunks(self) -> None:
        """Answer requests until the context ends. Ending the context waits until this thread has closed the socket."""
        try:
            while True:
                reader, request = self._socket.recv_multipart()
                version, offset, num_bytes = _REQUEST.unpack_from(request)
                data = read_chunk(request[_REQUEST.size :].decode(), version, offset, num_bytes)
                self._socket.send_multipart([reader, struct.pack("<Q", offset), data], copy=False)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)


def read_chunk(name: str, version: int, offset: int, num_bytes: int) -> bytes:
    """The requested bytes, b"" if the segment now holds another version."""
    try:
        segment = open_version(name, version)
    except SegmentLost:
        return b""
    try:
        return os.pread(segment.fd, num_bytes, DATA_OFFSET + offset)
    finally:
        segment.close()


def download_version(origin: Origin, version: int, num_bytes: int, into: Segment) -> None:
    """Copy a version's bytes into `into`, which is locked for writing. Raises SegmentLost."""
    context = zmq.Context()
    link = context.socket(zmq.DEALER)
    try:
        link.curve_serverkey = z85.encode(bytes.fromhex(origin.public_key))
        link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
        link.rcvtimeo = int(SILENCE_S * 1000)
        link.connect(f"tcp://{origin.host}:{origin.port}")
        starts = list(range(0, num_bytes, CHUNK_BYTES))
        name = origin.segment.encode()
        for asked, start in enumerate(starts):
            link.send(_REQUEST.pack(version, start, min(CHUNK_BYTES, num_bytes - start)) + name)
            if asked >= IN_FLIGHT:
                store_chunk(link, version, into)
        for _ in starts[-IN_FLIGHT:]:
            store_chunk(link, version, into)
    except zmq.Again:
        raise FlowrlError(
            f"the trainer's weights at {origin.host}:{origin.port} did not answer for {SILENCE_S:g} s; "
            "is the port reachable from this machine?"
        ) from None
    finally:
        context.destroy(linger=0)


def store_chunk(link: zmq.Socket[bytes], version: int, into: Segment) -> None:
    where, data = link.recv_multipart(copy=False)
    if not data.bytes:
        raise SegmentLost(f"version {version} was overwritten while it was being copied; take the newest manifest")
    into.write_data(struct.unpack("<Q", where.bytes)[0], memoryview(data.buffer))
