"""vLLM's engine process as a child of a generator: it ends with the generator, and Ctrl-C is not its business."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

PARENT_VARIABLE = "FLOWRL_HOST_PID"
"""Environment variable with the generator's process id."""
FIRST = "flowrl.weights.engine_main"


@contextmanager
def begun_by_us() -> Iterator[None]:
    """What multiprocessing spawns within imports `FIRST` before all else, in place of this process's main module.

    A generator that dies while vLLM is still loading leaves nothing behind, and Ray, whose worker is this
    process's main module, is not imported again by a process that does not use it.
    """
    main = sys.modules["__main__"]
    spec, main.__spec__ = main.__spec__, find_spec(FIRST)
    try:
        yield
    finally:
        main.__spec__ = spec


def collect_once_loaded() -> None:
    """No garbage collection until the first that vLLM asks for, when it has loaded the model.

    While modules load nearly all objects stay: looking at them again and again takes a fifth of the time.
    """

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.callbacks.remove(told)
            gc.enable()

    gc.disable()
    gc.callbacks.append(told)


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
