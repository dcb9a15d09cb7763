"""Processes that leave nothing behind, and waits for processes that no descendant of theirs can prolong.

A pipe ends when the last process that holds its other end has closed it, so a helper of a program prolongs a wait for
that end at will. Waits here are for the end of a process, which the kernel reports (`has_ended`, `run_program`).

Run as a script (`start_kept`), this file is a keeper: it forks, the child becomes the program, and the keeper adopts
what the child and its descendants leave. When the child has ended, or the keeper gets SIGTERM (also when the thread
that started the keeper ends), the keeper ends everything below it, and then itself in the child's way. As a script it
uses only the standard library, so that a keeper is small and starts fast. It waits for these two signals only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KEPT_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
KILLED_WITHIN_S = 5.0
"""A process that SIGKILL does not end within this time hangs in the kernel: nothing else can end it."""
CLEANED_UP_WITHIN_S = 1.0
TRACKER = b"resource_tracker"
"""Part of the command line of processes of multiprocessing and joblib that remove shared memory and semaphores when the
last process that used them has ended."""


def adopt_orphans() -> None:
    """From now on, a descendant of this process whose own parent has ended becomes a child of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets the signal when the thread that started it ends, and ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def child_pids() -> list[int]:
    """Pids of the children that this process's threads have started or adopted; empty if the kernel does not report
    them."""
    found: list[int] = []
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, thread.read_text(encoding="utf-8").split())
    return found


def has_ended(process: int, within_s: float | None = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or ends within that time; None: wait until it has ended.

    This uses `poll`, because `select.select` cannot watch all descriptors of a process with more than 1,024.
    """
    watch = select.poll()
    watch.register(process, select.POLLIN)
    return bool(watch.poll(None if within_s is None else 1000 * within_s))


def end_children(*, but: Collection[int] = ()) -> None:
    """Kill and reap all children of this process that are not in `but`, and their children, which this process adopts,
    until none is left. Trackers of shared memory get time to end by themselves, after all others.

    A process that does not end, or that belongs to another user, is left.
    """
    left, patient_until_s = set(but), time.monotonic() + CLEANED_UP_WITHIN_S
    while pids := [pid for pid in child_pids() if pid not in left]:
        others = []
        for pid in pids:
            with suppress(OSError):
                if TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
            others.append(pid)
        for pid in others:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in others or pids:
            if not _end_child(pid, patience_s=0.0 if others else patient_until_s - time.monotonic()):
                left.add(pid)


def _end_child(pid: int, *, patience_s: float) -> bool:
    """Kill a child unless it ends within `patience_s`, and reap it. Returns whether it has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:  # something else has reaped it
        return True
    try:
        if patience_s <= 0 or not has_ended(process, patience_s):
            os.kill(pid, signal.SIGKILL)
        ended = has_ended(process, KILLED_WITHIN_S)
    except PermissionError:
        return False
    finally:
        os.close(process)
    if ended:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return ended


def run_program(
    command: Sequence[str],
    *,
    text: str = "",
    within_s: float | None = None,
    together: bool = False,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program with `text` as its input, until it ends. `together` puts its errors into its output.

    What it has started may outlive it. Raises OSError if it cannot be started, and subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(text.encode(errors="surrogateescape"))
        given.seek(0)
        said = output if together else errors
        status = subprocess.run(command, stdin=given, stdout=output, stderr=said, timeout=within_s, env=env).returncode
        for file in (output, errors):
            file.seek(0)
        texts = (file.read().decode(errors="replace") for file in (output, errors))
        return subprocess.CompletedProcess(list(command), status, *texts)


def start_kept(
    module: str, *args: str, connection: socket.socket, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a keeper whose child runs `python -m module args DESCRIPTOR`, where the descriptor is that of `connection`.

    `variables` are its environment. Standard input is empty, and output goes to this process's standard error. The
    keeper has its own process group. Its SIGTERM ends all; its exit status is the child's, and then nothing is left.
    """
    return subprocess.Popen(
        (sys.executable, __file__, str(os.getpid()), module, *args, str(connection.fileno())),
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(connection.fileno(),),
        env=variables,
        process_group=0,
    )


def outlive_program(parent: int, connection: int) -> None:
    """Fork, and return in the child. This process never returns: it ends after the child and everything below it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    keeper = os.getpid()
    if os.getppid() != parent:  # it has ended before it could give the signal
        os._exit(1)
    kept = os.fork()
    if kept == 0:
        die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(connection)
    status = _outlive_child(kept)
    if status < 0:  # end in the child's way
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


def _outlive_child(kept: int) -> int:
    """Wait for the child, and end everything else. Returns the child's exit status, negative for a signal."""
    while True:
        if signal.sigwait(KEPT_SIGNALS) == signal.SIGTERM:
            os.kill(kept, signal.SIGKILL)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # adopted ones are reaped as they end
            if ended[0] != kept:
                continue
            # The kernel's list may lack a process while others end, so a wait has to confirm that none is left.
            until_s = time.monotonic() + KILLED_WITHIN_S
            with suppress(ChildProcessError):
                while time.monotonic() < until_s:
                    end_children()
                    os.waitpid(-1, os.WNOHANG)
            return os.waitstatus_to_exitcode(ended[1])


def _run_module(module: str, args: Sequence[str]) -> None:
    """Run a module as `python -m` does."""
    sys.argv[1:] = args
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that the processes that the command has started are ended as well."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    outlive_program(int(sys.argv[1]), int(sys.argv[-1]))
    _run_module(sys.argv[2], sys.argv[3:])
