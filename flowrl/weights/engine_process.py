"""vLLM's engine process as a child of a generator: it ends with the generator, and Ctrl-C is not its business."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

PARENT_VARIABLE = "FLOWRL_HOST_PID"
"""Environment variable with the generator's process id."""


class Adoption(dict[str, Any]):
    """Options that make a watched child of the process that unpickles them, where they are a plain dict.

    As part of vLLM's config they are unpickled as the first thing in its process: a generator that dies
    while vLLM is still loading leaves nothing behind either.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _adopted, (dict(self),)


def _adopted(options: dict[str, Any]) -> dict[str, Any]:
    adopt()
    return options


_watched = 0
"""Process that watches already: its own id, as forks inherit the value and not the thread."""


def adopt() -> None:
    """Watch the generator's process from one of vLLM's; once is enough. Nothing in the generator's own."""
    global _watched
    parent = int(os.environ.get(PARENT_VARIABLE, os.getpid()))
    if os.getpid() in (parent, _watched):
        return
    _watched = os.getpid()
    die_with(parent)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with(pid: int) -> None:
    """End this process as soon as process `pid` has ended, for whatever reason.

    Unlike PR_SET_PDEATHSIG, which follows the thread that started the child.
    """
    parent = os.pidfd_open(pid)

    def wait() -> None:
        watch = select.poll()
        watch.register(parent, select.POLLIN)
        watch.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="flowrl-parent-watch", daemon=True).start()
