"""Processes that are not of a run, at the door of one of its sockets."""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from flowrl.wire.connection import CurveKeys

PATIENCE_MS = 5000
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_DISCONNECTED,
)


def strangers(server: bytes) -> Iterator[tuple[str, CurveKeys | None, bytes]]:
    """(who, its own keys, the key that it takes for the server's); `server` is the real one's public key."""
    yield "without keys", None, b""
    foreign = CurveKeys.new()
    yield "with keys of another run", foreign, foreign.public
    yield "with the public key alone", CurveKeys.new(), server


def is_admitted(url: str, keys: CurveKeys | None, server: bytes, kind: int = zmq.PUSH) -> bool:
    """Whether a socket with these keys is admitted at `url`; blocks until that is decided."""
    context = zmq.Context()
    try:
        socket = context.socket(kind)
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, server
        monitor = socket.get_monitor_socket()
        socket.connect(url)
        while monitor.poll(PATIENCE_MS):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            if event in FAILED:
                return False
        raise AssertionError(f"nothing was heard of {url}")
    finally:
        context.destroy(linger=0)


def admitted_strangers(url: str, server: bytes) -> list[str]:
    """Those of the strangers that are admitted."""
    return [who for who, keys, key in strangers(server) if is_admitted(url, keys, key)]
