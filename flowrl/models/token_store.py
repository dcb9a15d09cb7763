"""Tokens of many sequences one after another: held, or in a file that has no name and is gone with its process.

The file is in flowrl's cache directory. While it is written, the disk keeps as much free as beside copies of rows.
"""

from __future__ import annotations

import os
import tempfile
from typing import Protocol

import numpy as np

from flowrl.cache import cache_dir
from flowrl.errors import ConfigError
from flowrl.hub.hub_problems import gigabytes
from flowrl.messages import Int32
from flowrl.tasks.spooled import CHECKED_BYTES, short_of_room

PART_TOKENS = 1 << 18
"""Tokens that are gathered before they are written."""
BYTES = 4
"""Of one token."""


class TokenStore(Protocol):
    """Tokens that are added first, and read when all are there."""

    def add(self, token_ids: Int32) -> None: ...

    def read(self, start: int, stop: int) -> Int32:
        """The tokens from one place to another, as slices count."""
        ...


class HeldTokens:
    """Tokens in memory."""

    def __init__(self) -> None:
        self._parts: list[Int32] = []

    def add(self, token_ids: Int32) -> None:
        self._parts.append(token_ids)

    def read(self, start: int, stop: int) -> Int32:
        if len(self._parts) != 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0][start:stop]


class TokenFile:
    """Tokens on disk. Reads from several threads do not disturb each other. Raises ConfigError for a full disk."""

    def __init__(self) -> None:
        self._home = cache_dir() / "tokens"
        self._parts: list[Int32] = []
        self._gathered = self._written = self._checked = 0
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._handle, name = tempfile.mkstemp(dir=self._home)
            os.unlink(name)
        except OSError as problem:
            raise self._no_room(problem.strerror or str(problem)) from None

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def add(self, token_ids: Int32) -> None:
        self._parts.append(token_ids)
        self._gathered += len(token_ids)
        if self._gathered >= PART_TOKENS:
            self._write()

    def read(self, start: int, stop: int) -> Int32:
        if self._parts:
            self._write()
        return np.frombuffer(os.pread(self._handle, (stop - start) * BYTES, start * BYTES), np.int32)

    def _write(self) -> None:
        content = np.concatenate(self._parts).astype(np.int32, copy=False).tobytes()
        self._parts, self._gathered = [], 0
        if self._written >= self._checked and (problem := short_of_room(self._home)):
            raise self._no_room(problem)
        self._checked = max(self._checked, self._written + CHECKED_BYTES)
        try:
            while content:
                number = os.write(self._handle, content)
                self._written, content = self._written + number, content[number:]
        except OSError as problem:
            raise self._no_room(problem.strerror or str(problem)) from None

    def _no_room(self, problem: str) -> ConfigError:
        return ConfigError(
            f"tokens cannot be kept in {self._home} after {gigabytes(self._written)} ({problem}); name a directory on "
            "a larger disk in FLOWRL_CACHE"
        )
