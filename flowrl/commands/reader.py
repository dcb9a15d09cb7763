"""The console of commands that print for a reader, who may stop reading."""

from __future__ import annotations

import errno
import os

from flowrl.runtime.telemetry.view import SafeConsole


class ReadersConsole(SafeConsole):
    """A console on which a closed pipe ends the command as it does elsewhere (see `flowrl.cli`)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def readers_console(*, plain: bool) -> ReadersConsole:
    """The console on standard output; `plain`: without colours."""
    return ReadersConsole(force_terminal=False if plain else None, color_system=None if plain else "auto")
