"""vLLM's engine process as a child of a generator: it ends with the generator, and ignores Ctrl-C."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

from flowrl.machine.orphans import has_ended

PARENT_VARIABLE = "FLOWRL_HOST_PID"
"""Environment variable with the generator's process id."""
FIRST = "flowrl.weights.vllm_process.engine_main"


@contextmanager
def begun_by_us() -> Iterator[None]:
    """Within this context, processes that multiprocessing spawns first import `FIRST` instead of this main module.

    So a generator that dies while vLLM is still loading leaves no process behind. It also saves importing Ray:
    this process's main module is Ray's worker, which the spawned process does not use.
    """
    main = sys.modules["__main__"]
    spec, main.__spec__ = main.__spec__, find_spec(FIRST)
    try:
        yield
    finally:
        main.__spec__ = spec


def collect_once_loaded() -> None:
    """Disable garbage collection until vLLM first requests one, after it has loaded the model.

    Nearly all objects that loading modules creates stay alive: scanning them repeatedly takes a fifth of the time. Then
    the memory in which the model was read and repacked goes back to the kernel.
    """

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.callbacks.remove(told)
            gc.enable()
            release_freed_memory()

    gc.disable()
    gc.callbacks.append(told)


def release_freed_memory() -> None:
    """Return freed memory to the kernel, also what lies between blocks that are in use: a process that keeps its memory
    has used it once, for the copies of a model that was loaded. Does nothing with another allocator than glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def interpret_triton() -> None:
    """Tell vLLM that Triton works on a CPU, if TRITON_INTERPRET says that its kernels are to be interpreted.

    vLLM's CPU build uses Triton only with a backend named cpu, which the published package lacks. The interpreter needs
    no backend.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))


_watched = 0
"""Id of the process that runs the watch thread. A fork inherits this value but not the thread, so `adopt` compares it
with the current process id."""


def adopt_process() -> None:
    """End this process of vLLM as soon as the generator's process has ended, for whatever reason. Does nothing the
    second time, and in the generator's own process."""
    global _watched
    parent = int(os.environ.get(PARENT_VARIABLE, os.getpid()))
    if os.getpid() in (parent, _watched):
        return
    _watched = os.getpid()
    generator = os.pidfd_open(parent)

    def wait() -> None:
        has_ended(generator, None)
        os.kill(os.getpid(), signal.SIGKILL)

    # PR_SET_PDEATHSIG is no alternative: it depends on the thread that started the child, not on the process.
    threading.Thread(target=wait, name="flowrl-parent-watch", daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
