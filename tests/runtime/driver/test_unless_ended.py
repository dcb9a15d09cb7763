"""Blocking calls are given up when a process that they need has ended; and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from flowrl.runtime.driver.ray_start import ProcessEnded, unless_ended

ROOT = Path(__file__).parents[3]


def test_the_result_and_the_exception_of_the_call_come_through() -> None:
    assert unless_ended(lambda: 7, dict) == 7
    with pytest.raises(KeyError, match="seven"):
        unless_ended(lambda: {}["seven"], dict)


def test_a_call_is_given_up_when_a_process_that_it_started_has_ended() -> None:
    started: dict[str, subprocess.Popen[bytes]] = {}
    begun, never = threading.Event(), threading.Event()

    def call() -> None:
        started["server"] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        begun.set()
        never.wait()

    def processes() -> dict[str, int]:
        if begun.is_set():
            started["server"].send_signal(signal.SIGKILL)
        return {name: process.pid for name, process in started.items()}

    with pytest.raises(ProcessEnded, match="server"):
        unless_ended(call, processes)
    started["server"].communicate()


def test_the_processes_of_a_call_outlive_it() -> None:
    """Ray's ask the kernel to be ended with the thread that has started them."""
    asks = "import ctypes; ctypes.CDLL(None).prctl(1, 9); print('asked', flush=True); input()"

    def call() -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", asks], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"asked\n"
        return child

    child = unless_ended(call, dict)
    assert child.poll() is None
    child.communicate(b"\n")
    assert child.returncode == 0


def test_orphans_are_ended_with_the_rest() -> None:
    """The middle process ends before its child; nobody but `end_descendants` would find that."""
    program = """
        import os, subprocess, sys
        from flowrl.machine.orphans import adopt_orphans
        from flowrl.machine.processes import end_descendants, find_descendants
        adopt_orphans()
        sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
        middle = f"import subprocess; print(subprocess.Popen({sleeper!r}, stdout=-3, stderr=-3).pid)"
        orphan = int(subprocess.run([sys.executable, "-c", middle], capture_output=True, check=True).stdout)
        child = subprocess.Popen(sleeper)
        assert sorted(find_descendants()) == sorted([child.pid, orphan]), find_descendants()
        end_descendants()
        assert find_descendants() == []
        print("none left")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "none left\n", done.stderr
