"""Messages between a process and its child: length-prefixed msgpack over a socket that is the child's alone.

Used by the workers of rewards and by the processes of environments.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from typing import IO, Any

import msgpack

LENGTH = struct.Struct("<I")
MOST_BYTES = (1 << 32) - 1
_private: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Connections that forked processes close."""


class Garbage(Exception):
    """The bytes that arrived are no message."""


def packed(message: Any) -> bytes:
    """The bytes of one message."""
    body: bytes = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader, *, most_bytes: int = MOST_BYTES) -> Any:
    """The next message. Raises asyncio.IncompleteReadError at the end of the connection.

    Raises Garbage for bytes that are no message, and for a message longer than `most_bytes`.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > most_bytes:
        raise Garbage(f"a message of {length} bytes was announced; at most {most_bytes} are allowed")
    return _unpacked(await reader.readexactly(length))


def read(inbox: IO[bytes]) -> Any:
    """The next message, None at the end of the connection. Raises Garbage."""
    head = inbox.read(LENGTH.size)
    return _unpacked(inbox.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def write(outbox: IO[bytes], message: Any) -> None:
    """Send one message."""
    outbox.write(packed(message))
    outbox.flush()


def keep_to_this_process(connection: socket.socket) -> None:
    """From now on, no process that this one starts or forks has the connection."""
    connection.set_inheritable(False)
    _private.add(connection)


def _close_private() -> None:
    for connection in _private:
        if connection.fileno() >= 0:
            os.close(connection.detach())


os.register_at_fork(after_in_child=_close_private)


def _unpacked(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as problem:
        raise Garbage(f"{len(body)} bytes are no message: {type(problem).__name__}") from None
