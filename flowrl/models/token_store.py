"""Stores the tokens of many sequences one after another: in memory, or in an unnamed file that is gone when its process
ends.

The file is in flowrl's cache directory.
"""

from __future__ import annotations

import os
import tempfile
from typing import Protocol

import numpy as np

from flowrl.machine.cache import cache_dir
from flowrl.machine.disk import DiskRoom
from flowrl.messages import Int32

PART_TOKENS = 1 << 18
"""Number of tokens that are collected before they are written."""
BYTES = 4
"""Bytes of one token."""


class TokenStore(Protocol):
    """Tokens that are all added first, and then read."""

    def add_tokens(self, token_ids: Int32) -> None: ...

    def read_tokens(self, start: int, stop: int) -> Int32:
        """The tokens at positions `start` to `stop`, counted as in a slice."""
        ...


class HeldTokens:
    """Tokens in memory."""

    def __init__(self) -> None:
        self._parts: list[Int32] = []

    def add_tokens(self, token_ids: Int32) -> None:
        self._parts.append(token_ids)

    def read_tokens(self, start: int, stop: int) -> Int32:
        if len(self._parts) != 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0][start:stop]


class TokenFile:
    """Tokens on disk. Reads from several threads do not disturb each other. Raises ConfigError for a full disk."""

    def __init__(self) -> None:
        home = cache_dir() / "tokens"
        self._parts: list[Int32] = []
        self._gathered, self._room = 0, DiskRoom("tokens", home)
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=home, buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise self._room.describe_refused(problem) from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def add_tokens(self, token_ids: Int32) -> None:
        self._parts.append(token_ids)
        self._gathered += len(token_ids)
        if self._gathered >= PART_TOKENS:
            self._write()

    def read_tokens(self, start: int, stop: int) -> Int32:
        if self._parts:
            self._write()
        return np.frombuffer(os.pread(self._file.fileno(), (stop - start) * BYTES, start * BYTES), np.int32)

    def _write(self) -> None:
        content = np.concatenate(self._parts).astype(np.int32, copy=False).tobytes()
        self._parts, self._gathered = [], 0
        self._room.require_room()
        try:
            while content:
                number = self._file.write(content)
                self._room.num_bytes, content = self._room.num_bytes + number, content[number:]
        except OSError as problem:
            raise self._room.describe_refused(problem) from None
