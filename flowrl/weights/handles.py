"""Passes update infos from a trainer to the generators on its machine, which report when they are done.

CUDA memory handles are valid only while the trainer keeps the tensors, so the trainer has to know when every
reader has loaded them. Waits: the trainer waits for each reader's "loaded", a reader waits for the trainer's
answer; both waits end at the latest with the processes, which the supervisor ends together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import zmq

from flowrl.channel.address import run_prefix, socket_root
from flowrl.channel.presence import Presence


class HandleServer:
    """The trainer's end. Only one thread at a time may use it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._path = socket_root() / f"{run_prefix(run_id, os.getpid())}-handles"
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> str:
        """Listen, if not yet done, and return the address for readers."""
        if self._socket is None:
            self._presence = Presence(self._run_id)
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.bind(f"ipc://{self._path}")
            self._path.chmod(0o600)
        return str(self._path)

    def hand_out(self, version: int, update: Mapping[str, Any], num_readers: int) -> None:
        """Answer `num_readers` readers of `version`; returns when all have loaded it."""
        self.open()
        assert self._socket is not None
        answer = json.dumps({"version": version, "update": dict(update)}).encode()
        loaded = 0
        while loaded < num_readers:
            reader, word = self._socket.recv_multipart()
            if word == b"loaded":
                loaded += 1
            else:
                self._socket.send_multipart([reader, answer])

    def close(self) -> None:
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=0)
            self._context.term()
            self._socket = None
            self._path.unlink(missing_ok=True)
            self._presence.close()


class HandleReader:
    """A generator's end."""

    def __init__(self, path: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{path}")

    def ask(self, version: int) -> dict[str, Any]:
        """Return the update info of `version`; blocks until the trainer has it."""
        self._socket.send(b"wanted")
        answer = json.loads(self._socket.recv())
        assert answer["version"] == version, (answer["version"], version)
        update: dict[str, Any] = answer["update"]
        return update

    def loaded(self) -> None:
        """Report that the tensors are loaded: as far as this reader is concerned, the trainer may release them."""
        self._socket.send(b"loaded")

    def close(self) -> None:
        self._context.destroy(linger=1000)
