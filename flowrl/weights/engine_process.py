"""vLLM's engine process as a child of a generator: it ends with the generator, and Ctrl-C is not its business."""

from __future__ import annotations

import os
import select
import signal
import threading

PARENT_VARIABLE = "FLOWRL_HOST_PID"
"""Environment variable with the generator's process id."""


def adopt() -> None:
    """Called in vLLM's processes as soon as they import flowrl's extension; nothing in the generator's own."""
    parent = int(os.environ.get(PARENT_VARIABLE, os.getpid()))
    if parent == os.getpid():
        return
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
